"""Packages with models, made ready to be imported."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch


@cache
def package(name: str) -> Any:
    """A package, imported."""
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
