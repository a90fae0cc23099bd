"""Epilogues that are made at run time, on CPUs: the entry checks a call, and PyTorch's operators compute it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn, PerRow, Scalar, UserEpilogue
from epigemm.calls import entry
from epigemm.planner.reasons import Reason
from tests.support.untyped import torch as untyped
from tests.support.watching import BUILT_IN, DONE

pytestmark = BUILT_IN
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@epigemm.epilogue
def mixed(acc: Tensor, bias: PerColumn, row: PerRow, other: Matrix, scale: Scalar = 0.5) -> Tensor:
    result: Tensor = F.gelu(acc + bias) * row + other * scale
    return result


def _draw(rng: torch.Generator, dtype: torch.dtype, lead: tuple[int, ...] = (5,)) -> list[Tensor]:
    """x, weight, bias, row, other."""
    shapes = ((*lead, 8), (16, 8), (16,), lead, (*lead, 16))
    return [torch.randn(shape, generator=rng).to(dtype) for shape in shapes]


def _cold(call: UserEpilogue, *given: object, **named: object) -> Tensor:
    """The call as the cold path answers it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry, "_module", None)
        return call(*given, **named)  # type: ignore[arg-type]


@pytest.mark.every(5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lead", [(5,), (2, 3), (1,), ()], ids=str)
@pytest.mark.parametrize("scale", [None, 0.25, 2, "tensor"], ids=str)
@pytest.mark.parametrize("vectors", ["of x's type", "fp32"])
def test_the_same_bits_as_the_cold_path(
    vectors: str, scale: float | str | None, lead: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator
) -> None:
    x, weight, bias, row, other = _draw(rng, dtype, lead)
    if vectors == "fp32" and dtype.itemsize == 2:
        bias, row = bias.float(), row.float()
    number = torch.tensor(0.75) if scale == "tensor" else scale
    named: dict[str, Any] = {} if number is None else {"scale": number}
    want = _cold(mixed, x, weight, bias, row, other, **named)
    assert torch.equal(mixed(x, weight, bias, row, other, **named), want)
    out = torch.full_like(want, float("nan"))
    assert mixed(x, weight, bias, row, other, **named, out=out) is out
    assert torch.equal(out, want)
    z = want.clone()
    want = _cold(mixed.elementwise, z, bias, row, other, **named)  # type: ignore[arg-type]
    assert torch.equal(mixed.elementwise(z, bias, row, other, **named), want)
    assert mixed.elementwise(z, bias, row, other, **named, out=z) is z
    assert torch.equal(z, want)


def test_the_entry_is_asked_once(answered: list[Reason | str], rng: torch.Generator) -> None:
    """What it answers needs no other check; an integer is for others to make a number of."""
    x, weight, *operands = _draw(rng, torch.float32)
    mixed(x, weight, *operands)
    mixed.elementwise(operands[2], *operands, 0.25)
    assert answered == [DONE] * 2
    mixed(x, weight, *operands, 2)
    assert answered[2:] == [Reason.NOT_PLAIN, DONE]


@pytest.mark.parametrize("lead", [(5,), (2, 3)], ids=str)
def test_a_recorded_call_is_asked_about_once(
    answered: list[Reason | str], lead: tuple[int, ...], rng: torch.Generator
) -> None:
    """Before autograd's node, which asks for its product and for what follows it."""
    x, weight, *operands = _draw(rng, torch.float32, lead)
    answered.clear()
    mixed(x.requires_grad_(), weight, *operands)
    assert answered.count(Reason.RECORDED) == 1 and answered[0] == Reason.RECORDED
    inside = len(answered)
    answered.clear()
    mixed.elementwise(operands[2].requires_grad_(), *operands)
    assert answered.count(Reason.RECORDED) == 1 and len(answered) < inside


WRONG = {
    "bias": lambda given: {**given, "bias": given["bias"][:-1]},
    "row": lambda given: {**given, "row": given["row"].unsqueeze(-1)},
    "other": lambda given: {**given, "other": given["other"].double()},
    "scale": lambda given: {**given, "scale": torch.ones(1)},
    "weight": lambda given: {**given, "weight": given["weight"][:, 1:]},
    "out": lambda given: {**given, "out": given["x"].new_empty(5, 15)},
    "strict": lambda given: {**given, "strict": True},
    "precision": lambda given: {**given, "precision": "highst"},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_worded_as_before(name: str, rng: torch.Generator) -> None:
    names = ("x", "weight", "bias", "row", "other")
    given = WRONG[name](dict(zip(names, _draw(rng, torch.float32), strict=True)))
    first = given.pop("x"), given.pop("weight")
    with pytest.raises((RuntimeError, ValueError)) as found:
        mixed(*first, **given)
    with pytest.raises(type(found.value)) as cold:
        _cold(mixed, *first, **given)
    assert str(found.value) == str(cold.value)


@epigemm.epilogue
def itself(acc: Tensor) -> Tensor:
    return acc


@epigemm.epilogue
def detached(acc: Tensor) -> Tensor:
    return acc.detach()


@epigemm.epilogue
def an_operand(acc: Tensor, other: Matrix) -> Tensor:
    return other


@epigemm.epilogue
def of_vectors(acc: Tensor, bias: PerColumn, row: PerRow) -> Tensor:
    result: Tensor = torch.sigmoid(bias) * row
    return result


@epigemm.epilogue
def rounded(acc: Tensor) -> Tensor:
    return acc.half().float()


@epigemm.epilogue
def a_constant(acc: Tensor) -> Tensor:
    return torch.full_like(acc, 2.0)


RETURNS = {"other": an_operand, "bias row": of_vectors} | {
    f"nothing: {each.traced.name}": each for each in (itself, detached, rounded, a_constant)
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("names", RETURNS)
def test_results_are_new_tensors(names: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    """Whatever the function returns: written to, they change no operand."""
    function = RETURNS[names]
    x, weight, bias, row, other = _draw(rng, dtype)
    named = {"bias": bias, "row": row, "other": other}
    operands = [named[name] for name in names.split() if name in named]
    z = other + 1
    for call, inputs in ((function, (x, weight)), (function.elementwise, (z,))):
        kept = [tensor.clone() for tensor in (*inputs, *operands)]
        want = _cold(call, *inputs, *operands)  # type: ignore[arg-type]
        result = call(*inputs, *operands)
        assert torch.equal(result, want) and result.is_contiguous()
        result.fill_(7.0)
        assert all(torch.equal(a, b) for a, b in zip((*inputs, *operands), kept, strict=True))


def test_explain_takes_the_elementwise_form() -> None:
    found = epigemm.explain(itself.elementwise, torch.ones(3, 4))
    assert found.path == "elementwise" and found.op.startswith("itself: epigemm::elementwise")
    with pytest.raises(ValueError, match="its `elementwise`"):
        epigemm.explain(itself.call, torch.ones(3, 4))


@epigemm.epilogue
def relu_of_sum(acc: Tensor, shift: PerColumn) -> Tensor:
    return torch.relu(acc + shift)


@pytest.mark.parametrize("shift", [torch.ones(5), torch.ones(6).int(), "text"], ids=str)
def test_errors_name_an_operand_as_its_function_does(shift: Any) -> None:
    """Also where the package has the function's kernels, under another name."""
    x, weight = torch.ones(4, 8), torch.ones(6, 8)
    calls: Any = (relu_of_sum, (x, weight, shift)), (relu_of_sum.elementwise, (x[:, :6], shift))
    for call, given in calls:
        with pytest.raises((RuntimeError, TypeError), match="shift: got "):
            call(*given)


@pytest.mark.parametrize("shift", [torch.ones(6).bfloat16(), 3.0], ids=str)
def test_errors_of_compiled_calls_name_an_operand_as_its_function_does(shift: Any) -> None:
    def call(x: Tensor) -> Tensor:
        return relu_of_sum(x, torch.ones(6, 8), shift)

    with pytest.raises(Exception, match="shift: got "):
        untyped.compile(call, backend="aot_eager", fullgraph=True)(torch.ones(4, 8))
