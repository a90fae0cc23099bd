"""Which NVRTC and nvJitLink are loaded, and what is reported where none is usable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from epigemm.linker import libraries
from epigemm.linker.libraries import LibrariesMissingError, Version
from tests.linker.fakes import FakeNvJitLink, FakeNvrtc


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
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with nothing on it but what a test adds; `packages` is on sys.path."""
    machine = Machine(tmp_path)
    for variable in ("EPIGEMM_CUDA_LIBRARIES", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "path", [machine.path("packages")])
    monkeypatch.setattr(sys, "prefix", machine.path("prefix"))
    monkeypatch.setitem(sys.modules, "torch", type(sys)("torch"))
    monkeypatch.setattr(libraries, "_load", machine.load)
    monkeypatch.setattr(libraries, "_loaded", list)
    real = libraries._in
    monkeypatch.setattr(
        libraries,
        "_in",
        lambda kind, folder: real(kind, folder) if folder.is_relative_to(tmp_path) else [],
    )
    return machine


def test_wheels_of_cuda_13_on_the_path(machine: Machine) -> None:
    machine.add("packages/nvidia/cu13/lib", (13, 0), (13, 0))
    machine.add("packages/nvidia/cuda_nvrtc/lib", (12, 8))
    machine.add("packages/nvidia/nvjitlink/lib", None, (12, 8))
    nvrtc, linker = libraries.libraries()
    assert nvrtc.path == machine.path("packages/nvidia/cu13/lib/libnvrtc.so.13")
    assert linker.path == machine.path("packages/nvidia/cu13/lib/libnvJitLink.so.13")
    assert nvrtc.version == linker.version == (13, 0)
    assert libraries.unavailable() == ""


def test_builtins_are_loaded_from_the_folder_of_nvrtc(machine: Machine) -> None:
    machine.add("packages/nvidia/cu13/lib", (13, 0), (13, 0))
    libraries.libraries()
    assert machine.path("packages/nvidia/cu13/lib/libnvrtc-builtins.so.13.0") in machine.loads


