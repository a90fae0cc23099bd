"""Every spelling of every epilogue: found, fused, and equal to what it was in value, type and gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from epigemm import fusion
from tests.fusion.eager import fuse_eagerly
from tests.fusion.layers import IN, OUT, ROWS, SPELLINGS, Layer, Spelling
from tests.support.arithmetic import BF16, FP32, Arithmetic
from tests.support.thorough import in_turn
from tests.support.untyped import backward


def identity(value: object) -> str:
    return f"{value.function}-{value.name}" if isinstance(value, Spelling) else str(value)


spellings = pytest.mark.parametrize("spelling", SPELLINGS, ids=identity)

NOT_DIFFERENTIABLE = ("div_", "all_in_place")  # they overwrite what the derivative of the step before needs


def report_of(model: nn.Module) -> fusion.FusionReport:
    report = model.fusion_report
    assert isinstance(report, fusion.FusionReport)
    return report


def draw(dtype: torch.dtype = torch.float32, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (ROWS, IN)), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    ("spelling", "arithmetic"),
    in_turn(SPELLINGS, [FP32, BF16]),
    ids=lambda v: getattr(v, "name", identity(v)),
)
def test_values(spelling: Spelling, arithmetic: Arithmetic) -> None:
    layer = spelling.make().to(arithmetic.dtype)
    fused = fuse_eagerly(layer)
    x = draw(arithmetic.dtype)
    with torch.no_grad():
        actual = fused(x)
    assert not report_of(fused).skipped
    (site,) = report_of(fused).sites
    assert site.function != "linear" and not site.notes, report_of(fused)
    assert actual.dtype is arithmetic.dtype
    spelling.check(actual, layer, x, arithmetic)
    if arithmetic is FP32:  # NaN and infinities come out where they did
        x[0, 0], x[1, 1], x[2, 2] = float("nan"), float("inf"), -float("inf")
        with torch.no_grad():
            torch.testing.assert_close(fused(x), layer(x), rtol=1e-4, atol=1e-4, equal_nan=True)


@spellings
def test_gradients(spelling: Spelling) -> None:
    """Of x and of every parameter: the original's."""
    layer = spelling.make()
    fused = fuse_eagerly(copy.deepcopy(layer))
    x, upstream = draw(), draw(torch.float32, ROWS, OUT)
    if spelling.name in NOT_DIFFERENTIABLE:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            backward(layer(x), upstream)
        return
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for model, argument in zip((layer, fused), inputs, strict=True):
        backward(model(argument), upstream)
    assert not report_of(fused).skipped
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-4, atol=1e-4)
    for (name, expected), (_, actual) in zip(layer.named_parameters(), fused.named_parameters(), strict=True):
        assert (expected.grad is None) == (actual.grad is None), name
        if expected.grad is not None:
            torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("spelling", "shape"), in_turn(SPELLINGS, [(IN,), (2, 3, IN), (0, IN), (2, OUT, IN)]), ids=identity
)
def test_other_ranks(spelling: Spelling, shape: tuple[int, ...]) -> None:
    """Whatever the original accepts, and the error that it raises otherwise."""
    layer = spelling.make()
    fused, x = fuse_eagerly(layer), draw(torch.float32, *shape)
    try:
        expected = layer(x)
    except (RuntimeError, ValueError) as error:
        if "mm" not in spelling.name:  # these accept fewer shapes than x @ weight does
            with pytest.raises(type(error)):
                fused(x)
        return
    torch.testing.assert_close(fused(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("spelling", "parameters"), in_turn(SPELLINGS, [torch.float32, torch.bfloat16]), ids=identity
)
def test_autocast_gives_the_same_type(spelling: Spelling, parameters: torch.dtype) -> None:
    layer = spelling.make().to(parameters)
    fused = fuse_eagerly(layer)
    for dtype in (torch.float32, torch.bfloat16):
        x = draw(dtype)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            expected, actual = layer(x), fused(x)
        assert actual.dtype is expected.dtype
        torch.testing.assert_close(actual.double(), expected.double(), rtol=0.1, atol=0.1)


@pytest.mark.every(4)
@spellings
def test_mixed_types_stay_as_they_were(spelling: Spelling) -> None:
    """Vectors of another type widen the result: such a call runs unfused, or gives the same type."""
    layer = spelling.make().to(torch.bfloat16)
    for name in ("bias", "scale", "factor", "divisor"):
        getattr(layer, name).data = getattr(layer, name).data.double()
    layer.bn.float()
    x = draw(torch.bfloat16)
    fused = fuse_eagerly(layer)
    try:
        expected = layer(x)
    except RuntimeError as error:
        with pytest.raises(type(error)):
            fused(x)
        return
    actual = fused(x)
    assert actual.dtype is expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0.1, atol=0.1)


@pytest.mark.every(4)
@spellings
def test_under_functional_transforms(spelling: Spelling) -> None:
    layer = spelling.make().double()
    fused = fuse_eagerly(layer)
    x = draw(torch.float64, ROWS, IN)

    def loss(model: Layer) -> torch.Tensor:
        result: torch.Tensor = torch.func.grad(lambda x: model(x).sin().sum())(x)
        return result

    if spelling.name not in NOT_DIFFERENTIABLE:
        torch.testing.assert_close(loss(fused), loss(layer))
    rows = draw(torch.float64, 3, ROWS, IN)
    torch.testing.assert_close(torch.vmap(fused)(rows), torch.stack([layer(part) for part in rows]))
