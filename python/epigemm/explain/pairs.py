"""Pairs of products that run as one kernel, for `explain`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from epigemm.arguments.calls import LinearCall
from epigemm.calls.considered import consider
from epigemm.calls.one_kernel import noted
from epigemm.planning.dry_runs import Tried


@contextmanager
def noting() -> Iterator[list[LinearCall]]:
    """Note the pairs that calls ask for. No kernel runs for them while a mode is entered, so two calls follow each."""
    before, noted.calls = noted.calls, []
    try:
        yield noted.calls
    finally:
        noted.calls = before


def taken(pair: LinearCall) -> Tried | None:
    """The plan of one kernel; None if two calls run."""
    considered = consider(pair)
    return considered.taken if considered.found.fused else None
