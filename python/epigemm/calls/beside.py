"""Calls that give more than a plain one beside their result: what they share of an fp32 product.

They are made by the entry alone. Where that lacks a pack or a kernel, it is made, and the call is made again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from epigemm.arguments.calls import LinearCall
from epigemm.arguments.precision import Order
from epigemm.calls import deeds, entry, weight_slices
from epigemm.linking import loading
from epigemm.planning import dry_runs
from epigemm.planning.dry_runs import DryRun
from epigemm.planning.reasons import Reason

_Found = TypeVar("_Found")


class Asking:
    """A call that is asked for, until there is a result or a reason about which nothing is done.

    Args:
        call: the call; its operands are used to link the kernel.
        order: the arithmetics to try.
        moments: whether it also gives statistics of its result.
    """

    def __init__(self, call: LinearCall, order: Order, *, moments: bool = False) -> None:
        self._call, self._order, self._moments = call, order, moments
        # A call whose weight needs a gradient uses no pack.
        needs_gradient = torch.is_grad_enabled() and call.weight.requires_grad
        self._reads_packs = order.slices > 0 and not needs_gradient
        self._packs: deeds.Packs | None = None  # where the entry's own look-up does not suffice

    def run(
        self,
        function: Callable[..., _Found | int],
        tensors: tuple[Any, ...],
        circumstances: int,
        *further: Any,
    ) -> _Found | int:
        """What `function` of the entry gives.

        `tensors`: what it takes ahead of the arithmetics; `further`: what it takes last.
        """
        return entry.ask_again(
            lambda: self._ask(function, tensors, circumstances, further),
            lambda reason: self._is_mended(reason),
        )

    def _ask(
        self,
        function: Callable[..., _Found | int],
        tensors: tuple[Any, ...],
        circumstances: int,
        further: tuple[Any, ...],
    ) -> _Found | int:
        call, order = self._call, self._order
        packs: Any = None
        slices = 0
        if self._reads_packs:
            at_hand = self._at_hand(circumstances)
            if isinstance(at_hand, int):
                return at_hand
            packs, slices = at_hand
        if order.overrides:
            circumstances |= dry_runs.OTHER_SETTING
        about = (order.number, packs, slices, call.strict, call.invariant, circumstances, None, None)
        return function(*tensors, *about, *further)

    def _at_hand(self, circumstances: int) -> tuple[Any, int] | int:
        """The weight's packs and what its slices cost; or why the call is not made here."""
        call = self._call
        if self._packs is None:
            found = entry.slices_at_hand(call.weight, self._order, call.pack_use, call.invariant)
            if found is not None:
                return found
            # Packs are made again for plain calls alone.
            seen = None if circumstances & dry_runs.ROUTED else entry.sees(*_plain(call))
            if seen is not None:
                return int(seen)
            self._packs = deeds.Packs(call)
        return self._packs.find()

    def _is_mended(self, reason: int) -> bool:
        """Whether the call can be made again, after what the reason says is lacking was made."""
        call = self._call
        if reason == Reason.LACKS_PACK:
            self._packs = self._packs or deeds.Packs(call)
            self._packs.make(self._order, moments=self._moments)
            return True
        if reason != Reason.NOT_LINKED:
            return False
        found = dry_runs.dry_run(
            call, weight_slices.number_for(call), order=self._order, moments=self._moments
        )
        return not loading.link(call.epilogue, ",".join(found.missing), call.x.device)


def is_made(dry: DryRun) -> bool:
    """Whether the entry makes a call by itself: it copies nothing for it."""
    return not dry.answer and not {Reason.NOT_STORABLE, Reason.NOT_READABLE} & set(dry.reasons)


def _plain(call: LinearCall) -> tuple[Any, ...]:
    return tuple(each for each in call.inputs if each is not None)
