"""Column statistics beside a product: what is launched, what is done about each reason, and the values elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import PerColumn
from epigemm._native import build_info
from epigemm.arguments.calls import LinearCall
from epigemm.calls import deeds, entry, moments
from epigemm.epilogues.library import BIAS, SCALE_BATCH_NORM
from epigemm.epilogues.parts import Wanted
from epigemm.epilogues.registry import compute_dtype
from epigemm.planning import dry_runs, plans
from epigemm.planning.reasons import Reason
from tests.gemm.query import H200
from tests.support.answers import Answers

BOTH = Wanted(columns=True, rows=True, needs_columns=True)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors count as lying on an H200."""
    monkeypatch.setattr(plans, "gpu_numbers", lambda device: H200)


def launches(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> list[str]:
    """Of a bias and a scale, or of a bias alone."""
    epilogue = options.pop("epilogue", SCALE_BATCH_NORM)
    x, weight, bias = (torch.empty(size, dtype=dtype) for size in ((m, k), (n, k), n))
    folded = torch.empty(2, n, dtype=compute_dtype(dtype)).unbind(0)
    call = LinearCall(epilogue, x, weight, (bias,) if epilogue is BIAS else folded)
    return dry_runs.dry_run(call, **{"moments": True, **options}).launches


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
    assert launches(4096, 1024, 512, plan=dry_runs.FALLBACK, epilogue=BIAS) == [
        "torch_gemm",
        "blocks",
        "merge",
    ]
    assert launches(2048, 512, 512, torch.float64, epilogue=BIAS) == ["torch_gemm", "blocks", "merge"]


@pytest.mark.usefixtures("described")
def test_those_of_rows_and_those_that_are_not_needed() -> None:
    """Only kernels that reduce what they store give them: a pass over the result counts against the others."""
    within, rows = dry_runs.COLUMNS_WITHIN, dry_runs.ROWS_WITHIN
    assert launches(16384, 8192, 8192, moments=rows) == ["fused", "merge_of_rows"]
    assert launches(16384, 8192, 8192, moments=within) == ["fused", "merge"]
    assert launches(16384, 8192, 8192, moments=within | rows) == ["fused", "merge", "merge_of_rows"]
    assert launches(2048, 8192, 8192, moments=dry_runs.COLUMNS | rows) == ["fused", "merge", "merge_of_rows"]
    swap_ab = list(build_info()["families"]).index("sm90_swap_ab")
    small = (0, swap_ab, 0, 0, 1, 1)
    assert launches(16, 4096, 1024, moments=within | rows, plan=small) == ["fused"]
    assert launches(16, 4096, 1024, moments=dry_runs.COLUMNS | rows, plan=small) == ["fused", "blocks"]
    for wanted in (within, rows):
        assert launches(4096, 1024, 512, plan=dry_runs.FALLBACK, epilogue=BIAS, moments=wanted) == [
            "torch_gemm"
        ]
        assert launches(4096, 1024, 512, epilogue=BIAS, moments=wanted)[0] == "fused"


@pytest.mark.usefixtures("described")
def test_without_them_nothing_is_launched() -> None:
    x, weight = torch.empty(4096, 1024, dtype=torch.float16), torch.empty(1024, 1024, dtype=torch.float16)
    assert not {"blocks", "merge"} & set(dry_runs.dry_run(LinearCall(BIAS, x, weight)).launches)


@pytest.mark.usefixtures("described")
def test_a_pass_over_the_result_counts_against_a_kernel_that_needs_it() -> None:
    """PyTorch's GEMM adds a bias itself; statistics take it another kernel."""
    shapes = [(m, n, k) for m in (4096, 8192) for n in (1024, 4096) for k in (512, 1024)]
    assert ["torch_gemm"] in [launches(*shape, moments=False, epilogue=BIAS) for shape in shapes]
    assert [launches(*shape, epilogue=BIAS) for shape in shapes] == [["fused", "merge"]] * len(shapes)


# --- the values, where no kernel of epigemm's runs ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_scale", [True, False])
def test_values(dtype: torch.dtype, has_bias: bool, has_scale: bool, rng: torch.Generator) -> None:
    x, weight, bias, scale = (
        torch.randn(size, generator=rng).to(dtype) for size in ((65, 32), (40, 32), 40, 40)
    )
    vectors = bias if has_bias else None, scale if has_scale else None
    z, (mean, variance, *_) = moments.linear_folded_with_moments(x, weight, vectors, None, False, None)
    expected = x.double() @ weight.double().t() + (bias.double() if has_bias else 0)
    expected = expected * scale.double() if has_scale else expected
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
        moments.linear_folded_with_moments(x, torch.empty(4, 8), (None, None), None, False, None)
    with pytest.raises(RuntimeError, match="scale"):
        moments.linear_folded_with_moments(x, weight, (None, torch.empty(5)), None, False, None)
    with pytest.raises(ValueError, match="precision"):
        moments.linear_folded_with_moments(x, weight, (None, None), "fast", False, None)
    with pytest.raises(RuntimeError, match="strict"):
        moments.linear_folded_with_moments(x, weight, (None, None), None, True, None)


@pytest.mark.skipif(entry._module is None, reason="the entry is not at hand")
def test_the_module_wants_a_gpu() -> None:
    x = torch.empty(8, 16)
    given = (BIAS.number, x, x, (None,), None, None, 0, None, 0, False, False, 0, None, None)
    assert entry.ask_with_moments(*given, torch.empty(2, 8), True, None, None) == Reason.DOES_NOT_FIT
    with pytest.raises(TypeError, match="got 14 arguments; accepted are 18"):
        entry.ask_with_moments(*given)


# --- in 16 bits on a GPU: what is done about reasons ---------------------------------------------------------------


def half_precision() -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    x, weight, vector = (
        torch.empty(size, dtype=torch.bfloat16) for size in ((4096, 1024), (2048, 1024), (2048,))
    )
    return x, weight, (vector, vector)


def test_the_fold_is_given_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, vectors = half_precision()
    result = torch.empty(4096, 2048)
    answers = Answers(monkeypatch, "ask_with_moments", (result, True, 0))
    z, (mean, variance, *_) = moments.linear_folded_with_moments(x, weight, vectors, None, False, None)
    assert z is result and mean.shape == variance.shape == (2048,) and mean.dtype is torch.float32
    (asked,) = answers.asked
    assert asked[0] == SCALE_BATCH_NORM.number and asked[3] == ()
    assert asked[4] == (*vectors, None, None, None, None, 0.0)
    assert asked[-4].data_ptr() == mean.data_ptr() and asked[-3:] == (True, None, None)


@pytest.mark.usefixtures("described")
def test_a_kernel_is_linked_and_the_call_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, vectors = half_precision()
    result = torch.empty(4096, 2048)
    answers = Answers(monkeypatch, "ask_with_moments", int(Reason.NOT_LINKED), (result, True, 0))
    assert moments.linear_folded_with_moments(x, weight, vectors, None, False, None)[0] is result
    (linked,) = answers.linked
    assert linked.startswith("epigemm_open_sm90_tma_bfloat16_")


@pytest.mark.parametrize("reason", [Reason.NOT_READABLE, Reason.NO_MEMORY, Reason.IS_EMPTY], ids=str)
def test_other_reasons_are_left_to_the_deeds(reason: Reason, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, vectors = half_precision()
    z, statistics = torch.empty(64, 8), moments.Moments(torch.empty(8), torch.empty(8))
    Answers(monkeypatch, "ask_with_moments", int(reason))
    monkeypatch.setattr(entry, "linear", lambda *arguments: reason)
    monkeypatch.setattr(deeds, "linear", lambda call, fold: z)
    monkeypatch.setattr(moments, "column_moments", lambda of, leaves_blocks: statistics)
    found = moments.linear_folded_with_moments(x, weight, vectors, None, False, None)
    assert found[0] is z and found[1] is statistics


def test_under_autocast_the_result_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, vectors = half_precision()
    answers = Answers(monkeypatch, "ask_with_moments", (torch.empty(0), True, 0))
    with torch.autocast("cpu", torch.bfloat16):
        moments.linear_folded_with_moments(x, weight, vectors, None, False, None)
    (asked,) = answers.asked
    assert asked[5].shape == (4096, 2048) and asked[-7] == dry_runs.ROUTED | dry_runs.OUT_APART


@pytest.mark.parametrize(("rows", "block_rows"), [(1024, 64), (1024, 0), (2048, 128), (4096, 0)])
def test_few_blocks_are_left(rows: int, block_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for them is there if the rows may be few blocks. The call says whether it has left any."""
    _, weight, vectors = half_precision()
    x, result = torch.empty(rows, 1024, dtype=torch.bfloat16), torch.empty(rows, 2048)
    answers = Answers(monkeypatch, "ask_with_moments", (result, True, block_rows))
    z, found = moments.linear_folded_with_moments(x, weight, vectors, None, False, None, leaves_blocks=True)
    given = answers.asked[0][-2]
    assert z is result and found.block_rows == block_rows
    assert (given is None) == (rows == 4096) and (found.blocks is None) == (block_rows == 0)
    if given is not None:
        assert given.shape == (moments.MOST_LEFT, 2048, 2) and given.dtype is torch.float32
    if found.blocks is not None:
        assert found.blocks is given


@pytest.mark.usefixtures("described")
def test_few_blocks_are_not_merged_by_a_kernel_of_their_own() -> None:
    assert launches(1024, 8192, 4096, epilogue=BIAS) == ["fused"]
    assert launches(1025, 8192, 4096, epilogue=BIAS) == ["fused", "merge"]


# --- of an epilogue, above autograd ----------------------------------------------------------------------------------


@epigemm.epilogue
def scaled(acc: Tensor, bias: PerColumn, scale: PerColumn) -> Tensor:
    return (acc + bias) * scale


def call_of_scaled(dtype: torch.dtype = torch.bfloat16) -> LinearCall:
    x, weight, vectors = half_precision()
    cast = [each.to(dtype) for each in (x, weight, *vectors)]
    return scaled.plain_call(cast[0], cast[1], cast[2:], strict=False)


def test_the_operands_are_given_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    made = call_of_scaled()
    result = torch.empty(4096, 2048)
    answers = Answers(monkeypatch, "ask_with_moments", (result, True, 0))
    found = moments.linear(made, BOTH)
    assert found is not None
    z, ((mean, variance, blocks, _, total), of_rows) = found[0], (found[1][0], found[1][1])
    (asked,) = answers.asked
    assert z is result and asked[0] == made.epilogue.number and asked[3] is made.operands and asked[4] is None
    assert mean.shape == variance.shape == (2048,) and blocks is None and asked[-3:-1] == (True, None)
    assert total is not None
    assert [each.data_ptr() for each in asked[-4]] == [each.data_ptr() for each in (mean, variance, total)]
    assert of_rows.mean.shape == of_rows.var.shape == (4096,)
    every = (of_rows.mean, of_rows.var, of_rows.sum)
    assert [each.data_ptr() for each in asked[-1]] == [each.data_ptr() for each in every if each is not None]


@pytest.mark.parametrize("is_within", [True, False])
@pytest.mark.parametrize(
    "wanted", [(True, False, True), (True, False, False), (False, True, False), (True, True, True)]
)
def test_what_is_given(
    wanted: tuple[bool, bool, bool], is_within: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the product's kernel all; by others the columns', if they are needed."""
    columns, rows, needs_columns = wanted
    answers = Answers(monkeypatch, "ask_with_moments", (torch.empty(0), is_within, 0))
    found = moments.linear(call_of_scaled(), Wanted(*wanted))
    assert found is not None
    axes = {0} if columns and (is_within or needs_columns) else set[int]()
    assert set(found[1]) == axes | ({1} if rows and is_within else set())
    given = answers.asked[0][-4:]
    assert (given[0] is not None, given[1], given[2], given[3] is not None) == (
        columns,
        needs_columns,
        None,
        rows,
    )


@pytest.mark.usefixtures("described")
def test_an_epilogue_is_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, "ask_with_moments", int(Reason.NOT_LINKED), (torch.empty(0), True, 0))
    assert moments.linear(call_of_scaled(), BOTH) is not None
    assert len(answers.linked) == 1 and answers.linked[0].startswith("epigemm_open_sm90_tma_bfloat16_")


@pytest.mark.parametrize("reason", sorted(set(Reason) - {Reason.NOT_LINKED, Reason.LACKS_PACK}))
def test_any_other_reason_is_left_to_the_caller(reason: Reason, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, "ask_with_moments", int(reason))
    assert moments.linear(call_of_scaled(), BOTH) is None and len(answers.asked) == 1 and not answers.linked


def test_other_types_are_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, "ask_with_moments")
    assert moments.linear(call_of_scaled(torch.float64), BOTH) is None
    assert not answers.asked


def test_autocast_with_nothing_to_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias is cast, as a linear layer's is. PyTorch's GEMM would write into a result of x's type."""
    x, weight, (vector, _) = half_precision()
    answers = Answers(monkeypatch, "ask_with_moments", int(Reason.NOT_PLAIN), (torch.empty(0), True, 0))
    with torch.autocast("cpu", torch.bfloat16):
        made = scaled.plain_call(x, weight, (vector.float(), vector), strict=False)
        assert moments.linear(made, BOTH) is not None
    first, second = answers.asked
    assert [each.dtype for each in made.operands if isinstance(each, Tensor)] == [torch.bfloat16] * 2
    assert first[5] is None and first[-7] == 0
    assert second[5].shape == (4096, 2048) and second[-7] == dry_runs.ROUTED | dry_runs.OUT_APART
