"""Functions of a product that are texts, for tables of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from epigemm import Matrix, PerColumn, PerRow, Scalar

_NAMES = {
    "torch": torch,
    "F": F,
    "Matrix": Matrix,
    "PerColumn": PerColumn,
    "PerRow": PerRow,
    "Scalar": Scalar,
}


def formula(text: str) -> Callable[..., Any]:
    """The function of a line such as `acc, bias: PerColumn -> acc + bias`."""
    parameters, _, value = text.partition(" -> ")
    scope: dict[str, Any] = dict(_NAMES)
    exec(f"def formula({parameters}):\n    return {value}", scope)
    made: Callable[..., Any] = scope["formula"]
    return made
