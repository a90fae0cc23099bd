"""Layers with a BatchNorm: in training and evaluation what PyTorch's layers compute one after the other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import epigemm
from tests.support import norm_calls

ROWS, IN, OUT = 9, 24, 16


@pytest.fixture(params=["where it runs", "everywhere"], autouse=True)
def _own_batch_norm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU PyTorch's BatchNorm is called; the formulas of the kernels are in PyTorch's operators there."""
    if request.param == "everywhere":
        norm_calls.pretended(monkeypatch)


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


@options_cases
def test_batch_norm_and_relu_in_training_equals_torch(options: dict[str, Any], device: torch.device) -> None:
    linear, _, norm, _ = batch_norm_pair(**options)
    ours = epigemm.nn.LinearBatchNormReLU.from_layers(copy.deepcopy(linear), copy.deepcopy(norm)).to(device)
    plain = nn.Sequential(linear, norm, nn.ReLU()).to(device)
    for rows in (9, 2, 30):
        x, upstream = torch.randn(rows, IN, device=device) + 0.5, torch.randn(rows, OUT, device=device)
        found, expected = ours(x), plain(x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for module, result in ((ours, found), (plain, expected)):
            module.zero_grad()
            result.backward(upstream)
        for own, its in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, its.grad, rtol=1e-3, atol=1e-3)
        for mine, other in zip(statistics(ours), statistics(plain), strict=True):
            assert mine.dtype is other.dtype
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_a_batch_norm_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bn: got num_features=5; accepted is 4, linear's out_features"):
        epigemm.nn.LinearBatchNormReLU.from_layers(nn.Linear(3, 4), nn.BatchNorm1d(5))


def test_batch_norm_from_layers_shares_their_objects() -> None:
    linear, scale, norm = nn.Linear(IN, OUT), nn.Parameter(torch.randn(OUT)), nn.BatchNorm1d(OUT)
    ours = epigemm.nn.LinearScaleBatchNorm1d.from_layers(linear, scale, norm)
    shared = {id(tensor) for tensor in [*ours.parameters(), *ours.buffers()]}
    plain = [*linear.parameters(), scale, *norm.parameters(), *norm.buffers()]
    assert shared == {id(tensor) for tensor in plain}