def test_nvrtc_without_its_builtins_is_none(machine: Machine) -> None:
    machine.add("packages/nvidia/cu13/lib", (13, 0), (13, 0))
    builtins = machine.root / "packages/nvidia/cu13/lib/libnvrtc-builtins.so.13.0"
    builtins.unlink()
    with pytest.raises(LibrariesMissingError, match=r"libnvrtc-builtins\.so\.13\.0"):
        libraries.libraries()


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_toolkit(variable: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.add("toolkit/lib64", (13, 1), (13, 1))
    monkeypatch.setenv(variable, machine.path("toolkit"))
    assert libraries.libraries().nvrtc.version == (13, 1)


def test_the_order(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place, as long as the ones before it have nothing."""
    torch = type(sys)("torch")
    torch.__file__ = machine.path("site/torch/__init__.py")
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setenv("CUDA_HOME", machine.path("toolkit"))
    monkeypatch.setenv("EPIGEMM_CUDA_LIBRARIES", machine.path("chosen"))
    loaded = machine.path("loaded/libnvJitLink.so.13")
    monkeypatch.setattr(libraries, "_loaded", lambda: [loaded] if Path(loaded).exists() else [])
    places = ["toolkit/lib64", "packages/nvidia/cu13/lib", "site/nvidia/cu13/lib", "loaded", "chosen"]
    for place in places:
        machine.add(place, (13, 0), (13, 0))
        monkeypatch.setattr(libraries, "_found", None)
        pair = libraries.libraries()
        assert {str(Path(each.path).parent) for each in pair} == {machine.path(place)}


def test_the_chosen_folder_may_be_one_of_packages(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.add("elsewhere/nvidia/cu13/lib", (13, 0), (13, 0))
    monkeypatch.setenv("EPIGEMM_CUDA_LIBRARIES", machine.path("elsewhere"))
    assert libraries.unavailable() == ""


def test_the_system_loader_comes_last(machine: Machine) -> None:
    for name, handle in {
        "libnvrtc.so.13": FakeNvrtc((13, 0)),
        "libnvJitLink.so.13": FakeNvJitLink((13, 0)),
        "libnvrtc-builtins.so.13.0": object(),
    }.items():
        machine.files[name] = handle
    assert [each.path for each in libraries.libraries()] == ["libnvrtc.so.13", "libnvJitLink.so.13"]


def test_an_nvrtc_that_is_newer_is_passed_over(machine: Machine) -> None:
    machine.add("packages/nvidia/cu13/lib", (13, 5), (13, 0))
    machine.add("packages/nvidia/other/lib", (13, 0))
    assert libraries.libraries().nvrtc.version == (13, 0)


def test_an_older_nvrtc_goes_with_a_newer_nvjitlink(machine: Machine) -> None:
    machine.add("packages/nvidia/cu13/lib", (13, 0), (13, 5))
    assert [each.version for each in libraries.libraries()] == [(13, 0), (13, 5)]


def test_a_newer_nvjitlink_elsewhere_is_taken_for_the_nvrtc_there_is(machine: Machine) -> None:
    machine.add("packages/nvidia/cu13/lib", (13, 5), (13, 0))
    machine.add("packages/nvidia/other/lib", None, (13, 6))
    assert [each.version for each in libraries.libraries()] == [(13, 5), (13, 6)]


def test_a_file_that_does_not_load_is_passed_over(machine: Machine) -> None:
    machine.add("packages/nvidia/cu13/lib", (13, 0), (13, 0))
    machine.files[machine.path("packages/nvidia/cu13/lib/libnvJitLink.so.13")] = None
    machine.add("packages/nvidia/other/lib", None, (13, 2))
    assert libraries.libraries().nvjitlink.version == (13, 2)


# --- what is said ----------------------------------------------------------------------------------------------------


def test_nothing_is_there(machine: Machine) -> None:
    with pytest.raises(LibrariesMissingError) as caught:
        libraries.libraries()
    text = str(caught.value)
    assert text == "nvJitLink 13.0 or later of CUDA 13 was not found; pip install epigemm[jit]"
    assert libraries.unavailable() == text


def test_a_version_that_is_too_old(machine: Machine) -> None:
    machine.add("packages/nvidia/cuda_nvrtc/lib", (12, 8))
    machine.add("packages/nvidia/nvjitlink/lib", None, (12, 8))
    path = machine.path("packages/nvidia/nvjitlink/lib/libnvJitLink.so.12")
    assert f"nvJitLink 13.0 or later of CUDA 13 was not found (found 12.8 at {path}); pip install" in (
        libraries.unavailable()
    )


def test_nvrtc_alone_is_missing(machine: Machine) -> None:
    machine.add("packages/nvidia/cu13/lib", None, (13, 0))
    assert libraries.unavailable().startswith("NVRTC 13.0 or later of CUDA 13 was not found; pip install")


def test_a_file_that_does_not_load(machine: Machine) -> None:
    machine.add("packages/nvidia/cu13/lib", (13, 0), (13, 0))
    path = machine.path("packages/nvidia/cu13/lib/libnvJitLink.so.13")
    machine.files[path] = object()
    assert f"({path} does not load: it has no nvJitLinkVersion)" in libraries.unavailable()


def test_an_nvrtc_that_is_too_new(machine: Machine) -> None:
    machine.add("packages/nvidia/cu13/lib", (13, 5), (13, 0))
    text = libraries.unavailable()
    assert text.startswith("NVRTC 13.5 (") and "is newer than nvJitLink 13.0 (" in text
    assert text.endswith("pip install 'nvidia-nvjitlink>=13.5,<14'")


def test_the_search_is_made_once(machine: Machine) -> None:
    libraries.unavailable()
    tried = len(machine.loads)
    libraries.unavailable()
    assert len(machine.loads) == tried


def test_what_this_process_has_loaded() -> None:
    """The file names that count, out of this process' real list of files."""
    assert all(Path(each).name.startswith(("libnvrtc.so", "libnvJitLink.so")) for each in libraries._loaded())
    for name, is_one in {"libnvrtc.so.13": True, "libnvrtc.so.13.0.88": True, "libnvrtc.so": False}.items():
        assert libraries._is_file_of(libraries._NVRTC, f"/folder/{name}") is is_one
    for name in ("libnvrtc-builtins.so.13.0", "libnvrtc.alt.so.13", "libnvJitLink.so.13"):
        assert not libraries._is_file_of(libraries._NVRTC, f"/folder/{name}")


@pytest.mark.skipif(bool(libraries.unavailable()), reason=libraries.unavailable().partition(";")[0])
def test_what_the_process_has_loaded_is_taken() -> None:
    """As torch loads them: by their paths, which are on no search path."""
    paths = [each.path for each in libraries.libraries()]
    script = (
        "import ctypes, sys, torch\n"
        "handles = [ctypes.CDLL(each) for each in sys.argv[1:]]\n"
        "from epigemm.linker import libraries, toolchain\n"
        "assert [each.path for each in libraries.libraries()] == sys.argv[1:]\n"
        "assert toolchain.compile_functor('__device__ float one() { return 1; }', 'sm_90a')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "EPIGEMM_CUDA_LIBRARIES"}
    subprocess.run([sys.executable, "-c", script, *map(os.path.realpath, paths)], check=True, env=environment)
