"""Functions that depend on dtypes and sizes of their arguments: right with all of them, or refused with the line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from epigemm.epilogues.declaring import trace
from epigemm.epilogues.kinds import Matrix, PerColumn, PerRow, Scalar

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIZES = [(1, 1), (1, 3), (4, 1), (4, 3)]
HALF = torch.float16


def of_matrix(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def with_matrix(acc: Tensor, m: Matrix) -> Any:
        return function(acc, m)

    return with_matrix


def of_vectors(function: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    def with_vectors(acc: Tensor, c: PerColumn, r: PerRow) -> Any:
        return function(acc, c, r)

    return with_vectors


def of_scalar(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def with_scalar(acc: Tensor, s: Scalar) -> Any:
        return function(acc, s)

    return with_scalar


ACCEPTED: list[Callable[..., Any]] = [
    # What is the same of all calls may be asked.
    lambda acc: acc * 2 if acc.dim() == 2 and acc.ndim == 2 and len(acc.shape) == 2 else acc * 3,
    lambda acc: acc * 2 if isinstance(acc, Tensor) and torch.is_tensor(acc) else acc * 3,
    lambda acc: acc * 2 if acc.is_floating_point() and not acc.is_sparse else acc * 3,
    lambda acc: acc * 2 if acc is not None and acc.layout is torch.strided else acc * 3,
    lambda acc: acc * max(1, 2 - acc.shape[0]),
    of_vectors(lambda acc, c, r: acc + r if r.shape[1] == 1 else acc + c),
    # Casts to a type that is read, casts that are written.
    lambda acc: acc + (acc.half() * 2).to(acc.dtype),
    lambda acc: acc + (acc.to(HALF) * 2).type_as(acc),
    lambda acc: F.gelu(acc.float()).to(acc.dtype),
    of_matrix(lambda acc, m: (acc.bfloat16() + m.to(acc.dtype)).to(m.dtype)),
    lambda acc: acc + torch.full((), 0.25, dtype=acc.dtype),
    lambda acc: acc * torch.finfo(HALF).eps,
    # Broadcasts, which torch decides by sizes.
    lambda acc: acc.expand(acc.shape) * 2,
    of_matrix(lambda acc, m: torch.mul(*torch.broadcast_tensors(acc, m))),  # type: ignore[no-untyped-call]
    of_vectors(lambda acc, c, r: acc * c.expand_as(acc) + c.unsqueeze(0) * r + c.squeeze(0)),
    of_vectors(lambda acc, c, r: torch.where(acc > c, r, acc) + torch.zeros_like(acc)),
    # What PyTorch has no result for, beside 16 bits.
    of_matrix(lambda acc, m: torch.lerp(acc, m, 0.25).half().to(acc.dtype)),
    # Whole numbers that are no tensors, and booleans.
    lambda acc: torch.add(acc, acc, alpha=2) + acc.pow(2) - acc**3,
    lambda acc: torch.clamp(acc, 0, 6) + torch.where(acc > 0, acc, 0) + acc.masked_fill(acc < 0, 1),
    lambda acc: (acc > 0) * acc + (acc < 1).float() + ((acc > 0) & ~(acc > 1)),
    of_scalar(lambda acc, s: acc * s**2 + abs(-s) / 3 + torch.where(acc > s, s, acc)),
]


def drawn(function: Callable[..., Any], rows: int, columns: int, dtype: torch.dtype) -> list[Any]:
    shapes = {"acc": (rows, columns), "m": (rows, columns), "c": (columns,), "r": (rows, 1)}
    generator = torch.Generator().manual_seed(2)
    return [
        torch.rand(shapes[name], generator=generator).mul(2).sub(0.5).to(dtype) if name in shapes else 1.5
        for name in inspect.signature(function).parameters
    ]


@pytest.mark.parametrize("function", ACCEPTED)
def test_accepted(function: Callable[..., Any]) -> None:
    made = epigemm.epilogue(function)
    for dtype in DTYPES:
        for sizes in SIZES:
            given = drawn(function, *sizes, dtype)
            is_narrow = dtype.itemsize == 2
            wide = [each.float() if is_narrow and isinstance(each, Tensor) else each for each in given]
            as_given = [
                each.squeeze(1) if name == "r" else each
                for name, each in zip(inspect.signature(function).parameters, given, strict=True)
            ]
            found = made.elementwise(*as_given)
            torch.testing.assert_close(found, function(*wide).to(dtype))
            unit = torch.finfo(dtype).eps if is_narrow else 1e-6
            torch.testing.assert_close(found, function(*given).to(dtype), rtol=4 * unit, atol=8 * unit)


def tries(acc: Tensor) -> Tensor:
    try:
        return torch.lerp(acc, torch.full((), 0.5), 0.5)
    except RuntimeError:
        return acc * 2


def raises(acc: Tensor) -> Tensor:
    if acc.dtype is torch.float64:
        raise ValueError("fp64")
    return acc


def matches(acc: Tensor, s: Scalar) -> Any:
    match s:
        case float():
            return acc * s
    return acc + s


SHAPE = "the shape or the strides of a tensor decide"
DTYPE = "a tensor's dtype decides what is computed"
TYPE = "the type of an argument decides"
INTEGER = r"its result is of torch\.u?int\d+; integers would"
REFUSED: list[tuple[Callable[..., Any], str]] = [
    (lambda acc: acc * 2 if acc.shape[0] == 1 else acc * 3, SHAPE),
    (lambda acc: acc * 2 if acc.shape[0] > 1 else acc * 3, SHAPE),
    (lambda acc: acc * 2 if acc.size(1) > 1 else acc * 3, SHAPE),
    (lambda acc: acc * 2 if acc.numel() == 1 else acc * 3, SHAPE),
    (lambda acc: acc * 2 if acc.stride(0) > 1 else acc * 3, SHAPE),
    (lambda acc: acc * 2 if acc.is_contiguous() else acc * 3, SHAPE),
    (lambda acc: acc * 2 if acc.storage_offset() == 0 else acc * 3, SHAPE),
    (lambda acc: acc.squeeze(), SHAPE),
    (of_vectors(lambda acc, c, r: torch.sigmoid(acc + c) if c.numel() == 1 else acc + c), SHAPE),
    (lambda acc: acc * 3 if acc.dtype == torch.bfloat16 else acc * 2, DTYPE),
    (lambda acc: acc * 3 if acc.dtype in (torch.float16,) else acc * 2, DTYPE),
    (of_matrix(lambda acc, m: acc + m * 2 if m.dtype is torch.bfloat16 else acc + m), DTYPE),
    (of_matrix(lambda acc, m: acc + m * 2 if m.dtype is acc.dtype else acc + m), DTYPE),
    (lambda acc: acc * acc.itemsize, DTYPE),
    (lambda acc: acc * acc.element_size(), DTYPE),
    (lambda acc: acc * 2 if "Half" in acc.type() else acc * 3, DTYPE),
    (lambda acc: acc * 2 if torch.result_type(acc, 1.0) == HALF else acc * 3, DTYPE),
    (lambda acc: acc * 2 if acc.float() is acc else acc * 3, DTYPE),
    (lambda acc: acc.to(HALF if acc.dtype is torch.float32 else torch.float32).float(), DTYPE),
    (tries, DTYPE),
    (raises, DTYPE),
    (lambda acc: acc * 2 if type(acc) is Tensor else acc * 3, TYPE),
    (lambda acc: acc * 2 if acc.__class__ is Tensor else acc * 3, TYPE),
    (lambda acc: acc * 2 if hasattr(acc, "fake_mode") else acc * 3, TYPE),
    (of_vectors(lambda acc, c, r: acc * c if isinstance(c, nn.Parameter) else acc + c), "Parameter is read"),
    (of_scalar(lambda acc, s: acc * s if isinstance(s, float) else acc + s), TYPE),
    (of_scalar(lambda acc, s: acc * s if type(s) is int else acc + s), TYPE),
    (of_scalar(lambda acc, s: acc * s if hasattr(s, "is_integer") else acc + s), TYPE),
    (matches, TYPE),
    (lambda acc: acc.cpu() * 2, "the device is read"),
    (lambda acc: (torch.where(acc > 0, 16777217, 0) == 16777216).float(), INTEGER),
    (lambda acc: torch.where(acc > 0, 1, 0) * acc, INTEGER),
    (lambda acc: acc * torch.tensor(2), INTEGER),
    (lambda acc: (acc > 0).long() * acc, INTEGER),
    (lambda acc: acc.to(torch.int32).float(), INTEGER),
    (lambda acc: torch.full_like(acc, 300, dtype=torch.uint8) * acc, INTEGER),
    (lambda acc: acc.view(torch.int32).view(torch.float32), INTEGER),
]  # fmt: skip


@pytest.mark.parametrize(("function", "text"), REFUSED)
def test_refused(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(NotImplementedError, match=text) as caught:
        trace(function)
    # The line of the lambda, which its wrapper captures.
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    first = inspect.unwrap(cells[0] if cells else function).__code__
    lines = {line for *_, line in first.co_lines() if line is not None}
    named = re.search(rf"{re.escape(__file__)}:(\d+)", str(caught.value))
    assert named is not None and int(named[1]) in lines, str(caught.value)
