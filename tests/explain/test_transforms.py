"""`explain` where tensors stand for others: an explanation, or an error that says what is accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import epigemm
from tests.net.explanations import Calls
from tests.support.formulas import formula

X, WEIGHT, BIAS = torch.randn(6, 8), torch.randn(4, 8), torch.randn(4)
Function = Callable[[Tensor], Tensor]


own = epigemm.epilogue(formula("acc, bias: PerColumn -> torch.tanh(acc + bias)"))


several = epigemm.epilogue(formula("acc, bias: PerColumn -> (acc + bias, acc.sum(0))"))


def batched(x: Tensor) -> Tensor:
    return torch.vmap(lambda z: epigemm.linear_relu(z, WEIGHT, BIAS))(x.repeat(4, 1, 1))


FUNCTIONS: dict[str, Any] = {
    "linear_relu": epigemm.linear_relu,
    "own": own,
    "several": several,
    "linear_glu": epigemm.linear_glu,
    "elementwise": own.elementwise,
    "layer": nn.Sequential(epigemm.nn.LinearGELU(8, 4)),
    "model": Calls(batched),
}


def arguments(name: str, x: Tensor) -> tuple[Any, ...]:
    if name in ("layer", "model"):
        return (x,)
    return (x[:, :4], BIAS) if name == "elementwise" else (x, WEIGHT, BIAS)


def with_modes(function: Function, *modes: Any) -> None:
    for mode in modes:
        with mode:
            function(X)


WHERE: dict[str, Callable[[Function], Any]] = {
    "grad": lambda f: torch.func.grad(f)(X),
    "vmap": lambda f: torch.vmap(f)(X[None]),
    "jvp": lambda f: torch.func.jvp(f, (X,), (X,)),
    "hessian": lambda f: torch.func.hessian(f)(X),
    "functionalize": lambda f: torch.func.functionalize(f)(X),
    "compile": lambda f: torch.compile(f, backend="eager")(X),
    "aot": lambda f: torch.compile(f, backend="aot_eager")(X.clone().requires_grad_()),
    "make_fx": lambda f: make_fx(f)(X),
    "pre_dispatch": lambda f: make_fx(f, pre_dispatch=True)(X),
    "export": lambda f: torch.export.export(Calls(f), (X,)),
    "modes": lambda f: with_modes(
        f, torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.profiler.profile()
    ),
    "fake": lambda f: with_modes(
        lambda x: f(torch.empty_like(x)), FakeTensorMode(allow_non_fake_inputs=True)
    ),
}
INSIDE = {"grad", "vmap", "jvp", "hessian", "functionalize", "make_fx", "pre_dispatch", "export"}
"""Where tensors stand for others."""


@pytest.mark.every(5)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_explanation_or_the_reason_why_there_is_none(name: str, where: str) -> None:
    torch._dynamo.reset()
    said = list[Any]()

    def explained(x: Tensor) -> Tensor:
        said.append(epigemm.explain(FUNCTIONS[name], *arguments(name, x)))
        return x.sum()

    def refused(x: Tensor) -> Tensor:
        with pytest.raises(
            RuntimeError, match=r"^explain: got a call (under|while).*; accepted is a call outside"
        ):
            explained(x)
        said.append(None)
        return x.sum()

    WHERE[where](refused if where in INSIDE else explained)
    assert said
    kind = epigemm.ModuleExplanation if name in ("layer", "model") else epigemm.Explanation
    assert all(where in INSIDE or isinstance(each, kind) for each in said)


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_model_that_maps_a_call(is_fused: bool) -> None:
    """One call for all of its elements."""
    model: Any = epigemm.fuse(Calls(batched)) if is_fused else Calls(batched)
    found = epigemm.explain(model, X)
    (product,) = list(found)
    assert (product.function, product.runs, product.size) == ("bias_relu", "fallback", (24, 4, 8))
