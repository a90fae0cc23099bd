"""`epigemm.tune`: measures the plans of a call, and has the planner know the fastest. `epigemm.calibrate`: a GPU.

Imports: `explain`, `calls`, `planning`. Taken by no other room.
"""

from epigemm.tuning.calibrating import Calibration, calibrate
from epigemm.tuning.tuner import Tuning, tune

__all__ = ["Calibration", "Tuning", "calibrate", "tune"]
