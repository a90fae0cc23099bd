"""An epilogue's source to intermediate code, by NVRTC."""

from __future__ import annotations

import ctypes
import re
from typing import Any

from epigemm.linking.errors import CompileError, LinkingError
from epigemm.linking.libraries import Library, libraries

FILE_NAME = "epilogue.cu"
"""What NVRTC's messages call the source."""

_SOURCE_IS_WRONG = 6  # NVRTC_ERROR_COMPILATION
_ARCHITECTURE = re.compile(r"sm_[0-9]+[af]?")


def compile_functor(source: str, architecture: str, *, library: Library | None = None) -> bytes:
    """The LTO-IR of an epilogue: C++ with `__device__` functions, no headers beside NVRTC's own.

    Arithmetic is IEEE's as far as CUDA has it: no fast math; products and sums contract to fused ones.

    Raises:
        CompileError: NVRTC refuses the source. It has NVRTC's log.
        LinkingError: it fails for another reason: this NVRTC does not know the architecture, no memory.
        LibrariesMissingError: there is no NVRTC of use.
        ValueError: no such architecture can be, or there is a NUL in the source.
    """
    check_architecture(architecture)
    if "\0" in source:
        raise ValueError("an epilogue's source must not have a NUL in it")
    handle = (library or libraries().nvrtc).handle
    program = ctypes.c_void_p()
    name = FILE_NAME.encode()
    _check("nvrtcCreateProgram", handle, ctypes.byref(program), source.encode(), name, 0, None, None)
    try:
        options = [f"-arch={architecture}", "-dlto", "--std=c++17"]
        values = (ctypes.c_char_p * len(options))(*(each.encode() for each in options))
        if status := handle.nvrtcCompileProgram(program, len(options), values):
            log = _sized("nvrtcGetProgramLog", handle, program).rstrip(b"\0").decode(errors="replace")
            if status != _SOURCE_IS_WRONG:
                raise LinkingError(
                    f"NVRTC did not compile for {architecture} (error {status})\n{log}".rstrip()
                )
            raise CompileError(f"NVRTC did not compile the epilogue for {architecture}", log)
        return _sized("nvrtcGetLTOIR", handle, program)
    finally:
        handle.nvrtcDestroyProgram(ctypes.byref(program))


def check_architecture(architecture: str) -> None:
    """ValueError where this is no GPU's architecture."""
    if not _ARCHITECTURE.fullmatch(architecture):
        raise ValueError(f"an architecture is written sm_90a or sm_86, got {architecture!r}")


def _sized(what: str, handle: Any, program: ctypes.c_void_p) -> bytes:
    """What NVRTC gives in two calls: its size, then itself."""
    size = ctypes.c_size_t()
    _check(f"{what}Size", handle, program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _check(what, handle, program, buffer)
    return buffer.raw


def _check(function: str, handle: Any, *arguments: Any) -> None:
    if status := getattr(handle, function)(*arguments):
        raise LinkingError(f"{function} gave error {status}")
