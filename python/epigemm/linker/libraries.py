"""Finds NVRTC and nvJitLink, and checks that they can be used.

The rules:

- Both are of CUDA 13: the kernels' intermediate code is made by CUDA 13.0, and nvJitLink 12 refuses it.
- NVRTC is not newer than nvJitLink, which refuses the code of an NVRTC newer than itself.

The places, in the order in which they are searched:

1. `EPIGEMM_CUDA_LIBRARIES`: a folder with the libraries, or one with `nvidia/*/lib` in it.
2. Libraries that this process has loaded: torch's CUDA wheels bring both libraries, and torch loads NVRTC late.
3. `nvidia/cu13/lib` and `nvidia/*/lib` beside torch, then on `sys.path`; `lib` of the Python environment.
4. `CUDA_HOME`, `CUDA_PATH`, /usr/local/cuda.
5. The system's loader.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

Version = tuple[int, int]

OLDEST: Version = (13, 0)
MAJOR = OLDEST[0]


class LinkingError(RuntimeError):
    """A kernel with this epilogue could not be made."""


class LibrariesMissingError(LinkingError):
    """NVRTC or nvJitLink was not found, or not in a version that can be used."""


class _WithLogError(LinkingError):
    """An error with the log of a library in `log`."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(f"{message}\n{log}".rstrip())
        self.log = log


class CompileError(_WithLogError):
    """NVRTC refused the epilogue's source."""


class LinkError(_WithLogError):
    """nvJitLink refused the kernel's or the epilogue's code."""


class Library(NamedTuple):
    """A loaded library."""

    handle: Any  # has the library's functions as attributes, as a `ctypes.CDLL` has
    path: str  # the file, or the name that the system's loader found it by
    version: Version  # of CUDA, (13, 0)


class Libraries(NamedTuple):
    """An NVRTC and an nvJitLink that can be used together."""

    nvrtc: Library
    nvjitlink: Library


class _Kind(NamedTuple):
    label: str
    stem: str
    ask_version: str


_NVRTC = _Kind("NVRTC", "libnvrtc", "nvrtcVersion")
_NVJITLINK = _Kind("nvJitLink", "libnvJitLink", "nvJitLinkVersion")

_found: Libraries | str | None = None  # or the reason why there are none
_lock = threading.Lock()


def libraries() -> Libraries:
    """Both libraries. The first call finds and loads them, and its result holds for the process.

    LibrariesMissingError says which one is missing, too old or not usable with the other one, and what to install.
    """
    global _found
    with _lock:
        _found = _found or _search()
    if isinstance(_found, str):
        raise LibrariesMissingError(_found)
    return _found


def nvjitlink() -> Library:
    """nvJitLink alone, for code that has been compiled already."""
    for library in _usable(_NVJITLINK):
        return library
    raise LibrariesMissingError(_reason(_NVJITLINK))


def unavailable() -> str:
    """Why no epilogue can be linked on this machine; empty if one can. Loads the libraries."""
    try:
        libraries()
    except LibrariesMissingError as error:
        return str(error)
    return ""


def text(version: Version) -> str:
    """A version as text: (13, 0) -> "13.0"."""
    return f"{version[0]}.{version[1]}"


# --- the choice ------------------------------------------------------------------------------------------------------


def _search() -> Libraries | str:
    """The first usable pair, or why there is none."""
    linkers = list(_usable(_NVJITLINK))
    if not linkers:
        return _reason(_NVJITLINK)
    compilers = []
    for compiler in _usable(_NVRTC):
        for linker in linkers:
            if compiler.version <= linker.version:
                return Libraries(compiler, linker)
        compilers.append(compiler)
    if not compilers:
        return _reason(_NVRTC)
    compiler = min(compilers, key=lambda each: each.version)
    linker = max(linkers, key=lambda each: each.version)
    return (
        f"NVRTC {text(compiler.version)} ({compiler.path}) is newer than nvJitLink {text(linker.version)} "
        f"({linker.path}), which cannot read its code; pip install "
        f"'nvidia-nvjitlink>={text(compiler.version)},<{MAJOR + 1}'"
    )


def _usable(kind: _Kind) -> Iterator[Library]:
    for path in _candidates(kind):
        if re.search(rf"\.so\.{MAJOR}\b", Path(path).name):
            with suppress(OSError):
                library = _open(kind, path)
                if library.version >= OLDEST:
                    yield library


