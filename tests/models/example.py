"""What a model of the zoo is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tests.models.packages import package

Inputs = Callable[[], dict[str, Any]]


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
    inputs: Inputs
    is_fp32: bool = False

    def __str__(self) -> str:
        return self.name


def of_package(
    name: str, path: str, inputs: Inputs, *given: Any, is_fp32: bool = False, **options: Any
) -> Example:
    """What a package's class or function makes of these arguments; the path is that of its module, and its name."""
    module, _, kind = path.rpartition(".")
    return Example(
        name,
        module.partition(".")[0],
        lambda: getattr(package(module), kind)(*given, **options),
        inputs,
        is_fp32,
    )


def first_tensor(output: Any) -> Tensor:
    """A floating tensor of a model's output."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, dict) else output
    found = next(value for value in values if isinstance(value, Tensor) and value.is_floating_point())
    assert isinstance(found, Tensor)
    return found
