"""What a model of the zoo is, and the packages of models, made ready to be imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

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


@cache
def package(name: str) -> Any:
    if name.partition(".")[0] in ("diffusers", "timm", "torchvision", "transformers"):
        _declare_operators_of_torchvision()
    return importlib.import_module(name)


@cache
def _declare_operators_of_torchvision() -> None:
    """Without its library of operators, torchvision's import ends in an error: it describes two to the compiler.

    PyPI's torchvision is linked to torch's CUDA build, and there is no other for CPU alone: its library cannot be
    loaded there. What is declared here has no kernel, and none of the models calls it.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", signature)


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
