"""The fp32 kernels on fp16 pieces, as the benchmark asks about them: dispatch's answers, and the bytes of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case, Data
from epigemm import decisions, packs, plans, split
from epigemm._native import cuda_status
from epigemm.calls import LinearCall
from epigemm.epilogues import EPILOGUES
from epigemm.precision import SCALED, SPLIT

# A problem and a GPU for which the planner lists every tile, also those for few rows: only descriptions count.
_FEW_ROWS = (16, 8192, 8192)
_HOPPER = (90, 132)
# The rows of csrc/call/decide.cpp, times two, in which an arithmetic stands beside the GEMM of `_tf32_allowed`.
_CODES = {SPLIT: 2, SCALED: 4}


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def why_no_kernels(device: torch.device) -> str:
    """Why no fused kernel can run on a device at all; empty where they can."""
    if device.type != "cuda":
        return "the fused kernels need a GPU"
    return cuda_status(_index(device)) or plans.no_gemm_kernels()


def why_not_on_pieces(case: Case, data: Data, out: Tensor, *, packed: bool) -> str:
    """Why an fp32 call would not run on fp16 pieces, its weight's being kept or made for it; empty where it would."""
    assert data.weight is not None
    why_not = why_no_kernels(data.x.device)
    if why_not:
        return why_not
    formula = case.problem.formula
    native = formula.native(data.x, data.parameters)
    arithmetic = case.setting.pieces
    tensors = (data.x, data.weight, native.bias, native.operands)
    call = LinearCall(EPILOGUES[formula.epilogue], *tensors, native.scalars, out=out)
    uses = {arithmetic: packs.KEEP if packed else packs.FIND}
    _, costs = split.find_for(call, uses, ignore_shortage=False)
    (found,) = (
        each
        for each in decisions.explain(call, _CODES[arithmetic], costs)["tried"]
        if each["arithmetic"] == arithmetic
    )
    return "" if found["runs"] else str(found["why_not"] or found["plan"]["why_not"])


def _tf32_allowed(arithmetic: str) -> bool:
    """To torch's GEMM: cases run under torch's setting of their own precision."""
    return arithmetic == SCALED


def plan_split(case: Case, device: torch.device, *, packed: bool) -> dict[str, Any]:
    """What dispatch says about the kernels on fp16 pieces alone, candidates included."""
    index = _index(device) if device.type == "cuda" else -1
    m, n, k = case.shape.m, case.shape.n, case.shape.k or 0
    arithmetic = case.setting.pieces
    return plans.ask(
        case.problem.formula.epilogue,
        m,
        n,
        k,
        "float32",
        arithmetic,
        packed=packed,
        tf32_allowed=_tf32_allowed(arithmetic),
        gpu=plans.gpu_numbers(index),
        device=index,
    )


def describe_tiles(epilogue: str, arithmetic: str) -> list[dict[str, Any]]:
    """The description of every tile of "split" or "scaled", by index, whatever dispatch would choose."""
    answer = plans.ask(epilogue, *_FEW_ROWS, "float32", arithmetic, packed=True, gpu=_HOPPER)
    found = {tile_of(candidate): candidate for candidate in reversed(answer["candidates"])}
    return [found[tile] for tile in sorted(found)]


def tile_of(plan: Mapping[str, Any]) -> tuple[int, int]:
    """The family and the tile of a plan, by their numbers."""
    family, tile = plan["plan"][:2]
    return int(family), int(tile)


def pack_of(weight: Tensor, arithmetic: str) -> Tensor:
    """A weight's pieces."""
    pieces = packs.PIECES[arithmetic]
    size = packs.pack_bytes(weight.shape[0], weight.shape[1], pieces)
    pack = torch.empty(size, dtype=torch.uint8, device=weight.device)
    torch.ops.epigemm._split_rows_out(weight, pieces, pack)
    return pack


def workspace_bytes(case: Case, *, packed: bool) -> int:
    """What a call asks of the allocator besides its result: x's pieces, and the weight's unless they are kept."""
    shape, pieces = case.shape, packs.PIECES[case.setting.pieces]
    assert shape.k
    weight = 0 if packed else packs.pack_bytes(shape.n, shape.k, pieces)
    return packs.pack_bytes(shape.m, shape.k, pieces) + weight


def kept_bytes(case: Case) -> int:
    """The bytes of a weight's pack."""
    assert case.shape.k
    return packs.pack_bytes(case.shape.n, case.shape.k, packs.PIECES[case.setting.pieces])
