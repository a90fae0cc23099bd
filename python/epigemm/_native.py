"""Loads the C++ modules and gives typed access to their operators."""

from __future__ import annotations

import functools
import importlib
import json
import warnings
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


def _load_entry() -> tuple[Any, str]:
    try:
        return importlib.import_module("epigemm._entry"), ""
    except ImportError as error:
        why_not = (
            f"epigemm: the module epigemm._entry does not load ({error}); PyTorch's operators compute every call. It "
            "takes a build with Python's headers and a CPython with the stable ABI, which free-threaded ones lack"
        )
        warnings.warn(why_not, RuntimeWarning, stacklevel=2)
        return None, why_not


entry, no_entry = _load_entry()
"""The module with the entry, `_entry`, or None; and the reason why it is None."""


def operator(name: str) -> Any:
    """A function that calls the operator `name` directly, without the Python code of its OpOverload."""
    overload = getattr(ops, name).default
    return getattr(overload, "_op", overload)


def build_info() -> dict[str, Any]:
    """What epigemm was built with: versions, architectures, number of GEMM kernels."""
    info: dict[str, Any] = json.loads(ops._build_info())
    return info


def registry() -> list[dict[str, Any]]:
    """The C++ half of the epilogue registry: name, forms and operands of each epilogue."""
    epilogues: list[dict[str, Any]] = json.loads(ops._registry())
    return epilogues


@functools.cache
def cuda_status(device: int) -> str:
    """Why epigemm's kernels cannot run on CUDA device `device`; empty when they can."""
    return str(ops._cuda_status(device))
