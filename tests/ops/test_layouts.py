"""Tensors wherever they lie: strides, transposed, offsets, broadcast; leading axes; and sizes of nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.bounds import assert_right, assert_within, bounded
from tests.ops.op import COLUMN, COUNT, Arguments, Op, map_tensors, results_of, tensors_of
from tests.ops.table import rows
from tests.ops.test_values import ieee
from tests.support.layouts import LAYOUTS
from tests.support.thorough import a_third

M = 19


def gaps(value: Tensor) -> Tensor:
    """Every second element."""
    return torch.stack((value, torch.full_like(value, 7)), -1)[..., 0]


def lying(arguments: Arguments, change: Callable[[Tensor], Tensor]) -> Arguments:
    """Each matrix by `change`, vectors with gaps."""
    changed = dict(arguments)
    for name, value in tensors_of(arguments).items():
        if value.dim() and value.is_floating_point():
            changed[name] = change(value) if value.dim() > 1 else gaps(value)
    return changed


def cheap(device: torch.device) -> torch.dtype:
    """In which dtype a case costs the least: on a CPU that without roundings, on a GPU that of its kernels."""
    return torch.float64 if device.type == "cpu" else torch.bfloat16


@rows("layouts")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts(op: Op, dtype: torch.dtype, device: torch.device, rng: torch.Generator) -> None:
    """All tensors in one layout, then x, the weight and each matrix alone in another."""
    arguments = op.draw(rng, (M,), dtype=dtype, device=device)
    want, allowed = bounded(op, arguments, dtype)
    matrices = [name for name, value in tensors_of(arguments).items() if value.dim() > 1]
    names = list(LAYOUTS)
    start = sum(map(ord, op.name)) % 3
    for layout in names if device.type == "cuda" else a_third(names[start:] + names[:start]):
        for changed in (None, *matrices):
            given = lying(arguments, LAYOUTS[layout]) if changed is None else dict(arguments)
            if changed is not None:
                given[changed] = LAYOUTS[layout](given[changed])
            got = results_of(op.call(**given, **ieee(op)))
            assert_within(op, got, want, allowed, dtype, about=(layout, changed))


@rows("broadcast")
def test_broadcast_memory(op: Op, device: torch.device, rng: torch.Generator) -> None:
    """Of one row for all, of one number for all, and of rows that overlap."""
    dtype = cheap(device)
    arguments = op.draw(rng, (M,), dtype=dtype, device=device)
    for name, value in tensors_of(arguments).items():
        if not value.dim() or not value.is_floating_point() or (op.of_kind(COUNT) and name == op.input):
            continue
        one = value[:1].expand_as(value)
        lies = [one]
        if value.dim() == 2:
            lies += [value[:, :1].expand_as(value), value.flatten().as_strided(value.shape, (3, 1))]
        for each in lies:
            given = {**arguments, name: each}
            assert_right(op, op.call(**given, **ieee(op)), given, dtype, about=name)


@rows("layouts of results", lambda op: not op.is_linear)
def test_results_lie_as_those_of_torch(op: Op, device: torch.device, rng: torch.Generator) -> None:
    """An elementwise result has the strides that `torch.empty_like` gives."""
    arguments = op.draw(rng, (2, 6), device=device)
    z = arguments[op.input]
    for each in (z, z.mT.contiguous().mT, z.transpose(0, 1).contiguous().transpose(0, 1)):
        result = results_of(op.call(**{**arguments, op.input: each}))[0]
        if result.shape == z.shape:
            accepted = [torch.empty_like(each).stride()]
            if op.name.startswith("@") and result.is_cuda:
                accepted.append(z.stride())
            assert result.stride() in accepted


LEADS: list[tuple[int, ...]] = [(), (1,), (2, 3), (3, 1, 2), (1, 1), (2, 0, 3), (0,)]


@rows("leading axes", lambda op: op.takes_any_lead)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_leading_axes(op: Op, dtype: torch.dtype, device: torch.device, rng: torch.Generator) -> None:
    """As of rows without them. Results are contiguous, and no views of one another or of the arguments."""
    for lead in LEADS if dtype is torch.float64 or device.type == "cuda" else LEADS[:3]:
        if has_no_extremes(op, lead):
            continue
        arguments = op.draw(rng, lead, dtype=dtype, device=device)
        got = results_of(op.call(**arguments, **ieee(op)))
        assert_right(op, tuple(got), arguments, dtype, about=lead)
        assert all(each.is_contiguous() for each in got)


@rows("no views", lambda op: op.takes_any_lead)
def test_results_are_no_views(op: Op, device: torch.device, rng: torch.Generator) -> None:
    """What is made under `no_grad` may be written in place later by something with a gradient."""
    leaf = torch.ones((), device=device, requires_grad=True)
    for lead in ((4,), (2, 3), ()):
        arguments = op.draw(rng, lead, device=device)
        with torch.no_grad():
            results = results_of(op.call(**arguments))
        for result in results:
            result.add_(leaf)
            assert result.requires_grad


@rows("shared rows", lambda op: bool(op.shared))
def test_matrices_with_a_row_for_each_batch(op: Op, device: torch.device, rng: torch.Generator) -> None:
    """`[B, 1, N]` beside results `[B, L, N]`, in every combination, also of strides."""
    dtype = cheap(device)
    for lead in ((3, 4), (2, 3, 2)):
        arguments = op.draw(rng, lead, dtype=dtype, device=device)
        shapes = [(*lead[:kept], *(1,) * (len(lead) - kept)) for kept in range(len(lead) + 1)]
        for chosen in itertools.product(shapes, repeat=len(op.shared)):
            given = dict(arguments)
            for name, shape in zip(op.shared, chosen, strict=True):
                given[name] = torch.randn(*shape, 16, generator=rng).to(device, dtype)
            assert_right(op, op.call(**given, **ieee(op)), given, dtype, about=chosen)
            for name in op.shared:
                given[name] = given[name].mT.contiguous().mT
            got = results_of(op.call(**given, **ieee(op)))
            assert_right(op, tuple(got), given, dtype, about=chosen)
            assert all(each.is_contiguous() for each in got) or not op.is_linear


def has_no_extremes(op: Op, lead: tuple[int, ...], n: int = 16) -> bool:
    """Whether a maximum of nothing would be asked for, which PyTorch refuses."""
    of_columns = op.name.startswith("@sums") and 0 in lead
    of_rows = op.name.startswith(("@sums", "@of_rows", "@of_every_operand")) and n == 0
    return of_columns or of_rows


@rows("empty", lambda op: not op.of_kind(COUNT))
@pytest.mark.parametrize("sizes", [(0, 16, 24), (5, 0, 24), (5, 16, 0), (0, 0, 0), (1, 1, 1)], ids=str)
def test_sizes_of_nothing(
    op: Op, sizes: tuple[int, int, int], device: torch.device, rng: torch.Generator
) -> None:
    """Values, and gradients that are PyTorch's zeros."""
    m, n, k = sizes
    arguments = op.draw(rng, (m,), n, k, dtype=torch.float64, device=device)
    if has_no_extremes(op, (m,), n):
        with pytest.raises(IndexError, match=r"[xz]: got no (rows|columns) for am"):
            op.call(**arguments)
        return
    assert_right(op, op.call(**arguments), arguments, torch.float64)
    gradients = []
    for call in (op.call, op.reference):
        leaves = {name: arguments[name].clone().requires_grad_() for name in op.leaves(arguments)}
        results = [each for each in results_of(call(**{**arguments, **leaves})) if each.requires_grad]
        total: Any = sum(each.sum() for each in results)
        gradients.append(torch.autograd.grad(total, list(leaves.values())) if results else ())
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, equal_nan=True)


