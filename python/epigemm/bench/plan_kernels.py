"""The families of fused kernels that a case can be run on with a plan of one's own, for the sweep over plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from epigemm._native import ops
from epigemm.bench.cases import Case, Data
from epigemm.bench.gradings.products import forced_into
from epigemm.bench.peers import explain_linear
from epigemm.bench.pieces import describe_tiles, pack_of, plan_split, workspace_bytes
from epigemm.bench.timing import Run
from epigemm.packs import PIECES


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

    def predicted_us(self, tile: int, raster: str, swizzle: int) -> float | None:
        """What the cost model expects of a plan; None for one that it does not consider."""
        for candidate in self.plan.get("candidates", []):
            if (candidate["tile_index"], candidate["raster"], candidate["swizzle"]) == (
                tile,
                raster,
                swizzle,
            ):
                return float(candidate["predicted_us"])
        return None


def families(case: Case, data: Data, out: Tensor) -> list[Family]:
    """On fp16 pieces for fp32, in one pass for everything else and for fp32 at "high"."""
    found = [] if case.setting.pieces == "split" else [_one_pass(case, data, out)]
    return found + ([_on_pieces(case, data, out)] if case.on_pieces else [])


def _one_pass(case: Case, data: Data, out: Tensor) -> Family:
    native = case.problem.formula.native(data.x, data.parameters)
    arithmetic = case.setting.arithmetic

    def bind(numbers: Sequence[int]) -> Run:
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
    tiles = {int(candidate["tile_index"]): candidate for candidate in plan.get("candidates", [])}
    name = arithmetic if case.on_pieces else case.setting.dtype_name
    return Family(name, plan, [tiles[index] for index in sorted(tiles)], bind)


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
    return Family(arithmetic, plan, describe_tiles(epilogue, arithmetic), bind, split_x)
