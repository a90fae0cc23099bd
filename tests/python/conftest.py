"""The fixtures of fp32 calls on fp16 pieces, and of a stage for tuning."""

from tests.python.pieces import road
from tests.python.stage import stage

__all__ = ["road", "stage"]
