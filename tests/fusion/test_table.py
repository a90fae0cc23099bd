"""The forwards of `table_*.py`, fused and compiled: what the plain model gives, and what the report says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm.fusion import FusionReport
from tests.fusion import fuzz, table_chains, table_products, table_writes
from tests.fusion.eager import fuse_eagerly
from tests.fusion.table import Row
from tests.fusion.table_chains import GATES, SPELLINGS
from tests.support.thorough import in_turn

# A backend, gradients or not, a type, and how many sizes: the second one makes the rows a symbol. Two for each row that
# writes; spellings of the same have one each.
Way = tuple[str, bool, torch.dtype, int]
WAYS: list[list[Way]] = [
    [("eager", False, torch.float32, 2), ("aot_eager", True, torch.float32, 1)],
    [("eager", True, torch.bfloat16, 1), ("eager", False, torch.float32, 1)],
    [("eager", False, torch.float32, 1), ("eager", True, torch.float16, 1)],
    [("eager", True, torch.float32, 2), ("aot_eager", False, torch.float32, 1)],
    [("eager", False, torch.float32, 1), ("eager", True, torch.float32, 1)],
]
ONE_EACH = in_turn(SPELLINGS, [way for ways in WAYS for way in ways])
# Of other chains each has one in fp32, for which its report is compared, and some have one in 16 bits beside it.
OTHERS = table_chains.ROWS[len(SPELLINGS) :]
IN_FP32, IN_16_BITS = (
    [way for ways in WAYS for way in ways if (way[2] is torch.float32) == is_fp32]
    for is_fp32 in (True, False)
)
OF_CHAINS = [
    *in_turn(OTHERS, IN_FP32),
    *in_turn(OTHERS[::4], IN_16_BITS),
    *in_turn(table_products.ROWS, IN_FP32),
]
TWO_EACH = [(row, way) for row, ways in in_turn(table_writes.ROWS, WAYS) for way in ways]
CASES = [(row, way) for row, way in (*ONE_EACH, *OF_CHAINS, *TWO_EACH) if way[0] in row.backends]


def check_report(row: Row, report: FusionReport) -> None:
    if row.chains is not None:
        assert report.chains == row.chains, report
    if row.sites is not None:
        assert len(report.sites) == row.sites, report
    elif row.chains != (0, 0):
        assert report.sites, report
    if row.formula:
        assert report.sites[0].formula == row.formula, report
    assert all(each.reason for each in report.not_taken)
    said = f"{report}\n{report.not_taken}"
    assert row.says in said and row.says_not not in said, report


@pytest.mark.parametrize(("row", "way"), CASES, ids=str)
def test_rows(row: Row, way: Way) -> None:
    backend, learns, dtype, sizes = way
    settings: dict[str, Any] = {"dtype": dtype, "rows": row.rows[:sizes] if len(row.rows) < 3 else row.rows}
    settings |= {} if learns else {"learns": (False,) * 3}
    verdict = fuzz.check(row.program(**settings), backend)
    assert verdict.word != fuzz.DIFFERS, verdict.text
    assert verdict.reports, "the plain model is an error"
    if dtype is torch.float32 and (not learns or row.learns == "all"):
        check_report(row, verdict.reports[0])


@pytest.mark.every(3)
@pytest.mark.parametrize("row", SPELLINGS, ids=str)
def test_nan_and_infinities(row: Row) -> None:
    """They come out where they did."""
    made = row.program(is_special=True, learns=(False,) * 3, rows=(8,), changes=())
    verdict = fuzz.check(made, "eager")
    assert verdict.word != fuzz.DIFFERS, verdict.text


def second_derivative(call: Any, x: Tensor, y: Tensor) -> Tensor:
    """Of the size of a gradient."""
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(call(leaf, y).sin().sum(), leaf, create_graph=True)
    (found,) = torch.autograd.grad(first.square().sum() + leaf.sum(), leaf)
    return found


def in_autocast(call: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        found: Tensor = call(x, y)
    return found


def vmapped(call: Any, x: Tensor, y: Tensor) -> Tensor:
    found: Tensor = torch.vmap(call)(torch.stack([x, y, -x]), torch.stack([y, x, x]))
    return found


def gradient(call: Any, x: Tensor, y: Tensor) -> Tensor:
    found: Tensor = torch.func.grad(lambda x: call(x, y).sin().sum())(x)
    return found


MODES = [second_derivative, in_autocast, vmapped, gradient]
ONE_RESULT = [row for row in (*SPELLINGS, *GATES) if row.source.count(", ") < 4 and "[:0]" not in row.source]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("row", "mode"), in_turn(ONE_RESULT, MODES), ids=lambda v: getattr(v, "__name__", str(v))
)
def test_other_modes_of_torch(row: Row, mode: Any) -> None:
    made = row.program(learns=(False,) * 3)
    x, y = made.inputs(0)
    plain, model = made.model(), made.model()
    try:
        expected = mode(plain, x, y)
    except (RuntimeError, AttributeError):  # no rule for vmap, or a result that is a tuple
        return
    if isinstance(expected, tuple):
        return
    fused = fuse_eagerly(model, strict=True)
    bound = 0.1 if mode is in_autocast else 1e-3
    scale = bound * max(1.0, float(expected.nan_to_num(0, 0, 0).abs().max()))
    for _ in range(2):
        actual = mode(fused, x, y)
        assert actual.dtype is expected.dtype
        torch.testing.assert_close(actual, expected, rtol=bound, atol=scale, equal_nan=True)
