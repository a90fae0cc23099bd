"""Which NVRTC and nvJitLink are loaded, how they are called, and what is reported where none is usable."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from epigemm.linker import libraries
from epigemm.linker.cubins import architecture
from epigemm.linker.libraries import (
    CompileError,
    Libraries,
    LinkError,
    Version,
    compile_functor,
    link,
)
from tests.linker.fakes import BAD_IR, BAD_SOURCE, KERNEL_IR, SOURCE, SYMBOL, FakeNvJitLink, FakeNvrtc


class Machine:
    """Folders with libraries in them: what `ctypes.CDLL` would load."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, Any] = {}
        self.loads: list[str] = []

    def add(self, where: str, nvrtc: Version | None = None, linker: Version | None = None) -> None:
        """Put libraries of these versions into a folder."""
        folder = self.root / where
        folder.mkdir(parents=True, exist_ok=True)
        if nvrtc:
            self._add(folder / f"libnvrtc.so.{nvrtc[0]}", FakeNvrtc(nvrtc))
            self._add(folder / f"libnvrtc-builtins.so.{nvrtc[0]}.{nvrtc[1]}", object())
            self._add(folder / f"libnvrtc.alt.so.{nvrtc[0]}", None)
        if linker:
            self._add(folder / f"libnvJitLink.so.{linker[0]}", FakeNvJitLink(linker))

    def _add(self, path: Path, handle: Any) -> None:
        path.touch()
        self.files[str(path)] = handle

    def load(self, path: str) -> Any:
        self.loads.append(path)
        if self.files.get(path) is None:
            raise OSError(f"{path}: cannot open shared object file")
        return self.files[path]

    def path(self, where: str) -> str:
        return str(self.root / where)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine with nothing on it but what a test adds; `packages` is on sys.path."""
    machine = Machine(tmp_path)
    for variable in ("EPIGEMM_CUDA_LIBRARIES", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "path", [machine.path("packages")])
    monkeypatch.setattr(sys, "prefix", machine.path("prefix"))
    monkeypatch.setitem(sys.modules, "torch", type(sys)("torch"))
    monkeypatch.setattr(ctypes, "CDLL", machine.load)
    libraries._load.cache_clear()
    yield machine
    libraries._load.cache_clear()


PACKAGE, OTHER = "packages/nvidia/cu13/lib", "packages/nvidia/other/lib"
Added = list[tuple[str, Version | None, Version | None]]
FOUND: dict[str, tuple[Added, dict[str, str], list[Version]]] = {
    "wheels of CUDA 13 beside those of 12": (
        [(PACKAGE, (13, 0), (13, 0)), ("packages/nvidia/cuda_nvrtc/lib", (12, 8), (12, 8))], {}, [(13, 0), (13, 0)],
    ),
    "a toolkit": ([("toolkit/lib64", (13, 1), (13, 1))], {"CUDA_HOME": "toolkit"}, [(13, 1), (13, 1)]),
    "another toolkit": ([("toolkit/lib64", (13, 1), (13, 1))], {"CUDA_PATH": "toolkit"}, [(13, 1), (13, 1)]),
    "a chosen folder of packages": (
        [("elsewhere/nvidia/cu13/lib", (13, 0), (13, 0))], {"EPIGEMM_CUDA_LIBRARIES": "elsewhere"}, [(13, 0), (13, 0)],
    ),
    "an NVRTC that is newer is passed over": (
        [(PACKAGE, (13, 5), (13, 0)), (OTHER, (13, 0), None)], {}, [(13, 0), (13, 0)],
    ),
    "an older NVRTC goes with a newer nvJitLink": ([(PACKAGE, (13, 0), (13, 5))], {}, [(13, 0), (13, 5)]),
    "a newer nvJitLink elsewhere": (
        [(PACKAGE, (13, 5), (13, 0)), (OTHER, None, (13, 6))], {}, [(13, 5), (13, 6)],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("added", "variables", "versions"), FOUND.values(), ids=FOUND)
def test_which_are_taken(
    added: Added,
    variables: dict[str, str],
    versions: list[Version],
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NVRTC's builtins are loaded from its folder."""
    for each in added:
        machine.add(*each)
    for name, place in variables.items():
        monkeypatch.setenv(name, machine.path(place))
    found = libraries._search()
    assert isinstance(found, Libraries) and [each.version for each in found] == versions
    folder, version = Path(found.nvrtc.path).parent, ".".join(map(str, found.nvrtc.version))
    assert str(folder / f"libnvrtc-builtins.so.{version}") in machine.loads


