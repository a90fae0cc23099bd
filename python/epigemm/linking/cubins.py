"""A kernel with an epilogue in it: from memory, from disk, or compiled and linked now."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from epigemm.linking import libraries as found
from epigemm.linking import store
from epigemm.linking.errors import LinkingError
from epigemm.linking.ir import architecture
from epigemm.linking.nvjitlink import check_symbol, link, side_by_side
from epigemm.linking.nvrtc import compile_functor
from epigemm.linking.once import Once
from epigemm.linking.store import Entry, digest, key_of


class Job(NamedTuple):
    """What a kernel is made of."""

    source: str  # the epilogue's, as `compile_functor` takes it
    symbol: str  # the open kernel's name
    ir: bytes | Path  # its intermediate code, or the file with it (`ir_path`)
    capability: tuple[int, int]  # of the GPU: (9, 0)


made: Once[Entry] = Once()
"""This process' entries, by key."""

_functors: Once[bytes] = Once()


def cubin(source: str, symbol: str, ir: bytes | Path, capability: tuple[int, int]) -> bytes:
    """The machine code of an open kernel with an epilogue in it.

    From memory, else from disk, else made: 0.4 s and more. Threads that ask for the same kernel wait for the first.

    Raises:
        LibrariesMissingError: it is not in the cache, and NVRTC or nvJitLink is missing.
        CompileError: NVRTC refuses the source.
        LinkError: nvJitLink refuses the code.
        LinkingError: the file with the intermediate code cannot be read.
        ValueError: the kernel does not run on this GPU, or its symbol is no identifier.
    """
    job = Job(source, symbol, ir, capability)
    key = key_for(job)
    return made.get(key, lambda: store.read(key) or _make(job)).cubin


def build_cubins(jobs: Sequence[Job]) -> list[bytes]:
    """Several kernels, linked side by side: a kernel and its fixup take as long as the longer one.

    An epilogue is compiled once for all its kernels.

    Raises:
        LinkingError: as `cubin` does, of the first job that failed.
        ValueError: as `cubin` does.
    """
    return side_by_side(lambda job: cubin(*job), jobs)


def find(source: str, symbol: str, ir: bytes | Path, capability: tuple[int, int]) -> bytes | None:
    """As `cubin`, where the cache has it; None where it would have to be made. Needs no libraries."""
    key = key_for(Job(source, symbol, ir, capability))
    entry = made.peek(key)
    if entry is None:
        entry = store.read(key)
        if entry is not None:
            made.put(key, entry)
    return entry.cubin if entry is not None else None


def key_for(job: Job) -> str:
    """The key of a job's entry in the cache: for `export_cache`.

    Raises:
        LinkingError: the file with the intermediate code cannot be read.
        ValueError: the kernel does not run on this GPU, or its symbol is no identifier.
    """
    check_symbol(job.symbol)
    target = architecture(job.symbol, job.capability)
    return key_of(digest(job.source.encode()), _ir_digest(job.ir), job.symbol, target)


def _make(job: Job) -> Entry:
    target = architecture(job.symbol, job.capability)
    nvrtc, nvjitlink = found.libraries()
    source_digest = digest(job.source.encode())
    functor_ir = _functors.get(f"{source_digest} {target}", lambda: compile_functor(job.source, target))
    kernel_ir = job.ir if isinstance(job.ir, bytes) else _read(job.ir)
    code = link(kernel_ir, functor_ir, job.symbol, target)
    versions = (nvrtc.version, nvjitlink.version)
    entry = Entry(source_digest, digest(kernel_ir), job.symbol, target, *versions, code)
    store.write(entry)
    return entry


def _ir_digest(ir: bytes | Path) -> str:
    if isinstance(ir, bytes):
        return digest(ir)
    try:
        about = ir.stat()
    except OSError as error:
        raise LinkingError(f"the open kernel's code cannot be read: {error}") from error
    return _file_digest(ir, about.st_mtime_ns, about.st_size)


@functools.lru_cache(maxsize=256)
def _file_digest(path: Path, changed: int, size: int) -> str:
    del changed, size  # another file under the same name has another digest
    return digest(_read(path))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise LinkingError(f"the open kernel's code cannot be read: {error}") from error
