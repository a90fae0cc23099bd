"""`explain` of functions with several results: every launch, and which result each of them is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn
from epigemm.calls import elementwise_kernels
from epigemm.explain import results
from epigemm.linker import loader
from epigemm.planner import plans
from tests.gemm.query import H200
from tests.support.results import (
    FUNCTIONS,
    NAMES,
    draw,
    gelu_and_product,
    in_fp32,
    squares,
    statistics,
    the_product_twice,
)
from tests.support.stage import Stage


@epigemm.epilogue
def several(acc: Tensor, bias: PerColumn, other: Matrix) -> tuple[Tensor, ...]:
    z = acc + bias
    y = F.gelu(z) * other
    return y, z, y.sum(0), (z * z).sum(0), z.float(), *torch.var_mean(z, 1)


def given(dtype: torch.dtype = torch.float32, m: int = 6) -> list[Tensor]:
    return [torch.ones(size, dtype=dtype) for size in ((m, 256), (64, 256), (64,), (m, 64))]


def test_it_knows_what_it_explains() -> None:
    assert results.takes(several) and results.takes(several.elementwise)
    for other in (epigemm.linear, "linear", torch.nn.Linear(2, 2), epigemm.epilogue(lambda acc: acc * 2.0)):
        assert not results.takes(other)


def test_launches_on_a_cpu() -> None:
    found = epigemm.explain(several, *given())
    assert found.path == "gemm+elementwise" and found.kernel == "torch GEMM (addmm, with the bias)"
    assert found.op.startswith("several: (r0, r1, r2, r3, r4, r5, r6), of several_shared: epigemm::linear")
    assert found.results[:3] == [
        "r0: a matrix, [..., N], x's dtype",
        "r1: a matrix, [..., N], x's dtype",
        "r2: sum of each column, [N], fp32 (fp64 beside fp64)",
    ]
    names = [kernel.partition(".")[0] for kernel in found.kernels]
    assert names == [
        "torch GEMM (addmm, with the bias): r1, r4",
        "PyTorch reference, several_result0",
        "PyTorch reference, several_result3",
        "torch sum of each column: r2",
        "torch sum of each column: r3",
        "torch var_mean of each row: r5, r6",
        "torch copy: r4",
    ]
    assert found.kernels[1].endswith(": r0") and found.kernels[2].endswith(", which others read")
    text = str(found)
    assert "  results:    r0: a matrix" in text and "6. torch var_mean of each row: r5, r6" in text
    assert "no argument requires grad" in found.backward


def test_in_16_bits_others_are_computed_in_fp32() -> None:
    kernels = epigemm.explain(several, *given(torch.bfloat16)).kernels
    assert [kernel.partition(".")[0] for kernel in kernels] == [
        "torch GEMM (mm), which others read",
        "PyTorch reference, several_result0",
        "PyTorch reference, bias: r1",
        "torch cast of [6, 64] to float32, which others read",
        "torch cast of [64] to float32",
        "PyTorch reference, bias: r4",
        "torch cast of [64] to float32",
        "PyTorch reference, several_result3",
        "torch sum of each column: r2",
        "torch sum of each column: r3",
        "torch var_mean of each row: r5, r6",
    ]


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors count as lying there."""
    monkeypatch.setattr(plans, "gpu_numbers", lambda device: H200)
    monkeypatch.setattr(plans, "has_gpu_kernels", lambda x: True)
    monkeypatch.setattr(loader, "would_link", lambda *_: "")
    monkeypatch.setattr(elementwise_kernels, "why_none", lambda x: "")


def sixteen_bits(m: int = 4096, n: int = 2048, k: int = 1024) -> list[Tensor]:
    return [torch.empty(size, dtype=torch.bfloat16) for size in ((m, k), (n, k), (n,), (n,))]


