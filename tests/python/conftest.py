"""The fixture of fp32 calls on fp16 pieces."""

from tests.python.pieces import road

__all__ = ["road"]
