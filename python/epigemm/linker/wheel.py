"""Kernels that were linked when the package was built: built-in epilogues in Hopper's kernels.

`cubins/NAME.zip` beside this file has the machine code of each kernel of an epilogue, under the kernel's symbol.
"""

from __future__ import annotations

import functools
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "cubins"
_CAPABILITY = (9, 0)
_given_up: set[str] = set()


class DamagedError(Exception):
    """A file cannot be read, or is damaged."""


def has(epilogue: str, symbol: str, capability: tuple[int, int]) -> bool:
    """Whether the package has a kernel for this GPU, and `give_up` was not called for the epilogue.

    Kernels from another folder (`EPIGEMM_IR_DIR`) are linked at run time.
    """
    if capability != _CAPABILITY or epilogue in _given_up or os.environ.get("EPIGEMM_IR_DIR"):
        return False
    try:
        return symbol in _names(_FOLDER / f"{epilogue}.zip")
    except DamagedError:
        return True  # `read` reports the damage


def read(epilogue: str, symbol: str, capability: tuple[int, int]) -> bytes | None:
    """A kernel's machine code; None if the package does not have it.

    Raises:
        DamagedError: its file is damaged.
    """
    if not has(epilogue, symbol, capability):
        return None
    file = _FOLDER / f"{epilogue}.zip"
    with _opened(file) as archive:
        cubin = archive.read(symbol)  # which compares the checksum
    if not cubin.startswith(b"\x7fELF"):
        raise DamagedError(f"{file.name}: it has no machine code")
    return cubin


def give_up(epilogue: str) -> None:
    """Do not use the package's kernels of an epilogue in this process any more: one warning is enough."""
    _given_up.add(epilogue)


@functools.cache
def _names(file: Path) -> frozenset[str]:
    """The names of the kernels in a file; none if there is no file."""
    if not file.is_file():
        return frozenset()
    with _opened(file) as archive:
        return frozenset(archive.namelist())


@contextmanager
def _opened(file: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(file) as archive:
            yield archive
    except Exception as error:  # zipfile raises errors of many types for a damaged file
        raise DamagedError(f"{file.name}: {error or type(error).__name__}") from error
