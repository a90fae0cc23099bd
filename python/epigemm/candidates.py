"""The ways to run one call: every plan of the fused kernels that cover it, and torch's own path, ready to be timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epigemm import decisions, execution, fallback, packs, plans, split
from epigemm import precision as _precision
from epigemm._native import ops
from epigemm.calls import LinearCall

TORCH: tuple[int, ...] = ()
"""In place of a plan: the fallback, torch's GEMM and one elementwise kernel where that does not do everything."""

_fused_linear_out = ops._fused_linear_out.default
_split_linear_out = ops._split_linear_out.default
SWAP_AB = "sm90_swap_ab"
"""The family of kernels whose tiles are walked in one order only."""
_RASTERS = ("along_m", "along_n")
_HOPELESS = 1.7  # times the best predicted time


def on_random_x(call: LinearCall) -> LinearCall:
    """The same call on one matrix of random x, and with ones for the epilogue's further operands."""
    device, dtype = call.x.device, call.x.dtype
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn((call.rows, call.weight.shape[1]), generator=generator, device=device, dtype=dtype)
    return call._replace(x=x, operands=[torch.ones_like(each) for each in call.operands], out=None)


@dataclass(frozen=True)
class Candidate:
    """One of the ways: `plan` is `TORCH` or family, tile, raster, swizzle and splits."""

    plan: tuple[int, ...]
    text: str
    run: Callable[[], Tensor]


class Kind(NamedTuple):
    """What tells one family of kernels from another.

    Attributes:
        arithmetic: what they multiply in.
        packed: on fp16 pieces: whether the weight's count as there already.
        tf32_allowed: fp32: whether torch's GEMM may use TF32.
        source: where the planner's choice among them comes from: "model" or "cache".
    """

    arithmetic: str
    packed: bool
    tf32_allowed: bool
    source: str


@dataclass(frozen=True)
class Family:
    """The kernels of one arithmetic, and what they stand against.

    Attributes:
        kind: which ones.
        candidates: every plan.
        rival: torch's own path.
        setting: torch's fp32 setting under which the rival is to be timed.
        now: the plan that runs at present; `TORCH` where that is the rival.
    """

    kind: Kind
    candidates: list[Candidate]
    rival: Candidate
    setting: Callable[[], AbstractContextManager[None]]
    now: tuple[int, ...] = TORCH


def families(call: LinearCall, wanted: Callable[[Kind], bool] = lambda kind: True) -> Iterator[Family]:
    """Each arithmetic that the call may run in and whose kernels cover it, in the order in which they are tried."""
    out = call.new_out()
    call = call._replace(out=out)
    roads = decisions.roads(call)
    for found in execution.considered(call):
        on_pieces = found.choice is not None
        # The planner compares the fused TF32 kernel with a TF32 GEMM, whatever torch's setting is.
        tf32_allowed = call.x.dtype == torch.float32 and (roads.tf32_allowed or not on_pieces)
        answer = found.plan
        now = tuple(answer.get("plan", TORCH))
        numbers = list(_every_plan(answer["candidates"], now))
        kind = Kind(found.arithmetic, on_pieces and found.packed, tf32_allowed, answer["source"])
        if not numbers or plans.no_gemm_kernels() or not wanted(kind):
            continue
        bind = _on_pieces(call, kind) if on_pieces else partial(_fused, call, kind.arithmetic, out)
        candidates = [Candidate(plan, text, partial(bind, list(plan))) for plan, text in numbers]
        setting: Callable[[], AbstractContextManager[None]] = nullcontext
        if tf32_allowed and not roads.tf32_allowed:
            setting = partial(_precision.switched, call.x.device.type, _precision.TF32)
        yield Family(kind, candidates, _rival(call), setting, now)


def _every_plan(
    answers: Sequence[dict[str, Any]], now: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], str]]:
    """The numbers and the description of the planner's candidates; where tiles are walked, in every order.

    `now`: the plan that runs at present, which is always among them.
    """
    best = min((float(answer["predicted_us"]) for answer in answers), default=0.0)
    seen: set[tuple[int, ...]] = set()
    for answer in answers:
        family, tile, raster, swizzle, splits = answer["plan"]
        orders = [(raster, swizzle)]
        if answer["family"] != SWAP_AB:  # its tiles are all at work at once, or nearly
            # The planner's swizzle is the widest that pads next to nothing; wider ones cost up to a factor of 2.8.
            orders = list(product(range(len(_RASTERS)), sorted({1, max(1, swizzle // 2), swizzle})))
        if answer["predicted_us"] > _HOPELESS * best and tuple(answer["plan"]) != now:
            continue
        for raster, swizzle in orders:
            numbers = (family, tile, raster, swizzle, splits)
            if numbers in seen:
                continue
            seen.add(numbers)
            text = (
                f"tile {answer['tile']}, cluster {answer['cluster']}, {answer['schedule']}, raster "
                f"{_RASTERS[raster]}, swizzle {swizzle}"
            )
            yield numbers, text if splits == 1 else f"{text}, K in {splits} parts"


def _rival(call: LinearCall) -> Candidate:
    return Candidate(TORCH, "torch's own path", partial(fallback.linear, call))


def _fused(call: LinearCall, arithmetic: str, out: Tensor, plan: list[int]) -> Tensor:
    """One kernel on the tensors as they are."""
    head = (call.epilogue.name, call.x, call.weight, call.bias, call.operands, call.scalars)
    if not _fused_linear_out(*head, arithmetic, plan, out):
        raise RuntimeError(f"plan {plan}: the fused kernel does not cover this call")
    return out


def _on_pieces(call: LinearCall, kind: Kind) -> Callable[[list[int]], Tensor]:
    """The launches of a call on fp16 pieces, with a plan still to come; without the copy of a padded result."""
    arithmetic, packed = kind.arithmetic, kind.packed
    pieces = packs.PIECES[arithmetic]
    (m, k), n = call.x.shape, call.weight.shape[0]
    size = packs.pack_bytes(m, k, pieces)
    pack = None
    if packed:
        pack = call.x.new_empty(packs.pack_bytes(n, k, pieces), dtype=torch.uint8)
        ops._split_rows_out(call.weight, pieces, pack)
    else:
        size += packs.pack_bytes(n, k, pieces)
    workspace = call.x.new_empty(size, dtype=torch.uint8)
    target = call.x.new_empty(m, split.stored_width(n))
    bias = None if call.bias is None else call.bias.contiguous()

    def run(plan: list[int]) -> Tensor:
        head = (call.epilogue.name, call.x, call.weight, pack, workspace, bias, call.operands, call.scalars)
        _split_linear_out(*head, arithmetic, plan, target)
        return target

    return run