@rows("special values")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_special_values(op: Op, dtype: torch.dtype, device: torch.device, rng: torch.Generator) -> None:
    """NaN and infinities come out where PyTorch has them: those of x, and of all else that is a tensor.

    But for infinities of vectors that are folded to a multiplier and an offset, of which NaN comes. In fp16 a CPU may
    have those of PyTorch in fp32: on some, oneDNN's GELU makes NaN of an infinity, in other types than fp16.
    """
    arguments = op.draw(rng, (M,), dtype=dtype, device=device)
    if op.of_kind(COUNT):
        return
    specials = (float("nan"), float("inf"), float("-inf"))
    is_folded = "scale" in op.of_kind(COLUMN) or "running_mean" in op.operands
    for name, special in itertools.product(op.leaves(arguments), specials):
        if is_folded and not math.isnan(special) and arguments[name].dim() == 1:
            continue
        given = {**arguments, name: arguments[name].clone()}
        given[name][..., 3] = special
        got, want = results_of(op.call(**given)), results_of(op.reference(**given))
        in_fp32 = map_tensors(given, lambda value: value.float() if value.dtype is torch.float16 else value)
        like_fp32 = results_of(op.reference(**in_fp32)) if device.type == "cpu" else want
        for one, other, alike in zip(got, want, like_fp32, strict=True):
            if not torch.equal(one.isnan(), other.isnan()):
                other = alike
            if (
                device.type == "cuda" and "statistics" in op.name
            ):  # a mean of infinities, or NaN: the page says so
                assert torch.equal(one.isfinite(), other.isfinite()), special
                continue
            assert torch.equal(one.isnan(), other.isnan()), special
            assert torch.equal(one[one.isinf()], other[other.isinf()].to(one.dtype)), special
