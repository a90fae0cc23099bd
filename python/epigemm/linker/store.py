"""The cache of linked kernels, in memory and on disk. Each entry is a file; several processes may use the folder.

A kernel's key is made of its sources: the epilogue's source, the open kernel's intermediate code, the kernel's symbol,
the GPU's architecture and this format. The versions of the libraries that made it are not part of the key. So an entry
is found on a machine without the libraries, and newer libraries do not make everything again. If a library had an
error, increase `FORMAT`, or delete the folder.

A file is `MAGIC`, the SHA-256 of the rest, the key, the cubin. The checksum detects damage only;
`epigemm.linker.folder` makes sure that no other user has written the file. If something is wrong with the folder or a
file, there is one warning, and the kernel is made again. The caller gets no error.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Generic, TypeVar

from epigemm.linker import folder
from epigemm.linker.folder import SUFFIX
from epigemm.planner import times

FORMAT = 3
MAGIC = b"epigemm cubin\n\r\n"

_CHECKSUM_BYTES = 32
_Value = TypeVar("_Value")


class Once(Generic[_Value]):
    """Values by key, each made once in a process, while other threads that ask for it wait."""

    def __init__(self) -> None:
        self.values: dict[str, _Value] = {}
        self._making: dict[str, Future[_Value]] = {}
        # After a fork: values that a thread of the parent was making are never finished in the child.
        os.register_at_fork(after_in_child=self._making.clear)

    def get(self, key: str, make: Callable[[], _Value]) -> _Value:
        """The value. An error of `make` is raised in every thread that waits for the value, and nothing is kept."""
        while True:
            own: Future[_Value] = Future()
            found = self._making.setdefault(key, own)
            if found is own:
                return self._make(key, make, own)
            with suppress(CancelledError):  # if the making thread was interrupted, the next one tries
                return found.result()

    def _make(self, key: str, make: Callable[[], _Value], own: Future[_Value]) -> _Value:
        try:
            if key not in self.values:
                self.values[key] = make()
            own.set_result(self.values[key])
            return self.values[key]
        except Exception as error:
            own.set_exception(error)
            raise
        finally:
            self._making.pop(key, None)
            own.cancel()  # does nothing if there is a result


made: Once[bytes] = Once()
"""This process' kernels, by key."""


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
    start = len(MAGIC) + _CHECKSUM_BYTES
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
    path = folder.path() / name
    try:
        with folder.opened() as found:
            try:
                return decoded(folder.read(found, name), key)
            except ValueError as error:
                times.warn_once(path, f"the linked kernel {path} is removed and made again: {error}")
                folder.remove(found, name)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except folder.UnsafeError as error:
        _warn_without_disk(error)
    except OSError as error:
        times.warn_once(path, f"the linked kernel {path} cannot be read and is made again: {error}")
    return None


def write(key: str, cubin: bytes) -> None:
    """Write a kernel to disk; one warning if that is impossible."""
    try:
        with folder.opened(make=True) as found:
            folder.write(found, f"{key}{SUFFIX}", encoded(key, cubin))
    except OSError as error:
        _warn_without_disk(error)


def _warn_without_disk(error: OSError) -> None:
    where = folder.path()
    times.warn_once(where, f"linked kernels last as long as this process: {where} is not used: {error}")
