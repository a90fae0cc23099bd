"""fp32 products on fp16 slices: which pack of its weight a call reads or makes, and the launch.

Everything here is about CUDA tensors whose device epigemm's kernels run on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from epigemm._native import operator
from epigemm.arguments.calls import LinearCall
from epigemm.packs import weight_packs
from epigemm.planning import decisions

KEPT = "kept"  # a current pack is at hand
MAKE = "make"  # it is made now, and kept
PER_CALL = "per call"  # the weight is split into this call's workspace

_ROW_ALIGNMENT = 4  # elements: the kernels store 16 bytes at a time
launch = operator("_split_linear_out")
"""The native operator: slices, product and fixup, for tensors in the layout that it needs."""


class Choice(NamedTuple):
    """How a call finds its weight's fp16 slices, and where its result is stored."""

    source: str  # where the weight's slices come from: `KEPT`, `MAKE` or `PER_CALL`
    pack: weight_packs.KeptPack | None  # the weight's kept pack, current or not
    # what the slices cost this call, as `epigemm.planning.decisions` has it; a pack for many calls costs one nothing
    cost: int
    padded: bool = False  # whether the result is written to a padded temporary and copied


def find(call: LinearCall, arithmetic: str, pack_use: str, *, ignore_shortage: bool = False) -> Choice:
    """Where a call's slices would come from; makes nothing.

    `ignore_shortage`: do not count what the last call of these sizes found no memory for.
    """
    found = _find(call.weight, arithmetic, pack_use)
    if ignore_shortage or not _shortages:
        return found
    if found.source == MAKE and _is_short(call, arithmetic, MAKE):
        found = found._replace(source=PER_CALL, cost=decisions.PER_CALL)
    if _is_short(call, arithmetic, found.source):
        found = found._replace(cost=found.cost | decisions.SHORT)
    return found


def find_for(
    call: LinearCall, uses: Mapping[str, str], *, ignore_shortage: bool
) -> tuple[dict[str, Choice], int]:
    """`find` for each arithmetic and its pack use; and all costs in the number that `decisions` takes."""
    found = {
        arithmetic: find(call, arithmetic, use, ignore_shortage=ignore_shortage)
        for arithmetic, use in uses.items()
    }
    return found, sum(choice.cost << decisions.SHIFTS[name] for name, choice in found.items())


def _find(weight: Tensor, arithmetic: str, pack_use: str) -> Choice:
    pack = (
        None if pack_use == weight_packs.NONE else weight_packs.find(weight, weight_packs.SLICES[arithmetic])
    )
    keeps = pack_use == weight_packs.KEEP
    captured = (keeps or pack is not None) and weight_packs.capturing(weight.device)
    if pack is not None and pack.is_current(weight) and (not captured or (keeps and pack.frozen)):
        return Choice(KEPT, pack, decisions.NO_COST)
    if not keeps or captured or weight.is_inference():
        return Choice(PER_CALL, pack, decisions.PER_CALL)
    if pack is None:
        return Choice(MAKE, pack, decisions.NO_COST)  # made once, for many calls
    # Stale: worth it for this call alone, or again for many, the weight staying as it is.
    return Choice(MAKE, pack, decisions.STALE if pack.is_settled(weight) else decisions.PER_CALL)


def run(choice: Choice, call: LinearCall, arithmetic: str, plan: Sequence[int]) -> None:
    """Launch the kernels, the GEMM under a plan, for a call with an `out`.

    Raises:
        torch.OutOfMemoryError: no memory for slices; nothing but perhaps the kept pack was written.
    """
    epilogue, x, weight, bias, operands, scalars, *_, out = call
    assert out is not None
    m, (n, k) = call.rows, weight.shape
    slices = weight_packs.SLICES[arithmetic]
    size = weight_packs.pack_bytes(m, k, slices)
    pack = choice.pack
    if choice.source == MAKE:
        pack = weight_packs.keep(weight, slices)
    elif choice.source == PER_CALL:
        pack = None
        size += weight_packs.pack_bytes(n, k, slices)
    workspace = _workspace(size, x)
    target = out
    if choice.padded:
        target = torch.empty((m, stored_width(n)), dtype=out.dtype, device=out.device)
    elif out.dim() != 2:
        target = out.view(m, n)
    launch(
        epilogue.name,
        x if x.dim() == 2 else x.reshape(-1, k),
        weight,
        None if pack is None else pack.read(),
        workspace,
        None if bias is None else bias.contiguous(),
        [operand.contiguous() for operand in operands] or None,
        scalars or None,
        arithmetic,
        plan,
        target,
    )
    if choice.padded:
        out.copy_(target[:, :n].view(out.shape))


