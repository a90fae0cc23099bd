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


def exact_state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@fused_modules
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_equals_linear_and_what_follows(fused: Fused, bias: bool, device: torch.device) -> None:
    linear = nn.Linear(IN, OUT, bias=bias).to(device)
    module = fused.from_linear(linear)
    for shape in [(ROWS, IN), (IN,), (2, 3, IN), (0, IN)]:
        x = torch.randn(*shape, device=device)
        torch.testing.assert_close(module(x), fused.after(linear(x)), rtol=1e-5, atol=1e-5)


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


@fused_modules
def test_from_linear_keeps_mode_dtype_and_device(fused: Fused) -> None:
    linear = nn.Linear(IN, OUT, dtype=torch.float64).eval()
    module = fused.from_linear(linear)
    assert module.training is False
    x = torch.randn(2, IN, dtype=torch.float64)
    torch.testing.assert_close(module(x), fused.after(linear(x)))
    with pytest.raises(TypeError, match="linear"):
        fused.from_linear(nn.Conv2d(1, 1, 1))  # type: ignore[arg-type]


def batch_norm_pair(**options: Any) -> tuple[nn.Linear, nn.Parameter, nn.BatchNorm1d, nn.Module]:
    """The plain layers and our module made from copies of them."""
    torch.manual_seed(5)
    linear, scale = nn.Linear(IN, OUT), nn.Parameter(torch.randn(OUT))
    norm = nn.BatchNorm1d(OUT, **options)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    ours = epigemm.nn.LinearScaleBatchNorm1d.from_layers(
        copy.deepcopy(linear), copy.deepcopy(scale), copy.deepcopy(norm)
    )
    return linear, scale, norm, ours


OPTIONS: list[dict[str, Any]] = [
    {},
    {"affine": False},
    {"momentum": None},
    {"momentum": 0.0},
    {"momentum": 1.0},
    {"momentum": 0.3, "eps": 0.125},
    {"track_running_stats": False},
    {"track_running_stats": False, "affine": False},
]
options_cases = pytest.mark.parametrize("options", OPTIONS, ids=str)


def plain_gradients(
    linear: nn.Linear, scale: nn.Parameter, norm: nn.BatchNorm1d
) -> dict[str, torch.Tensor | None]:
    """Gradients of the plain layers under the names that our module has for them."""
    named = {f"linear.{name}": parameter.grad for name, parameter in linear.named_parameters()}
    return {**named, "scale": scale.grad, **{f"bn.{name}": p.grad for name, p in norm.named_parameters()}}


def assert_same_gradients(ours: nn.Module, expected: dict[str, torch.Tensor | None]) -> None:
    actual = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient is not None
        torch.testing.assert_close(actual[name], gradient, rtol=1e-3, atol=1e-3, msg=name)


def statistics(module: nn.Module) -> list[torch.Tensor]:
    """Buffers in order, whatever prefix their names have: running mean, running variance, batches tracked."""
    return list(module.buffers())


@options_cases
def test_batch_norm_in_training_equals_torch(options: dict[str, Any], device: torch.device) -> None:
    """Outputs, gradients and running statistics over several batches of different sizes."""
    linear, scale, norm, ours = batch_norm_pair(**options)
    for module in (linear, norm, ours):
        module.to(device).train()
    scale = nn.Parameter(scale.detach().to(device))
    for rows in (9, 2, 30):
        x = torch.randn(rows, IN, device=device) + 0.5
        expected = norm(linear(x) * scale)
        actual = ours(x)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        upstream = torch.randn_like(expected)
        for each in (linear, norm, ours):
            each.zero_grad()
        scale.grad = None
        expected.backward(upstream)
        actual.backward(upstream)
        assert_same_gradients(ours, plain_gradients(linear, scale, norm))
        for mine, other in zip(statistics(ours), statistics(norm), strict=True):
            assert mine.dtype is other.dtype
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@options_cases
def test_batch_norm_in_evaluation_equals_torch(options: dict[str, Any], device: torch.device) -> None:
    linear, scale, norm, ours = batch_norm_pair(**options)
    for module in (linear, norm, ours):
        module.to(device)
    scale = nn.Parameter(scale.detach().to(device))
    for _ in range(3):
        x = torch.randn(ROWS, IN, device=device)
        norm(linear(x) * scale)
        ours(x)
    for module in (norm, ours):
        module.eval()
    before = [buffer.clone() for buffer in statistics(ours)]
    for rows in (1, 9):
        if rows == 1 and not options.get("track_running_stats", True):
            continue
        x = torch.randn(rows, IN, device=device)
        torch.testing.assert_close(ours(x), norm(linear(x) * scale), rtol=1e-4, atol=1e-4)
    for kept, buffer in zip(before, statistics(ours), strict=True):
        assert torch.equal(kept, buffer)