def _reason(kind: _Kind) -> str:
    found = []
    for path in _candidates(kind):
        try:
            library = _open(kind, path)
        except OSError as error:
            if os.path.isabs(path):  # noqa: PTH117 - a name alone is the system's loader: it has none
                found.append(f"{path} does not load: {error}")
        else:
            found.append(f"found {text(library.version)} at {library.path}")
    seen = f" ({'; '.join(found)})" if found else ""
    return (
        f"{kind.label} {text(OLDEST)} or later of CUDA {MAJOR} was not found{seen}; pip install epigemm[jit]"
    )


def _open(kind: _Kind, path: str) -> Library:
    """Load a library and ask for its version; OSError if it cannot be used."""
    handle = _load(path)
    major, minor = ctypes.c_int(), ctypes.c_int()
    try:
        status = getattr(handle, kind.ask_version)(ctypes.byref(major), ctypes.byref(minor))
    except AttributeError as error:
        raise OSError(f"it has no {kind.ask_version}") from error
    if status:
        raise OSError(f"{kind.ask_version} gave error {status}")
    version = (major.value, minor.value)
    if kind is _NVRTC and version >= OLDEST:
        # NVRTC opens a second library by name at its first compilation. pip's folder is on no search path, so it is
        # loaded here.
        name = f"libnvrtc-builtins.so.{text(version)}"
        beside = Path(path).with_name(name)
        _load(str(beside) if beside.is_absolute() and beside.exists() else name)
    return Library(handle, path, version)


@functools.cache
def _load(path: str) -> Any:
    return ctypes.CDLL(path)


# --- the search ------------------------------------------------------------------------------------------------------


def _candidates(kind: _Kind) -> Iterator[str]:
    """Files of this library, of any version, each once; the name for the system's loader last."""
    seen = set()
    for path in (each for folder in _folders() for each in _in(kind, folder)):
        real = os.path.realpath(path)
        if real not in seen:
            seen.add(real)
            yield path
    yield f"{kind.stem}.so.{MAJOR}"


def _folders() -> Iterator[Path]:
    if chosen := os.environ.get("EPIGEMM_CUDA_LIBRARIES"):
        yield Path(chosen).absolute()
        yield from _wheels(Path(chosen).absolute())
    yield from dict.fromkeys(Path(each).parent for each in _loaded())
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    beside_torch = [Path(torch).parents[1]] if torch else []
    for entry in dict.fromkeys([*beside_torch, *(Path(each) for each in sys.path if each)]):
        yield from _wheels(entry.absolute())
    yield Path(sys.prefix, "lib")
    homes = [home for variable in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(variable))]
    yield from (Path(home, lib) for home in homes for lib in ("lib64", "lib"))
    yield Path("/usr/local/cuda/lib64")


def _wheels(entry: Path) -> list[Path]:
    """The folders of pip's CUDA libraries in a folder of packages, those of CUDA 13 first."""
    packages = entry / "nvidia"
    ours = packages / f"cu{MAJOR}" / "lib"
    return [ours, *(each for each in sorted(packages.glob("*/lib")) if each != ours)]


def _in(kind: _Kind, folder: Path) -> list[str]:
    try:
        files = sorted(str(each) for each in folder.glob(f"{kind.stem}.so.*"))
    except OSError:
        return []
    return [each for each in files if _is_file_of(kind, each)]


def _is_file_of(kind: _Kind, path: str) -> bool:
    return re.fullmatch(rf"{re.escape(kind.stem)}\.so(\.\d+)+", Path(path).name) is not None


