"""Whole models in plain PyTorch, fused by `fuse` and by the compile backend: equal outputs and gradients.

Equal within the roundings that float64 shows: see `benchmarks.models.runner`.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epigemm
from benchmarks.models.alternatives import Results, Subject
from benchmarks.models.records import Error
from benchmarks.models.runner import distance, why_wrong
from epigemm import fusion
from epigemm.fusion import FusionReport
from tests.fusion.test_spellings import report_of
from tests.fusion.zoo import BY_NAME, EVERYTHING, KERNELBENCH, Example, of_workload
from tests.support.untyped import backward

everything = pytest.mark.parametrize("example", EVERYTHING, ids=str)
modes = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
Forward = Callable[..., Tensor]


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
        self.exact = self._subject(self.model, upstream).exact(copy.deepcopy(self.model).double())
        plain = copy.deepcopy(self.model)
        self.expected = self._subject(plain, upstream).results(plain)

    def _subject(self, model: nn.Module, upstream: Tensor | None) -> Subject:
        return Subject(model, self.inputs, upstream, "aot_eager")

    def check(self, model: nn.Module, forward: Forward) -> None:
        """Output and gradients: the same types and shapes, and as close to float64 as eager's are."""
        self._check(self._subject(model, self.upstream).results(forward))

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

    def _errors(self, results: Results) -> dict[str, Error]:
        return {name: distance(tensors, self.exact[name]) for name, tensors in results.items()}


def check_buffers(model: nn.Module, plain: nn.Module) -> None:
    for (name, mine), (_, other) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        tolerance = 1e-4 if mine.dtype != torch.bfloat16 else 2e-2
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance, msg=name)


@everything
@modes
@dtypes
def test_fuse(example: Example, training: bool, dtype: torch.dtype, device: torch.device) -> None:
    compared = Compared(example, device, dtype, training)
    model = copy.deepcopy(compared.model)
    fused = epigemm.fuse(model)
    assert list(fused.state_dict()) == list(compared.model.state_dict())
    assert all(a is b for a, b in zip(fused.parameters(), model.parameters(), strict=True))
    with fusion.watch() as unfused:
        compared.check(fused, fused)
        compared.check_inference(fused)
    if device.type == "cpu":  # elsewhere the planner decides, and these layers are small
        assert unfused == [] and report_of(fused).skipped == []
        assert bool(report_of(fused).sites) is bool(example.functions)
    plain = copy.deepcopy(compared.model)
    with torch.no_grad():
        for _ in range(2):
            plain(*compared.inputs)
    check_buffers(fused, plain)


@everything
def test_fuse_in_float64(example: Example) -> None:
    compared = Compared(example, torch.device("cpu"), torch.float64, training=False)
    fused = epigemm.fuse(copy.deepcopy(compared.model))
    with torch.no_grad():
        torch.testing.assert_close(fused(*compared.inputs), compared.expected["output"][0])


@everything
@pytest.mark.parametrize(
    ("training", "dtype"),
    [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16)],
    ids=["eval", "train", "eval-bf16"],
)
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
        assert [len(functions(report)) for report in reports] == [len(example.found(training))]
    assert list(model.state_dict()) == list(compared.model.state_dict())
    plain = copy.deepcopy(compared.model)
    with torch.no_grad():
        plain(*compared.inputs)
    check_buffers(model, plain)


@everything
@modes
def test_compiling_a_fused_model(example: Example, training: bool, device: torch.device) -> None:
    torch._dynamo.reset()
    compared = Compared(example, device, torch.float32, training)
    fused = epigemm.fuse(copy.deepcopy(compared.model))
    compiled: Any = torch.compile(fused, backend="aot_eager", fullgraph=True)
    if training:
        compared.check(fused, compiled)
    else:
        compared.check_inference(compiled)


def test_a_missing_bias_is_seen() -> None:
    """What these tests hold results to lets no epilogue go wrong unseen."""
    for dtype in (torch.float32, torch.bfloat16):
        example = of_workload(BY_NAME["problem_70"])
        compared = Compared(example, torch.device("cpu"), dtype, training=False)
        wrong: Any = copy.deepcopy(compared.model)
        with torch.no_grad():
            wrong.gemm.bias.zero_()
        with pytest.raises(AssertionError, match="output: norm"):
            compared.check(wrong, wrong)


@pytest.mark.skipif(not KERNELBENCH.is_dir(), reason="examples are not at hand")
@pytest.mark.parametrize(
    ("name", "file", "arguments"),
    [
        ("problem_76", "gemm_add_relu", (64, 48, (48,))),
        ("problem_70", "gemm_sigmoid_scaling_residual_add", (64, 48, 2.0)),
        ("problem_33", "gemm_scale_batch_norm", (64, 48, (48,))),
        ("problem_63", "gemm_relu_divide", (64, 48, 2.0)),
        ("problem_21", "sigmoid", ()),
    ],
)
def test_problems_are_those_of_the_examples(name: str, file: str, arguments: tuple[Any, ...]) -> None:
    spec = importlib.util.spec_from_file_location(f"plain_{file}", KERNELBENCH / f"{file}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    original: nn.Module = module.Model(*arguments)
    example = of_workload(BY_NAME[name])
    mine = example.make()
    original.load_state_dict(mine.state_dict())
    for training in (False, True):
        (x,) = example.inputs()
        expected = original.train(training)(x)
        torch.testing.assert_close(mine.train(training)(x), expected, rtol=0, atol=0)
        if expected.requires_grad:
            backward(expected, torch.ones_like(expected))
