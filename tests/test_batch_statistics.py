"""When a BatchNorm by the batch's own statistics runs in epigemm's passes, and when in PyTorch's."""

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
from epigemm import batch_statistics
from tests.support import norm_calls
from tests.support.untyped import backward, torch

ROWS, IN, OUT = 9, 24, 16
untyped_nn: Any = nn
Layer = epigemm.nn.LinearScaleBatchNorm1d | epigemm.nn.LinearBatchNormReLU


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of calls in epigemm's passes, which run on the CPU, too."""
    return norm_calls.counted(monkeypatch)


def layer(dtype: Any = torch.float32, **options: Any) -> Layer:
    made = epigemm.nn.LinearScaleBatchNorm1d(IN, OUT, **options).to(dtype)
    with torch.no_grad():
        for parameter in made.bn.parameters():
            parameter.normal_()
    return made


def plain(made: Layer, x: Tensor) -> Tensor:
    """What PyTorch's layers compute."""
    z = made.linear(x)
    scale = getattr(made, "scale", None)
    return made.bn(z if scale is None else z * scale)  # type: ignore[no-any-return]


def test_on_a_cpu_pytorchs_batch_norm_runs() -> None:
    assert not batch_statistics.is_served(torch.ones(2, 2))


@pytest.mark.gpu
def test_on_a_gpu_the_kernels_run() -> None:
    made = layer().cuda()
    result = made(torch.randn(ROWS, IN, device="cuda"))
    assert "LinearBatchNorm" in type(result.grad_fn).__name__


# --- what torch does, and this, too ----------------------------------------------------------------------------------

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
        message = str(error)
    else:
        message = ""
    if message:
        with pytest.raises(RuntimeError, match=re.escape(message)):
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


def test_autocast(calls: list[int]) -> None:
    """The product in 16 bits, BatchNorm's parameters in fp32. PyTorch's BatchNorm runs where a scale is, too."""
    narrow: Any = layer()
    narrow.scale = nn.Parameter(narrow.scale.detach().bfloat16())
    for made in (layer(), narrow, epigemm.nn.LinearBatchNormReLU(IN, OUT)):
        other, x = copy.deepcopy(made), torch.randn(ROWS, IN)
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = made(x), plain(other, x)
        expected = torch.relu(expected) if isinstance(made, epigemm.nn.LinearBatchNormReLU) else expected
        is_wide = isinstance(made, epigemm.nn.LinearScaleBatchNorm1d) and made is not narrow
        assert found.dtype is expected.dtype is (torch.float32 if is_wide else torch.bfloat16)
        torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)
        upstream = torch.randn_like(found)
        backward(found, upstream)
        backward(expected, upstream)
        for mine, theirs in zip(made.parameters(), other.parameters(), strict=True):
            assert mine.grad is not None and mine.grad.dtype is mine.dtype
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-1, atol=2e-1)
    assert len(calls) == 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, nullcontext])