def _loaded() -> list[str]:
    """The files of the two libraries that this process has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    lines = (line.split(maxsplit=5) for line in maps.splitlines())
    paths = dict.fromkeys(fields[5] for fields in lines if len(fields) == 6)
    return [each for each in paths if _is_file_of(_NVRTC, each) or _is_file_of(_NVJITLINK, each)]


# --- what the libraries are called for --------------------------------------------------------------------------------


_SOURCE_IS_WRONG = 6  # NVRTC_ERROR_COMPILATION
_LTOIR, _FATBIN = 3, 4  # nvJitLinkInputType
_FATBIN_MAGIC = b"\x50\xed\x55\xba"

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


def compile_functor(source: str, architecture: str) -> bytes:
    """The LTO-IR of an epilogue. The source is C++ with `__device__` functions, and includes only NVRTC's own headers.

    Arithmetic follows IEEE 754 as far as CUDA does: no fast math, but a product and a sum may become one fused
    operation.

    Raises:
        CompileError: NVRTC refuses the source. It has NVRTC's log.
        LinkingError: it fails for another reason: this NVRTC does not know the architecture, or there is no memory.
        LibrariesMissingError: there is no usable NVRTC.
    """
    handle = libraries().nvrtc.handle
    program = ctypes.c_void_p()

    def call(function: str, *arguments: Any) -> None:
        if status := getattr(handle, function)(*arguments):
            raise LinkingError(f"{function} gave error {status}")

    call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"epilogue.cu", 0, None, None)
    try:
        options = _options(f"-arch={architecture}", "-dlto", "--std=c++17")
        if status := handle.nvrtcCompileProgram(program, len(options), options):
            log = _text(_sized(call, "nvrtcGetProgramLog", program))
            if status != _SOURCE_IS_WRONG:
                raise LinkingError(
                    f"NVRTC did not compile for {architecture} (error {status})\n{log}".rstrip()
                )
            raise CompileError(f"NVRTC did not compile the epilogue for {architecture}", log)
        return _sized(call, "nvrtcGetLTOIR", program)
    finally:
        handle.nvrtcDestroyProgram(ctypes.byref(program))


def link(
    kernel_ir: bytes, functor_ir: bytes, symbol: str, architecture: str, *, library: Library | None = None
) -> bytes:
    """The cubin of one kernel with one epilogue in it. Any thread may call it, and other threads go on.

    Raises:
        LinkError: nvJitLink refuses the inputs, or the result has no such kernel. It has nvJitLink's log.
        LibrariesMissingError: there is no usable nvJitLink.
    """
    handle = (library or libraries().nvjitlink).handle
    linker = ctypes.c_void_p()
    # The host reads none of the kernel's variables by name.
    unused = "-optimize-unused-variables"
    options = _options(f"-arch={architecture}", "-lto", "-O3", f"-kernels-used={symbol}", unused)
    if status := handle.nvJitLinkCreate(ctypes.byref(linker), len(options), options):
        raise LinkError(f"nvJitLink does not take its options for {architecture} (error {status})", "")
    call = functools.partial(_call_linker, handle, symbol)
    try:
        for name, ir in ((symbol, kernel_ir), ("epilogue", functor_ir)):
            kind = _FATBIN if ir.startswith(_FATBIN_MAGIC) else _LTOIR
            size = ctypes.c_size_t(len(ir))
            _call_linker(handle, name, "nvJitLinkAddData", linker, kind, ir, size, name.encode())
        call("nvJitLinkComplete", linker)
        cubin = _sized(call, "nvJitLinkGetLinkedCubin", linker)
    finally:
        handle.nvJitLinkDestroy(ctypes.byref(linker))
    # nvJitLink gives no error for an unknown name: its result is then empty.
    if f".text.{symbol}\0".encode() not in cubin:
        raise LinkError(f"the code has no kernel {symbol}", "")
    return cubin


def side_by_side(make: Callable[[_Given], _Made], given: Sequence[_Given]) -> list[_Made]:
    """`make` for each item, in threads, at most as many as there are processors."""
    if len(given) < 2:
        return [make(each) for each in given]
    workers = min(len(given), len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(workers, thread_name_prefix="epigemm-link") as pool:
        return list(pool.map(make, given))


def _call_linker(handle: Any, about: str, function: str, linker: ctypes.c_void_p, *arguments: Any) -> None:
    """One call of nvJitLink; LinkError with its logs if it fails."""
    if status := getattr(handle, function)(linker, *arguments):
        logs = []
        for which in ("Error", "Info"):
            size = ctypes.c_size_t()
            if not getattr(handle, f"nvJitLinkGet{which}LogSize")(linker, ctypes.byref(size)) and size.value:
                buffer = ctypes.create_string_buffer(size.value)
                failed = getattr(handle, f"nvJitLinkGet{which}Log")(linker, buffer)
                logs += [] if failed else [_text(buffer.raw)]
        log = "\n".join(filter(None, logs))
        raise LinkError(f"nvJitLink did not link {about} (error {status} of {function})", log)


def _options(*options: str) -> Any:
    return (ctypes.c_char_p * len(options))(*(each.encode() for each in options))


def _sized(call: Callable[..., None], what: str, owner: ctypes.c_void_p) -> bytes:
    """Data that a library returns in two calls: first its size, then the data."""
    size = ctypes.c_size_t()
    call(f"{what}Size", owner, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    call(what, owner, buffer)
    return buffer.raw


def _text(log: bytes) -> str:
    return log.rstrip(b"\0").decode(errors="replace").strip()
