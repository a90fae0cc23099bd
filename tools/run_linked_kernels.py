"""Run one epilogue with operands of every kind through every family of open kernels: for compute-sanitizer.

compute-sanitizer --tool memcheck python -m tools.run_linked_kernels
compute-sanitizer --tool racecheck python -m tools.run_linked_kernels --shard 1/2
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn, PerRow, Scalar
from tools import sharded


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
        return torch.randn(shape, device="cuda", dtype=dtype)

    x, weight = random(m, k), random(n, k) / k**0.5
    operands: list[Tensor | float] = [random(n), random(n), random(m), random(m, n), random(m, n), 0.5, 2.0]
    result = everything(x, weight, *operands, precision=precision)
    everything.elementwise(result, *operands)
    leaves = [operand.requires_grad_() for operand in operands if isinstance(operand, Tensor)]
    everything.elementwise(result, *leaves, 0.5, 2.0).sum().backward()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    plan = epigemm.explain(everything, x, weight, *leaves, 0.5, 2.0, precision=precision)
    print(f"{m}x{n}x{k} {dtype} {precision}: {plan.path}, {plan.kernel}", flush=True)
    return 3


CALLS = [
    *[(1000, 1032, 256, dtype, None) for dtype in (torch.bfloat16, torch.float16)],
    *[(17, 1024, 1024, dtype, None) for dtype in (torch.bfloat16, torch.float16)],
    (517, 1024, 1024, torch.float32, "highest"),
    (1024, 1028, 1024, torch.float32, "high"),
    (33, 40, 64, torch.float64, None),
]
"""Sizes that the planner gives to the large tiles, to swap-AB and to fp16 slices; ragged ones among them."""


def jobs() -> sharded.Jobs:
    """Everything to run, by name."""
    return {
        f"{m}x{n}x{k} {dtype} {precision}": partial(run, m, n, k, dtype, precision)
        for m, n, k, dtype, precision in CALLS
    }


def main() -> None:
    """Run everything, or a shard of it."""
    sharded.run(jobs(), "calls")


if __name__ == "__main__":
    main()
