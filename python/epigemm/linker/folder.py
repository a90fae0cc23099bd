"""The folder of the linked kernels: at most 1 GiB, and only files that no other user can have written.

Its files are machine code that runs on the GPU. So a file is read only if the folder, its parent folder and the file
belong to this user and no one else may write them. Owner and permissions are checked after opening, and links are not
followed, so that nothing can be exchanged between check and use.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from epigemm.planner.times import cache_dir, make_folder

NAME = "cubins"
SUFFIX = ".cubin"
LIMIT = 1 << 30  # bytes of all files together
_TEMPORARY = ".tmp"
_ABANDONED = 3600  # seconds after which a temporary file counts as left behind


class UnsafeError(PermissionError):
    """A folder that others could have written."""


def path() -> Path:
    """Where the folder is, or would be."""
    return cache_dir() / NAME


@contextmanager
def opened(*, make: bool = False) -> Iterator[int]:
    """The folder's descriptor, for the functions below.

    Raises:
        UnsafeError: it or its parent folder belongs to another user, or others may write it, or it is a link.
        OSError: it is not there, or cannot be made.
    """
    outer = cache_dir()
    if make:
        make_folder(outer)
    # The parent folder may be a link, because the user chooses it.
    with _descriptor(outer, os.O_DIRECTORY) as around:
        _require_own_folder(around, outer)
        if make:
            with suppress(FileExistsError):
                os.mkdir(NAME, 0o700, dir_fd=around)
        if path().is_symlink():  # for the error's text; the next line does not follow links
            raise UnsafeError(f"{path()} is a symbolic link")
        with _descriptor(NAME, os.O_DIRECTORY | os.O_NOFOLLOW, around) as found:
            _require_own_folder(found, path())
            yield found


def read(folder: int, name: str) -> bytes:
    """A file's content; the file becomes the last used one.

    Raises:
        ValueError: others could have written it.
        OSError: it is not there, or cannot be read.
    """
    try:
        # Non-blocking, because it might be a pipe.
        with _descriptor(name, os.O_NOFOLLOW | os.O_NONBLOCK, folder) as found:
            if why := _why_not_own(os.fstat(found)):
                raise ValueError(why)
            with os.fdopen(found, "rb", closefd=False) as file:
                data = file.read()
            with suppress(OSError):  # the disk may not be writable
                os.utime(found)
            return data
    except OSError:
        if stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode):
            raise ValueError("it is a symbolic link") from None
        raise


def write(folder: int, name: str, data: bytes) -> None:
    """Write a file atomically: readers see no file, the old one or the new one. OSError if that fails."""
    temporary = f"{secrets.token_hex(8)}{_TEMPORARY}"
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        remove(folder, temporary)
        raise
    _keep_to_limit(folder)


def names(folder: int) -> list[str]:
    """The names of the files in the folder, in alphabetical order."""
    return sorted(os.listdir(folder))


def remove(folder: int, name: str) -> None:
    """Remove a file if that is possible. If it is a link, the link is removed."""
    with suppress(OSError):
        os.unlink(name, dir_fd=folder)


def _keep_to_limit(folder: int) -> None:
    """Remove the files that were last used the longest ago, and those that broken processes have left.

    Processes that do this at the same time choose the same files.
    """
    files = []
    for each in names(folder):
        with suppress(OSError):  # another process has removed it
            about = os.lstat(each, dir_fd=folder)
            is_abandoned = each.endswith(_TEMPORARY) and about.st_mtime < time.time() - _ABANDONED
            if each.endswith(SUFFIX) or is_abandoned:
                files.append((about.st_mtime_ns, each, about.st_size))
    total = sum(size for _, _, size in files)
    for _, each, size in sorted(files):
        if total <= LIMIT:
            return
        remove(folder, each)
        total -= size


@contextmanager
def _descriptor(name: str | Path, flags: int, folder: int | None = None) -> Iterator[int]:
    found = os.open(name, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=folder)
    try:
        yield found
    finally:
        os.close(found)


def _require_own_folder(found: int, where: Path) -> None:
    if why := _why_not_own(os.fstat(found)):
        raise UnsafeError(f"{where}: {why}")


def _why_not_own(about: os.stat_result) -> str:
    """Why another user may have written an opened file or folder; empty if that is impossible."""
    if about.st_uid != os.geteuid():
        return f"it belongs to another user ({about.st_uid})"
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write it (mode {stat.S_IMODE(about.st_mode):o})"
    if not (stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)):
        return "it is no file"
    return ""
