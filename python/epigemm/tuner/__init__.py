"""`epigemm.tune`: measures the plans of a call, and has the planner know the fastest.

Imports: `explain`, `calls`, `planner`. Taken by no other room.
"""

from epigemm.tuner.tuner import Tuning, tune

__all__ = ["Tuning", "tune"]
