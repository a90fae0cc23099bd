"""The products that are graded: functions from fp32 x [M, K] and weight [N, K] to ``x @ weight.T``, fp32 [M, N]."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import epigemm
from epigemm._native import ops
from epigemm.arguments import precision
from epigemm.arguments.calls import LinearCall
from epigemm.calls import entry
from epigemm.epilogues.kinds import MATRIX, SCALAR
from epigemm.epilogues.library import named
from epigemm.epilogues.registry import Epilogue
from epigemm.linker import loader
from epigemm.packs.weight_packs import SLICES, pack_bytes
from epigemm.planner import dry_runs, plans
from epigemm.planner.reasons import Reason
from tools.planner import ask_planner

Product = Callable[[Tensor, Tensor], Tensor]

SGEMM, TF32, SPLIT, SCALED = "sgemm", precision.TF32, precision.SPLIT, precision.SCALED
PRECISION = {SPLIT: "highest", SCALED: "high"}  # the precision of a call under which dispatch considers them
BASELINE = {SPLIT: SGEMM, SCALED: TF32}  # what each stands in for, and must not be less accurate than
ANY_TILE = (2, 0, 0, 1, 1)  # family sm90_fp16x3, tile, raster, swizzle, splits


@contextmanager
def matmul_setting(setting: str) -> Iterator[None]:
    """torch's fp32 setting for CUDA products, "ieee" or "tf32", put back afterwards."""
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = setting
    try:
        yield
    finally:
        matmul.fp32_precision = before


def sgemm(x: Tensor, weight: Tensor) -> Tensor:
    """cuBLAS's fp32 product (on a CPU: its library's)."""
    with matmul_setting("ieee"):
        return torch.mm(x, weight.t())


def tf32(x: Tensor, weight: Tensor) -> Tensor:
    """cuBLAS's TF32 product."""
    with matmul_setting("tf32"):
        return torch.mm(x, weight.t())


def make_pack(matrix: Tensor, arithmetic: str) -> Tensor:
    """`matrix` split by the native operator."""
    slices = SLICES[arithmetic]
    size = pack_bytes(matrix.shape[0], matrix.shape[1], slices)
    pack = torch.empty(size, dtype=torch.uint8, device=matrix.device)
    ops._split_rows_out(matrix, slices, pack)
    return pack


def forced_into(
    out: Tensor,
    epilogue: str,
    x: Tensor,
    weight: Tensor,
    arithmetic: str,
    *,
    bias: Tensor | None = None,
    operands: Sequence[Tensor] = (),
    scalars: Sequence[float] = (),
    plan: Sequence[int] = ANY_TILE,
    pack: Tensor | None = None,
    weight2: Tensor | None = None,
    moments: Tensor | None = None,
    stored: Tensor | None = None,
) -> Tensor:
    """The kernels of an arithmetic under a plan, whether or not dispatch would choose them.

    An empty plan is the fastest. What is behind the rows of `out`, to whole 16 bytes, may be written. `weight2`: of a
    pair of products, the second of which is the epilogue's first matrix: `operands` are without it. `moments`: receives
    the statistics of the columns of `out` (csrc/call/linear.h). `stored`: receives the second values of an epilogue
    that has them.
    """
    spec = named(epilogue)
    assert spec is not None
    if not plans.has_gpu_kernels(x):  # the question makes the device ready
        raise RuntimeError(f"no kernels run on {x.device}")
    wanted = (dry_runs.ARITHMETICS.index(arithmetic), *plan)
    known = dry_runs.ROUTED | dry_runs.OUT_APART | dry_runs.OUT_PADDED
    given = _in_order(spec, bias, operands, scalars, is_pair=weight2 is not None)
    call = LinearCall(spec, x, weight, given, out=out, weight2=weight2)
    kept = 0 if pack is None else dry_runs.ALL_KEPT
    found = dry_runs.dry_run(call, kept, circumstances=known, plan=wanted)
    if found.refused:
        raise RuntimeError(f"plan: {found.refused}")
    if reason := loader.link(spec, ",".join(found.missing), x.device):
        raise RuntimeError(f"{epilogue}: {reason}")
    packs = tuple(pack if name == arithmetic else None for name in dry_runs.SHIFTS)
    asked = (spec.number, x, weight, given, None, out, 0, packs, 0, False, False, known, wanted, weight2)
    answer: Tensor | int | tuple[Tensor, int] = entry.ask(*asked, stored, moments, None, None, None)
    if isinstance(answer, int):
        raise RuntimeError(f"plan {list(plan)}: {Reason(answer).name}")
    return answer if isinstance(answer, Tensor) else answer[0]


def _in_order(
    spec: Epilogue,
    bias: Tensor | None,
    tensors: Sequence[Tensor],
    scalars: Sequence[float],
    *,
    is_pair: bool,
) -> tuple[Tensor | float | None, ...]:
    """The operands of an epilogue, the bias among the tensors or apart; None where the second product is."""
    pair = next(i for i, each in enumerate(spec.operands) if each.kind == MATRIX) if is_pair else None
    has_bias = bias is None and len(tensors) + len(scalars) + is_pair == len(spec.operands)
    values, numbers = iter(tensors), iter(scalars)
    given: list[Tensor | float | None] = []
    for place, operand in enumerate(spec.operands):
        if place == pair:
            given.append(None)
        elif place + 1 == spec.bias_place and not has_bias:
            given.append(bias)
        elif operand.kind == SCALAR:
            number = next(numbers, None)
            given.append(next(values) if number is None else number)
        else:
            given.append(next(values))
    return tuple(given)


def forced(arithmetic: str, plan: Sequence[int] = ANY_TILE) -> Product:
    """The bare product by the split or the scaled kernels; N must be a multiple of 4."""

    def product(x: Tensor, weight: Tensor) -> Tensor:
        out = torch.full((x.shape[0], weight.shape[0]), float("nan"), device=x.device)
        return forced_into(out, "bias", x, weight, arithmetic, plan=plan)

    return product


def public(wish: str) -> Product:
    """What a user gets from `epigemm.linear` at a precision."""

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return epigemm.linear(x, weight, precision=wish)

    return product


def plan_of(
    epilogue: str, m: int, n: int, k: int, arithmetic: str, *, packed: bool = False
) -> dict[str, Any]:
    """What dispatch chooses for a problem on the current GPU."""
    device = torch.cuda.current_device()
    return ask_planner(
        epilogue,
        m,
        n,
        k,
        "float32",
        arithmetic,
        packed=packed,
        tf32_allowed=arithmetic == SCALED,
        gpu=plans.gpu_numbers(device),
        device=device,
    )


def on_gpu() -> dict[str, Product]:
    """The four products, ours by force so that they are seen where dispatch would not take them."""
    return {SGEMM: sgemm, TF32: tf32, SPLIT: forced(SPLIT), SCALED: forced(SCALED)}
