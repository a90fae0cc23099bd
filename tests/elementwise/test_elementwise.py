"""The elementwise kernels: every epilogue and dtype, any view, against float64. Layouts: tests/ops/test_layouts.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support import reference
from tests.support.arithmetic import BF16, STORAGE, Arithmetic
from tests.support.cases import ELEMENTWISE, Operands, cuda_unavailable, draw_operands, poisoned, signed

DEVICES = ["cpu"] if cuda_unavailable() else ["cpu", "cuda"]


def run(name: str, x: torch.Tensor, operands: Operands, out: torch.Tensor | None = None) -> torch.Tensor:
    if out is None:
        out = poisoned(x.shape, x.dtype, x.device)
    torch.ops.epigemm.elementwise_out(name, x, operands.bias, operands.tensors, operands.scalars, out)
    return out


def check(
    name: str, x: torch.Tensor, operands: Operands, arithmetic: Arithmetic, actual: torch.Tensor
) -> None:
    reference.assert_within(actual, reference.elementwise(name, x, operands, arithmetic))


def columns_of(x: torch.Tensor) -> int:
    return x.shape[-1] if x.dim() else 1


@st.composite
def strided(draw: st.DrawFn) -> torch.Tensor:
    """A view of random values: slices with steps and offsets, permutations, expansions."""
    rank = draw(st.integers(1, 4))
    shape = [draw(st.integers(1, 9)) for _ in range(rank)]
    steps = [draw(st.integers(1, 3)) for _ in range(rank)]
    offsets = [draw(st.integers(0, 2)) for _ in range(rank)]
    seed = draw(st.integers(0, 2**16))
    full = [size * step + offset for size, step, offset in zip(shape, steps, offsets, strict=True)]
    base = signed(tuple(full), torch.Generator().manual_seed(seed))
    for dim, (size, step, offset) in enumerate(zip(shape, steps, offsets, strict=True)):
        base = base.narrow(dim, offset, size * step)
    view = base[tuple(slice(None, None, step) for step in steps)]
    view = view.permute(draw(st.permutations(range(rank))))
    for dim in range(rank):
        if draw(st.booleans()) and draw(st.booleans()):
            view = view.narrow(dim, 0, 1).expand(
                [draw(st.integers(1, 5)) if at == dim else -1 for at in range(rank)]
            )
    return view


def copy_layout(view: torch.Tensor, dtype: torch.dtype, device: str) -> torch.Tensor:
    """The same strides and offset over storage of another dtype on another device."""
    storage = view.untyped_storage().size() // view.element_size()
    flat = view.as_strided((storage,), (1,), 0).to(dtype).to(device)
    return flat.as_strided(view.shape, view.stride(), view.storage_offset())


@given(view=strided(), name=st.sampled_from(ELEMENTWISE), arithmetic=st.sampled_from(STORAGE), data=st.data())
def test_any_view(view: torch.Tensor, name: str, arithmetic: Arithmetic, data: st.DataObject) -> None:
    rng = torch.Generator().manual_seed(7)
    order = data.draw(st.permutations(range(view.dim())))
    for device in DEVICES:
        x = copy_layout(view, arithmetic.dtype, device)
        assert x.stride() == view.stride()
        operands = draw_operands(name, columns_of(x), arithmetic, device, rng)
        inverse = [order.index(dim) for dim in range(view.dim())]
        out = poisoned(tuple(x.shape[dim] for dim in order), x.dtype, device).permute(inverse)
        check(name, x, operands, arithmetic, run(name, x, operands, out))


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_2_31_elements() -> None:
    """Element indices beyond int32 in every code path: contiguous, strided, and with a vector operand."""
    rows, columns = 2**16 + 8, 2**15 + 8
    assert rows * columns > 2**31
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda").uniform_(-4, 4)
    rng = torch.Generator().manual_seed(3)
    for name in ELEMENTWISE:
        operands = draw_operands(name, columns, BF16, "cuda", rng)
        for view in (x, x[:, 1:-3], x[::1].mT[1:].mT):
            kept = operands.map(lambda vector, view=view: vector[: view.shape[1]] if vector.dim() else vector)
            out = poisoned(view.shape, view.dtype, "cuda")
            run(name, view, kept, out)
            for rows_checked in (slice(0, 2), slice(rows // 2, rows // 2 + 2), slice(rows - 2, rows)):
                check(name, view[rows_checked], kept, BF16, out[rows_checked])
            assert not bool(out.isnan().any()), "elements were never written"
            del out
