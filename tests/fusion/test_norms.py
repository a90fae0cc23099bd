"""BatchNorm by the batch's own statistics in fused models: what one call replaces, and what is left as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from tests.fusion.eager import fuse_eagerly, report_of
from tests.support import norm_calls
from tests.support.untyped import backward, torch

ROWS, WIDTH, OUT = 12, 24, 16


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of calls in epigemm's passes, which run on the CPU, too."""
    return norm_calls.counted(monkeypatch)


class Model(nn.Module):
    """Layers for a forward."""

    def __init__(self, forward: Callable[[Model, Tensor], Any], **options: Any) -> None:
        super().__init__()
        self.fc, self.bn = nn.Linear(WIDTH, OUT), nn.BatchNorm1d(OUT, **options)
        self.second, self.scale = nn.Linear(WIDTH, OUT), nn.Parameter(torch.randn(OUT))
        with torch.no_grad():
            for parameter in self.bn.parameters():
                parameter.normal_()
        self._function = forward

    def forward(self, x: Tensor) -> Any:
        return self._function(self, x)


def alone(self: Model, x: Tensor) -> Any:
    return self.bn(self.fc(x))


def with_relu(self: Model, x: Tensor) -> Any:
    return torch.relu(self.bn(self.fc(x)))


def with_relu_in_place(self: Model, x: Tensor) -> Any:
    return F.relu(self.bn(self.fc(x)), inplace=True)


def with_scale(self: Model, x: Tensor) -> Any:
    return self.bn(self.fc(x) * self.scale).relu()


def with_scale_in_front(self: Model, x: Tensor) -> Any:
    return self.bn(self.scale * self.fc(x))


def without_bias(self: Model, x: Tensor) -> Any:
    return self.bn(F.linear(x, self.fc.weight)).relu_()


def with_residual(self: Model, x: Tensor) -> Any:
    return F.gelu(self.second(x)) + self.bn(self.fc(x))


def twice(self: Model, x: Tensor) -> Any:
    """Only the last one is taken: it may write what the first one's derivative reads, for all that is known."""
    return self.bn(self.fc(x)) + self.bn(self.second(x))


TAKEN = {
    alone: "batch_norm(acc + c1)",
    with_relu: "relu(batch_norm(acc + c1))",
    with_relu_in_place: "relu(batch_norm(acc + c1))",
    with_scale: "relu(batch_norm((acc + c1) * scale))",
    with_scale_in_front: "batch_norm((acc + c1) * scale)",
    without_bias: "relu(batch_norm(acc))",
    with_residual: "batch_norm(acc + c1)",
    twice: "batch_norm(acc + c1)",
}


