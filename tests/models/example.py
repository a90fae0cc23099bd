"""What a model of the zoo is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Example:
    """A model and the arguments of a call.

    Attributes:
        package: what has to be installed.
        is_fp32: whether it computes in fp32 whatever it is given.
    """

    name: str
    package: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    is_fp32: bool = False

    def __str__(self) -> str:
        return self.name


def first_tensor(output: Any) -> Tensor:
    """A floating tensor of a model's output."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, dict) else output
    found = next(value for value in values if isinstance(value, Tensor) and value.is_floating_point())
    assert isinstance(found, Tensor)
    return found
