"""The families of fused kernels that a case can be run on with a plan of one's own, for the sweep over plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case, Data
from benchmarks.gradings.products import forced_into
from benchmarks.peers import explain_linear
from benchmarks.pieces import describe_tiles, pack_of, plan_split, tile_of, workspace_bytes
from epigemm import linker, plans
from epigemm._native import ops
from epigemm.candidates import SWAP_AB
from epigemm.packs import PIECES
from epigemm.timing import Run

RASTERS = ("along_m", "along_n")
SWIZZLES = (1, 2, 4, 8)

_SMALL, _LARGE = 16, 4096


def plan_numbers(description: Mapping[str, Any]) -> list[int]:
    """What the native operators take as ``plan``: family, tile, raster, swizzle, splits."""
    return [int(number) for number in description["plan"]]


@dataclass(frozen=True)
class Family:
    """Kernels that share a list of tiles.

    Attributes:
        arithmetic: what they multiply in.
        plan: what dispatch would do with this call, the weight's pieces at hand.
        tiles: the descriptions of all tiles.
        bind: a plan, or [] for dispatch's own -> one call.
        split_x: the part of a call that splits x, alone; None where x is not split.
    """

    arithmetic: str
    plan: dict[str, Any]
    tiles: list[dict[str, Any]]
    bind: Callable[[Sequence[int]], Run]
    split_x: Run | None = None

    def predicted_us(self, numbers: Sequence[int]) -> float | None:
        """What the cost model expects of a plan; None for one that it does not consider."""
        for candidate in self.plan.get("candidates", []):
            if plan_numbers(candidate) == list(numbers):
                return float(candidate["predicted_us"])
        return None

    def plans(self, *, every_order: bool = True) -> list[tuple[dict[str, Any], list[int]]]:
        """Each tile's description with the numbers of a plan to run it by.

        ``every_order`` takes each tile in every raster order and swizzle, in place of the planner's.
        """
        found: dict[tuple[int, ...], dict[str, Any]] = {}
        for tile in self.tiles:
            family, index, own_raster, own_swizzle, splits = plan_numbers(tile)
            is_walked = tile["family"] != SWAP_AB and every_order
            orders = product(range(len(RASTERS)), SWIZZLES) if is_walked else [(own_raster, own_swizzle)]
            for raster, swizzle in orders:
                found.setdefault((family, index, raster, swizzle, splits), tile)
        return [(tile, list(numbers)) for numbers, tile in found.items()]


def families(case: Case, data: Data, out: Tensor) -> list[Family]:
    """On fp16 pieces for fp32, in one pass for everything else and for fp32 at "high"."""
    found = [] if case.setting.pieces == "split" else [_one_pass(case, data, out)]
    return found + ([_on_pieces(case, data, out)] if case.on_pieces else [])


def _one_pass(case: Case, data: Data, out: Tensor) -> Family:
    native = case.problem.formula.native(data.x, data.parameters)
    arithmetic = case.setting.arithmetic

    def bind(numbers: Sequence[int]) -> Run:
        linker.link_plan(case.problem.formula.epilogue, data.x, arithmetic, numbers)

        def run() -> Tensor:
            launched = ops._fused_linear_out(
                case.problem.formula.epilogue,
                data.x,
                data.weight,
                native.bias,
                native.operands,
                native.scalars,
                arithmetic,
                list(numbers),
                out,
            )
            if not launched:
                raise RuntimeError(f"plan {list(numbers)}: the fused kernel does not cover this problem")
            return out

        return run

    plan = explain_linear(case, data, out)
    name = arithmetic if case.on_pieces else case.setting.dtype_name
    index = torch.cuda.current_device() if data.x.device.index is None else data.x.device.index
    return Family(name, plan, one_pass_tiles(case, plan, index), bind)


def one_pass_tiles(
    case: Case, plan: Mapping[str, Any], device: int, gpu: tuple[int, ...] = ()
) -> list[dict[str, Any]]:
    """The tiles that the planner considers for a call; where it would take none of them, those of other sizes.

    Args:
        case: what is computed.
        plan: what the planner says about it.
        device: index of the CUDA device.
        gpu: another one, as `epigemm.plans.ask` takes it.
    """
    candidates = list(plan.get("candidates", []))
    if not candidates:
        n, k = case.shape.n, case.shape.k or 0
        for size in ((_SMALL, n, k), (_LARGE, n, k), (_SMALL, _LARGE, _LARGE), (_LARGE, _LARGE, _LARGE)):
            candidates += _candidates(case, *size, device, gpu)
    tiles: dict[tuple[int, ...], dict[str, Any]] = {}
    for candidate in candidates:
        numbers = plan_numbers(candidate)
        tiles.setdefault((numbers[0], numbers[1], numbers[4]), candidate)
    return [tiles[key] for key in sorted(tiles)]


def _candidates(
    case: Case, m: int, n: int, k: int, device: int, gpu: tuple[int, ...]
) -> list[dict[str, Any]]:
    dtype = str(case.setting.dtype).removeprefix("torch.")
    sizes = (case.problem.formula.epilogue, m, n, k, dtype, case.setting.arithmetic)
    answer = plans.ask(*sizes, gpu=gpu, device=device)
    found: list[dict[str, Any]] = answer.get("candidates", [])
    return found


def _on_pieces(case: Case, data: Data, out: Tensor) -> Family:
    """The weight is split beforehand; a call splits x, multiplies, and looks at the guard."""
    x, weight, arithmetic = data.x, data.weight, case.setting.pieces
    assert weight is not None
    epilogue, native = case.problem.formula.epilogue, case.problem.formula.native(x, data.parameters)
    pack = pack_of(weight, arithmetic)
    workspace = torch.empty(workspace_bytes(case, packed=True), dtype=torch.uint8, device=x.device)

    def bind(numbers: Sequence[int]) -> Run:
        return partial(
            forced_into,
            out,
            epilogue,
            x,
            weight,
            arithmetic,
            bias=native.bias,
            operands=native.operands,
            scalars=native.scalars,
            plan=numbers,
            pack=pack,
            workspace=workspace,
        )

    def split_x() -> Tensor:
        ops._split_rows_out(x, PIECES[arithmetic], workspace)
        return workspace

    plan = plan_split(case, x.device, packed=True)
    # The tiles' order at this size, where dispatch has one for them.
    described = {tile_of(tile): tile for tile in describe_tiles(epilogue, arithmetic)}
    # The best order of a tile comes first among the candidates.
    described |= {tile_of(tile): tile for tile in reversed(plan.get("candidates", []))}
    return Family(arithmetic, plan, [described[key] for key in sorted(described)], bind, split_x)
