"""Gets the kernels that a call needs, with the epilogue linked into them, and loads them.

It serves all epilogues, built in or made at run time. The kernels of the most used built-in ones are in the package
(`epigemm.linker.cubins`). The others are linked when a call first needs them (`epigemm.linker.cubins`).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress

import torch

from epigemm import progress
from epigemm._native import ops
from epigemm.compilers import capturing
from epigemm.epilogues.registry import Epilogue
from epigemm.epilogues.tracer.source import describe_compile_error
from epigemm.linker import cubins, libraries

_CAPTURING = "its kernel was not linked before, and nothing is compiled while a CUDA graph is captured"
_lock = threading.Lock()
_failed: dict[tuple[str, str, tuple[int, int]], str] = {}
"""Why a kernel was not linked, by the names of the epilogue and the kernel, and the GPU's compute capability."""


def link(epilogue: Epilogue, missing: str, device: torch.device) -> str:
    """Load kernels with an epilogue in them; returns why that is impossible, or an empty text.

    During the capture of a CUDA graph only kernels of the package are loaded. None is linked.

    Raises:
        libraries.CompileError: NVRTC refuses the epilogue, which is a mistake of epigemm's.
    """
    if not missing:
        return ""
    capability = torch.cuda.get_device_capability(device)
    with _lock:
        symbols = [
            symbol for symbol in missing.split(",") if not _load_prelinked(epilogue, symbol, capability)
        ]
        if reason := why_not(epilogue, symbols, capability):
            return reason
        if symbols and capturing(device):
            return _CAPTURING
        return _link(epilogue, symbols, capability) if symbols else ""


def link_for(
    epilogue: Epilogue, symbols: Sequence[str], capability: tuple[int, int]
) -> tuple[list[str], str]:
    """Link kernels into the cache, for a GPU that this machine need not have, except those that are in the package.

    Returns:
        The kernels that the cache did not have; and why they cannot be linked, or an empty text.

    Raises:
        libraries.CompileError: NVRTC refuses the epilogue, which is a mistake of epigemm's.
    """
    symbols = _not_in_package(epilogue, symbols, capability)
    if missing := next((symbol for symbol in symbols if cubins.ir_path(symbol) is None), ""):
        return [], f"this build has no kernel {missing} that epilogues are linked into"
    jobs = _jobs(epilogue, symbols, capability)
    try:
        made = [job for job in jobs if cubins.find(*job) is None]
        _built(epilogue, made)
    except libraries.CompileError:
        raise
    except (libraries.LinkingError, ValueError) as error:
        return [], str(error)
    return [job.symbol for job in made], ""


def link_each(epilogue: Epilogue, missing: Sequence[str], device: torch.device) -> list[str]:
    """`link` for each of these, with all kernels in parallel; for each the reason, or an empty text."""
    symbols = {symbol for each in missing for symbol in each.split(",") if symbol}
    capability = torch.cuda.get_device_capability(device)
    wanted = [each for each in sorted(symbols) if not why_not(epilogue, [each], capability)]
    if not capturing(device):
        with suppress(libraries.CompileError):  # reported below for the kernel that it concerns
            link_for(epilogue, wanted, capability)
    return [link(epilogue, each, device) for each in missing]


def would_link(epilogue: Epilogue, missing: str, device: torch.device) -> str:
    """What `link` would return, as far as that is known without linking anything."""
    if not missing:
        return ""
    capability = torch.cuda.get_device_capability(device)
    symbols = _not_in_package(epilogue, missing.split(","), capability)
    if reason := why_not(epilogue, symbols, capability):
        return reason
    try:
        is_at_hand = all(cubins.find(*job) is not None for job in _jobs(epilogue, symbols, capability))
    except (libraries.LinkingError, ValueError) as error:
        return str(error)
    if is_at_hand:
        return ""
    return _CAPTURING if capturing(device) else libraries.unavailable()


def why_not(epilogue: Epilogue, symbols: Sequence[str], capability: tuple[int, int]) -> str:
    """Why the epilogue cannot be linked into one of these kernels for such a GPU, as far as that is known."""
    for symbol in symbols:
        if reason := _failed.get((epilogue.name, symbol, capability)):
            return reason
        if cubins.ir_path(symbol) is None:
            return f"this build has no kernel {symbol} that epilogues are linked into"
    return ""


def _not_in_package(epilogue: Epilogue, symbols: Sequence[str], capability: tuple[int, int]) -> list[str]:
    return [each for each in symbols if not cubins.is_prelinked(epilogue.prelinked, each, capability)]


def _load_prelinked(epilogue: Epilogue, symbol: str, capability: tuple[int, int]) -> bool:
    """Load a kernel of the package; whether there is one and the driver accepts it."""
    try:
        cubin = cubins.prelinked(epilogue.prelinked, symbol, capability)
        if cubin is not None:
            _add(epilogue, symbol, capability, cubin)
    except (cubins.DamagedError, RuntimeError) as error:
        cubins.give_up(epilogue.prelinked)
        warnings.warn(
            f"epigemm's own kernel {symbol} for {epilogue.name!r} is of no use ({error}); those of this epilogue are "
            "linked anew, or PyTorch's operators stand in. Installing epigemm again may help",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return cubin is not None


def _link(epilogue: Epilogue, symbols: Sequence[str], capability: tuple[int, int]) -> str:
    jobs = _jobs(epilogue, symbols, capability)
    try:
        for symbol, cubin in zip(symbols, _built(epilogue, jobs), strict=True):
            _add(epilogue, symbol, capability, cubin)
    except libraries.CompileError as error:
        what = describe_compile_error(epilogue.traced.program, jobs[0].source, error.log)
        raise libraries.CompileError(f"{epilogue.name.partition('.')[0]}: {what}", error.log) from error
    except (RuntimeError, ValueError) as error:  # nvJitLink refuses the code, or the driver the kernel
        _failed.update({(epilogue.name, symbol, capability): str(error) for symbol in symbols})
        return str(error)
    return ""


def _built(epilogue: Epilogue, jobs: Sequence[cubins.Job]) -> list[bytes]:
    """The kernels' machine code, which may take seconds."""
    count = f"{len(jobs)} kernel{'s' if len(jobs) != 1 else ''}"
    with progress.doing(f"linking {count} of {epilogue.name.partition('.')[0]}"):
        return cubins.build_cubins(jobs)


def _add(epilogue: Epilogue, symbol: str, capability: tuple[int, int], cubin: bytes) -> None:
    major, minor = capability
    ops._add_kernel(
        epilogue.name, 10 * major + minor, symbol, torch.frombuffer(bytearray(cubin), dtype=torch.uint8)
    )


def _jobs(epilogue: Epilogue, symbols: Sequence[str], capability: tuple[int, int]) -> list[cubins.Job]:
    return [
        cubins.Job(epilogue.source(symbol), symbol, path, capability)
        for symbol in symbols
        if (path := cubins.ir_path(symbol)) is not None
    ]
