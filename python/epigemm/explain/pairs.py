"""Pairs of products that run as one kernel, for `explain`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from epigemm.arguments.calls import LinearCall
from epigemm.calls.considered import consider
from epigemm.calls.pairs import noted
from epigemm.planning.dry_runs import Tried

Pair = tuple[LinearCall, Tensor]
"""A call with the epilogue of one kernel, without the second product; and the second weight."""


@contextmanager
def noting() -> Iterator[list[Pair]]:
    """Note the pairs that calls ask for. No kernel runs for them while a mode is entered, so two calls follow each."""
    before, noted.calls = noted.calls, []
    try:
        yield noted.calls
    finally:
        noted.calls = before


def taken(pair: Pair) -> Tried | None:
    """The plan of one kernel; None if two calls run."""
    call, weight2 = pair
    considered = consider(call, weight2=weight2)
    return considered.taken if considered.found.fused else None
