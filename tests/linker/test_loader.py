"""Where a call's kernels come from: the package, or a new link; damaged and refused files are reported once."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from epigemm._native import ops
from epigemm.epilogues.library import BIAS_RELU, BIAS_TANH
from epigemm.linker import cubins, libraries, loader
from epigemm.linker.libraries import LinkError
from tests.linker.fakes import packaged

SYMBOL, OTHER = "epigemm_open_sm90_tma_bfloat16_0", "epigemm_open_sm90_tma_bfloat16_1"
DEVICE = torch.device("cuda", 0)
CODE = b"\x7fELF of the package" * 50


class Driver:
    """Stands for the native module, and for the linker behind it."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, str, bytes]] = []
        self.capabilities: list[int] = []
        self.linked: list[str] = []
        self.capturing = False
        self.refuses = b""
        self.cannot_link = ""

    def add_kernel(self, name: str, capability: int, symbol: str, cubin: Tensor) -> None:
        code = bytes(cubin.tolist())
        if self.refuses and code == self.refuses:
            raise RuntimeError("no kernel image is available")
        self.loaded.append((name, symbol, code))
        self.capabilities.append(capability)

    def build_cubins(self, jobs: list[cubins.Job]) -> list[bytes]:
        if self.cannot_link:
            raise LinkError(self.cannot_link, "")
        self.linked += [job.symbol for job in jobs]
        return [b"linked" for _ in jobs]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    with zipfile.ZipFile(tmp_path / "bias_relu.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(SYMBOL, CODE)
    monkeypatch.setattr(loader, "_failed", {})
    monkeypatch.setattr(loader, "capturing", lambda device: driver.capturing)
    monkeypatch.setattr(cubins, "build_cubins", driver.build_cubins)
    monkeypatch.setattr(cubins, "ir_path", lambda symbol: tmp_path / "ir")
    monkeypatch.setattr(cubins, "find", lambda *job: None)
    monkeypatch.setattr(libraries, "unavailable", lambda: "no libraries")
    monkeypatch.setattr(ops, "_add_kernel", driver.add_kernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for _ in packaged(monkeypatch, tmp_path):
        yield driver


def test_the_packages_kernel_is_loaded(driver: Driver) -> None:
    assert loader.would_link(BIAS_RELU, SYMBOL, DEVICE) == ""
    assert loader.link(BIAS_RELU, SYMBOL, DEVICE) == ""
    assert driver.loaded == [("bias_relu", SYMBOL, CODE)] and not driver.linked


def test_others_are_linked(driver: Driver) -> None:
    assert loader.link(BIAS_RELU, f"{SYMBOL},{OTHER}", DEVICE) == ""
    assert loader.link(BIAS_TANH, SYMBOL, DEVICE) == ""
    assert driver.linked == [OTHER, SYMBOL] and len(driver.loaded) == 3
    assert loader.would_link(BIAS_TANH, SYMBOL, DEVICE) == "no libraries"


def test_kernels_are_linked_for_a_gpu_that_is_not_here(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the cache alone; what is there is left, and what fails is remembered of no GPU that is here."""
    symbols = [f"epigemm_open_sm80_mma_bfloat16_{tile}" for tile in range(3)]
    monkeypatch.setattr(cubins, "find", lambda *job: b"there" if job[1] == symbols[1] else None)
    assert loader.link_for(BIAS_RELU, symbols, (8, 0)) == ([symbols[0], symbols[2]], "")
    assert driver.linked == [symbols[0], symbols[2]] and not driver.loaded
    assert loader.link_for(BIAS_RELU, [SYMBOL], (9, 0)) == ([], ""), "it lies in the package"
    driver.cannot_link = "nvJitLink did not"
    assert loader.link_for(BIAS_RELU, symbols, (8, 0)) == ([], "nvJitLink did not")
    assert loader.why_not(BIAS_RELU, symbols, (8, 0)) == ""
    monkeypatch.setattr(cubins, "ir_path", lambda symbol: None)
    linked, reason = loader.link_for(BIAS_RELU, symbols, (8, 0))
    assert not linked and reason.startswith(f"this build has no kernel {symbols[0]}")


def test_what_cannot_be_linked_is_remembered(driver: Driver) -> None:
    driver.cannot_link = "nvJitLink did not"
    assert loader.link(BIAS_TANH, SYMBOL, DEVICE) == "nvJitLink did not"
    driver.cannot_link = ""
    assert loader.would_link(BIAS_TANH, SYMBOL, DEVICE) == "nvJitLink did not"
    assert loader.link(BIAS_RELU, SYMBOL, DEVICE) == "", "another epilogue's"


def test_gpus_of_two_architectures(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has machine code of its own, and what one cannot have says nothing of the other."""
    other = torch.device("cuda", 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: (8, 9) if device == other else (9, 0)
    )
    driver.cannot_link = "nvJitLink did not"
    assert loader.link(BIAS_TANH, SYMBOL, other) == "nvJitLink did not"
    driver.cannot_link = ""
    assert loader.link(BIAS_TANH, SYMBOL, other) == "nvJitLink did not"
    assert loader.link(BIAS_TANH, SYMBOL, DEVICE) == ""
    assert loader.link(BIAS_RELU, SYMBOL, DEVICE) == "" and loader.link(BIAS_RELU, SYMBOL, other) == ""
    assert driver.capabilities == [90, 90, 89]
    assert [code for *_, code in driver.loaded] == [b"linked", CODE, b"linked"]


def test_a_capture_loads_and_links_nothing(driver: Driver) -> None:
    driver.capturing = True
    assert loader.link(BIAS_RELU, SYMBOL, DEVICE) == "" and len(driver.loaded) == 1
    assert "captured" in loader.link(BIAS_RELU, OTHER, DEVICE) and not driver.linked


@pytest.mark.parametrize("damage", ["cut", "changed", "no zip", "no code", "lzma"])
def test_a_damaged_file_is_said_once(driver: Driver, tmp_path: Path, damage: str) -> None:
    file = tmp_path / "bias_relu.zip"
    if damage in ("no code", "lzma"):
        with zipfile.ZipFile(file, "w", zipfile.ZIP_LZMA) as archive:
            archive.writestr(SYMBOL, b"" if damage == "no code" else CODE)
    data = bytearray(file.read_bytes())
    if damage in ("changed", "lzma"):
        data[len(SYMBOL) + (34 if damage == "changed" else 40)] ^= 0xFF
    file.write_bytes(data[: len(data) // 2] if damage == "cut" else b"" if damage == "no zip" else data)
    with pytest.warns(RuntimeWarning, match=rf"{SYMBOL} for 'bias_relu' is of no use \(bias_relu.zip: "):
        assert loader.link(BIAS_RELU, SYMBOL, DEVICE) == ""
    assert driver.linked == [SYMBOL]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loader.link(BIAS_RELU, SYMBOL, DEVICE) == ""


def test_what_the_driver_refuses_is_linked(driver: Driver) -> None:
    driver.refuses = CODE
    with pytest.warns(RuntimeWarning, match=r"is of no use \(no kernel image is available\)"):
        assert loader.link(BIAS_RELU, SYMBOL, DEVICE) == ""
    assert driver.loaded == [("bias_relu", SYMBOL, b"linked")]


def test_what_the_driver_refuses_of_what_was_linked_is_left_alone(driver: Driver) -> None:
    """PyTorch's operators then stand in; nothing is linked again and again."""
    driver.refuses = b"linked"
    for _ in range(2):
        assert loader.link(BIAS_TANH, SYMBOL, DEVICE) == "no kernel image is available"
    assert driver.linked == [SYMBOL]
    assert loader.would_link(BIAS_TANH, SYMBOL, DEVICE) == "no kernel image is available"


def test_code_that_cannot_be_read_is_a_reason(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*job: object) -> bytes:
        raise LinkError("the open kernel's code cannot be read", "")

    monkeypatch.setattr(cubins, "find", refuse)
    assert loader.would_link(BIAS_TANH, SYMBOL, DEVICE) == "the open kernel's code cannot be read"
