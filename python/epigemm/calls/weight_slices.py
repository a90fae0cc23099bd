"""fp32 products on fp16 slices: which pack a call reads or makes, and which calls found no memory.

All tensors here are on CUDA devices on which epigemm's kernels run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from epigemm.arguments.calls import LinearCall
from epigemm.packs import weight_packs
from epigemm.planner import dry_runs

KEPT = "kept"  # there is a current pack
MAKE = "make"  # it is made now, and kept
PER_CALL = "per call"  # the weight is split into this call's workspace


class Choice(NamedTuple):
    """Where a call takes its weight's fp16 slices from."""

    source: str  # where the weight's slices come from: `KEPT`, `MAKE` or `PER_CALL`
    pack: weight_packs.KeptPack | None  # the weight's kept pack, current or not
    # what the slices cost this call, as in `planner.dry_runs`; a pack for many calls counts nothing
    cost: int

    @property
    def is_stale(self) -> bool:
        """Whether the kept pack has to be made again."""
        return self.source == MAKE and self.pack is not None


def find(call: LinearCall, arithmetic: str, pack_use: str, *, ignore_shortage: bool = False) -> Choice:
    """Where a call's slices would come from. Nothing is made.

    `ignore_shortage`: as if no earlier call of these sizes had been short of memory.
    """
    found = _find(call.weight, arithmetic, pack_use)
    if ignore_shortage or not _shortages:
        return found
    if found.source == MAKE and _is_short(call, arithmetic, MAKE):
        found = found._replace(source=PER_CALL, cost=dry_runs.PER_CALL)
    if _is_short(call, arithmetic, found.source):
        found = found._replace(cost=found.cost | dry_runs.SHORT)
    return found


def find_all(call: LinearCall, *, ignore_shortage: bool = False) -> dict[str, Choice]:
    """The same for every arithmetic on slices."""
    return {
        name: find(call, name, call.pack_use, ignore_shortage=ignore_shortage) for name in weight_packs.SLICES
    }


def number_of(choices: Mapping[str, Choice]) -> int:
    """The argument `slices` of a dry run: the costs, and which packs exist."""
    there = {True: dry_runs.THERE, False: 0}
    return sum(
        (choice.cost | there[choice.source == KEPT]) << dry_runs.SHIFTS[name]
        for name, choice in choices.items()
    )


def _find(weight: Tensor, arithmetic: str, pack_use: str) -> Choice:
    pack = (
        None if pack_use == weight_packs.NONE else weight_packs.find(weight, weight_packs.SLICES[arithmetic])
    )
    keeps = pack_use == weight_packs.KEEP
    captured = (keeps or pack is not None) and weight_packs.capturing(weight.device)
    if pack is not None and pack.is_current(weight) and (not captured or (keeps and pack.frozen)):
        return Choice(KEPT, pack, dry_runs.NO_COST)
    if not keeps or captured or weight.is_inference():
        return Choice(PER_CALL, pack, dry_runs.PER_CALL)
    if pack is None:
        return Choice(MAKE, pack, dry_runs.NO_COST)  # made once, for many calls
    # Stale: made again if that pays for this call alone, or if the weight has stopped changing, for many calls.
    return Choice(MAKE, pack, dry_runs.STALE if pack.is_settled(weight) else dry_runs.PER_CALL)


_Sizes = tuple[torch.device, int, int, int, str, str]
_shortages: dict[_Sizes, int] = {}  # calls that found no memory, and the bytes that they needed
_MOST_SHORTAGES = 256


def ran_out_of_memory(call: LinearCall, arithmetic: str, source: str) -> None:
    """Note that a call got no memory for its slices. Trying in vain is slow: the allocator empties its cache."""
    if len(_shortages) >= _MOST_SHORTAGES:
        _shortages.clear()
    n, k = call.weight.shape
    slices = weight_packs.SLICES[arithmetic]
    size = weight_packs.pack_bytes(call.rows, k, slices)
    if source != KEPT:
        size += weight_packs.pack_bytes(n, k, slices)
    _shortages[_sizes(call, arithmetic, source)] = size
    weight_packs.look_in_python()


def ran(call: LinearCall, arithmetic: str, source: str) -> None:
    """A call ran on fp16 slices, or made its pack (`MAKE`)."""
    for each in {source, MAKE} if source == KEPT else {source}:  # a kept pack was made
        _shortages.pop(_sizes(call, arithmetic, each), None)


def has_been_short() -> bool:
    """Whether some call found no memory for its slices, and no call of the same sizes has run on slices since."""
    return bool(_shortages)


def lacked_memory(call: LinearCall, arithmetic: str) -> list[str]:
    """The sources of slices for which the last call of these sizes found no memory."""
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
    """The free bytes of the device and of torch's allocator, fragments included."""
    if device.type != "cuda":
        return sys.maxsize
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def describe_source(choice: Choice, weight: Tensor) -> str:
    """Where the weight's slices come from, in words."""
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
