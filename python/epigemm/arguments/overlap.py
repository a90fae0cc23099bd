"""Exact tests for overlapping memory of strided tensors.

torch's own checks let every view pass that is not dense; a kernel that writes through `out=` needs the exact
answer: `buf[:, :n]` and `buf[:, n:]` interleave without sharing an element, `x[1:]` and `x[:-1]` do share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

# A dimension as the solver sees it: the step in bytes and the largest index.
_Dimension = tuple[int, int]

_MAX_STEPS = 20_000
"""Bound on the search. A case that it does not decide counts as not overlapping, as in torch."""


def is_same_view(a: Tensor, b: Tensor) -> bool:
    """Whether both tensors address the same elements in the same order."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and _dims(a) == _dims(b))


def overlaps(a: Tensor, b: Tensor) -> bool:
    """Whether some byte belongs to both tensors."""
    a_start, b_start = a.data_ptr(), b.data_ptr()
    if a_start + _span(a) <= b_start or b_start + _span(b) <= a_start:
        return False
    if a.numel() == 0 or b.numel() == 0:
        return False
    if a.is_contiguous() and b.is_contiguous():
        return True
    # a_start + sum(a_step * i) + byte == b_start + sum(b_step * j) + byte'. Counting j and byte' from their
    # ends turns the differences into one sum of non-negative terms.
    dims = _dims(a) + _dims(b) + [(1, a.element_size() - 1), (1, b.element_size() - 1)]
    return _has_solution(dims, b_start - a_start + _span(b) - 1)


def overlaps_itself(a: Tensor) -> bool:
    """Whether two different indices of `a` address the same element."""
    if a.is_contiguous():
        return False
    dims = _dims(a)
    if a.numel() == 0 or _is_nested(dims):
        return False
    # Two indices differ by v, |v_k| <= last_k: look for sum(step_k * v_k) == 0 with a first v_k of at least
    # 1.
    for k, (step, last) in enumerate(dims):
        others = [(s, 2 * n) for j, (s, n) in enumerate(dims) if j != k]
        middle = sum(s * n for j, (s, n) in enumerate(dims) if j != k)
        if _has_solution([(step, last - 1), *others], middle - step):
            return True
    return False


def _dims(a: Tensor) -> list[_Dimension]:
    size = a.element_size()
    return [(step * size, length - 1) for step, length in zip(a.stride(), a.shape, strict=True) if length > 1]


def _span(a: Tensor) -> int:
    if a.is_contiguous():
        return a.nbytes
    return sum(step * last for step, last in _dims(a)) + a.element_size()


def _is_nested(dims: Iterable[_Dimension]) -> bool:
    """Whether every step is larger than all that the smaller steps can reach: then no two indices meet."""
    reach = 0
    for step, last in sorted(dims):
        if step <= reach:
            return False
        reach += step * last
    return True


def _has_solution(dims: Sequence[_Dimension], target: int) -> bool:
    """Whether sum(step * i) == target for some 0 <= i <= last of each dimension."""
    merged: dict[int, int] = {}
    for step, last in dims:
        merged[step] = merged.get(step, 0) + last
    terms = sorted(((s, n) for s, n in merged.items() if s > 0), reverse=True)
    reach = [0] * (len(terms) + 1)
    for position in range(len(terms) - 1, -1, -1):
        step, last = terms[position]
        reach[position] = reach[position + 1] + step * last
    pending = [(0, target)]
    for _ in range(_MAX_STEPS):
        if not pending:
            return False
        position, rest = pending.pop()
        if rest == 0:
            return True
        if rest < 0 or rest > reach[position] or position == len(terms):
            continue
        step, last = terms[position]
        lowest = max(0, -((reach[position + 1] - rest) // step))
        highest = min(last, rest // step, lowest + _MAX_STEPS)
        pending.extend((position + 1, rest - step * i) for i in range(lowest, highest + 1))
    return False