def test_the_order(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place, as long as the ones before it have nothing."""
    torch = type(sys)("torch")
    torch.__file__ = machine.path("site/torch/__init__.py")
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setenv("CUDA_HOME", machine.path("toolkit"))
    monkeypatch.setenv("EPIGEMM_CUDA_LIBRARIES", machine.path("chosen"))
    for place in ("toolkit/lib64", "packages/nvidia/cu13/lib", "site/nvidia/cu13/lib", "chosen"):
        machine.add(place, (13, 0), (13, 0))
        pair = libraries._search()
        assert isinstance(pair, Libraries)
        assert {str(Path(each.path).parent) for each in pair} == {machine.path(place)}


# --- what is said ----------------------------------------------------------------------------------------------------

OF_12 = "packages/nvidia/nvjitlink/lib"
SAID: dict[str, tuple[Added, str]] = {
    "nothing": ([], "nvJitLink 13.0 or later of CUDA 13 was not found ... ; pip install epigemm[jit]"),
    "too old": (
        [(OF_12, (12, 8), (12, 8))],
        f"nvJitLink 13.0 or later of CUDA 13 was not found ... found 12.8 at {{root}}/{OF_12}/libnvJitLink.so.12",
    ),
    "no NVRTC": (
        [(PACKAGE, None, (13, 0))],
        "NVRTC 13.0 or later of CUDA 13 was not found ... ; pip install",
    ),
    "too new": ([(PACKAGE, (13, 5), (13, 0))], "pip install 'nvidia-nvjitlink>=13.5,<14'"),
    "without builtins": ([(PACKAGE, (13, 0), (13, 0))], "libnvrtc-builtins.so.13.0"),
    "no library": (
        [(PACKAGE, (13, 0), (13, 0))],
        "libnvJitLink.so.13 does not load: it has no nvJitLinkVersion",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_said(name: str, machine: Machine) -> None:
    added, words = SAID[name]
    for each in added:
        machine.add(*each)
    if name == "without builtins":
        (machine.root / PACKAGE / "libnvrtc-builtins.so.13.0").unlink()
    if name == "no library":
        machine.files[machine.path(f"{PACKAGE}/libnvJitLink.so.13")] = object()
    said = str(libraries._search())
    assert all(part in said for part in words.format(root=machine.root).split(" ... "))


@pytest.mark.skipif(bool(libraries.unavailable()), reason=libraries.unavailable().partition(";")[0])
def test_what_the_process_has_loaded_is_taken() -> None:
    """As torch loads them: by their paths, which are on no search path."""
    paths = [each.path for each in libraries.libraries()]
    script = (
        "import ctypes, sys, torch\n"
        "handles = [ctypes.CDLL(each) for each in sys.argv[1:]]\n"
        "from epigemm.linker import libraries\n"
        "assert [each.path for each in libraries.libraries()] == sys.argv[1:]\n"
        "assert libraries.compile_functor('__device__ float one() { return 1; }', 'sm_90a')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "EPIGEMM_CUDA_LIBRARIES"}
    subprocess.run([sys.executable, "-c", script, *map(os.path.realpath, paths)], check=True, env=environment)


# --- how they are called, and how their errors are reported -----------------------------------------------------------


Fakes = tuple[FakeNvrtc, FakeNvJitLink]


def test_compile_and_link(fake: Fakes) -> None:
    assert compile_functor(SOURCE, "sm_90a") == b"ir of " + SOURCE.encode()
    assert fake[0].calls == ["-arch=sm_90a -dlto --std=c++17"]
    with pytest.raises(CompileError, match="did not compile the epilogue for sm_90a") as caught:
        compile_functor(BAD_SOURCE, "sm_90a")
    assert caught.value.log == "epilogue.cu(1): error: #error directive: \ufffd" in str(caught.value)
    cubin = link(KERNEL_IR, b"the functor's", SYMBOL, "sm_90a")
    assert cubin.startswith(b"\x7fELF" + KERNEL_IR + b"the functor's")
    (options,) = fake[1].calls
    assert options == f"-arch=sm_90a -lto -O3 -kernels-used={SYMBOL} -optimize-unused-variables"
    assert not fake[0].alive and not fake[1].alive


def test_code_in_a_fatbin_is_told_from_code_alone(fake: Fakes) -> None:
    for ir in (KERNEL_IR, b"\x50\xed\x55\xba" + KERNEL_IR):
        link(ir, b"functor", SYMBOL, "sm_90a")
    assert fake[1].kinds == [3, 3, 4, 3]


def test_code_that_is_refused(fake: Fakes) -> None:
    with pytest.raises(LinkError, match=f"did not link {SYMBOL}") as caught:
        link(BAD_IR, b"functor", SYMBOL, "sm_90a")
    assert caught.value.log == "parse Malformed block"
    assert not fake[1].alive
    with pytest.raises(LinkError, match="does not take its options for sm_999"):
        link(KERNEL_IR, b"functor", SYMBOL, "sm_999")
    fake[1].drops_the_kernel = True
    with pytest.raises(LinkError, match=f"the code has no kernel {SYMBOL}"):
        link(KERNEL_IR, b"functor", SYMBOL, "sm_90a")


@pytest.mark.parametrize(
    ("symbol", "capability", "expected"),
    [
        ("epigemm_open_sm90_tma_bfloat16_0", (9, 0), "sm_90a"),
        ("epigemm_open_elementwise_float32", (9, 0), "sm_90a"),
        ("epigemm_open_elementwise_float32", (8, 0), "sm_80"),
        ("epigemm_open_elementwise_float32", (8, 9), "sm_89"),
        ("epigemm_open_elementwise_float32", (12, 0), "sm_120"),
        ("epigemm_open_elementwise_float32", (7, 5), None),
        ("epigemm_open_sm90_tma_bfloat16_0", (10, 0), None),
        ("epigemm_open_sm90_tma_bfloat16_0", (8, 0), None),
    ],
)
def test_architecture(symbol: str, capability: tuple[int, int], expected: str | None) -> None:
    if expected:
        assert architecture(symbol, capability) == expected
    else:
        with pytest.raises(ValueError, match="does not run on GPUs of compute capability"):
            architecture(symbol, capability)
