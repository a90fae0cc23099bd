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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from benchmarks.harness.accuracy import UNIT_ROUNDOFF
from epigemm.fusion import FusionReport
from tests.fusion.eager import fuse_eagerly, report_of
from tests.fusion.zoo import EVERYTHING, KERNELBENCH, PROBLEMS, Example
from tests.support.thorough import in_turn
from tests.support.untyped import backward

everything = pytest.mark.parametrize("example", EVERYTHING, ids=str)
# Training or not, and a type.
EVAL, TRAIN = (False, torch.float32), (True, torch.float32)
EVAL_BF16, TRAIN_BF16 = (False, torch.bfloat16), (True, torch.bfloat16)
CPU = torch.device("cpu")
Forward = Callable[..., Tensor]
Mode = tuple[bool, torch.dtype]
Results = dict[str, list[Tensor]]


def of_all_modes(*some: list[Mode]) -> pytest.MarkDecorator:
    """Every model on the CPU in some of the modes, in turn; on a GPU in all of them."""
    cpu = [(example, *mode, CPU) for example, modes in in_turn(EVERYTHING, some) for mode in modes]
    every = dict.fromkeys(mode for modes in some for mode in modes)
    gpu = [
        pytest.param(example, *mode, torch.device("cuda"), marks=pytest.mark.gpu)
        for example in EVERYTHING
        for mode in every
    ]
    names = {False: "eval", True: "train"}
    return pytest.mark.parametrize(
        ("example", "training", "dtype", "device"),
        [*dict.fromkeys(cpu), *gpu],
        ids=lambda value: names.get(value, str(value)),
    )


class Error(NamedTuple):
    """The Frobenius norm of the error over that of the exact result; the same of the largest entries."""

    norm: float
    largest: float


def distance(result: Sequence[Tensor], exact: Sequence[Tensor]) -> Error:
    """Of two lists of tensors, taken as one vector each: some gradients vanish in exact arithmetic."""
    mine, other = (torch.cat([t.double().flatten() for t in each]) for each in (result, exact))
    error, scale = mine - other, other if other.any() else torch.ones(1)
    return Error(
        float(error.norm() / scale.norm()), float(error.abs().max() / scale.abs().max().to(error.device))
    )


def why_wrong(errors: dict[str, Error], eager: dict[str, Error], dtype: torch.dtype) -> str:
    """The first result that is further from float64 than it may be."""
    rounding = 4 * UNIT_ROUNDOFF[dtype]
    for name, error in errors.items():
        limit = Error(4 * eager[name].norm + rounding, 8 * eager[name].largest + rounding)
        for measure, value, most in zip(Error._fields, error, limit, strict=True):
            if not (math.isfinite(value) and value <= most):
                return f"{name}: {measure} {value:.3g} (allowed {most:.3g})"
    return ""


def results(
    model: nn.Module, forward: Forward, inputs: tuple[Tensor, ...], upstream: Tensor | None
) -> Results:
    """The output, and with an upstream gradient the gradient of every parameter of the model."""
    if upstream is None:
        return {"output": [forward(*inputs)]}
    model.zero_grad(set_to_none=True)
    output = forward(*inputs)
    backward(output, upstream)
    return {
        "output": [output.detach()],
        "gradients": [p.grad for p in model.parameters() if p.grad is not None],
    }


def functions(report: FusionReport) -> tuple[str, ...]:
    return tuple(site.function for site in report.sites)


