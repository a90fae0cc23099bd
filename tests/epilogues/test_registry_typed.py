"""An epilogue of a function, registered: its text for each kernel, and the package's own for what it has kernels of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm.epilogues import declaration
from epigemm.epilogues.declaration import Traced, trace
from epigemm.epilogues.kinds import PER_COLUMN, PER_ROW, Matrix, Operand, PerColumn, Scalar
from epigemm.epilogues.registry import EPILOGUES, Epilogue, typed
from epigemm.epilogues.tracer.reference import reference_module
from tools.operands import sample_inputs


def gated(acc: Tensor, bias: PerColumn, gate: Matrix, limit: Scalar) -> Tensor:
    return torch.clamp(acc + bias, -limit, limit) * gate


@pytest.fixture(scope="module")
def traced() -> Traced:
    return trace(gated)


def made(traced: Traced, *folded: bool) -> Epilogue:
    return typed(traced, folded or (False, False, True))


@pytest.mark.parametrize(
    ("symbol", "function"),
    [
        ("epigemm_open_sm90_tma_tf32_0", "EPIGEMM_DEFINE_APPLY(of_apply, "),
        ("epigemm_open_sm90_tma_float16_0", "epigemm::Rounded, "),
        ("epigemm_open_elementwise_bfloat16", "epigemm::RoundedToBFloat16, "),
        ("epigemm_open_elementwise_float64", "EPIGEMM_DEFINE_DOUBLE("),
        ("epigemm_open_derivative_float32", "EPIGEMM_DEFINE_SLOPE(float, epigemm_slope, "),
        ("epigemm_open_derivative_bfloat16", "EPIGEMM_DEFINE_SLOPE(float, epigemm_slope, "),
        ("epigemm_open_derivative_float64", "EPIGEMM_DEFINE_SLOPE(double, epigemm_slope_double, "),
    ],
)
def test_the_text_for_a_kernel(traced: Traced, symbol: str, function: str) -> None:
    text = made(traced).source(symbol)
    functions: Any = text[text.rindex("epigemm_operand") :]
    assert function in functions
    assert ("Rounded" in functions) == ("Rounded" in function)


def test_where_the_types_of_operands_stand(traced: Traced) -> None:
    """1: that of x; 2: that of the arithmetic (csrc/open/contract.h). Of the bias here."""
    for folded, code in ((False, 1), (True, 2)):
        text = made(traced, folded, False, True).source("epigemm_open_sm90_tma_tf32_0")
        assert f"if (slot == {traced.slots[0]}) return {code};" in text


@pytest.mark.parametrize("name", sorted(EPILOGUES))
@pytest.mark.parametrize("has_bias", [True, False])
def test_with_the_product_beside_it(name: str, has_bias: bool, rng: torch.Generator) -> None:
    """The second value is what the derivative reads: the product with its bias."""
    epilogue = EPILOGUES[name]
    found, place = epilogue.with_product, epilogue.bias_place
    acc = torch.randn(5, 4, generator=rng, dtype=torch.float64)
    operands: list[Any] = [
        1.5 if each.kind == "scalar" else torch.randn(4, generator=rng, dtype=torch.float64)
        for each in epilogue.operands
    ]
    bias = operands[place - 1] if place and has_bias else 0.0
    if place and not has_bias:
        operands[place - 1] = None
    torch.testing.assert_close(found.reference(acc, operands), epilogue.reference(acc, operands))
    assert found is epilogue.with_product and found.operands == epilogue.operands
    assert found.traced.stored is not None
    tensors = [torch.as_tensor(0.0 if each is None else each, dtype=acc.dtype) for each in operands]
    assert torch.equal(reference_module(found.traced.stored)(acc, *tensors), acc + bias)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("bias", lambda acc, shift: acc + shift),
        ("bias_relu", lambda acc, shift: torch.relu(shift + acc)),
        ("", lambda acc, shift: torch.relu(acc + shift).neg()),
        ("", lambda acc, shift: torch.relu((acc + shift).half()).float()),
        ("", lambda acc, shift: torch.relu(torch.relu(acc) - shift)),
    ],
)
def test_what_pytorchs_gemm_may_add_has_the_packages_kernels(name: str, function: Any) -> None:
    """Whoever wrote it, for operands of x's type; the operands keep their names. And nothing else is such a one."""
    shifts = ((Operand(kind, "shift"),) for kind in (PER_COLUMN, PER_ROW))
    of, by_row = (declaration.traced(function, shift, "function", "") for shift in shifts)
    usual = typed(of, [False])
    assert (usual.is_bias, usual.is_bias_relu) == (name == "bias", name == "bias_relu")
    assert usual.is_compiled == of.is_compiled == (usual.name in EPILOGUES) == bool(name)
    assert [operand.name for operand in usual.operands] == ["shift"]
    for other in (typed(of, [True]), usual.with_product, typed(by_row, [False])):
        assert not (other.is_compiled or other.is_bias or other.is_bias_relu), other
    if name:
        package = EPILOGUES[name]
        assert (usual.name, usual.number, usual.formula) == (package.name, package.number, package.formula)
        assert usual.source("float16") == package.source("float16")


@pytest.mark.parametrize("name", sorted(EPILOGUES))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_reference_rounds_once(name: str, dtype: torch.dtype) -> None:
    epilogue, acc = EPILOGUES[name], torch.randn(50, 64).to(dtype)
    given = epilogue.in_order(*sample_inputs(epilogue, 64, dtype, generator=torch.Generator().manual_seed(5)))
    assert given is not None
    wide = [each.float() if isinstance(each, torch.Tensor) else each for each in given]
    assert torch.equal(epilogue.reference(acc, given), epilogue.reference(acc.float(), wide).to(dtype))
