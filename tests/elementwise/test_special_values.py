"""NaN, infinities, signed zeros, subnormals, saturation and division by zero, as eager torch has them."""

from __future__ import annotations

import pytest
import torch

from epigemm.epilogues import registry
from tests.support import reference
from tests.support.arithmetic import STORAGE, Arithmetic
from tests.support.cases import ELEMENTWISE, Operands, draw_operands, poisoned

dtypes = pytest.mark.parametrize("arithmetic", STORAGE, ids=lambda a: a.name)

INF, NAN = float("inf"), float("nan")


def specials(arithmetic: Arithmetic) -> torch.Tensor:
    info = torch.finfo(arithmetic.dtype)
    subnormal = info.smallest_normal / 4
    values = [0.0, 1.0, 3.5, 17.0, 30.0, 88.0, 89.0, 104.0, 710.0, 746.0, 1e4, info.max, info.smallest_normal]
    values += [subnormal, info.smallest_normal * info.eps, info.eps, INF]
    tensor = torch.tensor([*values, *(-value for value in values), NAN], dtype=torch.float64)
    return tensor.to(arithmetic.dtype)


def run(name: str, x: torch.Tensor, operands: Operands) -> torch.Tensor:
    out = poisoned(x.shape, x.dtype, x.device) * 0 + 123.0
    out.fill_(123.0)
    torch.ops.epigemm.elementwise_out(name, x, operands.bias, operands.tensors, operands.scalars, out)
    return out


def eager(name: str, x: torch.Tensor, operands: Operands) -> torch.Tensor:
    """The registry's reference in the tensors' own dtype: plain torch operators."""
    given = registry.EPILOGUES[name].in_order(operands.bias, operands.tensors, operands.scalars)
    assert given is not None
    return registry.EPILOGUES[name].reference(x, given)


def assert_same_exceptions(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(actual.isnan(), expected.isnan()), (actual, expected)
    infinite = expected.isinf()
    assert torch.equal(actual.isinf(), infinite), (actual, expected)
    assert torch.equal(actual[infinite], expected[infinite])


@pytest.mark.parametrize("name", ELEMENTWISE)
@dtypes
def test_special_values_of_x(
    name: str, arithmetic: Arithmetic, device: torch.device, rng: torch.Generator
) -> None:
    """Each special value in every column position of a vector access and in a scalar tail."""
    values = specials(arithmetic)
    for roll in range(9):
        x = torch.stack([values.roll(roll), values.flip(0)]).to(device)
        operands = draw_operands(name, x.shape[1], arithmetic, device, rng)
        actual = run(name, x, operands)
        assert_same_exceptions(actual, eager(name, x, operands))
        bounded = reference.elementwise(name, x, operands, arithmetic)
        moderate = bounded.expected.abs() < torch.finfo(arithmetic.dtype).max / 4
        kept = reference.Bounded(bounded.expected[moderate], bounded.tolerance[moderate])
        reference.assert_within(actual[moderate], kept)


@dtypes
def test_the_plain_epilogue_is_the_identity_on_every_special_value(
    arithmetic: Arithmetic, device: torch.device
) -> None:
    """Without a bias: subnormals survive bit for bit (a kernel built with flush-to-zero would lose them)."""
    if "bias" not in ELEMENTWISE:
        pytest.skip("no plain epilogue registered")
    x = specials(arithmetic).to(device)
    actual = run("bias", x, Operands())
    assert torch.equal(actual.nan_to_num(nan=7.0), x.nan_to_num(nan=7.0))
