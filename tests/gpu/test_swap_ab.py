"""Hopper's tiles for few rows, in which the weight takes x's place, and the CTAs of a cluster may share K."""

from __future__ import annotations

import pytest

from tests.gpu.launching import every_tile
from tests.gpu.properties import Family, SecondValues, SharedRows, Values
from tests.support import plans
from tests.support.arithmetic import FUSED_ARITHMETICS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]


class TestSwapAB(Family, SharedRows, SecondValues):
    kernels = every_tile(plans.SWAP_AB, FUSED_ARITHMETICS)
    sizes = ((384, 512, 256), (129, 264, 136), (1, 8, 8), (200, 1032, 64))
    in_order = ((1100, 1304, 96), (3000, 136, 64), (72, 4104, 64))
    depths = (8, 16, 24, 40, 56, 64, 72, 128, 1000, 8192)


class TestSharedK(Values, SharedRows, SecondValues):
    """K is shared out evenly, unevenly, and in one stage each."""

    kernels = every_tile(plans.SWAP_AB, FUSED_ARITHMETICS, splits=(2, 4, 8))
    sizes = ((17, 264, 1024), (129, 136, 1160), (1, 72, 520), (300, 520, 2048))
    depths = (72, 200, 456, 1000, 8192)
