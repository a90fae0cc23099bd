"""Whole models in plain PyTorch, fused by `fuse` and by the compile backend: equal outputs and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epigemm
from epigemm import fusion
from epigemm.fusion import FusionReport
from tests.fusion.test_spellings import report_of
from tests.fusion.zoo import EVERYTHING, KERNELBENCH, Example, VisionTransformer
from tests.support.untyped import backward

pytestmark = pytest.mark.skipif(not KERNELBENCH.is_dir(), reason="examples are not at hand")
everything = pytest.mark.parametrize("example", EVERYTHING, ids=str)
modes = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])


def functions(report: FusionReport) -> tuple[str, ...]:
    return tuple(site.function for site in report.sites if site.function != "linear")


def in_mode(example: Example, training: bool) -> tuple[str, ...]:
    """What the backend finds: Dynamo's graphs hold the mode, and BatchNorm trains by itself."""
    return tuple("linear_scale" if training and "norm" in name else name for name in example.functions)


def results(model: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    """The output and the gradient of every parameter."""
    model.zero_grad()
    output = model(*inputs)
    if not output.requires_grad:
        return [output]
    # No plain sum: BatchNorm makes the gradients of that vanish, and noise would be compared with noise.
    backward(output, torch.linspace(-1, 1, output.numel()).reshape(output.shape))
    return [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@everything
@modes
def test_fuse(example: Example, training: bool) -> None:
    model = example.make().train(training)
    fused = epigemm.fuse(copy.deepcopy(model))
    assert functions(report_of(fused)) == example.functions
    for _ in range(2):
        inputs = example.inputs()
        with fusion.watch() as unfused:
            actual = results(fused, inputs)
        assert unfused == []
        for mine, other in zip(actual, results(model, inputs), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(fused(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)
    for (name, mine), (_, other) in zip(fused.named_buffers(), model.named_buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4, msg=name)


@everything
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_types(example: Example, dtype: torch.dtype) -> None:
    """Not less accurate than the unfused model, by its distance from float64."""
    model = example.make().eval()
    inputs = example.inputs()
    exact = copy.deepcopy(model).double()(*(i.double() if i.is_floating_point() else i for i in inputs))
    model = model.to(dtype)
    given = [i.to(dtype) if i.is_floating_point() else i for i in inputs]
    with torch.no_grad():
        expected, actual = model(*given), epigemm.fuse(model)(*given)
    assert actual.dtype is expected.dtype
    allowed = 2 * (expected.double() - exact).abs().max() + 4 * torch.finfo(dtype).eps * exact.abs().max()
    if dtype is torch.bfloat16:  # the parameters' own rounding weighs more than what is compared
        allowed = allowed + 0.02 * exact.abs().max()
    assert float((actual.double() - exact).abs().max()) <= float(allowed)


@everything
@modes
def test_compile_backend(example: Example, training: bool) -> None:
    torch._dynamo.reset()
    model = example.make().train(training)
    plain = copy.deepcopy(model)
    reports: list[FusionReport] = []
    options: dict[str, Any] = {"backend": "aot_eager", "report": reports.append}
    compiled: Any = torch.compile(model, backend="epigemm", fullgraph=True, options=options)
    inputs = example.inputs()
    actual = results(compiled, inputs)
    assert len(reports) == 1 and functions(reports[0]) == in_mode(example, training)
    for mine, other in zip(actual, results(plain, inputs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
    for (name, mine), (_, other) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4, msg=name)


@everything
@modes
def test_compiling_a_fused_model(example: Example, training: bool) -> None:
    torch._dynamo.reset()
    model = example.make().train(training)
    compiled: Any = torch.compile(epigemm.fuse(copy.deepcopy(model)), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        inputs = example.inputs()
        for mine, other in zip(results(compiled, inputs), results(model, inputs), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


def test_gelu_is_named_where_it_is_skipped() -> None:
    report = epigemm.fuse(VisionTransformer(), dry_run=True)
    notes = [note for site in report.sites for note in site.notes]
    assert sum("followed by act (nn.GELU): no built-in epilogue covers it" in note for note in notes) == 2
