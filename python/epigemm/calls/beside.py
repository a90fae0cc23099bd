"""Calls that give more than a plain one beside their result: what they share of an fp32 product.

They are made by the entry alone. Where that lacks a pack or a kernel, it is made, and the call is made again.
"""

from __future__ import annotations

from typing import Any

from epigemm.arguments.calls import LinearCall
from epigemm.arguments.precision import Order
from epigemm.calls import deeds, entry, weight_slices
from epigemm.linking import loading
from epigemm.planning import dry_runs
from epigemm.planning.reasons import Reason


def options(call: LinearCall, order: Order, circumstances: int) -> tuple[Any, ...]:
    """What the entry takes behind a call's tensors.

    Without memory for slices the call may end in a reason, as every call of the entry's may.
    """
    packs, slices = None, 0
    if order.overrides:
        circumstances |= dry_runs.OTHER_SETTING
    if order.slices:
        at_hand: Any = entry.slices_at_hand(call.weight, order, call.pack_use, call.invariant)
        packs, slices = deeds.find_packs(call) if at_hand is None else at_hand
    return order.number, packs, slices, call.strict, call.invariant, circumstances, None, None


def is_mended(reason: int, call: LinearCall, order: Order, moments: int = 0) -> bool:
    """Whether the call can be made again, after what the reason says is lacking was made.

    `moments`: as of `dry_runs.dry_run`.
    """
    if reason not in (Reason.NOT_LINKED, Reason.LACKS_PACK):
        return False
    found = dry_runs.dry_run(call, weight_slices.number_for(call), order=order, moments=moments)
    if reason == Reason.LACKS_PACK:
        return deeds.make_pack(call, found.arithmetic)
    return not loading.link(call.epilogue, ",".join(found.missing), call.x.device)
