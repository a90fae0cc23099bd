"""The split of fp32 rows into fp16 slices on a CPU, which the package has for GPUs alone: tests need no GPU for packs.

csrc/gemm/fp16_slices/slices.h has the formula, layout.h the sections of a pack. Both give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epigemm.packs.weight_packs import pack_bytes
from tests.support.packs import INTERLEAVE
from tests.support.split_emulation import split

TINY, INFINITE, NAN = 1 << 28, 1 << 29, 1 << 30
_ALIGNMENT = 256

_library = torch.library.Library("epigemm", "IMPL")  # type: ignore[no-untyped-call]


def split_rows(matrix: Tensor, slices: int, pack: Tensor) -> None:
    """What `epigemm::_split_rows_out` writes."""
    (rows, columns), size = matrix.shape, pack_bytes(*matrix.shape, slices)
    if pack.numel() < size:
        raise RuntimeError(f"pack has {pack.numel()} bytes, expected at least {size}")
    # A row of nothing has the sections of a zero, but for what is counted.
    pieces = split(matrix if columns else matrix.new_zeros(rows, 1))
    facts = pieces.large if columns else torch.zeros_like(pieces.large)
    for flag, where in (
        (TINY, pieces.tiny > 0),
        (INFINITE, matrix.isinf().any(1)),
        (NAN, matrix.isnan().any(1)),
    ):
        facts = facts | torch.where(where, flag, 0)
    width = -(-columns // INTERLEAVE) * INTERLEAVE if slices == 2 else -(-columns // 8) * 8
    halves = [each[:, :columns].half() for each in (pieces.high, pieces.low)[:slices]]
    parts = [torch.nn.functional.pad(each, (0, width - columns)) for each in halves]
    if slices == 2:
        parts = [each.view(rows, width // INTERLEAVE, 1, INTERLEAVE) for each in parts]
    sections = [
        torch.exp2(-pieces.exponents[:, 0].double() / 2).float(),
        facts.int(),
        pieces.tiny.int(),
        torch.cat(parts, 2) if slices == 2 else parts[0],
    ]
    start = 0
    for section in sections:
        data = section.contiguous().view(-1).view(torch.uint8)
        pack[start : start + data.numel()] = data
        start += -(-data.numel() // _ALIGNMENT) * _ALIGNMENT


_library.impl("_split_rows_out", split_rows, "CPU")  # type: ignore[no-untyped-call]
