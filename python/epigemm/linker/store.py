"""The cache of linked kernels, in memory and on disk, and what else epigemm keeps in its folder.

A kernel's key is made of its sources: the epilogue's source, the open kernel's intermediate code, the kernel's symbol,
the GPU's architecture and this format. The versions of the libraries that made it are not part of the key. So an entry
is found on a machine without the libraries, and newer libraries do not make everything again. If a library had an
error, increase `FORMAT`, or delete the folder.

Each entry is a file: `MAGIC`, the SHA-256 of the rest, the key, the cubin. The checksum detects damage only. The files
are machine code that runs on the GPU. So one is read only if the folder, its parent folder and the file belong to this
user and no one else may write them. Owner and permissions are checked after opening, and links are not followed, so
that nothing can be exchanged between check and use. If something is wrong, there is one warning, and the kernel is made
again. The caller gets no error. Several processes may use the folder. It holds at most 1 GiB.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from epigemm.planner import times
from epigemm.planner.times import cache_dir, make_folder

FORMAT = 3
MAGIC = b"epigemm cubin\n\r\n"
NAME, SUFFIX, TEMPORARY = "cubins", ".cubin", ".tmp"
LIMIT = 1 << 30  # bytes of all files together
_ABANDONED = 3600  # seconds after which a temporary file counts as left behind
# Names as `times.merge` and `write` make them.
_MEASURED = re.compile(rf"{re.escape(times.NAME)}|{re.escape(times.LOCK)}|{re.escape(times.NAME)}\.tmp")
_LINKED = re.compile(rf"[0-9a-f]{{64}}{re.escape(SUFFIX)}|[0-9a-f]{{16}}{re.escape(TEMPORARY)}")
_Value = TypeVar("_Value")


class UnsafeError(PermissionError):
    """A folder that others could have written."""


class Once(Generic[_Value]):
    """Values by key, each made once in a process, while other threads that ask for it wait."""

    def __init__(self) -> None:
        self.values: dict[str, _Value] = {}
        self._locks: dict[str, threading.Lock] = {}
        os.register_at_fork(after_in_child=self._locks.clear)  # a thread of the parent may hold one

    def get(self, key: str, make: Callable[[], _Value]) -> _Value:
        """The value. After an error of `make` nothing is kept, and who has waited tries."""
        with self._locks.setdefault(key, threading.Lock()):
            if key not in self.values:
                self.values[key] = make()
            return self.values[key]


made: Once[bytes] = Once()
"""This process' kernels, by key."""


# --- entries ---------------------------------------------------------------------------------------------------------


def digest(data: bytes) -> str:
    """SHA-256, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def key_of(source: str, ir_digest: str, symbol: str, architecture: str) -> str:
    """The key of a kernel that is made of these: 64 hexadecimal digits."""
    return digest(json.dumps([FORMAT, digest(source.encode()), ir_digest, symbol, architecture]).encode())


def encoded(key: str, cubin: bytes) -> bytes:
    """The content of a kernel's file, which `decoded` reads."""
    rest = key.encode() + cubin
    return MAGIC + hashlib.sha256(rest).digest() + rest


def decoded(data: bytes, key: str) -> bytes:
    """The kernel with this key.

    Raises:
        ValueError: the file is damaged, cut, or another kernel's.
    """
    if not data.startswith(MAGIC):
        raise ValueError("it is no entry of the cache")
    start = len(MAGIC) + hashlib.sha256().digest_size
    rest = data[start:]
    if hashlib.sha256(rest).digest() != data[len(MAGIC) : start]:
        raise ValueError("its checksum is wrong")
    if not rest.startswith(key.encode()):
        raise ValueError("it is another entry's")
    cubin = rest[len(key) :]
    if not cubin.startswith(b"\x7fELF"):
        raise ValueError("it has no machine code")
    return cubin


def read(key: str) -> bytes | None:
    """The kernel on disk; None if there is none, if it is damaged, or if other users could have written it."""
    name = f"{key}{SUFFIX}"
    path = cache_dir() / NAME / name
    try:
        with opened() as folder:
            try:
                return decoded(_content(folder, name), key)
            except ValueError as error:
                times.warn_once(path, f"the linked kernel {path} is removed and made again: {error}")
                _remove(folder, name)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except UnsafeError as error:
        _warn_without_disk(error)
    except OSError as error:
        times.warn_once(path, f"the linked kernel {path} cannot be read and is made again: {error}")
    return None