def test_the_running_statistics_follow_in_every_mode(mode: Callable[[], Any], calls: list[int]) -> None:
    made = layer(momentum=None)
    other = copy.deepcopy(made)
    for _ in range(3):
        x = torch.randn(ROWS, IN)
        with mode():
            torch.testing.assert_close(made(x), plain(other, x), rtol=1e-4, atol=1e-4)
    assert made.bn.num_batches_tracked is not None and made.bn.num_batches_tracked.item() == 3
    for mine, theirs in zip(made.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert len(calls) == 3


def test_in_eval_mode_without_running_statistics(calls: list[int]) -> None:
    made = layer(track_running_stats=False).eval()
    x = torch.randn(ROWS, IN)
    torch.testing.assert_close(made(x), plain(made, x), rtol=1e-4, atol=1e-4)
    assert calls


def test_a_number_of_batches_that_is_not_counted(calls: list[int]) -> None:
    """nn.BatchNorm1d without it does not move its running statistics, if they are cumulative."""
    made = layer(momentum=None)
    made.bn.num_batches_tracked = None
    other, x = copy.deepcopy(made), torch.randn(ROWS, IN)
    made(x), plain(other, x)
    assert calls and made.bn.running_mean is not None
    assert torch.equal(made.bn.running_mean, torch.zeros(OUT))
    assert torch.equal(made.bn.running_mean, other.bn.running_mean)


def test_packs_and_precision_reach_the_product(calls: list[int]) -> None:
    made = layer(precision="high")
    x = torch.randn(ROWS, IN)
    torch.testing.assert_close(made(x), plain(made, x), rtol=1e-2, atol=1e-2)
    with pytest.raises(ValueError, match="precision"):
        epigemm.nn.linear_scale_batch_norm1d(x, made.linear, None, made.bn, precision="low")


# --- what PyTorch's operators compute --------------------------------------------------------------------------------


class Seen(TorchFunctionMode):
    """A mode that changes nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def assert_by_torch(made: Any, calls: list[int], run: Callable[..., Any] | None = None) -> None:
    """The same results by PyTorch's BatchNorm."""
    x = torch.randn(ROWS, IN)
    expected = plain(copy.deepcopy(made), x)
    torch.testing.assert_close((run or made)(x), expected, rtol=1e-4, atol=1e-4)
    assert not calls


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_of_the_batch_norm_run(register: str, calls: list[int]) -> None:
    made, seen = layer(), []
    getattr(made.bn, register)(lambda *about: seen.append(1))
    made(torch.randn(ROWS, IN))
    assert seen and not calls


def test_global_hooks_run(calls: list[int]) -> None:
    made, seen = layer(), []

    def hook(module: nn.Module, *_: Any) -> None:
        seen.append(type(module))

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        made(torch.randn(ROWS, IN))
    finally:
        handle.remove()
    assert nn.BatchNorm1d in seen and not calls


class Other(nn.BatchNorm1d):
    """A subclass."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_other_batch_norms_are_left_alone(calls: list[int]) -> None:
    made = layer()
    made.bn = Other(OUT)
    assert_by_torch(made, calls)
    converted = untyped_nn.SyncBatchNorm.convert_sync_batchnorm(layer())
    assert type(converted.bn) is nn.SyncBatchNorm
    assert_by_torch(converted, calls)


def test_a_forward_of_its_own_runs(calls: list[int]) -> None:
    made = layer()
    made.bn.forward = torch.neg  # type: ignore[method-assign]
    x = torch.randn(ROWS, IN)
    torch.testing.assert_close(made(x), -made.linear(x) * made.scale, rtol=1e-4, atol=1e-4)
    assert not calls


def test_modes_and_transforms(calls: list[int]) -> None:
    def in_mode(x: Tensor) -> Tensor:
        with Seen():
            return made(x)  # type: ignore[no-any-return]

    made = layer(track_running_stats=False)
    assert_by_torch(made, calls, in_mode)
    assert_by_torch(made, calls, lambda x: torch.func.vmap(made)(x.unsqueeze(0)).squeeze(0))
    x = torch.randn(ROWS, IN)
    expected = torch.autograd.functional.jacobian(lambda x: plain(made, x).square().sum(), x)
    found = torch.func.grad(lambda x: made(x).square().sum())(x)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    tangent = torch.randn_like(x)
    derivative = torch.func.jvp(lambda x: made(x).square().sum(), (x,), (tangent,))[1]
    torch.testing.assert_close(derivative, (expected * tangent).sum(), rtol=1e-2, atol=1e-2)
    assert not calls


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str, calls: list[int], fresh_compiler: None) -> None:
    made = layer()
    compiled = torch.compile(copy.deepcopy(made), backend=backend, fullgraph=True)
    x = torch.randn(ROWS, IN)
    torch.testing.assert_close(compiled(x), plain(made, x), rtol=1e-4, atol=1e-4)
    assert not calls


def test_the_batch_invariant_mode_refuses(calls: list[int]) -> None:
    with epigemm.batch_invariant(), pytest.raises(RuntimeError, match="batch's own statistics"):
        layer()(torch.randn(ROWS, IN))
    assert not calls


def _too_few_features(made: Layer) -> None:
    made.bn = nn.BatchNorm1d(OUT + 1)


def _half_of_the_statistics(made: Layer) -> None:
    made.bn.running_var = None


def _an_eps_of_zero(made: Layer) -> None:
    made.bn.eps, made.bn.bias = 0.0, nn.Parameter(torch.ones(OUT + 1))


def _a_wrong_scale(made: Layer) -> None:
    made.scale = nn.Parameter(torch.randn(OUT + 1))


def _another_type(made: Layer) -> None:
    made.linear.double()


@pytest.mark.parametrize(
    "change", [_too_few_features, _half_of_the_statistics, _an_eps_of_zero, _a_wrong_scale, _another_type]
)
def test_what_does_not_fit_is_an_error_of_before(change: Callable[[Layer], None], calls: list[int]) -> None:
    made = layer()
    change(made)
    with pytest.raises((RuntimeError, ValueError)):
        made(torch.randn(ROWS, IN))
    assert not calls


def test_empty_batches(calls: list[int]) -> None:
    made = layer()
    assert made(torch.randn(0, IN)).shape == plain(made, torch.randn(0, IN)).shape == (0, OUT)
    assert not calls
