"""NVRTC and nvJitLink as plain Python objects: the functions that the package calls, with their way of answering."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from epigemm.linker import cubins, loader, store
from epigemm.linker.libraries import Libraries, Library, Version
from epigemm.linker.store import Once
from tests.support.pretended import pretend_linking

SOURCE = 'extern "C" __device__ int epigemm_operand(int slot) { return 0; }\n'
BAD_SOURCE = "#error no such thing\n"
SYMBOL = "epigemm_open_elementwise_float32"
KERNEL_IR = b"the kernel's code"
BAD_IR = b"damaged code"


def forget() -> None:
    """As another process: nothing in memory."""
    for kept in (store.made.values, cubins._functors.values, cubins._given_up):
        kept.clear()


def packaged(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """The package's kernels are in this folder."""
    pretend_linking(monkeypatch, package=folder)
    monkeypatch.delenv("EPIGEMM_IR_DIR", raising=False)
    cubins._names.cache_clear()
    yield
    cubins._names.cache_clear()


def put(reference: Any, value: int) -> None:
    """What C does with a pointer that `ctypes.byref` made."""
    reference._obj.value = value


def _told(name: str) -> tuple[Callable[..., int], Callable[..., int]]:
    """Two functions of a library: the size of what a handle has by this name, and a copy of it."""

    def size(self: _Fake, handle: Any, to: Any) -> int:
        put(to, len(self.alive[handle.value][name]))
        return 0

    def copy(self: _Fake, handle: Any, buffer: Any) -> int:
        buffer.raw = self.alive[handle.value][name]
        return 0

    return size, copy


class _Fake:
    def __init__(self, version: Version) -> None:
        self.version = version
        self.calls: list[str] = []
        self.alive: dict[int, dict[str, Any]] = {}
        self._handles = itertools.count(1)
        self._lock = threading.Lock()

    def _tell(self, major: Any, minor: Any) -> int:
        put(major, self.version[0])
        put(minor, self.version[1])
        return 0

    def _create(self, reference: Any, about: dict[str, Any]) -> int:
        with self._lock:
            handle = next(self._handles)
            self.alive[handle] = about
        put(reference, handle)
        return 0

    def _destroy(self, reference: Any) -> int:
        del self.alive[reference._obj.value]
        return 0


class FakeNvrtc(_Fake):
    """Compiles anything without `#error`; `calls` has the options of each compilation."""

    def nvrtcVersion(self, major: Any, minor: Any) -> int:
        return self._tell(major, minor)

    def nvrtcCreateProgram(
        self, program: Any, source: bytes, name: bytes, count: int, headers: None, names: None
    ) -> int:
        return self._create(program, {"source": source, "name": name})

    def nvrtcCompileProgram(self, program: Any, count: int, options: Any) -> int:
        about = self.alive[program.value]
        self.calls.append(" ".join(each.decode() for each in options))
        if b"#error" in about["source"]:
            about["log"] = about["name"] + b"(1): error: #error directive: \xff\0"
            return 6
        about["ir"] = b"ir of " + about["source"]
        return 0

    nvrtcGetProgramLogSize, nvrtcGetProgramLog = _told("log")
    nvrtcGetLTOIRSize, nvrtcGetLTOIR = _told("ir")

    def nvrtcDestroyProgram(self, program: Any) -> int:
        return self._destroy(program)