def assert_trains_alike(fused: Any, plain: Any, *, steps: int = 3) -> None:
    """Results, gradients and buffers over some steps with other numbers of rows."""
    for step in range(steps):
        x = torch.randn(ROWS + step, WIDTH)
        results = [model(x) for model in (fused, plain)]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
        upstream = torch.randn(results[0].shape)
        for model, result in zip((fused, plain), results, strict=True):
            model.zero_grad()
            backward(result, upstream)
        for (name, mine), other in zip(fused.named_parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), name
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-4)
    for mine, other in zip(fused.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("forward", TAKEN, ids=lambda each: each.__name__)
def test_what_is_taken(forward: Any, calls: list[int]) -> None:
    plain = Model(forward)
    fused = fuse_eagerly(copy.deepcopy(plain))
    assert_trains_alike(fused, plain)
    assert TAKEN[forward] in [site.formula for site in report_of(fused).sites]
    assert not report_of(fused).skipped and len(calls) == 3
    assert "by the batch's own statistics" in str(report_of(fused))
    calls.clear()
    fused.eval(), plain.eval()
    x = torch.randn(ROWS, WIDTH)
    torch.testing.assert_close(fused(x), plain(x), rtol=1e-4, atol=1e-4)
    assert not calls


OPTIONS: list[dict[str, Any]] = [
    {"affine": False},
    {"momentum": 1.0, "eps": 0.1},
    {"track_running_stats": False},
    {"track_running_stats": False, "affine": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options: dict[str, Any], calls: list[int]) -> None:
    plain = Model(with_scale, **options)
    assert_trains_alike(fuse_eagerly(copy.deepcopy(plain)), plain)
    assert len(calls) == 3


def test_a_cumulative_average_stays_right() -> None:
    """The host reads the number of batches, which ends Dynamo's graph."""
    plain = Model(alone, momentum=None)
    assert_trains_alike(fuse_eagerly(copy.deepcopy(plain)), plain)


def test_without_gradients(calls: list[int]) -> None:
    plain = Model(with_relu)
    fused = fuse_eagerly(copy.deepcopy(plain))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            x = torch.randn(ROWS, WIDTH)
            torch.testing.assert_close(fused(x), plain(x), rtol=1e-4, atol=1e-4)
    for mine, other in zip(fused.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, other)
    assert len(calls) == 2


def test_autocast(calls: list[int]) -> None:
    plain = Model(with_relu)
    fused = fuse_eagerly(copy.deepcopy(plain))
    x = torch.randn(ROWS, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = fused(x), plain(x)
    assert found.dtype is expected.dtype is torch.bfloat16 and calls
    torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)


def test_one_row_is_torchs_error(calls: list[int]) -> None:
    fused = fuse_eagerly(Model(alone))
    with pytest.raises(RuntimeError, match="more than 1 value per channel"):
        fused(torch.randn(1, WIDTH))
    assert not calls


def test_explain(calls: list[int]) -> None:
    """The model runs, and what is told is what runs."""
    plain = Model(alone, track_running_stats=False)
    fused, x = fuse_eagerly(copy.deepcopy(plain)), torch.randn(ROWS, WIDTH)
    fused(x)
    calls.clear()
    (product,) = epigemm.explain(fused, x)
    assert product.function == "linear_batch_norm" and "by the batch's own statistics" in str(product)
    assert len(calls) == 1


# --- what stays as it is ---------------------------------------------------------------------------------------------


def reads_the_product(self: Model, x: Tensor) -> Any:
    z = self.fc(x)
    return self.bn(z) + z


def writes_the_input(self: Model, x: Tensor) -> Any:
    x = x + 0.0
    z = self.fc(x)
    x.mul_(2.0)
    return self.bn(z) + x.sum()


def behind_an_activation(self: Model, x: Tensor) -> Any:
    return self.bn(torch.tanh(self.fc(x)))


def of_three_dimensions(self: Model, x: Tensor) -> Any:
    return self.bn(self.fc(x.view(2, -1, WIDTH)).transpose(1, 2))


def under_no_grad(self: Model, x: Tensor) -> Any:
    z = self.fc(x)
    with torch.no_grad():
        normed = self.bn(z)
    return normed + self.second(x)


def instance_norm(self: Model, x: Tensor) -> Any:
    return F.instance_norm(self.fc(x).unsqueeze(0), use_input_stats=True)


def adds_a_matrix(self: Model, x: Tensor) -> Any:
    return self.bn(torch.addmm(x[:, :OUT], x, self.fc.weight.t()))


def adds_a_row(self: Model, x: Tensor) -> Any:
    return self.bn(torch.addmm(self.scale.view(1, OUT), x, self.fc.weight.t()))


def scales_by_a_statistic(self: Model, x: Tensor) -> Any:
    return self.bn(self.fc(x) * self.bn.running_var)


LEFT = [
    reads_the_product,
    adds_a_matrix,
    adds_a_row,
    scales_by_a_statistic,
    writes_the_input,
    behind_an_activation,
    of_three_dimensions,
    under_no_grad,
    instance_norm,
]


@pytest.mark.parametrize("forward", LEFT, ids=lambda each: each.__name__)
def test_what_is_left(forward: Any, calls: list[int]) -> None:
    plain = Model(forward)
    fused = fuse_eagerly(copy.deepcopy(plain))
    for rows in (ROWS, ROWS + 2):
        x = torch.randn(rows, WIDTH)
        torch.testing.assert_close(fused(x), plain(x), rtol=1e-4, atol=1e-4)
    for mine, other in zip(fused.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, other)
    assert not calls


def writes_the_scale(self: Any, x: Tensor) -> Any:
    z = self.fc(x) * self.factor
    self.factor.mul_(-2.0)
    return self.bn(z)


def writes_a_view_of_the_scale(self: Any, x: Tensor) -> Any:
    z = self.fc(x) * self.factor
    self.factor.view(4, 4).add_(3.0)
    return self.bn(z)


@pytest.mark.parametrize("forward", [writes_the_scale, writes_a_view_of_the_scale])
@pytest.mark.parametrize("learns", [False, True])
def test_a_scale_is_read_before_it_is_written(forward: Any, calls: list[int], *, learns: bool) -> None:
    plain = Model(forward)
    plain.register_buffer("factor", torch.randn(OUT))
    plain.fc.requires_grad_(False)
    fused = fuse_eagerly(copy.deepcopy(plain))
    x = torch.randn(ROWS, WIDTH)
    with torch.set_grad_enabled(learns):
        torch.testing.assert_close(fused(x), plain(x), rtol=1e-4, atol=1e-4)
    for mine, other in zip(fused.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, other)
    assert not calls


def test_a_compiled_model_keeps_pytorchs(calls: list[int], fresh_compiler: None) -> None:
    """Its BatchNorm is the compiler's."""
    plain = Model(with_relu)
    compiled = torch.compile(copy.deepcopy(plain), backend="epigemm")
    x = torch.randn(ROWS, WIDTH)
    torch.testing.assert_close(compiled(x), plain(x), rtol=1e-4, atol=1e-4)
    assert not calls


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype: Any, calls: list[int]) -> None:
    """Large enough that the device pays for it."""
    layers = nn.Linear(2048, 2048), nn.BatchNorm1d(2048), nn.ReLU()
    plain = nn.Sequential(*layers).to("cuda", dtype)
    fused = fuse_eagerly(copy.deepcopy(plain))
    x = torch.randn(8192, 2048, device="cuda", dtype=dtype)
    tolerance = 5e-2 if dtype is torch.bfloat16 else 1e-3
    torch.testing.assert_close(fused(x), plain(x), rtol=tolerance, atol=tolerance)
    assert calls
    small = fuse_eagerly(copy.deepcopy(plain))
    calls.clear()
    small(x[:32])
    assert not calls
