"""Memory that strided tensors may share: against the sets of bytes that they address."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from epigemm.arguments.overlap import is_same_view, may_share, meets_itself, shares

BUFFER = torch.zeros(64, dtype=torch.float32)


def views() -> st.SearchStrategy[Tensor]:
    """Of a buffer, by any sizes and strides that stay in it."""

    @st.composite
    def draw(draw: st.DrawFn) -> Tensor:
        sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
        strides = [draw(st.integers(0, 7)) for _ in sizes]
        reach = sum(stride * max(size - 1, 0) for size, stride in zip(sizes, strides, strict=True))
        offset = draw(st.integers(0, max(0, 63 - reach)))
        view = BUFFER.as_strided(sizes, strides, offset)
        return view.view(torch.int32) if draw(st.booleans()) else view

    return draw()


def places(tensor: Tensor) -> list[int]:
    """Of every element, in the order of its indices."""
    found = [int(tensor.storage_offset())]
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        found = [start + int(stride) * index for start in found for index in range(int(size))]
    return found


@given(views(), views())
def test_two_views(a: Tensor, b: Tensor) -> None:
    """What shares memory may do so; what does for certain does."""
    in_common = bool(set(places(a)) & set(places(b)))
    assert may_share(a, b) or not in_common
    assert in_common or not shares(a, b)
    assert may_share(a, b) == may_share(b, a) and shares(a, b) == shares(b, a)


@given(views())
def test_one_view(a: Tensor) -> None:
    assert meets_itself(a) or len(set(places(a))) == len(places(a))


@given(views(), views())
def test_the_same_elements_in_the_same_order(a: Tensor, b: Tensor) -> None:
    if is_same_view(a, b) and a.numel():
        assert a.dtype == b.dtype and places(a) == places(b)


def test_by_hand() -> None:
    x = torch.zeros(6, 8)
    assert shares(x[1:], x[:-1]) and shares(x, x.t()) and not may_share(x[:3], x[3:])
    for a, b in ((x[:, :4], x[:, 4:]), (x[::2], x[1::2]), (x[::2], x[2])):
        assert may_share(a, b) and not shares(a, b)
    assert meets_itself(x[0].expand(3, 8)) and meets_itself(x.as_strided((6, 8), (2, 1)))
    assert not meets_itself(x.t()) and not meets_itself(x[:, 1:]) and not meets_itself(x[:0].expand(0, 8))
    assert is_same_view(x, x.view(6, 8)) and is_same_view(x[0], x.view(48)[:8])
    assert not is_same_view(x, x.t()) and not is_same_view(x, x.clone())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_elements_of_other_sizes(dtype: torch.dtype) -> None:
    """A byte in common is enough."""
    halves, other = BUFFER.view(dtype), BUFFER[3:4]
    size = halves.element_size()
    first = 12 // size
    assert shares(halves[first : first + 1], other) and not may_share(halves[:first], other)
    assert not may_share(halves[16 // size :], other) or size == 8
