"""Two results of one kernel: what the planner takes, what is done about each reason, and where calls remain."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from epigemm import PerColumn
from epigemm.arguments import forms
from epigemm.arguments.calls import LinearCall
from epigemm.arguments.precision import DEFAULT
from epigemm.calls import one_kernel
from epigemm.epilogues.registry import typed
from epigemm.planner import dry_runs, plans
from epigemm.planner.dry_runs import DryRun
from epigemm.planner.reasons import Reason
from tests.gemm.query import H200
from tests.support.answers import Answers
from tests.support.plans import FAMILIES, FP16X3, MMA, SWAP_AB, TMA, numbers

M, N, K = 4096, 2048, 1024


@epigemm.epilogue
def gelu_beside(acc: Tensor, bias: PerColumn) -> tuple[Tensor, Tensor]:
    z = acc + bias
    return F.gelu(z), z


@pytest.fixture(autouse=True)
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors count as lying on an H200."""
    monkeypatch.setattr(plans, "gpu_numbers", lambda device: H200)


def call(
    m: int = M, n: int = N, k: int = K, dtype: torch.dtype = torch.bfloat16, precision: str | None = None
) -> LinearCall:
    x, weight, bias = (torch.empty(size, dtype=dtype) for size in ((m, k), (n, k), (n,)))
    pair = gelu_beside.parts(dtype).pair
    assert pair is not None
    return LinearCall(forms.of_types(pair.traced, x, [bias]), x, weight, (bias,), precision or DEFAULT)


def dry(m: int, n: int, k: int, *, dtype: torch.dtype = torch.bfloat16, plan: tuple[int, ...] = ()) -> DryRun:
    return dry_runs.dry_run(call(m, n, k, dtype), plan=plan)


# --- the planner -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(8192, 3072, 768), (4096, 4096, 512), (16, 4096, 4096), (256, 1024, 1024)])
def test_one_kernel_where_it_is_faster(size: tuple[int, int, int]) -> None:
    found = dry(*size)
    assert found.fused and found.launches == ["fused"] and not found.answer
    assert list(FAMILIES)[found.plan[0]] in (TMA, SWAP_AB)


@epigemm.epilogue
def long_first(acc: Tensor, bias: PerColumn) -> tuple[Tensor, Tensor]:
    z = torch.lgamma(acc + bias)
    return z, 2 * z


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_long_second_value_has_a_kernel_of_its_own(dtype: torch.dtype) -> None:
    assert long_first.parts(dtype).pair is None and gelu_beside.parts(dtype).pair is not None


def test_several_kernels_where_the_product_takes_the_time() -> None:
    """They are compared with the fastest kernel of the product, not with PyTorch's GEMM alone."""
    made = call(16384, 8192, 8192)
    (tried,) = dry_runs.dry_run(made, tried=True).tried
    (one,) = dry_runs.dry_run(made._replace(epilogue=typed(gelu_alone.traced, (False,))), tried=True).tried
    assert tried.why_not.startswith("a product with one elementwise kernel is not expected to be slower")
    assert plans.fallback_us(tried.plan) < plans.fallback_us(one.plan)


@epigemm.epilogue
def gelu_alone(acc: Tensor, bias: PerColumn) -> Tensor:
    return F.gelu(acc + bias)


@pytest.mark.parametrize("size", [(4096, 4096, 512), (16, 4096, 4096)])
def test_a_second_matrix_takes_time(size: tuple[int, int, int]) -> None:
    made = call(*size)
    both, one = (
        predicted(each) for each in (made, made._replace(epilogue=typed(gelu_alone.traced, (False,))))
    )
    assert both.keys() & one.keys() and all(both[tile] > one[tile] for tile in both.keys() & one.keys())


def predicted(made: LinearCall) -> dict[str, float]:
    """What the planner expects of each tile that it compares."""
    (tried,) = dry_runs.dry_run(made, tried=True).tried
    return {str(each["plan"]): each["predicted_us"] for each in tried.plan["candidates"]}


@pytest.mark.parametrize("arithmetic", ["ieee", "split"])
def test_mma_kernels_store_nothing(arithmetic: str) -> None:
    dtype = torch.float32 if arithmetic == "split" else torch.bfloat16
    found = dry(M, N, K, dtype=dtype, plan=(dry_runs.ARITHMETICS.index(arithmetic), *numbers(MMA)))
    assert "beside the result" in found.refused


def test_fp32_on_slices() -> None:
    found = dry(16384, 4096, 512, dtype=torch.float32)
    assert found.fused and found.on_slices and list(FAMILIES)[found.plan[0]] == FP16X3


def test_rows_that_tma_does_not_store_are_left_to_several_calls() -> None:
    """A copy of the result from padded rows would need one of the stored matrix, too."""
    for size in ((M, N + 1, K), (M, N + 2, K)):
        found = dry(*size)
        assert found.answer == Reason.NOT_FUSED and not found.fused
    assert dry(8192, 3072, 767).launches == ["copy", "fused"]
    assert dry(M, N, K, dtype=torch.float64).answer == Reason.NOT_FUSED


# --- the call ---------------------------------------------------------------------------------------------------------


def test_both_tensors_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    result = torch.empty(M, N)
    answers = Answers(monkeypatch, "ask", result)
    made = call()
    found = one_kernel.both(made)
    assert found is not None and found.result is result
    (asked,) = answers.asked
    assert asked[0] == made.epilogue.number and asked[3] is made.operands and asked[-3] is found.stored
    assert found.stored.shape == (M, N) and found.stored.dtype is torch.bfloat16


def test_a_kernel_is_linked_and_the_call_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, "ask", int(Reason.NOT_LINKED), torch.empty(M, N))
    assert one_kernel.both(call()) is not None
    (linked,) = answers.linked
    assert linked.startswith("epigemm_open_sm90_tma_bfloat16_")


@pytest.mark.parametrize("reason", sorted(set(Reason) - {Reason.NOT_LINKED, Reason.LACKS_PACK}))
def test_several_calls_for_any_other_reason(reason: Reason, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, "ask", int(reason))
    assert one_kernel.both(call()) is None and len(answers.asked) == 1 and not answers.linked


def test_types_that_are_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, "ask", *[torch.empty(M, N)] * 3)
    assert one_kernel.both(call(dtype=torch.float32, precision="high")) is None
    assert one_kernel.both(call(dtype=torch.float64)) is None
    made = call()
    assert one_kernel.both(made._replace(invariant=True)) is None
    assert not answers.asked
    for precision in ("tf32", "highest", None):
        assert one_kernel.both(call(dtype=torch.float32, precision=precision)) is not None
