"""Results are no views: autograd refuses to write a view later that was made under `no_grad`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import epigemm
from tests.support.every_function import CASES, Case, K, N, draw
from tests.support.results import FUNCTIONS, NAMES
from tests.support.results import draw as draw_results
from tests.support.thorough import in_turn

LEADS = [(), (5,), (1,), (0,), (2, 3), (1, 1), (1, 3), (0, 3), (2, 0), (2, 1, 3), (1, 2, 2, 2), (2, 1, 1, 2)]


def assert_writable(results: Any) -> None:
    """Each is its own, and may be multiplied in place by what has a gradient."""
    for result in tree_leaves(results):
        assert not result._is_view() and result._base is None
        factor = torch.rand(result.shape, dtype=result.dtype, requires_grad=True)
        before = result.clone()
        result *= factor
        result.sum().backward()
        assert factor.grad is not None and torch.equal(factor.grad, before)


def fits(case: Case, lead: tuple[int, ...]) -> bool:
    """A vector x has no rows, and `F.batch_norm` and `amax` none of nothing."""
    return len(lead) > 0 or not set(case.operands) & {"row", "shared"}


@pytest.mark.parametrize("cast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize(("name", "recorded"), in_turn([*CASES], [False, True]))
def test_made_under_no_grad(name: str, recorded: bool, cast: bool) -> None:
    case = CASES[name]
    for lead in filter(lambda lead: fits(case, lead), LEADS):
        given = draw(case, [False] * len(case.operands), torch.bfloat16, recorded=recorded, lead=lead)
        if given.bias is None and name == "bias_twice" and 0 in lead:
            continue  # amax of nothing
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=cast):
            results = case.call(given.x, given.weight, given.bias, *given.operands)
        assert_writable(results)


@pytest.mark.parametrize("lead", [(5,), (1, 1), (2, 3), (2, 1, 3), (1, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("layout", ["given", "transposed"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=NAMES)
def test_several_results(function: Any, layout: str, lead: tuple[int, ...], rng: torch.Generator) -> None:
    given = draw_results(function, rng, torch.float32, torch.device("cpu"), lead, N, K)
    z = given.x @ given.weight.t()
    if layout == "transposed":
        z, given.x = (each.transpose(0, -1).contiguous().transpose(0, -1) for each in (z, given.x))
    for invariant in (nullcontext(), epigemm.batch_invariant()):
        with torch.no_grad(), invariant:
            if not isinstance(invariant, nullcontext) and function._reduces_columns:
                continue
            every = [
                function(given.x, given.weight, *given.operands),
                function.elementwise(z, *given.operands),
            ]
        for results in every:
            assert all(not each._is_view() for each in tree_leaves(results))


@pytest.mark.parametrize("layout", ["given", "transposed", "expanded"])
def test_elementwise(layout: str) -> None:
    @epigemm.epilogue
    def own(acc: Tensor, bias: epigemm.PerColumn) -> Tensor:
        return torch.sigmoid(acc + bias)

    @epigemm.epilogue
    def of_the_bias(acc: Tensor, bias: epigemm.PerColumn) -> Tensor:
        return bias * 2.0 + acc * 0.0

    bias = torch.randn(N)
    for lead in LEADS:
        z = torch.randn(*lead, N)
        if layout == "transposed" and z.dim() > 2:
            z = z.transpose(0, -2).contiguous().transpose(0, -2)
        if layout == "expanded":
            z = torch.randn(N).expand(*lead, N)
        calls: list[Callable[[], Any]] = [
            partial(own.elementwise, z, bias),
            partial(of_the_bias.elementwise, z, bias),
            partial(epigemm.sigmoid, z),
            partial(epigemm.bias_relu, z, bias),
        ]
        for call in calls:
            if lead == () and call is not calls[2]:
                continue
            with torch.no_grad():
                result = call()
            assert_writable(result)


class Target(nn.Module):
    """A target without a gradient, written in place by what has one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.fc = nn.Linear(K, N), nn.Linear(K, N)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            t = torch.sigmoid(self.gate(x))
        t *= self.fc(x).flip(-1)
        return t


@pytest.mark.parametrize(
    ("lead", "inner"), in_turn([(3,), (2, 3), (1, 1, 3)], ["eager", "aot_eager"]), ids=str
)
def test_in_graphs_of_the_backend(lead: tuple[int, ...], inner: str) -> None:
    torch._dynamo.reset()
    model, x = Target(), torch.randn(*lead, K)
    want = model(x)
    found = torch.compile(model, backend="epigemm", options={"backend": inner}, fullgraph=True)(x)
    torch.testing.assert_close(found, want)
    found.sum().backward()


@pytest.mark.parametrize(("name", "cast"), in_turn(["residual", "glu", "scale", "several"], [False, True]))
def test_compiled(name: str, cast: bool) -> None:
    case = CASES[name]
    given = draw(case, [False] * len(case.operands), torch.bfloat16)
    factor = torch.rand(N, requires_grad=True)

    def call(*arguments: Any, cast: bool = cast, factor: Tensor = factor) -> Any:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=cast):
            results = tree_leaves(case.call(*arguments))
        results[0] *= factor
        return results

    torch._dynamo.reset()
    arguments: Any = (given.x, given.weight, given.bias, *given.operands)
    results = torch.compile(call, backend="aot_eager", fullgraph=True)(*arguments)
    results[0].sum().backward()
    plain = tree_leaves(case.plain(F.linear(*arguments[:3]), *given.operands))
    torch.testing.assert_close(results[0].float(), plain[0] * factor, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("lead", [(5,), (2, 3), (2, 1, 3)], ids=str)
def test_transforms_of_results(lead: tuple[int, ...]) -> None:
    """What gives a result its shape has a derivative of every order, a batching rule and a tangent."""
    weight, z = torch.randn(N, K, dtype=torch.float64), torch.randn(*lead, N, dtype=torch.float64)
    x = torch.randn(*lead, K, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor) -> Tensor:
        return epigemm.linear_residual(x, weight, None, z).tanh()

    assert torch.autograd.gradgradcheck(call, (x,))
    assert torch.autograd.gradcheck(call, (x,), check_batched_grad=True)
    tangent = torch.func.jvp(call, (x.detach(),), (torch.ones_like(x),))[1]
    torch.testing.assert_close(tangent, (1 - call(x) ** 2) * (torch.ones_like(x) @ weight.t()))
