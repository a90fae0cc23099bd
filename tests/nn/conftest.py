"""The fixture of fp32 calls on fp16 slices."""

from tests.python.pieces import road

__all__ = ["road"]
