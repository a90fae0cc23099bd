"""The cache of linked kernels on disk: a file an entry, beside other processes that do the same.

An entry's key is made of its sources: the epilogue's source, the open kernel's intermediate code, the kernel's symbol,
the GPU's architecture and this format. The versions of the libraries that made it are no part of that: they stand in
the entry, so that it is found where neither library is, and newer libraries do not make everything again. What an older
library got wrong goes with `FORMAT`, or with the folder.

A file is `MAGIC`, the SHA-256 of the rest, a line of JSON, the cubin. What is wrong with the folder or a file in it is
never the caller's problem: one warning, and the kernel is made again.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from epigemm.linking.libraries import OLDEST, Version, text
from epigemm.tables import cache_dir, write_whole

FORMAT = 2
MAGIC = b"epigemm cubin\n\r\n"
SUFFIX = ".cubin"

_CHECKSUM_BYTES = 32
_warned: set[Path] = set()


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


def digest(data: bytes) -> str:
    """SHA-256, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def key_of(source_digest: str, ir_digest: str, symbol: str, architecture: str) -> str:
    """The key of an entry made of these: 64 hexadecimal digits."""
    return digest(json.dumps([FORMAT, source_digest, ir_digest, symbol, architecture]).encode())


def is_key(value: str) -> bool:
    """Whether this can be an entry's key."""
    return re.fullmatch(r"[0-9a-f]{64}", value) is not None


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
        versions = {name: header.pop(name) for name in ("nvrtc", "nvjitlink")}
        (major, minor), (linkers_major, linkers_minor) = versions.values()
        entry = Entry(**header, nvrtc=(major, minor), nvjitlink=(linkers_major, linkers_minor), cubin=cubin)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("its header cannot be read") from error
    numbers = (*entry.nvrtc, *entry.nvjitlink)
    if not all(type(each) is str for each in header.values()) or not all(
        type(each) is int for each in numbers
    ):
        raise ValueError("its header cannot be read")
    if not cubin.startswith(b"\x7fELF"):
        raise ValueError("it has no machine code")
    return entry


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
        with suppress(OSError):  # not our folder: the warning has said what is wrong
            path.unlink(missing_ok=True)
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
    found = (name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))
    return [key for key in found if is_key(key)]


def _path(key: str) -> Path:
    return folder() / f"{key}{SUFFIX}"


def _warn_once(about: Path, message: str) -> None:
    if about not in _warned:
        _warned.add(about)
        warnings.warn(f"epigemm: {message}", RuntimeWarning, stacklevel=2)
