"""A Triton kernel of ours as a peer: fp32 on tensor cores by three TF32 products, bias and ReLU fused.

``tl.dot`` with ``input_precision="tf32x3"`` splits every fp32 operand into two TF32 numbers and adds three
products. It is what a Triton user can have today at close to fp32's accuracy. Imported only where Triton is
installed.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")


def _tf32x3_bias_relu(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
) -> None:
    # Blocks go in groups of GROUP_M rows of tiles, so that those running together share operands in L2.
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    group = pid // (GROUP_M * tiles_n)
    group_rows = min(tiles_m - group * GROUP_M, GROUP_M)
    tile_m = group * GROUP_M + (pid % (GROUP_M * tiles_n)) % group_rows
    tile_n = (pid % (GROUP_M * tiles_n)) // group_rows

    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (rows % m)[:, None].to(tl.int64) * k + depth[None, :]
    weight_ptrs = weight_ptr + (columns % n)[None, :].to(tl.int64) * k + depth[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        inside = depth < k - start
        x = tl.load(x_ptrs, mask=inside[None, :], other=0.0)
        weight = tl.load(weight_ptrs, mask=inside[:, None], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="tf32x3")
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    bias = tl.load(bias_ptr + columns, mask=columns < n, other=0.0)
    result = acc + bias[None, :]
    result = tl.where(result < 0.0, 0.0, result)
    out_ptrs = out_ptr + rows[:, None].to(tl.int64) * n + columns[None, :]
    tl.store(out_ptrs, result, mask=(rows[:, None] < m) & (columns[None, :] < n))


_CONFIGS = (
    # BLOCK_M, BLOCK_N, BLOCK_K, warps, stages
    (128, 128, 32, 8, 3),
    (128, 128, 32, 4, 3),
    (128, 64, 32, 4, 4),
    (64, 128, 32, 4, 4),
)


class LinearReLU:
    """``relu(x @ weight.T + bias)`` into ``out``; the tile is chosen by measuring a few at the first call."""

    def __init__(self) -> None:
        configs = [
            triton.Config(
                {"BLOCK_M": bm, "BLOCK_N": bn, "BLOCK_K": bk, "GROUP_M": 8},
                num_warps=warps,
                num_stages=stages,
            )
            for bm, bn, bk, warps, stages in _CONFIGS
        ]
        self._kernel = triton.autotune(configs=configs, key=["m", "n", "k"])(triton.jit(_tf32x3_bias_relu))

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> Tensor:
        """Launch on the current stream; all tensors contiguous fp32 on one GPU."""
        (m, k), n = x.shape, weight.shape[0]

        def grid(meta: dict[str, int]) -> tuple[int]:
            return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

        with torch.cuda.device(x.device):
            self._kernel[grid](x, weight, bias, out, m, n, k)
        return out
