"""Measured choices of a device, which outlive a test in the planner."""

from __future__ import annotations

from epigemm.planner import times


def forget(device: int) -> None:
    """The planner has no measured choice for a device, and asks its models again for every plan."""
    times.install(device, [])
