"""The split product in plain PyTorch, on any device: what the kernels compute, written down a second time.

It exists so that the gradings themselves are tested where no kernel runs, and so that the guard's bound can be
attacked without one. `split_product` and `scaled_product` follow the formulas of docs/numerics.md; their sums are
exact (float64) and rounded once, or add as tensor cores do: 16 products at a time, truncated. The large products of the
split are promoted by rounded additions, every 64 of a long sum and every 32 of a short one; the scaled ones never.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOW_SCALE = 2.0**11
EXPONENT_RANGE = (-114, 126)
TINY = 2.0**-14
MMA_K = 16
INTERLEAVE = 64  # the kernels' K is a multiple of it
LONG_SUM, SHORT_PROMOTION, LONG_PROMOTION = 4096, 32, 64


@dataclass(frozen=True)
class Pieces:
    """A matrix as its split: two fp16 slices (as float64), an exponent for each row, and the facts of the guard."""

    high: Tensor
    low: Tensor
    exponents: Tensor  # [rows, 1]: scaled row = row * 2**exponent
    large: Tensor  # [rows]: elements within 2^-8 of the row's largest; K for a row of zeros
    tiny: Tensor  # [rows]: elements that lose bits
    special: Tensor  # [rows]: some element is not finite


def row_exponents(matrix: Tensor) -> Tensor:
    """Even e, [rows, 1]: the largest finite magnitude times 2^e lies in [2^13, 2^15), unless e is clamped."""
    finite = torch.where(matrix.isfinite(), matrix, 0.0).double()
    largest = finite.abs().amax(dim=1, keepdim=True)
    binade = torch.frexp(largest).exponent.long() - 1
    wanted = 13 - binade
    exponents = (wanted + wanted % 2).clamp(*EXPONENT_RANGE)
    return torch.where(largest > 0, exponents, 0)


def split(matrix: Tensor) -> Pieces:
    """Both pieces of an fp32 matrix [rows, K] and what the guard knows about it."""
    exponents = row_exponents(matrix)
    finite = torch.where(matrix.isfinite(), matrix, 0.0).double()
    scaled = torch.ldexp(finite, exponents).float()  # exact, or underflowing as in fp32
    high = scaled.half()
    low = ((scaled - high.float()) * LOW_SCALE).half()
    magnitude = scaled.abs()
    largest = magnitude.amax(dim=1, keepdim=True)
    return Pieces(
        high.double(),
        low.double(),
        exponents,
        (magnitude >= largest * 2.0**-8).sum(1),
        ((finite != 0) & (magnitude < TINY)).sum(1),
        (~matrix.isfinite()).any(1),
    )


def unsafe_pairs(x: Pieces, weight: Pieces) -> Tensor:
    """[M, N]: pairs of rows that the range check rejects."""
    k = x.high.shape[1]
    both_large = x.large[:, None] + weight.large[None, :] - k
    tiny = x.tiny[:, None] + weight.tiny[None, :]
    # An eighth of K, in steps of 64, may show that the rows meet.
    summed = slice(0, -(-(k // 8) // INTERLEAVE) * INTERLEAVE)
    sums = _magnitudes(x)[:, summed] @ _magnitudes(weight)[:, summed].mT
    return (tiny > 0) & (both_large < max(1, k // 64)) & (sums < 2.0**18 * tiny)


def _magnitudes(pieces: Pieces) -> Tensor:
    """The scaled elements."""
    return (pieces.high + pieces.low / LOW_SCALE).abs()


def truncated(values: Tensor) -> Tensor:
    """float64 to the fp32 number towards zero."""
    nearest = values.float()
    beyond = nearest.double().abs() > values.abs()
    return torch.where(beyond, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)


def promotion(k: int) -> int:
    """After how many products of a sum of K the kernels of the split promote."""
    padded = -(-k // INTERLEAVE) * INTERLEAVE
    return LONG_PROMOTION if padded >= LONG_SUM else SHORT_PROMOTION


def tensor_core_sum(x: Tensor, weight: Tensor, every: int) -> Tensor:
    """x @ weight.T as tensor cores add: truncated every 16 of K; promoted by rounded additions (0: never)."""
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    partial = torch.zeros_like(total)
    for start in range(0, x.shape[1], MMA_K):
        part = slice(start, start + MMA_K)
        partial = truncated(partial.double() + x[:, part] @ weight[:, part].mT)
        if every and (start + MMA_K) % every == 0:
            total, partial = total + partial, torch.zeros_like(partial)
    return total + partial


def _unscale(acc: Tensor, x: Pieces, weight: Pieces) -> Tensor:
    """Back from the scaled rows: exact but for the fp32 range."""
    return torch.ldexp(acc.double(), -(x.exponents + weight.exponents.mT)).float()


def _repaired(product: Tensor, x: Tensor, weight: Tensor, bad: Tensor) -> Tensor:
    """The pairs in `bad` computed anew, as precisely as fp32 can hold them."""
    return torch.where(bad, (x.double() @ weight.double().mT).float(), product)


def split_product(x: Tensor, weight: Tensor, *, tensor_cores: bool = True, guard: bool = True) -> Tensor:
    """x @ weight.T by three products of fp16 slices. fp32 [M, K] and [N, K] to fp32 [M, N]."""
    a, b = split(x), split(weight)
    if tensor_cores:
        large = tensor_core_sum(a.high, b.high, promotion(x.shape[1]))
        pieces = torch.cat([a.low, a.high], 1), torch.cat([b.high, b.low], 1)
        small = tensor_core_sum(*pieces, 0)
        acc = (large.double() + small.double() / LOW_SCALE).float()
    else:
        acc = a.high @ b.high.mT + (a.low @ b.high.mT + a.high @ b.low.mT) / LOW_SCALE
    product = _unscale(acc, a, b)
    bad = a.special[:, None] | b.special[None, :]
    return _repaired(product, x, weight, bad | unsafe_pairs(a, b) if guard else bad)


def scaled_product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T by the high pieces alone."""
    a, b = split(x), split(weight)
    product = _unscale(tensor_core_sum(a.high, b.high, 0), a, b)
    bad = a.special[:, None] | b.special[None, :]
    return _repaired(product, x, weight, bad | unsafe_pairs(a, b))


def tf32_rounded(matrix: Tensor) -> Tensor:
    """fp32 rounded to TF32's eleven significant bits, ties away from zero."""
    bits = matrix.view(torch.int32)
    rounded = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(matrix.isfinite(), rounded, matrix)


def tf32_product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T of operands rounded to TF32."""
    return tensor_core_sum(tf32_rounded(x).double(), tf32_rounded(weight).double(), 0)
