"""What the C++ planner chooses for a call, and the measured times that it uses.

Imports: `epilogues`, `arguments`. Taken by `calls`, `packs`, `tuner`, `explain`.
"""
