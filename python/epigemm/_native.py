"""Loads the native module and gives typed access to its operators."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

_LIBRARY = Path(__file__).with_name("_C.so")


def _load() -> None:
    if not _LIBRARY.exists():
        raise ImportError(
            f"epigemm: the native module {_LIBRARY} is missing. Build and install the package with `pip install .` "
            "in the source tree, and import it from outside of the source tree's python folder."
        )
    try:
        torch.ops.load_library(str(_LIBRARY))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ImportError(
            f"epigemm: the native module {_LIBRARY} does not load under torch {torch.__version__} "
            f"(torch 2.10 or later is needed): {error}"
        ) from error


_load()

ops: Any = torch.ops.epigemm
"""The namespace of the package's operators."""


def operator(name: str) -> Any:
    """What calls the operator `name`, without the layer of Python above it that its OpOverload is."""
    overload = getattr(ops, name).default
    return getattr(overload, "_op", overload)


def build_info() -> dict[str, Any]:
    """What the native module was built with: versions, architectures, number of GEMM kernels."""
    info: dict[str, Any] = json.loads(ops._build_info())
    return info


def registry() -> list[dict[str, Any]]:
    """The native half of the epilogue registry: name, forms and operands of each epilogue."""
    epilogues: list[dict[str, Any]] = json.loads(ops._registry())
    return epilogues


@functools.cache
def cuda_status(device: int) -> str:
    """Why epigemm's kernels cannot run on CUDA device `device`; empty when they can."""
    return str(ops._cuda_status(device))