def write(key: str, cubin: bytes) -> None:
    """Write a kernel to disk, atomically; one warning if that is impossible."""
    temporary = f"{secrets.token_hex(8)}{TEMPORARY}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with opened(make=True) as folder:
            try:
                with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=folder), "wb") as file:
                    file.write(encoded(key, cubin))
                os.replace(temporary, f"{key}{SUFFIX}", src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                _remove(folder, temporary)
                raise
            _keep_to_limit(folder)
    except OSError as error:
        _warn_without_disk(error)


def _warn_without_disk(error: OSError) -> None:
    where = cache_dir() / NAME
    times.warn_once(where, f"linked kernels last as long as this process: {where} is not used: {error}")


# --- the folder ------------------------------------------------------------------------------------------------------


@contextmanager
def opened(*, make: bool = False) -> Iterator[int]:
    """The folder's descriptor.

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
        if (outer / NAME).is_symlink():  # for the error's text; the next line does not follow links
            raise UnsafeError(f"{outer / NAME} is a symbolic link")
        with _descriptor(NAME, os.O_DIRECTORY | os.O_NOFOLLOW, around) as found:
            _require_own_folder(found, outer / NAME)
            yield found


def _content(folder: int, name: str) -> bytes:
    """A file's content; the file becomes the last used one. ValueError if others could have written it."""
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


def _remove(folder: int | None, name: str | Path) -> bool:
    """Remove a file; whether that was possible. If it is a link, the link is removed."""
    with suppress(OSError):
        os.unlink(name, dir_fd=folder)
        return True
    return False


def _keep_to_limit(folder: int) -> None:
    """Remove the files that were last used the longest ago, and those that broken processes have left.

    Processes that do this at the same time choose the same files.
    """
    files = []
    for name, about in _files(folder):
        is_abandoned = name.endswith(TEMPORARY) and about.st_mtime < time.time() - _ABANDONED
        if name.endswith(SUFFIX) or is_abandoned:
            files.append((about.st_mtime_ns, name, about.st_size))
    total = sum(size for _, _, size in files)
    for _, name, size in sorted(files):
        if total <= LIMIT:
            return
        _remove(folder, name)
        total -= size


def _files(where: Path | int) -> Iterator[tuple[str, os.stat_result]]:
    """The files of a folder, in alphabetical order. Links are not followed."""
    for each in sorted(os.scandir(where), key=lambda entry: entry.name):
        with suppress(OSError):  # another process has removed it
            yield each.name, each.stat(follow_symlinks=False)


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


# --- all that epigemm keeps on disk ----------------------------------------------------------------------------------


class Contents(NamedTuple):
    """The files in the cache, and their sizes in bytes."""

    where: Path
    measured: dict[str, int]
    linked: dict[str, int]
    why_not_linked: str  # why the folder of linked kernels is not used; empty if it is, or is not there

    @property
    def nbytes(self) -> int:
        """The size of all files."""
        return sum(self.measured.values()) + sum(self.linked.values())

    def __str__(self) -> str:
        """One line of text."""
        if not self.where.is_dir():
            return f"{self.where} (not there yet)"
        kernels = sum(name.endswith(SUFFIX) for name in self.linked)
        choices = "" if times.NAME in self.measured else "no "
        text = f"{self.where}: {kernels} linked kernels, {choices}measured choices, {self.nbytes} bytes"
        return f"{text}; {self.why_not_linked}" if self.why_not_linked else text


def contents() -> Contents:
    """The files that epigemm has written into the user's cache: measured choices and linked kernels."""
    where, why_not = cache_dir(), ""
    measured, linked = _sizes(where, _MEASURED), dict[str, int]()
    try:
        with opened() as folder:
            linked = _sizes(folder, _LINKED)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        why_not = f"linked kernels are not used: {error}"
    return Contents(where, measured, linked, why_not)


def clear() -> Contents:
    """Remove the files of `contents`; returns those that are gone. Running processes keep what they have in memory."""
    found, linked = contents(), dict[str, int]()
    with suppress(OSError), opened() as folder:
        linked = {name: size for name, size in found.linked.items() if _remove(folder, name)}
    measured = {name: size for name, size in found.measured.items() if _remove(None, found.where / name)}
    return found._replace(measured=measured, linked=linked)


def _sizes(where: Path | int, names: re.Pattern[str]) -> dict[str, int]:
    """The sizes of the regular files of these names in a folder."""
    with suppress(OSError):
        files = ((name, about) for name, about in _files(where) if names.fullmatch(name))
        return {name: about.st_size for name, about in files if stat.S_ISREG(about.st_mode)}
    return {}
