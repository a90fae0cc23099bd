"""The machine code of a kernel with an epilogue: from memory, from disk, or compiled and linked now."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from epigemm.linker import store
from epigemm.linker.libraries import LinkingError
from epigemm.linker.store import Once
from epigemm.linker.toolchain import compile_functor, link, side_by_side

_SHIPPED = Path(__file__).parents[1] / "ir"


class Job(NamedTuple):
    """What a kernel is made of."""

    source: str  # the epilogue's, as `compile_functor` takes it
    symbol: str  # the open kernel's name
    ir: bytes | Path  # its intermediate code, or the file with it (`ir_path`)
    capability: tuple[int, int]  # of the GPU: (9, 0)


_functors: Once[bytes] = Once()


def cubin(source: str, symbol: str, ir: bytes | Path, capability: tuple[int, int]) -> bytes:
    """The machine code of an open kernel with an epilogue linked into it.

    It comes from memory, else from disk, else it is made, which takes 0.4 s and more. Threads that ask for the same
    kernel wait for the first one.

    Raises:
        LibrariesMissingError: it is not in the cache, and NVRTC or nvJitLink is missing.
        CompileError: NVRTC refuses the source.
        LinkError: nvJitLink refuses the code.
        LinkingError: the file with the intermediate code cannot be read.
        ValueError: the kernel does not run on this GPU.
    """
    job = Job(source, symbol, ir, capability)
    key = key_for(job)
    return store.made.get(key, lambda: store.read(key) or _make(job, key))


def build_cubins(jobs: Sequence[Job]) -> list[bytes]:
    """Several kernels, linked in parallel. An epilogue is compiled once for all of them. Errors as of `cubin`."""
    return side_by_side(lambda job: cubin(*job), jobs)


def find(source: str, symbol: str, ir: bytes | Path, capability: tuple[int, int]) -> bytes | None:
    """As `cubin`, if the cache has the kernel; None if it would have to be made. Needs no libraries."""
    key = key_for(Job(source, symbol, ir, capability))
    found = store.made.values.get(key) or store.read(key)
    return None if found is None else store.made.values.setdefault(key, found)


def key_for(job: Job) -> str:
    """The key of a job's entry in the cache.

    Raises:
        LinkingError: the file with the intermediate code cannot be read.
        ValueError: the kernel does not run on this GPU.
    """
    target = architecture(job.symbol, job.capability)
    with _readable():
        return store.key_of(job.source, _ir_digest(job.ir), job.symbol, target)


def _make(job: Job, key: str) -> bytes:
    target = architecture(job.symbol, job.capability)
    functor_ir = _functors.get(f"{target} {job.source}", lambda: compile_functor(job.source, target))
    with _readable():
        kernel_ir = job.ir if isinstance(job.ir, bytes) else job.ir.read_bytes()
    code = link(kernel_ir, functor_ir, job.symbol, target)
    store.write(key, code)
    return code


def _ir_digest(ir: bytes | Path) -> str:
    if isinstance(ir, bytes):
        return store.digest(ir)
    about = ir.stat()
    return _file_digest(ir, about.st_mtime_ns, about.st_size)


@functools.lru_cache(maxsize=256)
def _file_digest(path: Path, changed: int, size: int) -> str:
    del changed, size  # part of the cache's key: a file that has been replaced gets another digest
    return store.digest(path.read_bytes())


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LinkingError(f"the open kernel's code cannot be read: {error}") from error


# --- the open kernels ------------------------------------------------------------------------------------------------


def ir_path(symbol: str) -> Path | None:
    """The file with an open kernel's code, and perhaps that of others; None if this build does not have it.

    `index.json` in the same folder says which file has which kernel. `EPIGEMM_IR_DIR` names a folder to use in place of
    the package's.
    """
    folder = Path(os.environ.get("EPIGEMM_IR_DIR") or _SHIPPED)
    name = _index(folder).get(symbol)
    return None if name is None else folder / name


@functools.lru_cache(maxsize=8)
def _index(folder: Path) -> dict[str, str]:
    """Each kernel's file; empty if there is no index, or a damaged one."""
    try:
        found = json.loads((folder / "index.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def architecture(symbol: str, capability: tuple[int, int]) -> str:
    """What an open kernel is linked for on a GPU of this compute capability.

    Kernels with `sm90` in their names are Hopper's, and run on 9.0 only. The others are linked for any GPU since
    Ampere. ValueError: the kernel does not run on this GPU.
    """
    major, minor = capability
    if capability == (9, 0):
        return "sm_90a"
    if capability < (8, 0) or "_sm90_" in symbol:
        raise ValueError(f"{symbol} does not run on GPUs of compute capability {major}.{minor}")
    return f"sm_{major}{minor}"
