"""What a pack of fp16 slices holds."""

from __future__ import annotations

import torch
from torch import Tensor

from epigemm.packs import weight_packs

INTERLEAVE = 64


def decode(pack: Tensor, rows: int, columns: int, pieces: int) -> Tensor:
    """The fp64 matrix whose pieces a pack holds."""
    roots = pack[: 4 * rows].view(torch.float32).double()
    padded = -(-columns // INTERLEAVE) * INTERLEAVE if pieces == 2 else -(-columns // 8) * 8
    size = 2 * pieces * rows * padded
    # The slices are the last section; sections are whole 256 bytes.
    start = weight_packs.pack_bytes(rows, columns, pieces) - -(-size // 256) * 256
    halves = pack[start : start + size].view(torch.float16).double()
    if pieces == 2:
        halves = halves.view(rows, -1, 2, INTERLEAVE)
        values = (halves[:, :, 0] + halves[:, :, 1] * 2.0**-11).reshape(rows, padded)
    else:
        values = halves.view(rows, padded)
    return values[:, :columns] * (roots * roots)[:, None]


def pack_size(matrix: Tensor, pieces: int) -> int:
    rows, columns = matrix.shape
    return weight_packs.pack_bytes(rows, columns, pieces)


def held(pack: Tensor, matrix: Tensor, pieces: int) -> bytes:
    """What a pack of `matrix` holds, to be compared."""
    rows, columns = matrix.shape
    return bytes(decode(pack.cpu(), rows, columns, pieces).numpy().tobytes())