class FakeNvJitLink(_Fake):
    """Links anything that is not `BAD_IR`, in `seconds`; `most_at_once` counts the links side by side."""

    def __init__(self, version: Version, seconds: float = 0.0) -> None:
        super().__init__(version)
        self.seconds = seconds
        self.most_at_once, self.kinds = 0, list[int]()
        self.drops_the_kernel = False

    def nvJitLinkVersion(self, major: Any, minor: Any) -> int:
        return self._tell(major, minor)

    def nvJitLinkCreate(self, linker: Any, count: int, options: Any) -> int:
        given = [each.decode() for each in options]
        self.calls.append(" ".join(given))
        if "-arch=sm_999" in given:
            return 16
        (symbol,) = (each.partition("=")[2] for each in given if each.startswith("-kernels-used="))
        return self._create(linker, {"symbol": symbol, "inputs": []})

    def nvJitLinkAddData(self, linker: Any, kind: int, data: bytes, size: Any, name: bytes) -> int:
        assert size.value == len(data)
        self.alive[linker.value]["inputs"].append((kind, data, name))
        self.kinds.append(kind)
        return 0

    def nvJitLinkComplete(self, linker: Any) -> int:
        about = self.alive[linker.value]
        self.most_at_once = max(self.most_at_once, len(self.alive))
        time.sleep(self.seconds)
        if any(data == BAD_IR for _, data, _ in about["inputs"]):
            about["log"] = b"parse Malformed block\0"
            return 5
        name = "other" if self.drops_the_kernel else about["symbol"]
        codes = b"".join(data for _, data, _ in about["inputs"])
        about["cubin"] = b"\x7fELF" + codes + f"\0.text.{name}\0".encode()
        return 0

    nvJitLinkGetLinkedCubinSize, nvJitLinkGetLinkedCubin = _told("cubin")
    nvJitLinkGetErrorLogSize, nvJitLinkGetErrorLog = _told("log")

    def nvJitLinkGetInfoLogSize(self, linker: Any, size: Any) -> int:
        put(size, 0)
        return 0

    def nvJitLinkDestroy(self, linker: Any) -> int:
        return self._destroy(linker)


def fakes(seconds: float = 0.0) -> tuple[FakeNvrtc, FakeNvJitLink, Libraries]:
    """Both of CUDA 13.0, and as `libraries` gives them."""
    nvrtc, linker = FakeNvrtc((13, 0)), FakeNvJitLink((13, 0), seconds)
    pair = Libraries(Library(nvrtc, "/nvrtc", (13, 0)), Library(linker, "/nvjitlink", (13, 0)))
    return nvrtc, linker, pair


REAL = {name: getattr(loader, name) for name in ("link", "link_each", "would_link")}
"""The loader's own functions, for `pretend_gpu`."""


class Linking:
    """Linking by the fakes, for a GPU that a CPU stands for.

    Attributes:
        loaded: of each kernel that was loaded what `ran` was then, in their order.
        tried: how often kernels were linked.
        capturing: whether a CUDA graph is captured.
        others: capabilities of other GPUs of the machine.
        bad, absent: whether the open kernel's code is damaged, or not there.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        folder: Path,
        capability: tuple[int, int] = (9, 0),
        seconds: float = 0.0,
    ) -> None:
        _, self.linker, pair = fakes(seconds)
        self.folder, self.build, self.patch = folder, cubins.build_cubins, patch
        self.loaded: dict[str, int] = {}
        self.others: dict[torch.device, tuple[int, int]] = {}
        self.tried, self.capturing = 0, False
        self.bad: Callable[[str], bool] = lambda symbol: False
        self.absent: Callable[[str], bool] = lambda symbol: False
        self.ran: Callable[[], int] = lambda: 0
        functions = {name: getattr(self, name) for name in ("ir_path", "build_cubins", "add_kernel")}
        pretend_linking(patch, found=pair, made=Once(), functors=Once(), failed={}, **functions)
        pretend_linking(patch, capturing=lambda device: self.capturing)
        pretend_linking(patch, capability=lambda device: self.others.get(device, capability))

    def lose_libraries(self) -> str:
        """What is said from now on."""
        pretend_linking(self.patch, found="nvJitLink was not found")
        return "nvJitLink was not found"

    def has(self, names: Iterable[str]) -> bool:
        """Whether these kernels are loaded."""
        return set(names) <= self.loaded.keys()

    def ir_path(self, symbol: str) -> Path | None:
        """As `cubins.ir_path`."""
        if self.absent(symbol):
            return None
        if not (path := self.folder / symbol).is_dir():
            path.write_bytes(BAD_IR if self.bad(symbol) else KERNEL_IR)
        return path

    def build_cubins(self, jobs: Sequence[cubins.Job]) -> list[bytes]:
        """As `cubins.build_cubins`."""
        self.tried += 1
        return self.build(jobs)

    def add_kernel(self, name: str, capability: int, symbol: str, cubin: Any) -> None:
        """As the native module's."""
        self.loaded[symbol] = self.ran()
