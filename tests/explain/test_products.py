"""What is recorded while a module runs: for each call what `explain` says of the function, and its layer's name."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from epigemm.arguments.calls import LinearCall
from epigemm.calls.log import current
from epigemm.explain.log import Log
from epigemm.explain.summary import products_of
from tests.net.explanations import Calls
from tests.ops.op import Op
from tests.support.pretended import Pretended, pretend_gpu
from tests.support.public import PUBLIC
from tests.support.stage import DEVICE


@pytest.mark.parametrize("function", PUBLIC, ids=lambda function: function.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gradients", [False, True])
def test_a_call_is_told_as_explain_tells_it(
    function: Op, dtype: torch.dtype, gradients: bool, rng: torch.Generator
) -> None:
    """One product, also where a folded BatchNorm is two calls to who looks; and the result is the call's."""
    arguments = function.draw(rng, dtype=dtype)
    for name, value in arguments.items():
        if gradients and isinstance(value, Tensor) and "running" not in name:
            value.requires_grad_()
    wanted, results = epigemm.explain(function.name, **arguments), list[Tensor]()
    (product,) = epigemm.explain(Calls(lambda: results.append(function.call(**arguments))))
    assert product.explanation is not None
    assert replace(product.explanation, op=wanted.op) == wanted
    assert product.dtype == str(dtype).removeprefix("torch.")
    torch.testing.assert_close(results[0], function.call(**arguments), rtol=1e-2, atol=1e-2)


def test_layers_are_named_where_the_call_is() -> None:
    """By the innermost module, though it be shared, in a list, or called by another method than forward."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), epigemm.nn.LinearReLU(8, 8)])
            self.again = self.layers[0]

        def encode(self, x: Tensor) -> Tensor:
            for layer in [*self.layers, self.again]:
                x = layer(x)
            return x

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.encode(x), torch.eye(8))

    found = epigemm.explain(Model(), torch.randn(2, 8))
    assert [each.name for each in found] == ["layers.0", "layers.1", "layers.0#2", "Model"]
    assert sum(each.explanation is not None for each in found) == 1


class Zeros(Pretended):
    def _compute(self, call: LinearCall, *_: Any) -> Tensor:
        return call.new_out().zero_()


def test_a_layers_products_are_one_in_an_explanation_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel has run, also one that stores what a gradient needs, after which a pair is still one product."""
    pretend_gpu(monkeypatch, DEVICE, Zeros())
    gelu, glu = (
        kind(1024, 2048, dtype=torch.bfloat16) for kind in (epigemm.nn.LinearGELU, epigemm.nn.LinearGLU)
    )
    model: Any = Calls(lambda x: (gelu(x), glu.requires_grad_(False)(x)))
    x = torch.zeros(4096, 1024, dtype=torch.bfloat16)
    found = [(each.runs, "gradients are recorded" in str(each)) for each in epigemm.explain(model, x)]
    assert found == [("fused kernel", True), ("fused kernel", False)]


def test_it_belongs_to_its_thread() -> None:
    log, found, square = Log(nn.Identity()), list[Any](), torch.ones(4, 4)
    with log:
        thread = threading.Thread(target=lambda: found.append(current.log))
        thread.start()
        thread.join()
        assert current.log is log
        with log.closed():
            square @ square
            with log:
                square @ square
    assert found == [None] and current.log is None
    assert len(products_of(log)) == 1