def tensors_to(inputs: tuple[Tensor, ...], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(x.to(device, dtype) if x.is_floating_point() else x.to(device) for x in inputs)


class Compared:
    """A model in one dtype on one device, and its results in float64, eager and otherwise."""

    def __init__(self, example: Example, device: torch.device, dtype: torch.dtype, training: bool) -> None:
        self.dtype = dtype
        self.model = example.make().to(device, dtype).train(training)
        self.inputs = tensors_to(example.inputs(), device, dtype)
        with torch.no_grad():
            output = copy.deepcopy(self.model).eval()(*self.inputs)
        # No plain sum: BatchNorm makes the gradients of that vanish, and noise would be compared with noise.
        upstream = torch.randn_like(output) if list(self.model.parameters()) else None
        self.upstream = upstream
        wide, plain = copy.deepcopy(self.model).double(), copy.deepcopy(self.model)
        wide_inputs = tensors_to(self.inputs, device, torch.float64)
        wide_upstream = None if upstream is None else upstream.double()
        self.exact = results(wide, wide, wide_inputs, wide_upstream)
        self.expected = results(plain, plain, self.inputs, upstream)

    def check(self, model: nn.Module, forward: Forward) -> None:
        """Output and gradients: the same types and shapes, and as close to float64 as eager's are."""
        self._check(results(model, forward, self.inputs, self.upstream))

    def check_inference(self, forward: Forward) -> None:
        """The output without autograd."""
        with torch.no_grad():
            self._check({"output": [forward(*self.inputs)]})

    def _check(self, actual: Results) -> None:
        for name, tensors in actual.items():
            for tensor, other in zip(tensors, self.expected[name], strict=True):
                assert (tensor.dtype, tensor.shape, tensor.device) == (other.dtype, other.shape, other.device)
        mine, eager = self._errors(actual), self._errors(self.expected)
        assert why_wrong(mine, eager, self.dtype) == ""

    def _errors(self, found: Results) -> dict[str, Error]:
        return {name: distance(tensors, self.exact[name]) for name, tensors in found.items()}


def check_buffers(model: nn.Module, plain: nn.Module) -> None:
    for (name, mine), (_, other) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        tolerance = 1e-4 if mine.dtype != torch.bfloat16 else 2e-2
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance, msg=name)


@of_all_modes([EVAL, TRAIN_BF16], [EVAL_BF16, TRAIN])
def test_fuse(example: Example, training: bool, dtype: torch.dtype, device: torch.device) -> None:
    compared = Compared(example, device, dtype, training)
    model = copy.deepcopy(compared.model)
    fused = fuse_eagerly(model)
    assert list(fused.state_dict()) == list(compared.model.state_dict())
    assert all(a is b for a, b in zip(fused.parameters(), model.parameters(), strict=True))
    compared.check(fused, fused)
    compared.check_inference(fused)
    if device.type == "cpu":  # elsewhere the planner decides, and these layers are small
        assert report_of(fused).skipped == []
        assert bool(report_of(fused).sites) is bool(example.products)
    plain = copy.deepcopy(compared.model)
    with torch.no_grad():
        for _ in range(2):
            plain(*compared.inputs)
    check_buffers(fused, plain)


@everything
def test_fuse_in_float64(example: Example) -> None:
    compared = Compared(example, torch.device("cpu"), torch.float64, training=False)
    fused = fuse_eagerly(copy.deepcopy(compared.model))
    with torch.no_grad():
        torch.testing.assert_close(fused(*compared.inputs), compared.expected["output"][0])


@of_all_modes([EVAL, TRAIN], [EVAL_BF16, TRAIN])
def test_compile_backend(example: Example, training: bool, dtype: torch.dtype, device: torch.device) -> None:
    torch._dynamo.reset()
    compared = Compared(example, device, dtype, training)
    model = copy.deepcopy(compared.model)
    reports: list[FusionReport] = []
    options: dict[str, Any] = {"backend": "aot_eager", "report": reports.append}
    compiled: Any = torch.compile(model, backend="epigemm", fullgraph=True, options=options)
    if training:
        compared.check(model, compiled)
    else:
        compared.check_inference(compiled)
    if device.type == "cpu":
        assert [len(functions(report)) for report in reports] == [example.products]
    assert list(model.state_dict()) == list(compared.model.state_dict())
    plain = copy.deepcopy(compared.model)
    with torch.no_grad():
        plain(*compared.inputs)
    check_buffers(model, plain)


@of_all_modes([EVAL], [TRAIN])
def test_compiling_a_fused_model(
    example: Example, training: bool, dtype: torch.dtype, device: torch.device
) -> None:
    torch._dynamo.reset()
    compared = Compared(example, device, dtype, training)
    fused = fuse_eagerly(copy.deepcopy(compared.model))
    compiled: Any = torch.compile(fused, backend="aot_eager", fullgraph=True)
    if training:
        compared.check(fused, compiled)
    else:
        compared.check_inference(compiled)


@pytest.mark.skipif(not KERNELBENCH.is_dir(), reason="examples are not at hand")
def test_a_missing_bias_is_seen() -> None:
    """What these tests hold results to lets no epilogue go wrong unseen."""
    for dtype in (torch.float32, torch.bfloat16):
        compared = Compared(PROBLEMS[1], torch.device("cpu"), dtype, training=False)
        wrong: Any = copy.deepcopy(compared.model)
        with torch.no_grad():
            wrong.gemm.bias.zero_()
        with pytest.raises(AssertionError, match="output: norm"):
            compared.check(wrong, wrong)
