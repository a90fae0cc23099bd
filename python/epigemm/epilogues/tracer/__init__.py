"""A Python function -> a program of primitives -> the text of a functor. `source` imports no torch: the build uses it.

Imports: `epilogues.kinds`. Taken by `epilogues.declaration` and `fusion`, whose chains are traced, too.
"""
