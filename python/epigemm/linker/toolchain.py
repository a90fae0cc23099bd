"""NVRTC compiles an epilogue to intermediate code, and nvJitLink links it with an open kernel to machine code."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from epigemm.linker.libraries import CompileError, Library, LinkError, LinkingError, libraries

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
