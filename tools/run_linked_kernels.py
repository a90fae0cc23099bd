"""Run open kernels of every family for compute-sanitizer: operands of every kind, 8 bits, rows in groups, pairs.

compute-sanitizer --tool memcheck python -m tools.run_linked_kernels
compute-sanitizer --tool racecheck python -m tools.run_linked_kernels --shard 1/2
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn, PerRow, Scalar
from tools import sharded

DEVICE = "cuda"
_E4M3 = torch.float8_e4m3fn


@epigemm.epilogue
def everything(
    acc: Tensor, a: PerColumn, b: PerColumn, r: PerRow, m: Matrix, n: Matrix, s: Scalar, t: Scalar
) -> Tensor:
    """(acc + a) * b + r * s + m * t + tanh(n)."""
    result: Tensor = (acc + a) * b + r * s + m * t + torch.tanh(n)
    return result


def run(m: int, n: int, k: int, dtype: torch.dtype, precision: str | None = None) -> int:
    """One call, its elementwise form and its derivatives; how many calls that is."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, dtype=dtype)

    x, weight = random(m, k), random(n, k) / k**0.5
    operands: list[Tensor | float] = [random(n), random(n), random(m), random(m, n), random(m, n), 0.5, 2.0]
    result = everything(x, weight, *operands, precision=precision)
    everything.elementwise(result, *operands)
    leaves = [operand.requires_grad_() for operand in operands if isinstance(operand, Tensor)]
    everything.elementwise(result, *leaves, 0.5, 2.0).sum().backward()  # type: ignore[no-untyped-call]
    plan = epigemm.explain(everything, x, weight, *leaves, 0.5, 2.0, precision=precision)
    print(f"{m}x{n}x{k} {dtype} {precision}: {plan.path}, {plan.kernel}", flush=True)
    return 3


def run_in_8_bits(accumulate: str, out_scale: float | str | None) -> int:
    """GELU of one product and SwiGLU of two, at few rows and at many; how many calls that is."""
    n, k = 1040, 272
    for m in (9, 600):
        x, weight = (torch.randn(rows, k, device=DEVICE).to(_E4M3) for rows in (m, 2 * n))
        scales = [torch.rand(rows, device=DEVICE) + 0.01 for rows in (m, 2 * n)]
        about: dict[str, Any] = {"accumulate": accumulate, "out_scale": out_scale}
        about["out_dtype"] = torch.bfloat16 if out_scale is None else _E4M3
        epigemm.linear_glu(x, weight, x_scale=scales[0], weight_scale=scales[1], **about)
        epigemm.linear_gelu(x, weight[:n], x_scale=scales[0], weight_scale=scales[1][:n], **about)
    return 4


def run_groups(dtype: torch.dtype, ends: tuple[int, ...]) -> int:
    """One product and two of rows in groups, with more tiles than multiprocessors; how many calls that is."""
    m, n, k, groups = 3000, 1032, 136, len(ends)
    offs = torch.tensor(ends, dtype=torch.int32, device=DEVICE)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, dtype=dtype)

    x, weight = random(m, k), random(groups, 2 * n, k)
    of_groups = (random(groups, n), random(groups, n), random(m), random(m, n), random(m, n))
    everything(x, weight[:, :n], *of_groups, 0.5, 2.0, offs=offs)
    epigemm.grouped_linear_glu(x, weight, random(groups, 2 * n), offs=offs)
    return 2


CALLS = [
    *[(1000, 1032, 256, dtype, None) for dtype in (torch.bfloat16, torch.float16)],
    *[(17, 1024, 1024, dtype, None) for dtype in (torch.bfloat16, torch.float16)],
    (517, 1024, 1024, torch.float32, "highest"),
    (1024, 1028, 1024, torch.float32, "high"),
    (33, 40, 64, torch.float64, None),
    (4096, 4096, 128, torch.bfloat16, None),
]
"""Sizes that the planner gives to the large tiles, to swap-AB and to fp16 slices; ragged ones among them, and several
tiles for each warpgroup."""
ENDS = {"groups": (0, 130, 130, 131, 388, 1900, 2990), "wrong ends": (700, 3, -8, 1 << 30, 5)}


def jobs() -> sharded.Jobs:
    """Everything to run, by name."""
    found = {
        f"{m}x{n}x{k} {dtype} {precision}": partial(run, m, n, k, dtype, precision)
        for m, n, k, dtype, precision in CALLS
    }
    for accumulate, scale in itertools.product(("fast", "promoted"), (None, 0.02, "1x128")):
        found[f"8 bits, {accumulate}, {scale}"] = partial(run_in_8_bits, accumulate, scale)
    for dtype, (name, ends) in itertools.product((torch.bfloat16, torch.float16), ENDS.items()):
        found[f"{name}, {dtype}"] = partial(run_groups, dtype, ends)
    return found


def main() -> None:
    """Run everything, or a shard of it."""
    sharded.run(jobs(), "calls")


if __name__ == "__main__":
    main()
