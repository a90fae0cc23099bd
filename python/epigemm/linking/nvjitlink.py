"""An open kernel and an epilogue to machine code, by nvJitLink."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from epigemm.linking.errors import LinkError
from epigemm.linking.libraries import Library, libraries
from epigemm.linking.nvrtc import check_architecture

_LTOIR, _FATBIN = 3, 4  # nvJitLinkInputType
_FATBIN_MAGIC = b"\x50\xed\x55\xba"

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


def link(
    kernel_ir: bytes, functor_ir: bytes, symbol: str, architecture: str, *, library: Library | None = None
) -> bytes:
    """The cubin of one kernel with one epilogue in it. Any thread may call it; the others go on meanwhile.

    Raises:
        LinkError: nvJitLink refuses the inputs, or the result has no such kernel. It has nvJitLink's log.
        LibrariesMissingError: there is no nvJitLink of use.
        ValueError: the symbol or the architecture is none.
    """
    check_architecture(architecture)
    check_symbol(symbol)
    handle = (library or libraries().nvjitlink).handle
    options = [
        f"-arch={architecture}",
        "-lto",
        "-O3",
        f"-kernels-used={symbol}",
        "-optimize-unused-variables",  # the host reads no variable of the kernel's by its name
    ]
    values = (ctypes.c_char_p * len(options))(*(each.encode() for each in options))
    linker = ctypes.c_void_p()
    if status := handle.nvJitLinkCreate(ctypes.byref(linker), len(options), values):
        raise LinkError(f"nvJitLink does not take its options for {architecture} (error {status})", "")
    try:
        for name, ir in ((symbol, kernel_ir), ("epilogue", functor_ir)):
            kind = _FATBIN if ir.startswith(_FATBIN_MAGIC) else _LTOIR
            size = ctypes.c_size_t(len(ir))
            _check(handle, linker, "nvJitLinkAddData", kind, ir, size, name.encode(), about=name)
        _check(handle, linker, "nvJitLinkComplete", about=symbol)
        size = ctypes.c_size_t()
        _check(handle, linker, "nvJitLinkGetLinkedCubinSize", ctypes.byref(size), about=symbol)
        buffer = ctypes.create_string_buffer(size.value)
        _check(handle, linker, "nvJitLinkGetLinkedCubin", buffer, about=symbol)
    finally:
        handle.nvJitLinkDestroy(ctypes.byref(linker))
    cubin = buffer.raw
    if (
        f".text.{symbol}\0".encode() not in cubin
    ):  # an unknown name is no error of nvJitLink's: nothing is left then
        raise LinkError(f"the code has no kernel {symbol}", "")
    return cubin


def side_by_side(make: Callable[[_Given], _Made], given: Sequence[_Given]) -> list[_Made]:
    """`make` of each in threads, no more than there are processors."""
    if len(given) < 2:
        return [make(each) for each in given]
    workers = min(len(given), len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(workers, thread_name_prefix="epigemm-link") as pool:
        return list(pool.map(make, given))


def check_symbol(symbol: str) -> None:
    """ValueError where this is no kernel's name."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", symbol):
        raise ValueError(f"a kernel's symbol is a C identifier, got {symbol!r}")


def _check(handle: Any, linker: ctypes.c_void_p, function: str, *arguments: Any, about: str) -> None:
    if status := getattr(handle, function)(linker, *arguments):
        log = "\n".join(
            part for part in (_log(handle, linker, "Error"), _log(handle, linker, "Info")) if part
        )
        raise LinkError(f"nvJitLink did not link {about} (error {status} of {function})", log)


def _log(handle: Any, linker: ctypes.c_void_p, which: str) -> str:
    size = ctypes.c_size_t()
    if getattr(handle, f"nvJitLinkGet{which}LogSize")(linker, ctypes.byref(size)) or not size.value:
        return ""
    buffer = ctypes.create_string_buffer(size.value)
    if getattr(handle, f"nvJitLinkGet{which}Log")(linker, buffer):
        return ""
    return buffer.raw.rstrip(b"\0").decode(errors="replace").strip()
