"""The fixtures of fp32 calls on fp16 slices, of a stage for tuning, of the entry and of compiled calls."""

from tests.python.compiling import fresh_compiler, no_python
from tests.python.pieces import road
from tests.python.stage import stage
from tests.python.watching import answered, known_device

__all__ = ["answered", "fresh_compiler", "known_device", "no_python", "road", "stage"]
