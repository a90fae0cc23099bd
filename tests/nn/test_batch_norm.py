"""Layers with a BatchNorm: in training and evaluation what PyTorch's layers compute, whoever computes it.

Rows of tests/ops have the values and the gradients; here are BatchNorm's options, types, modes and hooks, and when a
BatchNorm by the batch's own statistics runs in epigemm's passes.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import epigemm
from tests.support import norm_calls
from tests.support.untyped import torch

ROWS, IN, OUT = 9, 24, 16
untyped_nn: Any = nn


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of calls in epigemm's passes, which run on the CPU, too."""
    return norm_calls.counted(monkeypatch)


@pytest.fixture(params=["where it runs", "everywhere"])
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU PyTorch's BatchNorm is called; the formulas of the kernels are in PyTorch's operators there."""
    if request.param == "everywhere":
        norm_calls.pretended(monkeypatch)


def layer(dtype: Any = torch.float32, *, relu: bool = False, **options: Any) -> Any:
    kind = epigemm.nn.LinearBatchNormReLU if relu else epigemm.nn.LinearScaleBatchNorm1d
    made: Any = kind(IN, OUT, **options).to(dtype)
    with torch.no_grad():
        for parameter in made.bn.parameters():
            parameter.normal_()
        if not relu:
            made.scale.normal_()
    return made


def plain(made: Any, x: Tensor) -> Tensor:
    """What PyTorch's layers compute."""
    z = made.linear(x)
    scale = getattr(made, "scale", None)
    y: Tensor = made.bn(z if scale is None else z * scale)
    return torch.relu(y) if isinstance(made, epigemm.nn.LinearBatchNormReLU) else y


