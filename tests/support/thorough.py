"""How much runs of random tests and of long lists of combinations: a part, or all of it with `--thorough`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

_PART = 3
_Case = TypeVar("_Case")
_Setting = TypeVar("_Setting")
_Cases = TypeVar("_Cases", bound=Sequence[Any])
_chosen = {"thorough": False}


def choose(is_thorough: bool) -> None:
    """What the command line says; before the tests are collected."""
    _chosen["thorough"] = is_thorough


def is_thorough() -> bool:
    return _chosen["thorough"]


def a_third(cases: _Cases, device: torch.device | None = None) -> _Cases:
    """Every third one, the first of them; all with `--thorough`, and on a GPU, where they cost little."""
    if is_thorough() or (device is not None and device.type == "cuda"):
        return cases
    return cases[::_PART]  # type: ignore[return-value]


def a_third_of(count: int) -> int:
    """The same of a number of random examples."""
    return count if is_thorough() else count // _PART


def in_turn(cases: Sequence[_Case], settings: Sequence[_Setting]) -> list[tuple[_Case, _Setting]]:
    """Each case with one of the settings, in turn; all pairs with `--thorough`."""
    return [
        (case, setting)
        for number, case in enumerate(cases)
        for place, setting in enumerate(settings)
        if is_thorough() or number % len(settings) == place
    ]
