"""One entry of the cache of linked kernels: its key, and its format on disk.

An entry's key is made of its sources: the epilogue's source, the open kernel's intermediate code, the kernel's
symbol, the GPU's architecture and this format. The versions of the libraries that made it are no part of that: they
stand in the entry, so that it is found where neither library is, and newer libraries do not make everything again.
What an older library got wrong goes with `FORMAT`, or with the folder.

On disk: `MAGIC`, then `FORMAT` and the length of what follows the checksum (little-endian), the SHA-256 of that, the
length of a JSON header, the header, the cubin.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from dataclasses import dataclass
from typing import Any

from epigemm.linking.libraries import OLDEST, Version, text

FORMAT = 1
MAGIC = b"epigemm cubin\n\r\n"
SUFFIX = ".cubin"

_START = struct.Struct("<IQ32s")
_HEADER_LENGTH = struct.Struct("<I")
_WORDS = ("source", "ir", "symbol", "architecture")


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
        header = {
            "source": self.source_digest,
            "ir": self.ir_digest,
            "symbol": self.symbol,
            "architecture": self.architecture,
            "nvrtc": list(self.nvrtc),
            "nvjitlink": list(self.nvjitlink),
        }
        written = json.dumps(header).encode()
        rest = _HEADER_LENGTH.pack(len(written)) + written + self.cubin
        return MAGIC + _START.pack(FORMAT, len(rest), hashlib.sha256(rest).digest()) + rest


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
        ValueError: it is damaged, cut, of another format, another entry, or made by libraries that are too old.
    """
    start = len(MAGIC) + _START.size
    if not data.startswith(MAGIC):
        raise ValueError("it is no entry of the cache")
    if len(data) < start:
        raise ValueError("it is cut")
    form, length, checksum = _START.unpack_from(data, len(MAGIC))
    if form != FORMAT:
        raise ValueError(f"it is of format {form}, this version reads format {FORMAT}")
    rest = data[start:]
    if len(rest) != length:
        raise ValueError(f"it has {len(rest)} bytes where {length} were written")
    if hashlib.sha256(rest).digest() != checksum:
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
    if len(rest) < _HEADER_LENGTH.size:
        raise ValueError("it has no header")
    (length,) = _HEADER_LENGTH.unpack_from(rest)
    end = _HEADER_LENGTH.size + length
    try:
        header = json.loads(rest[_HEADER_LENGTH.size : end])
    except (ValueError, RecursionError) as error:
        raise ValueError("its header cannot be read") from error
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    cubin = rest[end:]
    if not cubin.startswith(b"\x7fELF"):
        raise ValueError("it has no machine code")
    source, ir, symbol, architecture = (_word(header, each) for each in _WORDS)
    return Entry(
        source, ir, symbol, architecture, _version(header, "nvrtc"), _version(header, "nvjitlink"), cubin
    )


def _word(header: dict[str, Any], name: str) -> str:
    value = header.get(name)
    if not isinstance(value, str):
        raise ValueError(f"its header lacks {name}")
    return value


def _version(header: dict[str, Any], name: str) -> Version:
    value = header.get(name)
    if not isinstance(value, list) or len(value) != 2 or not all(type(each) is int for each in value):
        raise ValueError(f"its header lacks the version of {name}")
    return (value[0], value[1])
