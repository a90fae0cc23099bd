"""Calls of which one kernel gives more than a plain one: pairs of products, two values, statistics of columns.

What is done about each reason of the entry, and where the caller makes several calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from epigemm import PerColumn, glu
from epigemm.arguments import forms
from epigemm.arguments.calls import LinearCall
from epigemm.arguments.precision import DEFAULT
from epigemm.calls import moments, one_kernel, resolve
from epigemm.calls.resolve import Beside
from epigemm.epilogues.library import BIAS, FUNCTIONS
from epigemm.planner import dry_runs
from epigemm.planner.reasons import Reason
from tests.support.pretended import MODULE, describe, replace_entry

M, N, K = 4096, 2048, 1024
RESULT = torch.empty(M, N)


@pytest.fixture(autouse=True)
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors count as lying on an H200."""
    describe(monkeypatch, kernels=True)


class Answers:
    """A module in place of the entry's, with answers one after the other. Linking succeeds, and kernels run anywhere.

    `is_routed`: the first call of the resolver has the first answer, and what is asked before it none.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Any, is_routed: bool = False) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.linked: list[str] = []
        self.sees = MODULE.sees
        self._answers, self._is_routed = iter(answers), is_routed
        replace_entry(monkeypatch, self, link=self.link)

    def linear(self, *arguments: Any) -> Any:
        if self._is_routed and not arguments[11] & dry_runs.ROUTED:
            return int(Reason.NOT_PLAIN)
        self.asked.append(arguments)
        return next(self._answers)

    def link(self, epilogue: Any, missing: str, device: torch.device) -> str:
        self.linked.append(missing)
        return ""


@epigemm.epilogue
def gelu_beside(acc: Tensor, bias: PerColumn) -> tuple[Tensor, Tensor]:
    z = acc + bias
    return F.gelu(z), z


def drawn(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = (torch.empty(size, dtype=dtype) for size in ((m, k), (n, k), (n,)))
    return x, weight, bias


def pair_call(dtype: torch.dtype = torch.bfloat16) -> LinearCall:
    """Both products have a bias."""
    x, weight, bias = drawn(M, N, K, dtype)
    return glu.pair_call(
        FUNCTIONS["gated_silu"], (x, weight, bias, torch.empty_like(weight), bias, None), None
    )


def both_call(
    m: int = M, n: int = N, k: int = K, dtype: torch.dtype = torch.bfloat16, precision: str | None = None
) -> LinearCall:
    x, weight, bias = drawn(m, n, k, dtype)
    made = gelu_beside.parts(dtype).pair
    assert made is not None
    return LinearCall(forms.of_types(made.traced, x, [bias]), x, weight, (bias,), precision or DEFAULT)


def norm_call(dtype: torch.dtype = torch.bfloat16, **more: Any) -> LinearCall:
    x, weight, bias = drawn(M, N, K, dtype)
    return LinearCall(BIAS, x, weight, (bias,), **more)


class Kind(NamedTuple):
    """What makes such a call, what runs it and gives the result or None, and what the entry answers for a result."""

    call: Callable[..., LinearCall]
    run: Callable[[LinearCall], Tensor | None]
    answer: Any
    kernel: str


def run_pair(call: LinearCall) -> Tensor | None:
    found = one_kernel.pair(call)
    return found if isinstance(found, Tensor) else None


def run_both(call: LinearCall) -> Tensor | None:
    found = one_kernel.both(call)
    return found[0] if isinstance(found, tuple) else None


def run_moments(call: LinearCall) -> Tensor | None:
    found = resolve.one_kernel(call._replace(statistics=True), Beside(None, torch.empty(2, N), None))
    return found[0] if isinstance(found, tuple) else None


KINDS = {
    "pair": Kind(pair_call, run_pair, RESULT, "_pair"),
    "both": Kind(both_call, run_both, RESULT, "epigemm_open_sm90_tma_bfloat16_"),
    "moments": Kind(norm_call, run_moments, (RESULT, 0), "epigemm_open_sm90_tma_bfloat16_"),
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@kinds
def test_a_kernel_is_linked_and_the_call_made_again(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """No reason is met twice by the resolver, before which most calls are made at once."""
    not_linked, tries = int(Reason.NOT_LINKED), 1 if kind is KINDS["moments"] else 2
    given = *[not_linked] * tries, kind.answer, *[not_linked] * (tries + 1)
    answers = Answers(monkeypatch, *given)
    assert kind.run(kind.call()) is RESULT
    (linked,) = answers.linked
    assert kind.kernel in linked
    assert kind.run(kind.call()) is None and len(answers.asked) == len(given)


@kinds
@pytest.mark.parametrize("reason", sorted(set(Reason) - {Reason.NOT_LINKED}))
def test_several_calls_for_any_other_reason(
    kind: Kind, reason: Reason, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers(monkeypatch, *[int(reason)] * 2)
    assert kind.run(kind.call()) is None and answers.asked and not answers.linked


@kinds
def test_autocast_with_nothing_to_cast(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver gives the result, as torch's GEMM would make one of another type."""
    is_resolved = kind is KINDS["moments"]
    answers = Answers(monkeypatch, kind.answer, is_routed=is_resolved)
    with torch.autocast("cpu", torch.bfloat16):
        assert kind.run(kind.call()) is RESULT
    if is_resolved:
        assert answers.asked[0][5].shape == (M, N)
        assert answers.asked[0][11] == dry_runs.ROUTED | dry_runs.OUT_APART
    else:
        assert answers.asked[0][11] & dry_runs.CAST


@pytest.mark.parametrize("kind", [KINDS["pair"], KINDS["both"]], ids=["pair", "both"])
def test_several_calls_where_somebody_intercepts(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast casts, autograd records, a transform batches: nothing is asked."""
    answers, made = Answers(monkeypatch, is_routed=True), kind.call()
    with torch.autocast("cpu", torch.float16):
        assert kind.run(made) is None
    many = torch.empty(2, M, K, dtype=torch.bfloat16)
    found = torch.vmap(lambda x: x if kind.run(made._replace(x=x)) is None else 2 * x)(many)
    assert found.shape == many.shape
    made.weight.requires_grad_()
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled):
            assert kind.run(made) is None
    assert not answers.asked


def test_types_that_no_kernel_stores_two_values_of(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, *[RESULT] * 3)
    assert run_both(both_call(dtype=torch.float32, precision="high")) is None
    assert run_both(both_call(dtype=torch.float64)) is None
    assert run_both(both_call()._replace(invariant=True)) is None
    assert not answers.asked
    for precision in ("tf32", "highest", None):
        assert run_both(both_call(dtype=torch.float32, precision=precision)) is RESULT


# --- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "block_rows"), [(1024, 64), (1024, 0), (2048, 128), (4096, 0)])
def test_few_blocks_are_left(rows: int, block_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for them is there if the rows may be few blocks. The call says whether it has left any."""
    made = norm_call()
    x, result = torch.empty(rows, K, dtype=torch.bfloat16), torch.empty(rows, N)
    answers = Answers(monkeypatch, (result, block_rows), is_routed=True)
    z, found = moments.with_moments(made._replace(x=x), leaves_blocks=True)
    of_columns, given = answers.asked[0][15:17]
    assert z is result and found.block_rows == block_rows and found.mean.dtype is torch.float32
    assert of_columns.data_ptr() == found.mean.data_ptr() and of_columns.shape == (2, N)
    assert (given is None) == (rows == 4096) and (found.blocks is None) == (block_rows == 0)
    assert given is None or (given.shape == (moments.MOST_LEFT, N, 2) and given.dtype is torch.float32)
    assert found.blocks is None or found.blocks is given