def test_batch_norm_of_one_row_in_training_is_torchs_error() -> None:
    linear, scale, norm, ours = batch_norm_pair()
    x = torch.randn(1, IN)
    with pytest.raises(ValueError, match="more than 1 value per channel") as theirs:
        norm(linear(x) * scale)
    before = [buffer.clone() for buffer in statistics(ours)]
    with pytest.raises(ValueError, match="more than 1 value per channel") as mine:
        ours(x)
    assert str(mine.value) == str(theirs.value)
    assert torch.equal(statistics(ours)[0], before[0]) and torch.equal(statistics(ours)[1], before[1])


def test_batch_norm_in_evaluation_reads_live_statistics_and_parameters() -> None:
    _, _, _, ours = batch_norm_pair()
    ours.eval()
    x = torch.randn(ROWS, IN)
    before = ours(x)
    with torch.no_grad():
        for tensor in (*list(ours.parameters())[2:], *statistics(ours)[:2]):
            kept = tensor.clone()
            tensor.add_(0.5)
            assert not torch.allclose(ours(x), before)
            tensor.copy_(kept)
    assert torch.equal(ours(x), before)


def test_batch_norm_in_evaluation_differentiates() -> None:
    linear, scale, norm, ours = batch_norm_pair()
    norm.eval(), ours.eval()
    x = torch.randn(ROWS, IN)
    upstream = torch.randn(ROWS, OUT)
    norm(linear(x) * scale).backward(upstream)
    ours(x).backward(upstream)
    assert_same_gradients(ours, plain_gradients(linear, scale, norm))


def test_batch_norm_from_layers_shares_their_objects() -> None:
    linear, scale, norm = nn.Linear(IN, OUT), nn.Parameter(torch.randn(OUT)), nn.BatchNorm1d(OUT)
    ours = epigemm.nn.LinearScaleBatchNorm1d.from_layers(linear, scale, norm)
    shared = {id(tensor) for tensor in [*ours.parameters(), *ours.buffers()]}
    plain = [*linear.parameters(), scale, *norm.parameters(), *norm.buffers()]
    assert shared == {id(tensor) for tensor in plain}


@pytest.fixture(params=[*FUSED, "batch_norm", "sigmoid"], ids=lambda f: f if isinstance(f, str) else f.name)
def module(request: pytest.FixtureRequest) -> nn.Module:
    if request.param == "batch_norm":
        return batch_norm_pair()[3].eval()
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_conversions(module: nn.Module, dtype: torch.dtype) -> None:
    x = torch.randn(ROWS, IN)
    expected = module(x).double()
    converted = module.to(dtype)
    actual = converted(x.to(dtype))
    assert actual.dtype is dtype
    eps = max(torch.finfo(dtype).eps, 2.0**-23)
    assert float(((actual.double() - expected).abs() / (1 + expected.abs())).max()) <= 60 * eps


def test_repr_names_what_was_configured(module: nn.Module) -> None:
    text = repr(module)
    assert type(module).__name__ in text
    if any(True for _ in module.parameters()):
        assert str(IN) in text and str(OUT) in text


def test_training_a_few_steps_decreases_the_loss(module: nn.Module) -> None:
    if not list(module.parameters()):
        pytest.skip("has no parameters")
    module.train()
    x, target = torch.randn(64, IN), torch.rand(64, OUT) * 0.5
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (module(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_modules_compile(module: nn.Module) -> None:
    torch.compiler.reset()
    x = torch.randn(ROWS, IN)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)


def test_sigmoid_module() -> None:
    x = torch.randn(ROWS, IN)
    torch.testing.assert_close(epigemm.nn.Sigmoid()(x), torch.sigmoid(x))
    assert list(epigemm.nn.Sigmoid().state_dict()) == []
