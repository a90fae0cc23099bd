"""What the planner in C++ says of a call, and the user's measured choices, which it is given.

Imports: `epilogues`, `arguments`. Taken by `calls`, `packs`, `tuning`, `explain`.
"""
