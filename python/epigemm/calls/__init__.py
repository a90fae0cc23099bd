"""One call: the entry to C++, and what Python does where the entry returns a reason and no result.

Imports: `epilogues`, `arguments`, `planner`, `linker`, `packs`. Taken by `autograd`, `operators`, `route` and the
    rooms that measure or explain calls.
"""
