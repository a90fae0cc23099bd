"""The machine code of a kernel with an epilogue: from memory, from disk, or compiled and linked now."""

from __future__ import annotations

import functools
import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from epigemm.linker import store
from epigemm.linker.libraries import LinkingError, compile_functor, link, side_by_side
from epigemm.linker.store import Once

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


# --- kernels of the package ------------------------------------------------------------------------------------------

# Linked when the package was built: built-in epilogues in Hopper's kernels. `cubins/NAME.zip` of the package has the
# machine code of each kernel of an epilogue, under the kernel's symbol.


_FOLDER = Path(__file__).parents[1] / "cubins"
_CAPABILITY = (9, 0)
_given_up: set[str] = set()


class DamagedError(Exception):
    """A file cannot be read, or is damaged."""


def is_prelinked(epilogue: str, symbol: str, capability: tuple[int, int]) -> bool:
    """Whether the package has a kernel for this GPU, and `give_up` was not called for the epilogue.

    Kernels from another folder (`EPIGEMM_IR_DIR`) are linked at run time.
    """
    if capability != _CAPABILITY or epilogue in _given_up or os.environ.get("EPIGEMM_IR_DIR"):
        return False
    try:
        return symbol in _names(_FOLDER / f"{epilogue}.zip")
    except DamagedError:
        return True  # `prelinked` reports the damage


def prelinked(epilogue: str, symbol: str, capability: tuple[int, int]) -> bytes | None:
    """A kernel's machine code; None if the package does not have it.

    Raises:
        DamagedError: its file is damaged.
    """
    if not is_prelinked(epilogue, symbol, capability):
        return None
    file = _FOLDER / f"{epilogue}.zip"
    with _opened(file) as archive:
        cubin = archive.read(symbol)  # which compares the checksum
    if not cubin.startswith(b"\x7fELF"):
        raise DamagedError(f"{file.name}: it has no machine code")
    return cubin


def give_up(epilogue: str) -> None:
    """Do not use the package's kernels of an epilogue in this process any more: one warning is enough."""
    _given_up.add(epilogue)


@functools.cache
def _names(file: Path) -> frozenset[str]:
    """The names of the kernels in a file; none if there is no file."""
    if not file.is_file():
        return frozenset()
    with _opened(file) as archive:
        return frozenset(archive.namelist())


@contextmanager
def _opened(file: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(file) as archive:
            yield archive
    except Exception as error:  # zipfile raises errors of many types for a damaged file
        raise DamagedError(f"{file.name}: {error or type(error).__name__}") from error
