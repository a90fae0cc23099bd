"""Linked kernels on disk: a file an entry, beside other processes that do the same.

What is wrong with the folder or a file in it is never the caller's problem: one warning, and the kernel is made again.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from epigemm.linking.entries import SUFFIX, Entry, decode, is_key
from epigemm.tables import cache_dir, write_whole

_warned: set[Path] = set()


def folder() -> Path:
    """Where the entries are: `cubins` in the folder of the user's caches."""
    return cache_dir() / "cubins"


def read(key: str) -> Entry | None:
    """The entry on disk; None where there is none, or a damaged one, which is removed."""
    path = _path(key)
    try:
        return decode(path.read_bytes(), key)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        _warn_once(path, f"the linked kernel {path} cannot be read and is made again: {error}")
        return None
    except ValueError as error:
        _warn_once(path, f"the linked kernel {path} is removed and made again: {error}")
        _remove(path)
        return None


def write(entry: Entry) -> None:
    """Keep an entry where that is possible; one warning where it is not."""
    try:
        write_whole(_path(entry.key), entry.encode())
    except OSError as error:
        where = folder()
        _warn_once(where, f"linked kernels last as long as this process: {where} cannot be written: {error}")


def keys() -> list[str]:
    """The keys of what is on disk; the entries may be damaged."""
    try:
        names = sorted(each.name for each in folder().iterdir())
    except OSError:
        return []
    return [
        name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX) and is_key(name[: -len(SUFFIX)])
    ]


def _path(key: str) -> Path:
    return folder() / f"{key}{SUFFIX}"


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # not our folder: the warning has said what is wrong


def _warn_once(about: Path, message: str) -> None:
    if about not in _warned:
        _warned.add(about)
        warnings.warn(f"epigemm: {message}", RuntimeWarning, stacklevel=2)
