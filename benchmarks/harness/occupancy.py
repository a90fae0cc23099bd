"""How many CTAs of a kernel a multiprocessor runs at once, as the driver computes it."""

from __future__ import annotations

import ctypes
from typing import Any

_MAX_THREADS_PER_BLOCK, _MAX_DYNAMIC_SHARED_SIZE_BYTES = 0, 8  # CUfunction_attribute


def ctas_of_multiprocessor(cubin: bytes, symbol: str, shared_bytes: int, driver: Any = None) -> int:
    """Of the current device.

    Args:
        cubin: the kernel's machine code.
        symbol: its name. A CTA has as many threads as its launch bounds say.
        shared_bytes: what a CTA takes of dynamic shared memory.
        driver: libcuda, unless a test has another.

    Raises:
        RuntimeError: the driver refuses the code, or a multiprocessor has no room for a CTA.
        OSError: there is no driver.
    """
    driver = driver or ctypes.CDLL("libcuda.so.1")

    def call(name: str, *given: Any) -> None:
        if error := getattr(driver, name)(*given):
            raise RuntimeError(f"{symbol}: {name} returned CUDA error {error}")

    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    threads, ctas = ctypes.c_int(), ctypes.c_int()
    call("cuModuleLoadData", ctypes.byref(module), cubin)
    try:
        call("cuModuleGetFunction", ctypes.byref(function), module, symbol.encode())
        call("cuFuncGetAttribute", ctypes.byref(threads), _MAX_THREADS_PER_BLOCK, function)
        call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        call(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            *(ctypes.byref(ctas), function, threads, ctypes.c_size_t(shared_bytes)),
        )
    finally:
        driver.cuModuleUnload(module)
    if not ctas.value:
        raise RuntimeError(f"{symbol}: a multiprocessor has no room for a CTA")
    return ctas.value
