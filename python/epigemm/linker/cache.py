"""All that epigemm keeps on disk: measured choices and linked kernels. It touches no other file there."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from epigemm.linker import folder
from epigemm.planner.times import LOCK, NAME, cache_dir

# Names as `measured.merge` and `store.write` make them.
_MEASURED = re.compile(rf"{re.escape(NAME)}|{re.escape(LOCK)}|{re.escape(NAME)}\.tmp")
_LINKED = re.compile(rf"[0-9a-f]{{64}}{re.escape(folder.SUFFIX)}|[0-9a-f]{{16}}\.tmp")


class Contents(NamedTuple):
    """The files in the cache, and their sizes in bytes."""

    where: Path
    measured: dict[str, int]
    linked: dict[str, int]
    why_not_linked: (
        str  # why the folder of linked kernels is not used; empty if it is used, or does not exist
    )

    @property
    def nbytes(self) -> int:
        """The size of all files."""
        return sum(self.measured.values()) + sum(self.linked.values())

    def __str__(self) -> str:
        """One line of text."""
        if not self.where.is_dir():
            return f"{self.where} (not there yet)"
        kernels = sum(name.endswith(folder.SUFFIX) for name in self.linked)
        choices = "" if NAME in self.measured else "no "
        text = f"{self.where}: {kernels} linked kernels, {choices}measured choices, {self.nbytes} bytes"
        return f"{text}; {self.why_not_linked}" if self.why_not_linked else text


def contents() -> Contents:
    """The files that epigemm has written into the user's cache."""
    where = cache_dir()
    found = _sizes(where)
    measured = {name: size for name, size in found.items() if _MEASURED.fullmatch(name)}
    try:
        with folder.opened() as opened:
            linked = {name: size for name, size in _sizes(opened).items() if _LINKED.fullmatch(name)}
    except (FileNotFoundError, NotADirectoryError):
        return Contents(where, measured, {}, "")
    except OSError as error:
        return Contents(where, measured, {}, f"linked kernels are not used: {error}")
    return Contents(where, measured, linked, "")


def clear() -> Contents:
    """Remove the files of `contents`; returns those that are gone. Running processes keep what they have in memory."""
    found = contents()
    removed = Contents(found.where, {}, {}, found.why_not_linked)
    if found.linked:
        with suppress(OSError), folder.opened() as opened:
            for name in found.linked:
                folder.remove(opened, name)
            removed.linked.update(_without(found.linked, folder.names(opened)))
    for name in found.measured:
        with suppress(OSError):
            (found.where / name).unlink()
            removed.measured[name] = found.measured[name]
    return removed


def _without(sizes: dict[str, int], left: list[str]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if name not in left}


def _sizes(where: Path | int) -> dict[str, int]:
    """The sizes of the regular files of a folder. Links are not followed."""
    found = {}
    with suppress(OSError):
        for each in sorted(os.scandir(where), key=lambda entry: entry.name):
            with suppress(OSError):  # another process has removed it
                about = each.stat(follow_symlinks=False)
                if stat.S_ISREG(about.st_mode):
                    found[each.name] = about.st_size
    return found