def _workspace(size: int, x: Tensor) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=x.device)


def declined(choice: Choice, weight: Tensor) -> None:
    """A call ran elsewhere: a weight that stays as it is will be worth packing again."""
    if choice.source == MAKE and choice.pack is not None:
        choice.pack.see(weight)


_Sizes = tuple[torch.device, int, int, int, str, str]
_shortages: dict[_Sizes, int] = {}  # calls that found no memory, and the bytes that they needed
_MOST_SHORTAGES = 256


def ran_out_of_memory(choice: Choice, call: LinearCall, arithmetic: str) -> None:
    """Remember that a call got no memory for its slices: trying costs much, as the allocator empties its cache."""
    if len(_shortages) >= _MOST_SHORTAGES:
        _shortages.clear()
    n, k = call.weight.shape
    slices = weight_packs.SLICES[arithmetic]
    size = weight_packs.pack_bytes(call.rows, k, slices)
    if choice.source != KEPT:
        size += weight_packs.pack_bytes(n, k, slices)
    _shortages[_sizes(call, arithmetic, choice.source)] = size


def ran(choice: Choice, call: LinearCall, arithmetic: str) -> None:
    """A call ran on fp16 slices."""
    if _shortages:
        _shortages.pop(_sizes(call, arithmetic, choice.source), None)


def has_been_short() -> bool:
    """Whether some call found no memory for its slices, and none of its like has since."""
    return bool(_shortages)


def lacked_memory(call: LinearCall, arithmetic: str) -> list[str]:
    """The sources of the weight's slices that the last call of these sizes found no memory for."""
    return [source for source in (KEPT, MAKE, PER_CALL) if _sizes(call, arithmetic, source) in _shortages]


def _sizes(call: LinearCall, arithmetic: str, source: str) -> _Sizes:
    n, k = call.weight.shape
    return call.x.device, call.x.numel(), n, k, arithmetic, source


def _is_short(call: LinearCall, arithmetic: str, source: str) -> bool:
    """Whether a call of these sizes found no memory, and would find none now."""
    needed = _shortages.get(_sizes(call, arithmetic, source)) if _shortages else None
    device = call.x.device
    return needed is not None and (weight_packs.capturing(device) or _free_bytes(device) < needed)


def _free_bytes(device: torch.device) -> int:
    """What the device and torch's allocator have left; fragments count too."""
    if device.type != "cuda":
        return sys.maxsize
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def describe_source(choice: Choice, weight: Tensor) -> str:
    """Where the weight's slices come from, for people."""
    pack = choice.pack
    if choice.source == KEPT:
        return "the weight's pack is kept and current"
    if choice.source == MAKE and pack is None:
        return "the weight's pack is made by this call and kept"
    if choice.source == MAKE:
        moved = pack is not None and not pack.frozen and pack.has_moved(weight)
        where = "into new memory, as the weight has moved" if moved else "into the same memory"
        return f"the weight's pack is stale: the weight has changed; it is made again, {where}"
    if pack is None:
        return "the weight is split at every call: no pack of it is kept (epigemm.pack and modules keep one)"
    if weight_packs.capturing(weight.device):
        return (
            "the weight is split inside of the CUDA graph, at every replay: its kept pack is stale, or was not made "
            "on purpose by repack()"
        )
    return "the weight is split at every call: its kept pack is stale, and this call does not keep one"


def describe_launches(choice: Choice, x: Tensor, gemm: str) -> list[str]:
    """Every launch of `run`, in order; `gemm` describes the kernel."""
    launches = []
    if x.dim() > 2 and not flattens(x):
        launches.append("torch copy of x: its leading dimensions are not one stride apart")
    if choice.source != KEPT:
        launches.append("epigemm CUDA kernel, split of weight into fp16 slices")
    launches += [
        "epigemm CUDA kernel, split of x into fp16 slices",
        gemm,
        "epigemm CUDA kernel, fixup of what the range check rejected (exits at once where that is nothing)",
    ]
    if choice.padded:
        launches.append("torch copy of the result: out is no matrix with rows of whole 16 bytes")
    return launches


def flattens(tensor: Tensor) -> bool:
    """Whether a single stride reaches all leading dimensions."""
    try:
        tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        return False
    return True


def stored_width(n: int) -> int:
    """Columns that the kernels write."""
    return -(-n // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