def assert_same_buffers(made: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(made.buffers(), other.buffers(), strict=True):
        assert mine.dtype is theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


OPTIONS: list[dict[str, Any]] = [
    {"affine": False},
    {"momentum": None},
    {"momentum": 0.0},
    {"momentum": 1.0},
    {"momentum": 0.3, "eps": 0.125},
    {"track_running_stats": False},
    {"track_running_stats": False, "affine": False},
]


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("relu", [False, True], ids=["plain", "relu"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_as_pytorchs_layers(options: dict[str, Any], relu: bool, device: torch.device) -> None:
    """Results, gradients and running statistics over batches of different sizes; then evaluated, which changes none."""
    made = layer(relu=relu, **options).to(device)
    other = copy.deepcopy(made)
    for rows in (9, 2, 30):
        x, upstream = torch.randn(rows, IN, device=device) + 0.5, torch.randn(rows, OUT, device=device)
        for run, module in ((made, made), (lambda x: plain(other, x), other)):
            module.zero_grad()
            result = run(x)
            result.backward(upstream)
        torch.testing.assert_close(made(x), plain(other, x), rtol=1e-4, atol=1e-4)
        for mine, theirs in zip(made.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-3)
        assert_same_buffers(made, other)
    made.eval(), other.eval()
    for rows in (1, 9) if options.get("track_running_stats", True) else (9,):
        x = torch.randn(rows, IN, device=device)
        torch.testing.assert_close(made(x), plain(other, x), rtol=1e-4, atol=1e-4)
    assert_same_buffers(made, other)


@pytest.mark.usefixtures("passes")
def test_one_row_in_training_is_torchs_error() -> None:
    made = layer()
    before = copy.deepcopy(made)
    errors = []
    for run in (made, lambda x: plain(before, x)):
        with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
            run(torch.randn(1, IN))
        errors.append(str(caught.value))
    assert errors[0] == errors[1] and torch.equal(made.bn.running_mean, before.bn.running_mean)


# --- in epigemm's passes ---------------------------------------------------------------------------------------------


TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("of_layer", TYPES, ids=str)
@pytest.mark.parametrize("of_norm", TYPES, ids=str)
def test_types_are_as_with_pytorch(of_layer: Any, of_norm: Any, calls: list[int]) -> None:
    made = layer(of_layer)
    made.bn.to(of_norm)
    other, x = copy.deepcopy(made), torch.randn(ROWS, IN).to(of_layer)
    try:
        expected = plain(other, x)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            made(x)
        assert not calls
        return
    found = made(x)
    assert found.dtype is expected.dtype and calls
    tolerance = {torch.float16: 2e-2, torch.bfloat16: 1e-1}.get(of_layer, 1e-4)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(made.bn.buffers(), other.bn.buffers(), strict=True):
        assert mine.dtype is theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, nullcontext])
def test_the_running_statistics_follow_in_every_mode(mode: Callable[[], Any], calls: list[int]) -> None:
    made = layer(momentum=None)
    other = copy.deepcopy(made)
    for _ in range(3):
        x = torch.randn(ROWS, IN)
        with mode():
            torch.testing.assert_close(made(x), plain(other, x), rtol=1e-4, atol=1e-4)
    assert_same_buffers(made, other)
    assert len(calls) == 3 and made.bn.num_batches_tracked.item() == 3


def test_a_number_of_batches_that_is_not_counted(calls: list[int]) -> None:
    """nn.BatchNorm1d without it does not move its running statistics, if they are cumulative."""
    made = layer(momentum=None)
    made.bn.num_batches_tracked = None
    made(torch.randn(ROWS, IN))
    assert calls and torch.equal(made.bn.running_mean, torch.zeros(OUT))


class Seen(TorchFunctionMode):
    """A mode that changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Other(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def negating(made: Any) -> Any:
    made.bn.forward = torch.neg
    return made


def with_other(made: Any) -> Any:
    made.bn = Other(OUT)
    return made


def in_mode(made: Any) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with Seen():
            return made(x)  # type: ignore[no-any-return]

    return run


def untracked(run: Callable[[Any], Any]) -> Callable[[], tuple[Any, Any]]:
    """A layer that keeps no statistics, and how it is run."""
    made = layer(track_running_stats=False)
    return lambda: (made, run(made))


BY_TORCH: dict[str, Callable[[], tuple[Any, Any]]] = {
    "another batch norm": lambda: (made := with_other(layer()), made),
    "synchronised": lambda: (made := untyped_nn.SyncBatchNorm.convert_sync_batchnorm(layer()), made),
    "a forward of its own": lambda: (made := negating(layer()), made),
    "a mode": untracked(in_mode),
    "vmap": untracked(lambda made: lambda x: torch.func.vmap(made)(x.unsqueeze(0)).squeeze(0)),
    "compiled, eager": lambda: (made := layer(), torch.compile(copy.deepcopy(made), backend="eager")),
    "compiled": lambda: (made := layer(), torch.compile(copy.deepcopy(made), backend="aot_eager")),
    "no rows": untracked(lambda made: lambda x: torch.cat((made(x[:0]), plain(made, x)))),
}


@pytest.mark.parametrize("name", BY_TORCH)
def test_pytorchs_batch_norm_computes(name: str, calls: list[int], fresh_compiler: None) -> None:
    made, run = BY_TORCH[name]()
    x = torch.randn(ROWS, IN)
    expected = plain(copy.deepcopy(made), x)
    torch.testing.assert_close(run(x), expected, rtol=1e-4, atol=1e-4)
    assert not calls


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook", "global"])
def test_hooks_run(register: str, calls: list[int]) -> None:
    made, seen = layer(), []
    of_all = nn.modules.module.register_module_forward_hook
    handle = (of_all if register == "global" else getattr(made.bn, register))(
        lambda module, *_: seen.append(type(module))
    )
    made(torch.randn(ROWS, IN))
    handle.remove()
    assert nn.BatchNorm1d in seen and not calls


def _an_eps_of_zero(made: Any) -> None:
    made.bn.eps, made.bn.bias = 0.0, nn.Parameter(torch.ones(OUT + 1))


UNFIT: dict[str, Callable[[Any], Any]] = {
    "too few features": lambda made: setattr(made, "bn", nn.BatchNorm1d(OUT + 1)),
    "half of the statistics": lambda made: setattr(made.bn, "running_var", None),
    "an eps of 0": _an_eps_of_zero,
    "a wrong scale": lambda made: setattr(made, "scale", nn.Parameter(torch.randn(OUT + 1))),
    "another type": lambda made: made.linear.double(),
}


@pytest.mark.parametrize("change", UNFIT.values(), ids=UNFIT)
def test_what_does_not_fit_is_an_error_of_before(change: Callable[[Any], Any], calls: list[int]) -> None:
    made = layer()
    change(made)
    with pytest.raises((RuntimeError, ValueError)):
        made(torch.randn(ROWS, IN))
    assert not calls
