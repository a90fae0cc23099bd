"""The split of fp32 rows into fp16 slices on a CPU, which the package has for GPUs alone: tests need no GPU for packs.

csrc/gemm/fp16_slices/slices.h has the formula, layout.h the sections of a pack. Both give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epigemm.packs.weight_packs import pack_bytes
from tests.support.packs import INTERLEAVE

TINY, INFINITE, NAN = 1 << 28, 1 << 29, 1 << 30
_ALIGNMENT = 256

_library = torch.library.Library("epigemm", "IMPL")  # type: ignore[no-untyped-call]


def _exponents(largest: Tensor) -> Tensor:
    """Of each row, the even e with 2^13 <= largest * 2^e < 2^15, at most 126; 0 for a row of zeros."""
    wanted = 15 - torch.frexp(largest.double()).exponent
    return torch.where(largest > 0, (wanted - wanted % 2).clamp(max=126), 0)


def _statistics(matrix: Tensor, scaled: Tensor, tiny: Tensor) -> Tensor:
    size, columns = scaled.abs(), matrix.shape[1]
    largest = size.amax(1, keepdim=True) if columns else size.new_zeros(len(size), 1)
    found = torch.where(largest[:, 0] > 0, (size >= largest * 2.0**-8).sum(1), columns)
    for flag, where in ((TINY, tiny), (INFINITE, matrix.isinf()), (NAN, matrix.isnan())):
        found = found | torch.where(where.any(1), flag, 0)
    return found


def split_rows(matrix: Tensor, slices: int, pack: Tensor) -> None:
    """What `epigemm::_split_rows_out` writes."""
    (rows, columns), size = matrix.shape, pack_bytes(*matrix.shape, slices)
    if pack.numel() < size:
        raise RuntimeError(f"pack has {pack.numel()} bytes, expected at least {size}")
    finite = torch.where(matrix.isfinite(), matrix, 0.0)
    largest = finite.abs().amax(1) if columns else finite.new_zeros(rows)
    exponents = _exponents(largest)
    scaled = (finite.double() * torch.exp2(exponents.double())[:, None]).float()
    high = scaled.half()
    low = ((scaled - high.float()) * 2.0**11).half()
    tiny = (finite != 0) & (scaled.abs() < 2.0**-14)
    width = -(-columns // INTERLEAVE) * INTERLEAVE if slices == 2 else -(-columns // 8) * 8
    parts = [torch.nn.functional.pad(each, (0, width - columns)) for each in (high, low)[:slices]]
    if slices == 2:
        parts = [each.view(rows, width // INTERLEAVE, 1, INTERLEAVE) for each in parts]
    sections = [
        torch.exp2(-exponents.double() / 2).float(),
        _statistics(matrix, scaled, tiny).int(),
        tiny.sum(1).int(),
        torch.cat(parts, 2) if slices == 2 else parts[0],
    ]
    start = 0
    for section in sections:
        data = section.contiguous().view(-1).view(torch.uint8)
        pack[start : start + data.numel()] = data
        start += -(-data.numel() // _ALIGNMENT) * _ALIGNMENT


_library.impl("_split_rows_out", split_rows, "CPU")  # type: ignore[no-untyped-call]
