"""How far a result may be off: a running error analysis of the PyTorch program that the call replaces.

The program runs in fp64. Then it runs again for each of its operations, whose result is off by what one operation in
the call's own arithmetic may be off, with random signs and with their opposites. The bound is the sum of what these
errors do to the results, and holds to first order for every order in which the operations are fused, as fusing leaves
roundings out (Higham, Accuracy and Stability, chapter 3).

- A product of K terms, summed in precision u: K u |x| |w|^T. u is that of fp32 (of fp64 for fp64 tensors), twice of it
  on tensor cores, which truncate. Its result may be rounded to the tensors' dtype; a split of K in 16 bits
  rounds parts.
- A sum of n numbers, in the precision of products: n u times the sum of their sizes.
- Any other operation: one rounding to the tensors' dtype, or `STEPS` of fp32's, the error of its functions.
- A result that is a sum of many elements: errors of random signs. Four times their root mean square over the results is
  taken, as a single sum may be nearly right by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.op import COLUMN, ROW, TWO_WEIGHTS, Arguments, Op, results_of, wide

STEPS = 8
"""Errors of functions such as exp and erf are at most so many roundings."""


class Off(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The `at`-th operation's result is off, in one direction or the other. `at` of -1 counts operations."""

    def __init__(
        self, dtype: torch.dtype, *, is_gpu: bool, at: int = -1, sign: int = 1, draw: int = 0
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        info = torch.finfo(dtype)
        summed = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps / 2
        self._of_sum = summed * (2 if is_gpu else 1)
        self._rounding = max(info.eps / 2, STEPS * summed)
        self._parts = info.eps if is_gpu and dtype.itemsize == 2 else 0.0
        self._least = info.smallest_normal * (info.eps if dtype is torch.float16 else 1)
        self._at, self._sign, self._draw = at, sign, draw
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.is_mutable:
            return result
        made = [
            each
            for each in (result if isinstance(result, (tuple, list)) else [result])
            if isinstance(each, Tensor) and each.is_floating_point() and each.numel()
        ]
        if made:
            if self.count == self._at:
                for number, each in enumerate(made):
                    self._change(func, args, each, number)
            self.count += 1
        return result

    def _change(self, func: Any, args: Any, result: Tensor, number: int) -> None:
        name = str(func)
        of_steps = STEPS * torch.finfo(result.dtype).eps / 2  # a program in fp64 may have steps in fp32
        size = max(self._rounding, of_steps) * result.abs() + self._least
        if "gelu" in name:  # z (1 + s) / 2, whose sum loses its digits where s is near -1
            size = size + STEPS / 2 * self._of_sum * args[0].abs()
        if "sum" in name or "mean.dim" in name:
            count = args[0].numel() / max(result.numel(), 1)
            size = size + count * max(self._of_sum, of_steps / STEPS) * func(args[0].abs(), *args[1:])
        if "mm" in name:
            *_, a, b = args[: 3 if "addmm" in name else 2]
            terms = a.abs() @ b.abs()
            size = size + (a.shape[-1] * self._of_sum + self._parts) * terms
        signs = self._signs(result, number)
        result.add_(self._sign * torch.where(result.isfinite(), size, 0.0) * signs.to(result.device))

    def _signs(self, result: Tensor, number: int) -> Tensor:
        """Random signs. `draw` of 1 and -1: both halves of the columns have equal signs, or opposite ones.

        Two halves of one product are multiplied: in one of the two draws their errors add up.
        """
        rng = torch.Generator().manual_seed(1000 * self._at + number)
        *rows, columns = result.shape or (1,)
        is_halved = self._draw != 0 and columns % 2 == 0
        drawn = (*rows, columns // 2) if is_halved else result.shape
        signs = torch.randint(2, drawn, generator=rng, dtype=torch.float64) * 2 - 1
        return torch.cat([signs, self._draw * signs], -1) if is_halved else signs


def bounded(op: Op, arguments: Arguments, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """The results in fp64, and how far each element of a call's may be off."""
    given = wide(arguments)
    is_gpu = any(value.is_cuda for value in given.values() if isinstance(value, Tensor))

    def run(mode: Off) -> list[Tensor]:
        with torch.no_grad(), mode:
            return [each.detach().clone() for each in results_of(op.reference(**given))]

    counting = Off(dtype, is_gpu=is_gpu)
    expected = run(counting)
    allowed = [
        _rounding(result.dtype(dtype), each) for result, each in zip(op.results, expected, strict=True)
    ]
    for at in range(counting.count):
        draws = (1, -1) if op.of_kind(TWO_WEIGHTS) else (0,)
        every = [
            run(Off(dtype, is_gpu=is_gpu, at=at, sign=sign, draw=draw)) for sign in (1, -1) for draw in draws
        ]
        for number, (result, want) in enumerate(zip(op.results, expected, strict=True)):
            if not want.is_floating_point():
                continue
            off = torch.stack([(each[number] - want).abs() for each in every]).amax(0).nan_to_num(0.0)
            if result.of in (COLUMN, ROW) and off.numel():
                off = torch.full_like(off, 4 * float(off.square().mean().sqrt()))
            allowed[number] += off
    return expected, allowed


def _rounding(dtype: torch.dtype, want: Tensor) -> Tensor:
    """Of a result that is stored."""
    if not want.is_floating_point():
        return torch.zeros_like(want)
    info = torch.finfo(dtype)
    return want.abs().nan_to_num(0.0, posinf=0.0) * info.eps + info.smallest_normal


def assert_right(
    op: Op, actual: Any, arguments: Arguments, dtype: torch.dtype, *, about: Any = "", times: float = 1.0
) -> None:
    """All results of a call, their number, shapes and dtypes. In fp64 errors are far below, or they are mistakes."""
    if dtype is torch.float64:
        want = results_of(op.reference(**wide(arguments)))
        allowed = [1e-11 * (1 + each.abs().nan_to_num(posinf=0.0)) for each in want]
        allowed = [
            each if result.dtype(dtype) is dtype else 1e6 * each  # a sum of fp32
            for each, result in zip(allowed, op.results, strict=True)
        ]
        assert_within(op, results_of(actual), want, allowed, dtype, about=about)
        return
    assert_within(op, results_of(actual), *bounded(op, arguments, dtype), dtype, about=about, times=times)


def assert_within(
    op: Op,
    actual: Sequence[Tensor],
    expected: Sequence[Tensor],
    allowed: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    about: Any = "",
    times: float = 1.0,
) -> None:
    """Each element lies within its own bound; NaN and infinities stand exactly where they should."""
    assert len(actual) == len(expected) == len(op.results), f"{op.name} {about}: {len(actual)} results"
    largest = torch.finfo(dtype).max
    for number, (result, got, want, most) in enumerate(
        zip(op.results, actual, expected, allowed, strict=True)
    ):
        told = f"{op.name} {about}: result {number}"
        assert got.shape == want.shape, f"{told}: {tuple(got.shape)} for {tuple(want.shape)}"
        if not want.is_floating_point():
            assert torch.equal(got, want), told
            continue
        of = result.dtype(dtype)
        assert got.dtype is of, f"{told}: {got.dtype} for {of}"
        found = got.detach().double()
        assert torch.equal(found.isnan(), want.isnan()), f"{told}: NaN in other places"
        exact = want.isfinite() & (want.abs() + most <= largest)
        off, least = (found - want).abs()[exact], times * most[exact]
        assert bool((off <= least).all()), (
            f"{told}: {int((off > least).sum())} of {off.numel()} are off, at worst {float((off / least).max()):.3g} "
            "times what is allowed"
        )
