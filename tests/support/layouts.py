"""The same values in every memory layout that a caller may hand in."""

from __future__ import annotations

from collections.abc import Callable

import torch

Layout = Callable[[torch.Tensor], torch.Tensor]


def contiguous(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous()


def transposed(values: torch.Tensor) -> torch.Tensor:
    """Column-major."""
    return values.mT.contiguous().mT


def padded_rows(values: torch.Tensor) -> torch.Tensor:
    """Rows of a wider matrix: a row stride that is a multiple of 16 bytes."""
    wide = torch.full((*values.shape[:-1], values.shape[-1] + 64), 7.0).to(values)
    view = wide[..., 16 : 16 + values.shape[-1]]
    return view.copy_(values)


def aligned_rows(values: torch.Tensor) -> torch.Tensor:
    """A row stride that is a multiple of 16 bytes even where the rows themselves are not."""
    wide = torch.full((*values.shape[:-1], (values.shape[-1] // 64 + 1) * 64), 7.0).to(values)
    return wide[..., : values.shape[-1]].copy_(values)


def odd_rows(values: torch.Tensor) -> torch.Tensor:
    """A row stride that is not a multiple of 16 bytes."""
    wide = torch.full((*values.shape[:-1], values.shape[-1] + 3), 7.0).to(values)
    return wide[..., : values.shape[-1]].copy_(values)


def every_second_column(values: torch.Tensor) -> torch.Tensor:
    wide = torch.full((*values.shape[:-1], 2 * values.shape[-1]), 7.0).to(values)
    return wide[..., ::2].copy_(values)


def every_second_row(values: torch.Tensor) -> torch.Tensor:
    tall = torch.full((2 * values.shape[0], *values.shape[1:]), 7.0).to(values)
    return tall[::2].copy_(values)


def misaligned(values: torch.Tensor) -> torch.Tensor:
    """Contiguous, but one element away from an aligned address."""
    storage = torch.empty(values.numel() + 1, dtype=values.dtype, device=values.device)
    return storage[1:].view(values.shape).copy_(values)


LAYOUTS: dict[str, Layout] = {
    "contiguous": contiguous,
    "transposed": transposed,
    "padded_rows": padded_rows,
    "aligned_rows": aligned_rows,
    "odd_rows": odd_rows,
    "every_second_column": every_second_column,
    "every_second_row": every_second_row,
    "misaligned": misaligned,
}
