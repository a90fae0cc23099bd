"""Column statistics beside a product: what is launched, what is done about each reason, and the values elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from epigemm._native import build_info
from epigemm.arguments.calls import LinearCall
from epigemm.calls import entry, moments, resolve
from epigemm.epilogues.library import BIAS
from epigemm.epilogues.registry import compute_dtype
from epigemm.planner import dry_runs, plans
from epigemm.planner.reasons import Reason
from tests.gemm.query import H200
from tests.support.answers import Answers

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors count as lying on an H200."""
    monkeypatch.setattr(plans, "gpu_numbers", lambda device: H200)


def launches(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    statistics: bool = True,
    plan: tuple[int, ...] = (),
) -> list[str]:
    x, weight, bias = (torch.empty(size, dtype=dtype) for size in ((m, k), (n, k), n))
    call = LinearCall(BIAS, x, weight, (bias,), statistics=statistics)
    return dry_runs.dry_run(call, plan=plan).launches


@pytest.mark.usefixtures("described")
def test_large_tiles_reduce_what_they_store() -> None:
    assert launches(16384, 8192, 8192) == ["fused", "merge"]
    assert launches(2048, 8192, 8192, torch.float16) == ["fused", "merge"]
    families = build_info()["families"]
    tma = list(families).index("sm90_tma")
    for tile in range(families["sm90_tma"]["16_bits"]):
        assert launches(1300, 1024, 512, plan=(0, tma, tile, 0, 8, 1)) == ["fused", "merge"]


@pytest.mark.usefixtures("described")
def test_other_kernels_are_followed_by_one_that_reads_their_result() -> None:
    swap_ab = list(build_info()["families"]).index("sm90_swap_ab")
    assert launches(16, 4096, 1024, plan=(0, swap_ab, 0, 0, 1, 1)) == ["fused", "blocks"]
    assert launches(4096, 1024, 512, plan=dry_runs.FALLBACK) == ["torch_gemm", "blocks", "merge"]
    assert launches(2048, 512, 512, torch.float64) == ["torch_gemm", "blocks", "merge"]


@pytest.mark.usefixtures("described")
def test_without_them_nothing_is_launched() -> None:
    x, weight = torch.empty(4096, 1024, dtype=torch.float16), torch.empty(1024, 1024, dtype=torch.float16)
    assert not {"blocks", "merge"} & set(dry_runs.dry_run(LinearCall(BIAS, x, weight)).launches)


@pytest.mark.usefixtures("described")
def test_a_pass_over_the_result_counts_against_a_kernel_that_needs_it() -> None:
    """PyTorch's GEMM adds a bias itself; statistics take it another kernel."""
    shapes = [(m, n, k) for m in (4096, 8192) for n in (1024, 4096) for k in (512, 1024)]
    assert ["torch_gemm"] in [launches(*shape, statistics=False) for shape in shapes]
    assert [launches(*shape) for shape in shapes] == [["fused", "merge"]] * len(shapes)


# --- the values, where no kernel of epigemm's runs ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_values(dtype: torch.dtype, has_bias: bool, rng: torch.Generator) -> None:
    x, weight, bias = (torch.randn(size, generator=rng).to(dtype) for size in ((65, 32), (40, 32), 40))
    given = bias if has_bias else None
    z, (mean, variance, *_) = moments.with_moments(LinearCall(BIAS, x, weight, (given,)))
    expected = x.double() @ weight.double().t() + (bias.double() if has_bias else 0)
    rounding = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(z.double(), expected, rtol=rounding, atol=8 * rounding)
    assert z.dtype is dtype and mean.dtype is variance.dtype is compute_dtype(dtype)
    of_stored = torch.var_mean(z.double(), 0, correction=0)
    fine = 16 * torch.finfo(mean.dtype).eps
    torch.testing.assert_close(variance.double(), of_stored[0], rtol=fine, atol=fine)
    torch.testing.assert_close(mean.double(), of_stored[1], rtol=fine, atol=16 * fine)


def test_of_a_stored_matrix() -> None:
    z = torch.tensor([[1.0, 1e4], [3.0, 1e4 + 2]], dtype=torch.float32)
    mean, variance, *_ = moments.column_moments(z)
    assert mean.tolist() == [2.0, 1e4 + 1] and variance.tolist() == [1.0, 1.0]
    mean, variance, *_ = moments.column_moments(z.t())
    assert mean.tolist() == [5000.5, 5002.5]
    torch.testing.assert_close(variance, torch.full((2,), 4999.5**2))


def test_one_row() -> None:
    mean, variance, *_ = moments.column_moments(torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16))
    assert mean.tolist() == [1.5, -2.0] and variance.tolist() == [0.0, 0.0]


