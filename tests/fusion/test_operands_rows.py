"""Chains that read a matrix with a row for several rows of the product, as the gates `[B, 1, N]` of adaLN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fusion.eager import fuse_eagerly
from tests.support.thorough import in_turn

N = 24


class Base(nn.Module):
    """A linear layer, and what its forward does with the result."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(N, N)
        self._forward = forward

    def forward(self, *given: Tensor) -> Any:
        return self._forward(self.fc, *given)


def gate(fc: nn.Module, x: Tensor, rows: Tensor) -> Any:
    return fc(x) * rows.unsqueeze(1)


def gate_and_residual(fc: nn.Module, x: Tensor, rows: Tensor) -> Any:
    return x + rows[:, None] * fc(x)


def scale_and_shift(fc: nn.Module, x: Tensor, rows: Tensor) -> Any:
    return torch.tanh(fc(x)) * (1 + rows[:, None]) + rows.flip(0)[:, None]


def behind_a_view(fc: nn.Module, x: Tensor, rows: Tensor) -> Any:
    """The product has no batches of its own."""
    flat = fc(x.reshape(-1, N)).view(x.shape)
    return flat * rows[:, None] + x


def of_two_lengths(fc: nn.Module, x: Tensor, rows: Tensor) -> Any:
    four = fc(x.reshape(-1, N)).view(x.shape[0], 2, x.shape[1] // 2, N)
    return four * rows[:, None, None] + x[:, :2].unsqueeze(2)


def turned(fc: nn.Module, x: Tensor, rows: Tensor) -> Any:
    return fc(x).transpose(1, 2) * rows.unsqueeze(2)


def in_place(fc: nn.Module, x: Tensor, rows: Tensor) -> Any:
    z = fc(x)
    z *= rows[:, None]
    return z.relu_()


def through_chunks(fc: nn.Module, x: Tensor, rows: Tensor) -> Any:
    shift, scale = torch.cat((rows, rows + 1), -1).chunk(2, -1)
    return fc(x) * scale[:, None] + shift[:, None]


def with_norm(fc: nn.Module, x: Tensor, rows: Tensor) -> Any:
    """A BatchNorm's vectors come before the gate."""
    mean, var = rows.new_zeros(N), rows.new_ones(N)
    flat = nn.functional.batch_norm(fc(x.reshape(-1, N)), mean, var)
    return flat.view(x.shape) * rows[:, None]


TAKEN = [
    gate,
    gate_and_residual,
    scale_and_shift,
    behind_a_view,
    of_two_lengths,
    turned,
    in_place,
    through_chunks,
    with_norm,
]


def drawn(batches: int, rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(batches, rows, N, dtype=dtype), torch.randn(batches, N, dtype=dtype)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.mark.parametrize("forward", TAKEN, ids=lambda each: each.__name__)
def test_fused(forward: Callable[..., Tensor]) -> None:
    """Sizes that change from call to call, too."""
    model = Base(forward).eval()
    fused: Any = fuse_eagerly(model)
    with torch.no_grad():
        for batches, rows in ((3, 4), (5, 6), (2, 8)):
            given = drawn(batches, rows)
            result, wanted = fused(*given), model(*given)
            assert result.shape == wanted.shape and result.stride() == wanted.stride()
            torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)
    report = fused.fusion_report
    found, taken = report.chains  # of every graph
    assert found == taken > 0 and not report.not_taken, str(report)


@pytest.mark.parametrize(
    ("forward", "with_backend"),
    in_turn(TAKEN, [False, True]),
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_gradients(forward: Callable[..., Tensor], with_backend: bool) -> None:
    model = Base(forward).double()
    made: Any = torch.compile(model, backend="epigemm") if with_backend else fuse_eagerly(model)
    for batches, rows in ((3, 4), (5, 6)):
        given = drawn(batches, rows, torch.float64)
        found, wanted = (
            torch.autograd.grad(call(*leaves).square().sum(), [*leaves, *model.parameters()])
            for call, leaves in (
                (each, [one.clone().requires_grad_() for one in given]) for each in (made, model)
            )
        )
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)


def given_as_it_is(fc: nn.Module, x: Tensor, gates: Tensor) -> Any:
    """Of a flat product; the gates are `[B, 1, N]` from the start."""
    return fc(x.reshape(-1, N)).view(x.shape) * gates


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("with_backend", [False, True], ids=["fuse", "torch.compile"])
def test_sizes_that_change(with_backend: bool, dynamic: bool | None) -> None:
    """Symbolic sizes, and a batch of none."""
    model = Base(given_as_it_is)
    compiled: Any = (
        torch.compile(model, backend="epigemm", dynamic=dynamic) if with_backend else fuse_eagerly(model)
    )
    for batches, rows in ((3, 5), (4, 5), (4, 7), (0, 5), (2, 1)):
        x, gates = torch.randn(batches, rows, N), torch.randn(batches, 1, N)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, gates), model(x, gates), rtol=1e-5, atol=1e-5)


def along_rows(fc: nn.Module, x: Tensor, rows: Tensor) -> Any:
    """A position's embedding, the same for all batches."""
    return fc(x).relu() * 2 + x[:1]


def of_different_views(fc: nn.Module, x: Tensor, rows: Tensor) -> Any:
    z = fc(x.reshape(-1, N))
    one = z.view(x.shape) * rows[:, None]
    return one.view(-1, 2, N) * x.reshape(-1, 2, N)[:, :1]


@pytest.mark.parametrize(
    ("forward", "reason"),
    [(along_rows, "is no operand"), (of_different_views, "is repeated along other axes")],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_left_to_torch(forward: Callable[..., Tensor], reason: str) -> None:
    """The chain ends before it."""
    model = Base(forward).eval()
    fused: Any = fuse_eagerly(model)
    with torch.no_grad():
        given = drawn(3, 4)
        torch.testing.assert_close(fused(*given), model(*given), rtol=1e-5, atol=1e-5)
    assert reason in str(fused.fusion_report), str(fused.fusion_report)
