"""The modules: compatible with what they replace, in names, state, copies and every mode."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import epigemm
from tests.nn.test_batch_norm import layer as batch_norm

ROWS, IN, OUT = 9, 24, 16


@dataclass(frozen=True)
class Fused:
    """A module of ours, how it is made and remade from a linear layer, and what follows that layer in plain PyTorch."""

    name: str
    make: Callable[..., nn.Module]
    from_linear: Callable[[nn.Linear], nn.Module]
    after: Callable[[torch.Tensor], torch.Tensor]


FUSED = [
    Fused(
        "LinearReLU",
        epigemm.nn.LinearReLU,
        epigemm.nn.LinearReLU.from_linear,
        torch.relu,
    ),
    Fused(
        "LinearSigmoidScaleResidual",
        lambda k, n, bias=True: epigemm.nn.LinearSigmoidScaleResidual(k, n, scale=2.0, bias=bias),
        lambda linear: epigemm.nn.LinearSigmoidScaleResidual.from_linear(linear, scale=2.0),
        lambda z: z + 2.0 * torch.sigmoid(z),
    ),
    Fused(
        "LinearReLUDiv",
        lambda k, n, bias=True: epigemm.nn.LinearReLUDiv(k, n, divisor=-2.0, bias=bias),
        lambda linear: epigemm.nn.LinearReLUDiv.from_linear(linear, divisor=-2.0),
        lambda z: torch.relu(z) / -2.0,
    ),
    Fused(
        "LinearGELU",
        lambda k, n, bias=True: epigemm.nn.LinearGELU(k, n, bias, approximate="tanh"),
        lambda linear: epigemm.nn.LinearGELU.from_linear(linear, approximate="tanh"),
        lambda z: torch.nn.functional.gelu(z, approximate="tanh"),
    ),
    Fused("LinearSiLU", epigemm.nn.LinearSiLU, epigemm.nn.LinearSiLU.from_linear, torch.nn.functional.silu),
    Fused("LinearTanh", epigemm.nn.LinearTanh, epigemm.nn.LinearTanh.from_linear, torch.tanh),
]
fused_modules = pytest.mark.parametrize("fused", FUSED, ids=lambda f: f.name)


@fused_modules
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_names_and_random_draws_are_those_of_linear(fused: Fused, bias: bool) -> None:
    """The same seed gives the same parameters; state dicts load both ways, strictly."""
    torch.manual_seed(3)
    linear = nn.Linear(IN, OUT, bias=bias)
    torch.manual_seed(3)
    module = fused.make(IN, OUT, bias=bias)
    assert list(module.state_dict()) == list(linear.state_dict())
    for name, tensor in linear.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor)
    other = fused.make(IN, OUT, bias=bias)
    other.load_state_dict(linear.state_dict())
    nn.Linear(IN, OUT, bias=bias).load_state_dict(module.state_dict())
    x = torch.randn(ROWS, IN)
    assert torch.equal(other(x), module(x))


@fused_modules
def test_from_linear_shares_the_parameter_objects(fused: Fused) -> None:
    linear = nn.Linear(IN, OUT)
    module = fused.from_linear(linear)
    parameters = dict(module.named_parameters())
    assert parameters["weight"] is linear.weight and parameters["bias"] is linear.bias
    with torch.no_grad():
        linear.weight.mul_(2)
    x = torch.randn(ROWS, IN)
    torch.testing.assert_close(module(x), fused.after(linear(x)), rtol=1e-5, atol=1e-5)
    module(x).sum().backward()
    assert linear.weight.grad is not None and linear.bias.grad is not None


@pytest.fixture(params=[*FUSED, "batch_norm", "sigmoid"], ids=lambda f: f if isinstance(f, str) else f.name)
def module(request: pytest.FixtureRequest) -> nn.Module:
    if request.param == "batch_norm":
        return batch_norm().eval()  # type: ignore[no-any-return]
    if request.param == "sigmoid":
        return epigemm.nn.Sigmoid().eval()
    return request.param.make(IN, OUT).eval()  # type: ignore[no-any-return]


def test_copies_and_pickles(module: nn.Module) -> None:
    x = torch.randn(ROWS, IN)
    expected = module(x)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), expected)
        for mine, other in zip(module.parameters(), twin.parameters(), strict=True):
            assert mine is not other and torch.equal(mine, other)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    module.load_state_dict(torch.load(buffer))
    assert torch.equal(module(x), expected)


def test_repr_names_what_was_configured(module: nn.Module) -> None:
    text = repr(module)
    assert type(module).__name__ in text
    if any(True for _ in module.parameters()):
        assert str(IN) in text and str(OUT) in text
        assert "epilogue=" in text and "precision=None" in text and "strict" not in text


@pytest.mark.parametrize(
    ("layer", "epilogue"),
    [
        (epigemm.nn.Linear, "None"),
        (epigemm.nn.LinearReLU, "bias_relu"),
        (epigemm.nn.LinearGELU, "bias_gelu"),
        (epigemm.nn.LinearReLUDiv, "relu_div"),
        (epigemm.nn.LinearResidual, "residual"),
        (epigemm.nn.LinearGated, "gated_silu"),
        (epigemm.nn.LinearLayerScaleResidual, "layer_scale_residual"),
        (epigemm.nn.LinearScaleBatchNorm1d, "scale_batch_norm"),
        (epigemm.nn.LinearBatchNormReLU, "batch_norm_relu"),
    ],
)
def test_repr_names_epilogue_precision_and_mode(layer: Any, epilogue: str) -> None:
    text = layer(IN, OUT, precision="ieee", strict=True).extra_repr()
    assert f"epilogue={epilogue}, precision='ieee', strict=True" in text
    assert "batch_invariant" not in text
    with epigemm.batch_invariant():
        assert f"epilogue={epilogue}, precision=None, batch_invariant=True" in layer(IN, OUT).extra_repr()
    assert "batch_invariant" not in layer(IN, OUT).extra_repr()
