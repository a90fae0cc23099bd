"""Matrices with a row for several rows of the result, as calls give them: `[B, 1, N]` beside a result `[B, L, N]`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import epigemm
from epigemm import Matrix, PerColumn, PerRow, Scalar
from epigemm.calls import entry

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LEADS = [(1,), (5,), (1, 4), (3, 1), (3, 4), (2, 3, 5), (2, 1, 5), (0, 3), (3, 0)]


@epigemm.epilogue
def gated(
    acc: Tensor, bias: PerColumn, gate: Matrix, residual: Matrix, row: PerRow, by: Scalar = 0.5
) -> Tensor:
    return residual + gate * (acc + bias) * row * by


@epigemm.epilogue
def modulated(acc: Tensor, scale: Matrix, shift: Matrix) -> Tensor:
    return torch.tanh(acc) * (1 + scale) + shift


@epigemm.epilogue
def of_gate_alone(acc: Tensor, gate: Matrix) -> Tensor:
    return torch.exp(gate)


def leads_of(lead: Sequence[int]) -> list[tuple[int, ...]]:
    """The leading sizes that a matrix may have beside these."""
    return [(*lead[:kept], *(1,) * (len(lead) - kept)) for kept in range(len(lead) + 1)]


def draw(
    lead: Sequence[int],
    of_gate: Sequence[int],
    dtype: torch.dtype,
    rng: torch.Generator,
    n: int = 16,
    k: int = 8,
) -> list[Tensor]:
    """x, weight, bias, gate, residual, row."""
    shapes = ((*lead, k), (n, k), (n,), (*of_gate, n), (*lead, n), lead)
    return [torch.randn(shape, generator=rng).to(dtype) for shape in shapes]


def expected_of(given: Sequence[Tensor]) -> Tensor:
    x, weight, bias, gate, residual, row = (each.double() for each in given)
    return residual + gate * (x @ weight.t() + bias) * row.unsqueeze(-1) * 0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_values(lead: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> None:
    """Against float64, through the entry and through the operators, of contiguous and of other gates."""
    step = torch.finfo(dtype).eps
    for of_gate in leads_of(lead):
        given = draw(lead, of_gate, dtype, rng)
        expected = expected_of(given)
        if dtype.itemsize == 2:
            given[3] = given[3].float()
        turned = given[3].mT.contiguous().mT
        for gate in (given[3], turned):
            given[3] = gate
            out = torch.full((*lead, 16), math.nan, dtype=dtype)
            results = [gated(*given), gated(*given, out=out)]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(entry, "_module", None)
                results.append(gated(*given))
            for found in results:
                assert found.shape == (*lead, 16) and found.dtype == dtype
                torch.testing.assert_close(found.double(), expected, rtol=8 * step, atol=64 * step)
        product = given[0] @ given[1].t()
        found = modulated.elementwise(product, given[3], given[4])
        exact = product.double().tanh() * (1 + given[3].double()) + given[4].double()
        torch.testing.assert_close(found.double(), exact, rtol=4 * step, atol=4 * step)


@pytest.mark.parametrize("lead", [(3, 4), (2, 3, 5), (1, 4)], ids=str)
def test_two_matrices_of_different_rows(lead: tuple[int, ...], rng: torch.Generator) -> None:
    x, weight = (torch.randn(*sizes, 8, generator=rng, dtype=torch.float64) for sizes in (lead, (16,)))
    for of_scale, of_shift in product(leads_of(lead), repeat=2):
        scale, shift = (
            torch.randn(*of, 16, generator=rng, dtype=torch.float64) for of in (of_scale, of_shift)
        )
        expected = torch.tanh(x @ weight.t()) * (1 + scale) + shift
        torch.testing.assert_close(modulated(x, weight, scale, shift), expected)


@pytest.mark.parametrize("lead", [(3, 4), (2, 3, 2), (4, 1)], ids=str)
def test_gradients(lead: tuple[int, ...], rng: torch.Generator) -> None:
    for of_gate in leads_of(lead):
        given = [each.requires_grad_() for each in draw(lead, of_gate, torch.float64, rng, n=5, k=3)]
        assert torch.autograd.gradcheck(gated, given)
        assert torch.autograd.gradgradcheck(gated, given, atol=1e-4)
        assert torch.autograd.gradcheck(gated.elementwise, [given[4], *given[2:]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_gate_s_gradient_is_the_sum_over_its_rows(dtype: torch.dtype, rng: torch.Generator) -> None:
    given = [each.requires_grad_() for each in draw((3, 50), (3, 1), dtype, rng)]
    exact = [each.detach().double().requires_grad_() for each in given]
    grad = torch.randn(3, 50, 16, generator=rng).to(dtype)
    found = torch.autograd.grad(gated(*given), given, grad)
    wanted = torch.autograd.grad(expected_of(exact), exact, grad.double())
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape and one.dtype == dtype
        assert (one.double() - other).norm() <= 4 * torch.finfo(dtype).eps * other.norm() * 4


def test_what_is_refused(rng: torch.Generator) -> None:
    """The error names the argument and every shape that is accepted."""
    given = draw((3, 4), (3, 4), torch.float32, rng)
    accepted = "gate: got shape {}; accepted is [3, 4, 16] or [3, 1, 16] or [1, 1, 16]"
    for wrong in [(1, 4, 16), (3, 16), (1, 16), (2, 1, 16), (3, 1, 1), (3, 4, 1), (3, 1, 4, 16), (3, 2, 16)]:
        given[3] = torch.zeros(wrong)
        with pytest.raises(RuntimeError, match=re.escape(accepted.format(list(wrong)))):
            gated(*given)
        with pytest.raises(RuntimeError, match=re.escape(accepted.format(list(wrong)))):
            gated.elementwise(given[4], *given[2:])
    given[3] = torch.zeros(3, 1, 16)
    given[5] = torch.zeros(3, 1)
    with pytest.raises(RuntimeError, match=re.escape("row: got shape [3, 1]; accepted is [3, 4]")):
        gated(*given)


def test_a_function_of_the_gate_alone_has_all_rows(rng: torch.Generator) -> None:
    x, weight, _, gate, *_ = draw((3, 4), (3, 1), torch.float32, rng)
    found = of_gate_alone(x, weight, gate)
    assert found.is_contiguous() and torch.equal(found, gate.exp().expand(3, 4, 16))


def test_batch_invariant_calls(rng: torch.Generator) -> None:
    given = draw((3, 4), (3, 1), torch.float32, rng)
    with epigemm.batch_invariant():
        whole = gated(*given)
        x, weight, bias, gate, residual, row = given
        part = gated(x[1:2, 2:], weight, bias, gate[1:2], residual[1:2, 2:], row[1:2, 2:])
    assert torch.equal(whole[1:2, 2:], part)
    torch.testing.assert_close(whole.double(), expected_of(given), rtol=1e-5, atol=1e-5)


def test_vmap(rng: torch.Generator) -> None:
    x, weight, bias, gate, residual, row = draw((5, 3, 4), (5, 3, 1), torch.float64, rng)
    found = torch.vmap(lambda *each: gated(each[0], weight, bias, *each[1:]))(x, gate, residual, row)
    torch.testing.assert_close(found, expected_of([x, weight, bias, gate, residual, row]))


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled(rng: torch.Generator, *, is_dynamic: bool) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(gated, backend=counter, fullgraph=True, dynamic=is_dynamic)
    for lead in ((3, 4), (5, 7)):
        given = [each.requires_grad_() for each in draw(lead, (lead[0], 1), torch.float64, rng)]
        found = compiled(*given)
        torch.testing.assert_close(found, expected_of(given))
        wanted = torch.autograd.grad(expected_of(given).sum(), given)
        for one, other in zip(torch.autograd.grad(found.sum(), given), wanted, strict=True):
            torch.testing.assert_close(one, other)
    assert counter.frame_count == (1 if is_dynamic else 2)


def test_several_results(rng: torch.Generator) -> None:
    @epigemm.epilogue
    def several(acc: Tensor, gate: Matrix) -> tuple[Tensor, Tensor, Tensor]:
        z = acc * gate
        return torch.relu(z), z.sum(0), z.amax(1)

    x, weight, _, gate, *_ = draw((3, 4), (3, 1), torch.float64, rng)
    z = x @ weight.t() * gate
    found = several(x, weight, gate)
    for one, other in zip(found, (z.relu(), z.sum((0, 1)), z.amax(2)), strict=True):
        torch.testing.assert_close(one, other)


def test_explain_and_names(rng: torch.Generator) -> None:
    """Each choice of matrices that share rows is an epilogue of its own."""
    given = draw((3, 4), (3, 1), torch.float32, rng)
    assert "gated" in str(epigemm.explain(gated, *given))
    x, _, bias, gate, residual, row = given
    shared, plain = (gated.of_types(x, [bias, each, residual, row, 0.5]) for each in (gate, residual))
    assert shared.name != plain.name and plain is gated.linked([False] * 4 + [True])
    assert [operand.shared for operand in shared.operands[1:]] == [False, True, False, False, False]


def test_epigemm_s_own_functions(rng: torch.Generator) -> None:
    x, weight, bias, gate, *_ = draw((3, 4), (3, 1), torch.float64, rng)
    torch.testing.assert_close(epigemm.linear_residual(x, weight, bias, gate), x @ weight.t() + bias + gate)
