"""Whole models in plain PyTorch, fused by `fuse` and by the compile backend: equal outputs and gradients.

Equal within the roundings that float64 shows. Eager rounds once or more in every layer, the others never at more than
twice as many places (a product that is rounded before its bias is added), by no more each: the error is at most twice
eager's, but for chance, as the two are different samples of rounding. Their norms over thousands of entries, of which a
few layers decide, scatter by less than another factor of two. So four times eager's error is allowed, and four
roundings of the output where eager happens to be exact; of the largest entry, which scatters more, eight times eager's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness.accuracy import UNIT_ROUNDOFF
from epigemm.fusion import FusionReport
from tests.fusion.eager import fuse_eagerly
from tests.fusion.zoo import EVERYTHING, KERNELBENCH, PROBLEMS, UNSEEN, Example
from tests.support.thorough import in_turn
from tests.support.untyped import backward


def by_fuse(model: nn.Module) -> tuple[Any, FusionReport]:
    fused = fuse_eagerly(model, inplace=True)
    return fused, fused.fusion_report


def by_backend(model: nn.Module) -> tuple[Any, FusionReport]:
    report = FusionReport()
    options: dict[str, Any] = {"backend": "aot_eager", "report": report.add}
    return torch.compile(model, backend="epigemm", fullgraph=True, options=options), report


def by_both(model: nn.Module) -> tuple[Any, FusionReport]:
    """A fused model within torch.compile, which compiles it as it was."""
    fused = fuse_eagerly(model, inplace=True)
    return torch.compile(fused, backend="aot_eager", fullgraph=True), fused.fusion_report


# How it is fused, training or not, and a type.
Way = tuple[Callable[[nn.Module], tuple[Any, FusionReport]], bool, torch.dtype]
FP32, BF16 = torch.float32, torch.bfloat16
WAYS: list[list[Way]] = [
    [(by_fuse, False, FP32), (by_backend, True, FP32), (by_fuse, True, BF16), (by_both, False, FP32)],
    [(by_fuse, True, FP32), (by_backend, False, BF16), (by_fuse, False, BF16), (by_both, True, FP32)],
]
CPU = [(example, way, "cpu") for example, ways in in_turn(EVERYTHING, WAYS) for way in ways]
CPU += [(example, way, "cpu") for example in UNSEEN for way in WAYS[0][:2]]
GPU = [
    pytest.param(example, way, "cuda", marks=pytest.mark.gpu)
    for example in EVERYTHING
    for way in (*WAYS[0], *WAYS[1])
]


def tensors_to(inputs: tuple[Tensor, ...], device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(x.to(device, dtype) if x.is_floating_point() else x.to(device) for x in inputs)


class ReLUs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What a model's ReLUs read."""

    def __init__(self, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: list[Tensor] = []
        with self, torch.no_grad():
            copy.deepcopy(model)(*inputs)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket in (torch.ops.aten.relu, torch.ops.aten.relu_):
            self.read.append(args[0].to(torch.float64, copy=True))
        return function(*args, **(kwargs or {}))


def is_off_kinks(model: nn.Module, inputs: tuple[Tensor, ...]) -> bool:
    """Whether no value is so near to a ReLU's kink that its error decides on which side it falls.

    On the other side a whole term of the gradients would be missing. The error is eager's, eight times as above.
    """
    wide = ReLUs(copy.deepcopy(model).double(), tensors_to(inputs, str(inputs[0].device), torch.float64)).read
    pairs = zip(ReLUs(model, inputs).read, wide, strict=True)
    return all(bool(exact.abs().min() > 8 * (found - exact).abs().max()) for found, exact in pairs)


def results(model: nn.Module, call: Any, inputs: tuple[Tensor, ...], upstream: Tensor | None) -> list[Tensor]:
    """The output, and with an upstream gradient the gradients of the parameters, as vectors."""
    if upstream is None:
        with torch.no_grad():
            return [call(*inputs).flatten()]
    model.zero_grad(set_to_none=True)
    output = call(*inputs)
    backward(output, upstream.to(output.dtype))
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return [output.detach().flatten(), torch.cat(gradients) if gradients else torch.zeros(1)]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[tuple[float, float]]:
    """Of each vector the norm of the error over that of the exact one; the same of the largest entries."""
    pairs = [
        (mine.double(), other.double().to(mine.device)) for mine, other in zip(found, exact, strict=True)
    ]
    return [
        (
            float((mine - other).norm() / (other.norm() or 1)),
            float((mine - other).abs().max() / (other.abs().max() or 1)),
        )
        for mine, other in pairs
    ]


def check(
    plain: nn.Module, model: nn.Module, call: Any, inputs: tuple[Tensor, ...], upstream: Tensor | None
) -> None:
    """Types and shapes are the same, and results as close to float64 as eager's."""
    wide = copy.deepcopy(plain).double()
    dtype = next(each.dtype for each in (*plain.parameters(), *inputs))
    device = str(inputs[0].device)
    exact = results(wide, wide, tensors_to(inputs, device, torch.float64), upstream)
    expected, actual = results(plain, plain, inputs, upstream), results(model, call, inputs, upstream)
    assert [(t.dtype, t.shape) for t in actual] == [(t.dtype, t.shape) for t in expected]
    rounding = 4 * UNIT_ROUNDOFF[dtype]
    for mine, eager in zip(errors(actual, exact), errors(expected, exact), strict=True):
        for error, limit in zip(mine, (4 * eager[0] + rounding, 8 * eager[1] + rounding), strict=True):
            assert math.isfinite(error) and error <= limit, (mine, eager)


@pytest.mark.parametrize(
    ("example", "way", "device"),
    [*CPU, *GPU],
    ids=lambda v: (
        "-".join(getattr(each, "__name__", str(each)) for each in v) if isinstance(v, tuple) else str(v)
    ),
)
def test_models(example: Example, way: Way, device: str) -> None:
    fuse, training, dtype = way
    plain = example.make().to(device, dtype).train(training)
    model, drawn = copy.deepcopy(plain), (tensors_to(example.inputs(), device, dtype) for _ in range(100))
    # In 16 bits values fall on either side in eager's results, too.
    inputs = next(each for each in drawn if dtype is not FP32 or not training or is_off_kinks(plain, each))
    call, report = fuse(model)
    with torch.no_grad():
        output = copy.deepcopy(plain).eval()(*inputs)
    # No plain sum: BatchNorm makes the gradients of that vanish, and noise would be compared with noise.
    upstream = torch.randn_like(output) if list(plain.parameters()) else None
    check(plain, model, call, inputs, upstream if training or fuse is by_fuse else None)
    if fuse is by_fuse:
        check(plain, model, call, inputs, None)
    if device == "cpu" and fuse is not by_both:  # elsewhere the planner decides, and these layers are small
        assert report.skipped == []
        if fuse is by_backend:
            assert len(report.sites) == example.products, report
        assert bool(report.sites) is bool(example.products)
    assert list(model.state_dict()) == list(plain.state_dict())
    for mine, other in zip(model.buffers(), plain.buffers(), strict=True):
        close = 2e-2 if mine.dtype is BF16 else 1e-4
        torch.testing.assert_close(mine, other, rtol=close, atol=close)


@pytest.mark.skipif(not KERNELBENCH.is_dir(), reason="examples are not at hand")
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_missing_bias_is_seen(dtype: torch.dtype) -> None:
    """What these tests hold results to lets no epilogue go wrong unseen."""
    plain, inputs = PROBLEMS[1].make().to(dtype).eval(), tensors_to(PROBLEMS[1].inputs(), "cpu", dtype)
    wrong: Any = copy.deepcopy(plain)
    with torch.no_grad():
        wrong.gemm.bias.zero_()
    with pytest.raises(AssertionError):
        check(plain, wrong, wrong, inputs, None)
