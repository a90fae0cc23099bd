"""fp32 products on fp16 slices: which pack a call reads, and which calls found no memory.

All tensors here are on CUDA devices on which epigemm's kernels run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NamedTuple

import torch

from epigemm.arguments.calls import LinearCall
from epigemm.packs import weight_packs
from epigemm.planner import dry_runs


class Choice(NamedTuple):
    """Where a call takes its weight's fp16 slices from."""

    pack: weight_packs.KeptPack | None  # the weight's kept pack, current or not
    is_kept: bool  # whether the call reads it; else the weight as it lies, or slices in this call's workspace
    is_short: bool  # whether a call of these sizes found no memory, and would find none now


def find_all(call: LinearCall, *, ignore_shortage: bool = False) -> dict[str, Choice]:
    """Where a call's slices would come from, for every arithmetic on slices.

    `ignore_shortage`: as if no earlier call of these sizes had been short of memory.
    """
    packs, found = weight_packs.kept(call.weight) if call.uses_pack else {}, dict[str, Choice]()
    for arithmetic, slices in weight_packs.SLICES.items():
        pack = packs.get(slices)
        is_kept = pack is not None and pack.is_current(call.weight)
        is_short = not ignore_shortage and _is_short(call, arithmetic, is_kept)
        found[arithmetic] = Choice(pack, is_kept, is_short)
    return found


def number_of(choices: Mapping[str, Choice]) -> int:
    """The argument `slices` of a dry run."""
    return sum(
        (dry_runs.SHORT * choice.is_short | dry_runs.THERE * choice.is_kept) << dry_runs.SHIFTS[name]
        for name, choice in choices.items()
    )


_Sizes = tuple[torch.device, int, int, int, str, bool]
shortages: dict[_Sizes, int] = {}
"""Calls that found no memory, and no call of the same sizes has run on slices since; and the bytes that they needed."""
_MOST_SHORTAGES = 256


def ran_out_of_memory(call: LinearCall, arithmetic: str, is_kept: bool, reads_weight: bool) -> None:
    """Note that a call got no memory for its slices. Trying in vain is slow: the allocator empties its cache.

    `reads_weight`: as it lies, so that it needs none for the weight's.
    """
    if len(shortages) >= _MOST_SHORTAGES:
        shortages.clear()
    *_, n, k = call.weight.shape  # several weights are read as they lie
    slices = weight_packs.SLICES[arithmetic]
    size = weight_packs.pack_bytes(call.rows, k, slices)
    if not is_kept and not reads_weight:
        size += weight_packs.pack_bytes(n, k, slices)
    shortages[_sizes(call, arithmetic, is_kept)] = size
    weight_packs.look_in_python()


def ran(call: LinearCall, arithmetic: str, is_kept: bool) -> None:
    """A call ran on fp16 slices."""
    shortages.pop(_sizes(call, arithmetic, is_kept), None)


def lacked_memory(call: LinearCall, arithmetic: str) -> bool:
    """Whether the last call of these sizes found no memory for slices."""
    return any(_sizes(call, arithmetic, is_kept) in shortages for is_kept in (True, False))


def _sizes(call: LinearCall, arithmetic: str, is_kept: bool) -> _Sizes:
    *_, n, k = call.weight.shape
    return call.x.device, call.x.numel(), n, k, arithmetic, is_kept


def _is_short(call: LinearCall, arithmetic: str, is_kept: bool) -> bool:
    """Whether a call of these sizes found no memory, and would find none now."""
    needed = shortages.get(_sizes(call, arithmetic, is_kept)) if shortages else None
    device = call.x.device
    return needed is not None and (weight_packs.capturing(device) or _free_bytes(device) < needed)


def _free_bytes(device: torch.device) -> int:
    """The free bytes of the device and of torch's allocator, fragments included."""
    if device.type != "cuda":
        return sys.maxsize
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def describe_source(choice: Choice) -> str:
    """Where the weight's slices come from, in words."""
    if choice.is_kept:
        return "the weight's pack is kept and current"
    if choice.pack is None:
        return "the weight is split at every call: no pack of it is kept (epigemm.pack keeps one)"
    return (
        "the weight is split at every call: its kept pack is stale until repack(), as the weight has changed"
    )