@pytest.mark.usefixtures("on_h200")
def test_one_kernel_for_two_matrices() -> None:
    """On an H200, and not where gradients are recorded."""

    @epigemm.epilogue
    def beside(acc: Tensor, bias: PerColumn) -> tuple[Tensor, ...]:
        z = acc + bias
        return F.gelu(z), z, z.sum(0)

    x, weight, bias, _ = sixteen_bits()
    found = epigemm.explain(beside, x, weight, bias)
    assert found.path == "fused" and "one kernel computes two matrices" in found.reasons[-1]
    kernel, *others = found.kernels
    assert kernel.startswith("epigemm fused GEMM, tile ") and kernel.endswith(": r0, r1")
    assert others == ["torch sum of each column: r2"]
    assert found.op.startswith("beside: (r0, r1, r2), of epigemm::linear, epilogue beside_and_stored.")
    several = epigemm.explain(beside, x, weight.requires_grad_(), bias)
    assert "beside_result0" in " ".join(several.kernels) and several.reasons[-1] == results._SHARED
    assert "one kernel computes two" not in several.reasons[-1]


@pytest.mark.usefixtures("on_h200")
def test_reductions_are_pytorchs() -> None:
    """On every GPU, along either axis, recorded or not, behind one kernel for the product."""
    kernels = [
        *("torch cast to float32", "torch var_mean of each column: r1, r2"),
        *("torch cast to float32", "torch var_mean of each row: r3", "torch sum of each column: r4"),
        *("torch amax", "torch cast to float32 of each row: r5"),
    ]
    x, weight, *vectors = sixteen_bits()
    for requires_grad in (False, True):
        found = epigemm.explain(statistics, x.requires_grad_(requires_grad), weight, *vectors)
        assert found.path == "fused" and found.kernels[0].endswith(": r0") and found.kernels[1:] == kernels
        assert found.reasons[-1] == results._SHARED


