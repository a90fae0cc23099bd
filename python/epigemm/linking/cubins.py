"""A kernel with an epilogue in it: from memory, from disk, or compiled and linked now."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from epigemm.linking import libraries as found
from epigemm.linking import store
from epigemm.linking.libraries import LinkingError
from epigemm.linking.store import Entry, Once, digest, key_of
from epigemm.linking.toolchain import check_symbol, compile_functor, link, side_by_side

_SHIPPED = Path(__file__).parents[1] / "ir"


class Job(NamedTuple):
    """What a kernel is made of."""

    source: str  # the epilogue's, as `compile_functor` takes it
    symbol: str  # the open kernel's name
    ir: bytes | Path  # its intermediate code, or the file with it (`ir_path`)
    capability: tuple[int, int]  # of the GPU: (9, 0)


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
    return store.made.get(key, lambda: store.read(key) or _make(job)).cubin


def build_cubins(jobs: Sequence[Job]) -> list[bytes]:
    """Several kernels, linked side by side, an epilogue compiled once for all of them. Raises what `cubin` does."""
    return side_by_side(lambda job: cubin(*job), jobs)


def find(source: str, symbol: str, ir: bytes | Path, capability: tuple[int, int]) -> bytes | None:
    """As `cubin`, where the cache has it; None where it would have to be made. Needs no libraries."""
    key = key_for(Job(source, symbol, ir, capability))
    entry = store.made.values.get(key) or store.read(key)
    return None if entry is None else store.made.values.setdefault(key, entry).cubin


def key_for(job: Job) -> str:
    """The key of a job's entry in the cache.

    Raises:
        LinkingError: the file with the intermediate code cannot be read.
        ValueError: the kernel does not run on this GPU, or its symbol is no identifier.
    """
    check_symbol(job.symbol)
    target = architecture(job.symbol, job.capability)
    if isinstance(job.ir, bytes):
        return key_of(digest(job.source.encode()), digest(job.ir), job.symbol, target)
    try:
        about = job.ir.stat()
    except OSError as error:
        raise LinkingError(f"the open kernel's code cannot be read: {error}") from error
    ir_digest = _file_digest(job.ir, about.st_mtime_ns, about.st_size)
    return key_of(digest(job.source.encode()), ir_digest, job.symbol, target)


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


@functools.lru_cache(maxsize=256)
def _file_digest(path: Path, changed: int, size: int) -> str:
    del changed, size  # another file under the same name has another digest
    return digest(_read(path))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise LinkingError(f"the open kernel's code cannot be read: {error}") from error


# --- the open kernels ------------------------------------------------------------------------------------------------


def ir_path(symbol: str) -> Path | None:
    """The file with an open kernel's code, perhaps among others; None where this build has none.

    `index.json` beside the files says which kernel is in which. `EPIGEMM_IR_DIR` names another folder than the
    package's own. ValueError: the symbol is no identifier.
    """
    check_symbol(symbol)
    folder = Path(os.environ.get("EPIGEMM_IR_DIR") or _SHIPPED)
    name = _index(folder).get(symbol)
    return None if name is None else folder / name


@functools.lru_cache(maxsize=8)
def _index(folder: Path) -> dict[str, str]:
    """Each kernel's file; empty where there is no index, or a damaged one."""
    try:
        found = json.loads((folder / "index.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def architecture(symbol: str, capability: tuple[int, int]) -> str:
    """What an open kernel is linked for on a GPU of this compute capability.

    Hopper's own kernels, `sm90` in their names, run on 9.0 alone. The others are linked for any GPU since Ampere.
    ValueError: the kernel does not run on this GPU.
    """
    major, minor = capability
    if capability == (9, 0):
        return "sm_90a"
    if capability < (8, 0) or "_sm90_" in symbol:
        raise ValueError(f"{symbol} does not run on GPUs of compute capability {major}.{minor}")
    return f"sm_{major}{minor}"
