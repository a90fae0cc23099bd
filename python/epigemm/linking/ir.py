"""The open kernels' intermediate code, and what GPU it is linked for."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

from epigemm.linking.nvjitlink import check_symbol

_SHIPPED = Path(__file__).parents[1] / "ir"
_OLDEST_CAPABILITY = (8, 0)
_HOPPER = (9, 0)


def ir_path(symbol: str) -> Path | None:
    """The file with an open kernel's code, perhaps among others; None where this build has none.

    `index.json` beside the files says which kernel is in which. `EPIGEMM_IR_DIR` names another folder than the
    package's own.

    Raises:
        ValueError: the symbol is no identifier.
    """
    check_symbol(symbol)
    folder = Path(os.environ.get("EPIGEMM_IR_DIR") or _SHIPPED)
    name = _index(folder).get(symbol)
    return None if name is None else folder / name


@functools.lru_cache(maxsize=8)
def _index(folder: Path) -> dict[str, str]:
    """Each kernel's file; empty where there is no index, or a damaged one."""
    try:
        found = json.loads((folder / "index.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def architecture(symbol: str, capability: tuple[int, int]) -> str:
    """What an open kernel is linked for on a GPU of this compute capability.

    Hopper's own kernels, `sm90` in their names, run on 9.0 alone. The others are linked for any GPU since Ampere.

    Raises:
        ValueError: the kernel does not run on this GPU.
    """
    major, minor = capability
    if capability == _HOPPER:
        return "sm_90a"
    if capability < _OLDEST_CAPABILITY or "_sm90_" in symbol:
        raise ValueError(f"{symbol} does not run on GPUs of compute capability {major}.{minor}")
    return f"sm_{major}{minor}"
