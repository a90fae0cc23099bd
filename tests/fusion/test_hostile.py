"""Forwards that depend on more than their inputs, and what changes between two calls: what torch.compile gives.

Each model is called before and after the change, fused and compiled without epigemm. Where `fused` is True, something
must have run fused before the change, so that refusing everything does not pass.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fusion import hostile
from tests.fusion.eager import compile_eagerly, fuse_eagerly
from tests.fusion.hostile import WIDTH, Case
from tests.support.thorough import in_turn


@pytest.fixture(autouse=True)
def globals_as_they_were() -> Any:
    scope, defaults = vars(hostile), hostile.ordinary.__defaults__
    saved = dict(scope)
    yield
    scope.update(saved)
    hostile.ordinary.__defaults__ = defaults
    hostile.STEPS[:] = [1.0, 2.0]


def called(model: Any, x: Tensor) -> Any:
    torch.manual_seed(0), random.seed(0)
    hostile.COUNTER = itertools.count()
    return model(x.clone())


def compare(fused: Any, plain: Any, x: Tensor) -> None:
    for _ in range(2):
        try:
            expected = called(plain, x)
        except Exception as error:
            with pytest.raises(type(error)):
                called(fused, x)
            continue
        bound = 1e-2 if x.dtype is torch.float16 else 1e-4
        torch.testing.assert_close(called(fused, x), expected, rtol=bound, atol=bound, equal_nan=True)


# In place and copied in turn: what is done to a fused model meets a copy as it meets the model. Some cases are called
# with another size afterwards, too.
WAYS = [("in_place", (9,)), ("copied", (9,)), ("in_place", (9, 1)), ("copied", (9,)), ("in_place", (9,))]


@pytest.mark.parametrize(("case", "way"), in_turn(hostile.cases(), WAYS), ids=str)
def test_what_torch_compile_gives(case: Case, way: tuple[str, tuple[int, ...]]) -> None:
    how, sizes = way
    kind = case.make()
    plain, model = kind().eval(), kind().eval()
    model.load_state_dict(plain.state_dict())
    model.plain, model.outside[0].weight, model.outside[0].bias = (
        plain.plain,
        plain.outside[0].weight,
        plain.outside[0].bias,
    )
    fused, expected = fuse_eagerly(model, inplace=how == "in_place"), compile_eagerly(plain)
    x = torch.randn(9, WIDTH)
    compare(fused, expected, x)
    assert fused.fusion_report.sites or not case.fused, fused.fusion_report
    for made in (plain, fused):
        case.apply(made)
    for rows in sizes:
        compare(fused, expected, torch.randn(rows, WIDTH).to(fused.mask.dtype))
