"""`out=`: it is filled and returned, wherever it lies; what does not fit is refused before anything is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import BaseTorchFunctionMode

from tests.ops.bounds import assert_within, bounded
from tests.ops.op import VARIANCE, Op, tensors_of
from tests.ops.table import rows
from tests.support.untyped import backward

with_out = rows("out", lambda op: op.takes_out)
N = 16


def poisoned(*shape: int, like: Tensor) -> Tensor:
    """An element that was never written shows up as NaN."""
    return torch.full(shape, float("nan"), dtype=like.dtype, device=like.device)


@with_out
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_filled_and_returned(op: Op, dtype: torch.dtype, device: torch.device, rng: torch.Generator) -> None:
    """The same bits where it is contiguous; for another layout a product may add in another order."""
    for lead in ((2, 3), (), (9,)):
        arguments = op.draw(rng, lead, dtype=dtype, device=device)
        expected = op.call(**arguments)
        out = poisoned(*lead, N, like=expected)
        assert op.call(**arguments, out=out) is out
        assert torch.equal(out, expected)
        if len(lead) == 2:
            swapped = arguments[op.input].transpose(0, 1).contiguous().transpose(0, 1)
            assert op.call(**{**arguments, op.input: swapped}, out=out.zero_()) is out
            assert_within(op, [out], *bounded(op, arguments, dtype), dtype)
    want, allowed = bounded(op, arguments, dtype)
    for out in (
        poisoned(N, 9, like=expected).t(),
        poisoned(9, 2 * N, like=expected)[:, :N],
        poisoned(9, 2 * N, like=expected)[:, ::2],
        poisoned(9 * N + 1, like=expected)[1:].view(9, N),
    ):
        assert op.call(**arguments, out=out) is out
        assert_within(op, [out], want, allowed, dtype)


@with_out
def test_written_is_noticed(op: Op, rng: torch.Generator) -> None:
    """By what saved `out` for its own backward pass."""
    leaf, saved = torch.randn(9, N, requires_grad=True), torch.randn(9, N)
    product = leaf * saved
    op.call(**op.draw(rng), out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(product.sum())


@rows("out", lambda op: op.takes_out and not op.is_linear)
def test_in_place(op: Op, device: torch.device, rng: torch.Generator) -> None:
    """An elementwise call may write its own argument."""
    arguments = op.draw(rng, device=device)
    expected = op.call(**arguments)
    out = arguments[op.input]
    assert op.call(**arguments, out=out) is out
    assert torch.equal(out, expected)


@with_out
def test_gradients_are_refused(op: Op, rng: torch.Generator) -> None:
    """As PyTorch's `out=` does, by the name of the function; under `no_grad` it is written."""
    arguments = op.draw(rng, tensor_numbers=True)
    out = poisoned(9, N, like=arguments[op.input])
    for value in (arguments[name] for name in op.leaves(arguments)):
        value.requires_grad_()
        with pytest.raises(
            RuntimeError, match=r"out=\.\.\. arguments don't support automatic differentiation"
        ):
            op.call(**arguments, out=out)
        assert bool(out.isnan().all())
        with torch.no_grad():
            op.call(**arguments, out=out)
        assert not bool(out.isnan().any())
        value.requires_grad_(False)
        out.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="out"):
        op.call(**arguments, out=out.requires_grad_())


@with_out
def test_what_does_not_fit_is_refused(op: Op, rng: torch.Generator) -> None:
    """The message says what was got and what is accepted, and nothing is written."""
    arguments = op.draw(rng)
    wrong: list[tuple[Any, str]] = [
        (torch.full((9, N + 1), 7.0), rf"got shape \[9, {N + 1}\]; accepted is \[9, {N}\]"),
        (torch.full((9 * N,), 7.0), rf"got shape \[{9 * N}\]; accepted is \[9, {N}\]"),
        (torch.full((9, N), 7.0).double(), "got dtype torch.float64; accepted is torch.float32"),
        (torch.full((9, N), 7.0, device="meta"), "got device meta; accepted is cpu"),
        (torch.full((1, N), 7.0).expand(9, N), "several indices may address the same element"),
        (torch.zeros(64).add_(7.0).as_strided((9, N), (1, 1)), "same element"),
        (torch.full((9, N), 7.0).to_sparse(), "layout"),
        (torch._neg_view(torch.full((9, N), -7.0)), "negated"),
        (7.0, "got float"),
    ]
    for out, words in wrong:
        with pytest.raises((RuntimeError, TypeError), match="out: .*" + words) as caught:
            op.call(**arguments, out=out)
        assert type(caught.value) is (TypeError if isinstance(out, float) else RuntimeError)
        if isinstance(out, Tensor) and out.layout is torch.strided and not out.is_meta:
            assert bool((out == 7).all())


@with_out
def test_views_whose_ranges_meet(op: Op, rng: torch.Generator) -> None:
    """Columns beside those of x, and columns between them: what they share or not, the result is right."""
    arguments = op.draw(rng)
    expected, x = op.call(**arguments), arguments[op.input]
    columns = x.shape[1]
    beside = torch.full((9, columns + N), float("nan"))
    beside[:, :columns] = x
    between = torch.zeros(9, 2 * max(columns, N))
    between[:, : 2 * columns : 2] = x
    for lying, out in (
        (beside[:, :columns], beside[:, columns:]),
        (between[:, : 2 * columns : 2], between[:, :N]),
    ):
        assert op.call(**{**arguments, op.input: lying}, out=out) is out
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


ROADS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], torch.dtype, dict[str, float]]] = {
    "plain": (nullcontext, torch.float32, {}),
    "16 bits": (nullcontext, torch.bfloat16, {}),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), torch.float32, {}),
    "mode": (BaseTorchFunctionMode, torch.bfloat16, {}),
    "unfolded": (nullcontext, torch.float32, {"eps": 0.0}),
}
"""Ways of a call: in one step or in several, of which the last alone writes `out`."""


@pytest.mark.parametrize("road", ROADS)
@rows("memory of an argument", lambda op: op.takes_out)
def test_memory_of_an_argument_is_refused(op: Op, road: str, rng: torch.Generator) -> None:
    """It is named. Rows beside it, in the same storage, are accepted."""
    around, dtype, more = ROADS[road]
    arguments = op.draw(rng, n=24, dtype=dtype)  # a square of x and its result
    if more:
        if VARIANCE not in op.operands.values():
            pytest.skip("no BatchNorm")
        arguments |= more
    with around():
        expected = op.call(**arguments)
    for name, value in tensors_of(arguments).items():
        if value.dim() == 0 or (not op.is_linear and name == op.input):
            continue
        memory = torch.randn(max(9 * 24, value.numel()) + 24).to(dtype)
        lying = memory[: value.numel()].view(value.shape).copy_(value)
        out = memory.view(expected.dtype)[: 9 * 24].view(9, 24)
        words = re.escape(f"out: some of its elements share memory with {name};")
        kept = memory.clone()
        with around(), pytest.raises(RuntimeError, match=words):
            op.call(**{**arguments, name: lying}, out=out)
        assert torch.equal(memory.view(torch.int16), kept.view(torch.int16))
    beside = torch.randn(18, 24).to(dtype)
    beside[9:] = arguments[op.input]
    if expected.dtype is dtype:
        with around():
            found = op.call(**{**arguments, op.input: beside[9:]}, out=beside[:9])
        assert torch.equal(found, expected)
