"""`epigemm.tune`: measures the plans of a call, and has the planner know the fastest.

Imports: `explain`, `calls`, `planning`. Taken by no other room.
"""

from epigemm.tuning.tuner import Tuning, tune

__all__ = ["Tuning", "tune"]
