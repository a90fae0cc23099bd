"""Memory that strided tensors may share, by the ranges of their bytes.

`buf[:, :n]` and `buf[:, n:]` interleave without sharing an element, which ranges do not tell: of such tensors
`may_share` is true, and `shares` is not.
"""

from __future__ import annotations

from torch import Tensor


def is_same_view(a: Tensor, b: Tensor) -> bool:
    """Whether both tensors address the same elements in the same order."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and _dims(a) == _dims(b))


def may_share(a: Tensor, b: Tensor) -> bool:
    """Whether the ranges of bytes of both tensors meet."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    return a.data_ptr() < b.data_ptr() + _span(b) and b.data_ptr() < a.data_ptr() + _span(a)


def shares(a: Tensor, b: Tensor) -> bool:
    """Whether the ranges meet and both tensors fill theirs: then they share memory for certain."""
    return may_share(a, b) and all(not meets_itself(each) and _span(each) == each.nbytes for each in (a, b))


def meets_itself(a: Tensor) -> bool:
    """Whether a step is no longer than all that the smaller ones reach: two indices may address the same element."""
    reach = 0
    for step, last in sorted(_dims(a)):
        if step <= reach:
            return a.numel() > 0
        reach += step * last
    return False


def _dims(a: Tensor) -> list[tuple[int, int]]:
    """Of each dimension the step in bytes and the largest index."""
    size = a.element_size()
    return [(step * size, length - 1) for step, length in zip(a.stride(), a.shape, strict=True) if length > 1]


def _span(a: Tensor) -> int:
    return sum(step * last for step, last in _dims(a)) + a.element_size()
