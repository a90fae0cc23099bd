"""The cache of linked kernels, in memory and on disk: a file an entry, beside other processes that do the same.

An entry's key is made of its sources: the epilogue's source, the open kernel's intermediate code, the kernel's symbol,
the GPU's architecture and this format. The versions of the libraries that made it are no part of that: they stand in
the entry, so that it is found where neither library is, and newer libraries do not make everything again. What an older
library got wrong goes with `FORMAT`, or with the folder.

A file is `MAGIC`, the SHA-256 of the rest, a line of JSON, the cubin. The checksum tells of damage alone; that nobody
else has written the file is up to `epigemm.linking.folder`. What is wrong with the folder or a file in it is never the
caller's problem: one warning, and the kernel is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from epigemm.linking import folder
from epigemm.linking.folder import SUFFIX
from epigemm.linking.libraries import OLDEST, Version, text

FORMAT = 2
MAGIC = b"epigemm cubin\n\r\n"

_CHECKSUM_BYTES = 32
_Value = TypeVar("_Value")
_warned: set[Path] = set()


class Once(Generic[_Value]):
    """Values by key, each made once in a process: threads that ask for what another one is making wait for it."""

    def __init__(self) -> None:
        self.values: dict[str, _Value] = {}
        self._making: dict[str, Future[_Value]] = {}
        # What a thread of the parent was at work on is never finished in the child.
        os.register_at_fork(after_in_child=self._making.clear)

    def get(self, key: str, make: Callable[[], _Value]) -> _Value:
        """The value. What `make` raises is raised in every thread that waits for it; nothing is kept then."""
        while True:
            own: Future[_Value] = Future()
            found = self._making.setdefault(key, own)
            if found is own:
                return self._make(key, make, own)
            with suppress(CancelledError):  # an interrupt is one thread's own: the next one tries
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
            own.cancel()  # does nothing where it has a result


@dataclass(frozen=True)
class Entry:
    """A linked kernel."""

    source_digest: str  # of the epilogue's source (`digest`)
    ir_digest: str  # of the open kernel's intermediate code (`digest`)
    symbol: str  # the kernel's name
    architecture: str  # "sm_90a"
    nvrtc: Version  # the version that compiled the epilogue
    nvjitlink: Version  # the version that linked
    cubin: bytes  # the machine code

    @property
    def key(self) -> str:
        """The entry's name in the cache."""
        return key_of(self.source_digest, self.ir_digest, self.symbol, self.architecture)

    def encode(self) -> bytes:
        """As `decode` takes it."""
        header = {name: value for name, value in vars(self).items() if name != "cubin"}
        rest = json.dumps(header).encode() + b"\n" + self.cubin
        return MAGIC + hashlib.sha256(rest).digest() + rest


made: Once[Entry] = Once()
"""This process' entries, by key."""


def digest(data: bytes) -> str:
    """SHA-256, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def key_of(source_digest: str, ir_digest: str, symbol: str, architecture: str) -> str:
    """The key of an entry made of these: 64 hexadecimal digits."""
    return digest(json.dumps([FORMAT, source_digest, ir_digest, symbol, architecture]).encode())


def decode(data: bytes, key: str) -> Entry:
    """The entry with this key.

    Raises:
        ValueError: it is damaged, cut, another entry, or made by libraries that are too old.
    """
    if not data.startswith(MAGIC):
        raise ValueError("it is no entry of the cache")
    start = len(MAGIC) + _CHECKSUM_BYTES
    rest = data[start:]
    if hashlib.sha256(rest).digest() != data[len(MAGIC) : start]:
        raise ValueError("its checksum is wrong")
    entry = _parsed(rest)
    if entry.key != key:
        raise ValueError("it is another entry's")
    for label, version in (("NVRTC", entry.nvrtc), ("nvJitLink", entry.nvjitlink)):
        if version < OLDEST:
            raise ValueError(f"it was made by {label} {text(version)}, {text(OLDEST)} or later is needed")
    return entry


def _parsed(rest: bytes) -> Entry:
    """What follows a checksum that is right: still anything, where the file comes from elsewhere."""
    written, _, cubin = rest.partition(b"\n")
    try:
        header = json.loads(written)
        nvrtc, nvjitlink = (tuple(header.pop(name)) for name in ("nvrtc", "nvjitlink"))
        entry = Entry(**header, nvrtc=nvrtc, nvjitlink=nvjitlink, cubin=cubin)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("its header cannot be read") from error
    types = [[type(each) for each in given] for given in (header.values(), nvrtc, nvjitlink)]
    if types != [[str] * 4, [int] * 2, [int] * 2]:
        raise ValueError("its header cannot be read")
    if not cubin.startswith(b"\x7fELF"):
        raise ValueError("it has no machine code")
    return entry


def read(key: str) -> Entry | None:
    """The entry on disk; None where there is none, where it is damaged, or where others could have written it."""
    name = f"{key}{SUFFIX}"
    path = folder.path() / name
    try:
        with folder.opened() as found:
            try:
                return decode(folder.read(found, name), key)
            except ValueError as error:
                _warn_once(path, f"the linked kernel {path} is removed and made again: {error}")
                folder.remove(found, name)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except folder.UnsafeError as error:
        _warn_without_disk(error)
    except OSError as error:
        _warn_once(path, f"the linked kernel {path} cannot be read and is made again: {error}")
    return None


def write(entry: Entry) -> None:
    """Keep an entry where that is possible; one warning where it is not."""
    try:
        with folder.opened(make=True) as found:
            folder.write(found, f"{entry.key}{SUFFIX}", entry.encode())
    except OSError as error:
        _warn_without_disk(error)


def _warn_without_disk(error: OSError) -> None:
    where = folder.path()
    _warn_once(where, f"linked kernels last as long as this process: {where} is not used: {error}")


def _warn_once(about: Path, message: str) -> None:
    if about not in _warned:
        _warned.add(about)
        warnings.warn(f"epigemm: {message}", RuntimeWarning, stacklevel=2)