def test_arguments_that_do_not_fit() -> None:
    x, weight = torch.empty(8, 16), torch.empty(4, 16)
    with pytest.raises(RuntimeError, match="weight"):
        moments.with_moments(LinearCall(BIAS, x, torch.empty(4, 8)))
    with pytest.raises(RuntimeError, match="bias"):
        moments.with_moments(LinearCall(BIAS, x, weight, (torch.empty(5),)))
    with pytest.raises(ValueError, match="precision"):
        moments.with_moments(LinearCall(BIAS, x, weight, precision="fast"))
    with pytest.raises(RuntimeError, match="strict"):
        moments.with_moments(LinearCall(BIAS, x, weight, strict=True))


@pytest.mark.skipif(entry._module is None, reason="the entry is not at hand")
def test_the_module_wants_a_gpu() -> None:
    x = torch.empty(8, 16)
    given = (BIAS.number, x, x, (None,), None, None, 0, None, 0, False, False, 0, None, None)
    assert entry.ask(*given, None, torch.empty(2, 8), None) == Reason.DOES_NOT_FIT
    with pytest.raises(TypeError, match="got 14 arguments; accepted are 17"):
        entry.ask(*given)


# --- in 16 bits on a GPU: what is done about reasons ---------------------------------------------------------------


def half_precision() -> tuple[Tensor, Tensor, Tensor]:
    x, weight, vector = (
        torch.empty(size, dtype=torch.bfloat16) for size in ((4096, 1024), (2048, 1024), (2048,))
    )
    return x, weight, vector


def test_the_bias_is_given_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = half_precision()
    result = torch.empty(4096, 2048)
    answers = Answers(monkeypatch, "ask", (result, 0))
    z, (mean, variance, *_) = moments.with_moments(LinearCall(BIAS, x, weight, (bias,)))
    assert z is result and mean.shape == variance.shape == (2048,) and mean.dtype is torch.float32
    (asked,) = answers.asked
    assert asked[0] == BIAS.number and asked[3] == (bias,) and asked[4] is None
    assert asked[-2].data_ptr() == mean.data_ptr() and asked[-2].shape == (2, 2048) and asked[-1] is None


@pytest.mark.usefixtures("described")
def test_a_kernel_is_linked_and_the_call_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = half_precision()
    result = torch.empty(4096, 2048)
    answers = Answers(monkeypatch, "ask", int(Reason.NOT_LINKED), (result, 0))
    assert moments.with_moments(LinearCall(BIAS, x, weight, (bias,)))[0] is result
    (linked,) = answers.linked
    assert linked.startswith("epigemm_open_sm90_tma_bfloat16_")


@pytest.mark.parametrize("reason", [Reason.NOT_READABLE, Reason.NO_MEMORY, Reason.IS_EMPTY], ids=str)
def test_other_reasons_are_left_to_the_deeds(reason: Reason, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = half_precision()
    z, statistics = torch.empty(64, 8), moments.Moments(torch.empty(8), torch.empty(8))
    Answers(monkeypatch, "ask", int(reason))
    monkeypatch.setattr(resolve, "run_linear", lambda call: z)
    monkeypatch.setattr(moments, "column_moments", lambda of, leaves_blocks: statistics)
    found = moments.with_moments(LinearCall(BIAS, x, weight, (bias,)))
    assert found[0] is z and found[1] is statistics


def test_under_autocast_the_result_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = half_precision()
    answers = Answers(monkeypatch, "ask", (torch.empty(0), 0))
    with torch.autocast("cpu", torch.bfloat16):
        moments.with_moments(LinearCall(BIAS, x, weight, (bias,)))
    (asked,) = answers.asked
    assert asked[5].shape == (4096, 2048) and asked[-6] == dry_runs.ROUTED | dry_runs.OUT_APART


@pytest.mark.parametrize(("rows", "block_rows"), [(1024, 64), (1024, 0), (2048, 128), (4096, 0)])
def test_few_blocks_are_left(rows: int, block_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for them is there if the rows may be few blocks. The call says whether it has left any."""
    _, weight, bias = half_precision()
    x, result = torch.empty(rows, 1024, dtype=torch.bfloat16), torch.empty(rows, 2048)
    answers = Answers(monkeypatch, "ask", (result, block_rows))
    z, found = moments.with_moments(LinearCall(BIAS, x, weight, (bias,)), leaves_blocks=True)
    given = answers.asked[0][-1]
    assert z is result and found.block_rows == block_rows
    assert (given is None) == (rows == 4096) and (found.blocks is None) == (block_rows == 0)
    if given is not None:
        assert given.shape == (moments.MOST_LEFT, 2048, 2) and given.dtype is torch.float32
    if found.blocks is not None:
        assert found.blocks is given


@pytest.mark.usefixtures("described")
def test_few_blocks_are_not_merged_by_a_kernel_of_their_own() -> None:
    assert launches(1024, 8192, 4096) == ["fused"]
    assert launches(1025, 8192, 4096) == ["fused", "merge"]