def test_memory() -> None:
    """Of matrices that are no results, until the call returns."""

    @epigemm.epilogue
    def of_squares(acc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return acc, (acc * acc).sum(0), acc.var(1)

    for dtype, size in ((torch.float16, "2, 4.0 MiB"), (torch.float32, "1, 2.0 MiB")):
        x, weight = torch.empty(1024, 8, dtype=dtype), torch.empty(512, 8, dtype=dtype)
        for found in (
            epigemm.explain(of_squares, x, weight),
            epigemm.explain(of_squares.elementwise, x.new_empty(1024, 512)),
        ):
            (memory,) = [each for each in found.reasons if "MiB" in each]
            assert memory == f"matrices that are no results, kept until the call returns: {size}"
    assert "MiB" not in str(epigemm.explain(gelu_and_product, x, weight, x.new_empty(512)))


def test_casts() -> None:
    """Of the shared matrix, of the operands, and of a result."""

    @epigemm.epilogue
    def scaled(z: Tensor, other: Matrix) -> tuple[Tensor, Tensor, Tensor]:
        return z, (z * other).sum(0), z.float()

    def given(dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.ones(size, dtype=dtype) for size in ((6, 256), (64, 256), (6, 64))]

    kernels = epigemm.explain(scaled, *given(torch.float16)).kernels
    assert kernels[1:3] == ["torch cast of [6, 64] to float32: r2"] * 1 + ["torch cast of [6, 64] to float32"]
    assert epigemm.explain(scaled, *given(torch.float64)).kernels[-1] == "torch cast to float32: r2"
    with torch.autocast("cpu"):
        kernels = epigemm.explain(scaled, *given()).kernels
    assert kernels[0] == "torch cast of [6, 256] from float32 to bfloat16"


def test_the_elementwise_form() -> None:
    *_, bias, other = given()
    found = epigemm.explain(several.elementwise, other, bias, other)
    assert found.path == "elementwise" and "of bias: epigemm::elementwise, epilogue bias" in found.op
    assert found.reasons[0] == "on a CPU, PyTorch's operators compute this function; x is float32"
    assert found.kernels[0].endswith(": r1, r4")
    found = epigemm.explain(squares.elementwise, other)
    assert found.path == "elementwise" and found.kernels[-1] == "torch sum of each column: r0"
    found = epigemm.explain(the_product_twice.elementwise, other)
    assert found.path == "reference" and found.kernels == ["torch copy of z: r0"]
    assert found.op == "the_product_twice: (r0, r0), of z"


def test_gradients_and_batch_invariance() -> None:
    x, weight, bias, other = given()
    found = epigemm.explain(several, x.requires_grad_(), weight, bias, other)
    assert (
        "one matrix product each" in found.backward
        and "of reductions and casts PyTorch's own" in found.backward
    )
    found = epigemm.explain(several, x.detach(), weight, bias, other.requires_grad_())
    assert not found.backward.startswith("not needed")

    @epigemm.epilogue
    def rows(acc: Tensor) -> tuple[Tensor, Tensor]:
        return acc.sum(1), acc.amax(1)

    with epigemm.batch_invariant():
        kernels = epigemm.explain(rows, x.detach(), weight).kernels
    assert kernels[-2:] == [
        "torch sum, as sums of two numbers: one kernel for each halving of the columns of each row: r0",
        "torch amax of each row: r1",
    ]


def test_nothing_runs() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        epigemm.explain(several, *given(torch.bfloat16))
        epigemm.explain(several.elementwise, given()[3], *given()[2:])
    names = {event.key for event in profile.key_averages()}
    assert not names & {"aten::mm", "aten::addmm", "aten::mul", "aten::gelu", "aten::sum", "aten::_to_copy"}


def test_the_errors_are_those_of_the_call() -> None:
    x, weight, bias, other = given()
    with pytest.raises(RuntimeError, match=r"bias: got shape \[63\]"):
        epigemm.explain(several, x, weight, bias[:-1], other)
    with pytest.raises(RuntimeError, match="strict: got True"):
        epigemm.explain(several, x, weight, bias, other, strict=True)
    with pytest.raises(RuntimeError, match="out: got Tensor; accepted is None"):
        epigemm.explain(several, x, weight, bias, other, out=x)


@pytest.mark.parametrize("function", FUNCTIONS, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_function_is_explained(function: Any, dtype: torch.dtype, rng: torch.Generator) -> None:
    call = draw(function, rng, dtype, lead=(2, 3))
    found = epigemm.explain(function, call.x, call.weight, *call.operands)
    named = {f"r{number}" for number in range(len(function.results))}
    assert {word.strip(",") for kernel in found.kernels for word in kernel.split(": ")[-1].split()} >= named
    assert epigemm.explain(function.elementwise, call.product.to(dtype), *call.operands).kernels


def test_on_a_gpu_the_product_is_one_kernel(stage: Stage) -> None:
    """A pretended one, whose kernels are in Python."""
    x, weight, bias, other = (each.bfloat16() for each in given(m=256))
    found = epigemm.explain(gelu_and_product, x, weight, bias)
    assert "gelu_and_product_and_stored" in found.kernels[0] and found.kernels[0].endswith(": r0, r1")
    assert not any("gelu_and_product_result0" in kernel for kernel in found.kernels)
    got = gelu_and_product(x, weight, bias)
    assert got[0].shape == (256, 64)
    tuned = epigemm.tune(several, x, weight, bias, other)
    assert {entry.epilogue for entry in tuned.entries} == {"bias"}
    tuned = epigemm.tune(statistics, x, weight, bias, bias)
    assert all(entry.epilogue.startswith("statistics_shared") for entry in tuned.entries) and tuned.entries


def test_what_has_no_product_is_not_tuned() -> None:
    with pytest.raises(ValueError, match="which has no kernel; accepted are linear functions"):
        epigemm.tune(the_product_twice.elementwise, torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"got <.*elementwise of .*\(in_fp32\)>, which has one kernel only"):
        epigemm.tune(in_fp32.elementwise, torch.ones(2, 3), torch.ones(3), torch.ones(2, 3))
