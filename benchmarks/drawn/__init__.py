"""The test of the choice: shapes drawn at random, so that nothing can have been tuned to them.

``python -m benchmarks --random SEED --count N`` measures a fixed list of cases at N shapes that follow from the
seed alone, ``--between`` at numbers of rows between powers of two on four layers besides. Each case has a bar that
every point is held to.

============  ===========================================================================================
``points``    which shapes
``series``    which cases, their baselines and bars
``runner``    points x cases -> times
``summary``   times -> the numbers of a case, tables
``command``   what ``--random`` does
============  ===========================================================================================
"""

from benchmarks.drawn.command import check, folder, plan, shapes
from benchmarks.drawn.runner import EFFORT

__all__ = ["EFFORT", "check", "folder", "plan", "shapes"]
