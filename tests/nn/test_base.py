"""What counts as a plain layer, whose forward a fused layer may replace: others are refused."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.testing._internal import two_tensor as _two_tensor

import epigemm
from tests.support.formulas import formula
from tests.support.thorough import in_turn
from tests.support.untyped import torch as untyped

ROWS, IN, OUT = 9, 24, 16
VECTOR = torch.ones(OUT)

_prune: Any = prune
two_tensor: Any = _two_tensor.TwoTensor
"""A wrapper of two tensors: torch's example of its kind."""


class LoRA(nn.Linear):
    def __init__(self) -> None:
        super().__init__(IN, OUT)
        self.down = nn.Parameter(torch.randn(IN, 2))
        self.up = nn.Parameter(torch.randn(2, OUT))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down @ self.up


class Derived(nn.Linear):
    """One whose class computes nothing else yet."""


def changed(change: Callable[[nn.Linear], Any]) -> Callable[[], nn.Linear]:
    def make() -> nn.Linear:
        linear = nn.Linear(IN, OUT)
        change(linear)
        return linear

    return make


def add_weight_as_a_buffer(linear: nn.Linear) -> None:
    del linear.weight
    linear.register_buffer("weight", torch.ones(OUT, IN))


def become(changed: Callable[[Tensor], Tensor]) -> Callable[[nn.Linear], None]:
    """Another weight, made of the one that is there."""
    return lambda layer: setattr(layer, "weight", changed(layer.weight))


def patch(name: str) -> Callable[[nn.Module], None]:
    return lambda layer: setattr(layer, name, types.MethodType(lambda self, x: x, layer))


class Doubling(nn.Parameter):
    """A parameter that means something else to `F.linear`, as quantised ones do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.nn.functional.linear else result


CHANGES: dict[str, tuple[Callable[[nn.Linear], Any], str]] = {
    "parametrised": (parametrizations.weight_norm, "got ParametrizedLinear"),
    "spectral": (parametrizations.spectral_norm, "got ParametrizedLinear"),
    "old weight norm": (untyped.nn.utils.weight_norm, "weight_g, weight_v"),
    "old spectral norm": (untyped.nn.utils.spectral_norm, "weight_orig"),
    "pruned": (lambda layer: _prune.random_unstructured(layer, "weight", 0.5), "weight_mask"),
    "patched": (patch("forward"), "in forward;"),
    "patched call": (patch("_call_impl"), "in _call_impl;"),
    "buffer": (lambda layer: layer.register_buffer("zero_point", VECTOR), "in zero_point;"),
    "parameter": (lambda layer: layer.register_parameter("gain", nn.Parameter(VECTOR)), "in gain;"),
    "module": (lambda layer: layer.add_module("after", nn.ReLU()), "in after;"),
    "special weight": (become(lambda w: Doubling(w.detach())), "in a weight of type Doubling;"),
    "wrapped weight": (become(lambda w: nn.Parameter(two_tensor(w, w))), "in a weight of type TwoTensor;"),
    "hidden weight": (lambda layer: layer.__dict__.update(weight=torch.ones(OUT, IN)), "in weight;"),
    "compiled": (lambda layer: layer.compile(backend="eager"), "in compile();"),
    "weight as a buffer": (add_weight_as_a_buffer, "in weight;"),
    **{
        hook: (lambda layer, hook=hook: getattr(layer, f"register_{hook}")(lambda *_: None), "_hooks;")  # type: ignore[misc]
        for hook in (
            *("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"),
            *("state_dict_pre_hook", "load_state_dict_post_hook"),
        )
    },
}
ODD: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "another class": (lambda: nn.Conv2d(1, 1, 1), "got Conv2d"),
    "lora": (LoRA, "got LoRA"),
    "derived": (lambda: Derived(IN, OUT), "got Derived"),
    "lazy": (lambda: nn.LazyLinear(OUT), "got LazyLinear"),
    **{name: (changed(change), words) for name, (change, words) in CHANGES.items()},
}
"""Classes are refused by a TypeError."""


doubled = epigemm.epilogue(formula("acc, bias: PerColumn -> (acc + bias) * 2"))


TAKES: dict[str, Callable[[Any], object]] = {
    "Linear": lambda linear: epigemm.nn.Linear.from_linear(linear, doubled),
    "LinearReLU": epigemm.nn.LinearReLU.from_linear,
    "LinearGELU": epigemm.nn.LinearGELU.from_linear,
    "LinearSigmoidScaleResidual": epigemm.nn.LinearSigmoidScaleResidual.from_linear,
    "LinearReLUDiv": epigemm.nn.LinearReLUDiv.from_linear,
    "LinearGated": epigemm.nn.LinearGated.from_linear,
    "LinearGLU": epigemm.nn.LinearGLU.from_linear,
    "LinearGLU of two": lambda linear: epigemm.nn.LinearGLU.from_linears(linear, nn.Linear(IN, OUT)),
    "LinearResidual": epigemm.nn.LinearResidual.from_linear,
    "LinearLayerScaleResidual": lambda linear: epigemm.nn.LinearLayerScaleResidual.from_linear(
        linear, VECTOR
    ),
    "LinearScaleBatchNorm1d": lambda linear: epigemm.nn.LinearScaleBatchNorm1d.from_layers(
        linear, VECTOR, nn.BatchNorm1d(OUT)
    ),
    "LinearBatchNormReLU": lambda linear: epigemm.nn.LinearBatchNormReLU.from_layers(
        linear, nn.BatchNorm1d(OUT)
    ),
    "linear_scale_batch_norm1d": lambda linear: epigemm.nn.linear_scale_batch_norm1d(
        torch.randn(ROWS, IN), linear, VECTOR, nn.BatchNorm1d(OUT)
    ),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("odd", "takes"), in_turn([*ODD], [*TAKES]))
def test_refused_by_name(odd: str, takes: str) -> None:
    make, words = ODD[odd]
    error = TypeError if words.startswith("got") else ValueError
    with pytest.raises(error, match=r"^linear: got .*; accepted is") as caught:
        TAKES[takes](make())
    assert type(caught.value) is error and words in str(caught.value)


def materialised() -> nn.Linear:
    lazy = nn.LazyLinear(OUT)
    lazy(torch.randn(1, IN))
    return lazy


def attributed() -> nn.Linear:
    linear = nn.Linear(IN, OUT, bias=False)
    linear._is_initialized = True  # type: ignore[assignment]  # as libraries mark what they have filled
    return linear


def unhooked() -> nn.Linear:
    linear = nn.Linear(IN, OUT)
    linear.register_forward_hook(lambda *_: None).remove()
    return linear


@pytest.mark.parametrize(
    "make",
    [materialised, attributed, unhooked, lambda: nn.MultiheadAttention(OUT, 2).out_proj],
    ids=["materialised", "attributed", "unhooked", "attention"],
)
def test_taken(make: Callable[[], nn.Linear]) -> None:
    linear = make()
    x = torch.randn(ROWS, linear.in_features)
    expected = linear(x).double().relu()
    torch.testing.assert_close(epigemm.nn.LinearReLU.from_linear(linear)(x).double(), expected)


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (nn.Linear, "forward", lambda self, input: input * 2),
        (nn.Linear.forward, "__code__", (lambda self, input: input * 2).__code__),
    ],
)
def test_a_class_that_was_patched_is_refused(
    owner: Any, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(ValueError, match=r"differs from a plain one in Linear\.forward;"):
        epigemm.nn.LinearReLU.from_linear(nn.Linear(IN, OUT))
