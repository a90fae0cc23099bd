"""Epilogues that are made at run time, on a GPU: which kernels run, CUDA graphs, streams, the cache on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from benchmarks.gradings.products import forced_into
from epigemm import Matrix, PerColumn, Scalar
from epigemm.epilogues.registry import typed
from epigemm.linker import store
from epigemm.planner import dry_runs
from tests.gpu.properties import of_text

pytestmark = pytest.mark.gpu


copy_of_relu = of_text("acc, bias: PerColumn -> torch.relu(acc + bias)")
copy_of_sigmoid = of_text("acc, bias: PerColumn, s: Scalar -> (z := acc + bias) + s * torch.sigmoid(z)")
negated = of_text("acc, bias: PerColumn -> -(acc + bias)")


def tensors(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(n, k, device="cuda", dtype=dtype)
    return x, weight / k**0.5, torch.randn(n, device="cuda", dtype=dtype)


@pytest.mark.parametrize(
    ("precision", "where"), [("highest", "split"), ("high", "scaled"), ("tf32", "fused GEMM, tile")]
)
def test_every_arithmetic_of_fp32(precision: str, where: str) -> None:
    """One kernel each: three products of slices, one of scaled slices, TF32."""
    x, weight, bias = tensors(4096, 4096, 2048, torch.float32)
    z = x.double() @ weight.double().t() + bias.double()
    expected = z + 0.5 * torch.sigmoid(z)
    relative = 2.0**-18 if precision == "highest" else 2.0**-8
    for given in (epigemm.pack(weight, precision=precision), weight):
        result = copy_of_sigmoid(x, given, bias, 0.5, precision=precision, strict=given is not weight)
        assert bool(((result.double() - expected).abs() <= relative * (1 + expected.abs())).all())
    explanation = epigemm.explain(copy_of_sigmoid, x, weight, bias, 0.5, precision=precision)
    assert explanation.path == "fused"
    assert where in explanation.kernel or explanation.arithmetic.startswith(where)


def test_nothing_is_compiled_under_capture() -> None:
    @epigemm.epilogue
    def never_linked(acc: Tensor, bias: PerColumn) -> Tensor:
        return torch.cos(acc + bias) * 1.25

    x, weight, bias = tensors(512, 1024, 1024, torch.bfloat16)
    want = torch.cos(torch.nn.functional.linear(x.double(), weight.double()) + bias.double()) * 1.25
    torch.mm(x, weight.t())  # cuBLAS makes itself ready
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = never_linked(x, weight, bias)
        text = str(epigemm.explain(never_linked, x, weight, bias))
        with pytest.raises(RuntimeError, match="captured"):
            never_linked(x, weight, bias, strict=True)
    graph.replay()
    torch.cuda.synchronize()
    assert "CUDA graph" in text
    assert float((found.double() - want).abs().max()) < 0.1
    assert epigemm.explain(never_linked, x, weight, bias).kernels


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [(65, 200, 96), (33, 77, 40)], ids=str)
def test_torchs_gemm_has_added_the_bias(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    """The kernel behind it adds nothing more: the result has the bits of PyTorch's, also where that is -0."""
    x, weight, bias = tensors(*size, dtype)
    x[::2], bias[::3], bias[1::3] = 0.0, -0.0, 0.0
    out = torch.full((size[0], size[1]), 7.0, device="cuda", dtype=dtype)
    spec = typed(negated.traced, [False])
    forced_into(out, spec.name, x, weight, "ieee", operands=[bias], plan=dry_runs.FALLBACK[1:])
    expected = -torch.nn.functional.linear(x, weight, bias)
    if dtype is torch.float32:  # which makes no -0 of +0 + -0
        torch.testing.assert_close(out, expected)
    else:
        assert torch.equal(out.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_strict_calls(dtype: torch.dtype) -> None:
    """The product is made again, in fp32, beside operands of 16 bits."""
    x, weight, bias = tensors(512, 1024, 1024, dtype)
    residual, scale = torch.randn(512, 1024, device="cuda", dtype=dtype), torch.tensor(0.5, device="cuda")

    @epigemm.epilogue
    def gated(acc: Tensor, bias: PerColumn, residual: Matrix, scale: Scalar) -> Tensor:
        z = acc + bias
        return torch.sigmoid(z) * z * scale + residual * z

    leaves = [each.requires_grad_() for each in (x, weight, bias, residual, scale)]
    wide = [each.detach().double().requires_grad_() for each in leaves]
    gated(*leaves, strict=True).sum().backward()  # type: ignore[no-untyped-call]
    z = torch.nn.functional.linear(*wide[:3])
    (torch.sigmoid(z) * z * wide[4] + wide[3] * z).sum().backward()  # type: ignore[no-untyped-call]
    for mine, other in zip(leaves, wide, strict=True):
        assert mine.grad is not None and other.grad is not None
        error = (mine.grad.double() - other.grad).norm() / other.grad.norm()
        assert float(error) < 4 * torch.finfo(dtype).eps


def test_operands_written_right_before() -> None:
    """The kernel starts while the one ahead drains: it must wait before it reads."""
    x, weight, bias = tensors(2048, 2048, 256, torch.bfloat16)
    want = copy_of_relu(x, weight, bias)
    for _ in range(20):
        fresh = torch.full_like(bias, float("nan"))
        fresh.copy_(bias)
        assert torch.equal(copy_of_relu(x, weight, fresh), want)


def test_the_cache_on_disk_serves_another_process(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import torch, epigemm

        @epigemm.epilogue
        def halved(acc, bias: epigemm.PerColumn):
            return torch.sin(acc + bias) * 0.5

        options = {"device": "cuda", "dtype": torch.bfloat16}
        x, weight, bias = torch.ones(256, 512, **options), torch.ones(512, 512, **options), torch.zeros(512, **options)
        y = halved(x, weight, bias, strict=False)
        print(float(y[0, 0]))
        """)
    environment = {**os.environ, "EPIGEMM_CACHE_DIR": str(tmp_path)}
    results = []
    for _ in range(2):
        run = [sys.executable, "-c", script]
        done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        # What is made again is another file.
        results.append((done.stdout, {each.stat().st_ino for each in (tmp_path / "cubins").iterdir()}))
    assert results[0] == results[1] and results[0][1]


@pytest.mark.parametrize("operand_dtype", [None, torch.float32], ids=str)
def test_precompile_links_what_training_takes(operand_dtype: torch.dtype | None) -> None:
    @epigemm.epilogue
    def trained(acc: Tensor, bias: PerColumn, scale: Scalar) -> Tensor:
        return torch.tanh(acc + bias) * scale + 0.125

    x, weight, bias = tensors(512, 1024, 1024, torch.bfloat16)
    bias = bias.to(operand_dtype or bias.dtype)
    given: dict[str, Any] = {"operand_dtype": operand_dtype, "training": True}
    names = " ".join(epigemm.precompile(trained, [(512, 1024, 1024)], **given))
    assert "_elementwise_" in names and "_derivative_" in names
    assert epigemm.precompile(trained, [(512, 1024, 1024)], **given) == []
    linked = set(store.made.values)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    torch.autograd.grad(trained(x, weight, bias, 0.5).sum(), leaves)
    with torch.no_grad():
        trained.elementwise(trained(x, weight, bias, 0.5), bias, 0.5)
    assert set(store.made.values) == linked
