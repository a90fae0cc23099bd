"""Where a call's kernels come from: the package, or a new link; damaged and refused files are reported once."""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from epigemm.epilogues.library import BIAS_RELU, BIAS_TANH
from epigemm.linker import loader
from tests.linker.fakes import Linking, packaged

SYMBOL, OTHER = "epigemm_open_elementwise_bfloat16", "epigemm_open_elementwise_float16"
DEVICE = torch.device("cuda", 0)
CODE = b"\x7fELF of the package" * 50


class Driver(Linking):
    """Linking by fakes, and the native module: what it has loaded, and code that it refuses."""

    refuses = b""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.codes: list[tuple[str, str, bytes, int]] = []
        super().__init__(patch, folder)

    def add_kernel(self, name: str, capability: int, symbol: str, cubin: Tensor) -> None:
        code = bytes(cubin.tolist())
        if self.refuses and self.refuses in code:
            raise RuntimeError("no kernel image is available")
        self.codes.append((name, symbol, code, capability))

    @property
    def linked(self) -> list[str]:
        """The kernels that were linked, in alphabetical order."""
        return sorted(re.findall(r"-kernels-used=(\w+)", " ".join(self.linker.calls)))

    @property
    def of_package(self) -> list[bool]:
        """Of each kernel that was loaded whether it is the package's."""
        return [code == CODE for _, _, code, _ in self.codes]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    with zipfile.ZipFile(tmp_path / "bias_relu.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(SYMBOL, CODE)
    driver = Driver(monkeypatch, tmp_path)
    for _ in packaged(monkeypatch, tmp_path):
        yield driver


def test_the_packages_kernel_is_loaded(driver: Driver) -> None:
    assert loader.would_link(BIAS_RELU, SYMBOL, DEVICE) == ""
    assert loader.link(BIAS_RELU, SYMBOL, DEVICE) == ""
    assert driver.codes == [("bias_relu", SYMBOL, CODE, 90)] and not driver.linked


def test_others_are_linked(driver: Driver) -> None:
    assert loader.link(BIAS_RELU, f"{SYMBOL},{OTHER}", DEVICE) == ""
    assert loader.link(BIAS_TANH, SYMBOL, DEVICE) == ""
    assert driver.linked == [SYMBOL, OTHER] and sorted(driver.of_package) == [False, False, True]
    reason = driver.lose_libraries()
    assert loader.would_link(BIAS_TANH, SYMBOL, DEVICE) == "", "in the cache"
    assert loader.would_link(BIAS_TANH, OTHER, DEVICE) == reason


def test_kernels_are_linked_for_a_gpu_that_is_not_here(driver: Driver) -> None:
    """Into the cache alone; what is there is left, and what fails is remembered of no GPU that is here."""
    symbols = [f"epigemm_open_sm80_mma_bfloat16_{tile}" for tile in range(3)]
    assert loader.link_for(BIAS_RELU, symbols[1:2], (8, 0)) == (symbols[1:2], "")
    assert loader.link_for(BIAS_RELU, symbols, (8, 0)) == ([symbols[0], symbols[2]], "")
    assert driver.linked == symbols and not driver.codes
    assert loader.link_for(BIAS_RELU, [SYMBOL], (9, 0)) == ([], ""), "it lies in the package"
    driver.bad = lambda symbol: True
    linked, reason = loader.link_for(BIAS_TANH, symbols, (8, 0))
    assert not linked and "Malformed" in reason
    assert loader.why_not(BIAS_TANH, symbols, (8, 0)) == ""
    driver.absent = lambda symbol: True
    linked, reason = loader.link_for(BIAS_TANH, symbols, (8, 0))
    assert not linked and reason.startswith(f"this build has no kernel {symbols[0]}")


def test_what_cannot_be_linked_is_remembered(driver: Driver) -> None:
    driver.bad = lambda symbol: True
    reason = loader.link(BIAS_TANH, SYMBOL, DEVICE)
    driver.bad = lambda symbol: False
    assert "Malformed" in reason and loader.would_link(BIAS_TANH, SYMBOL, DEVICE) == reason
    assert loader.link(BIAS_RELU, SYMBOL, DEVICE) == "", "another epilogue's"


def test_gpus_of_two_architectures(driver: Driver) -> None:
    """Each has machine code of its own, and what one cannot have says nothing of the other."""
    other = torch.device("cuda", 1)
    driver.others[other] = (8, 9)
    driver.bad = lambda symbol: True
    reason = loader.link(BIAS_TANH, SYMBOL, other)
    driver.bad = lambda symbol: False
    assert "Malformed" in reason and loader.link(BIAS_TANH, SYMBOL, other) == reason
    assert loader.link(BIAS_TANH, SYMBOL, DEVICE) == ""
    assert loader.link(BIAS_RELU, SYMBOL, DEVICE) == "" and loader.link(BIAS_RELU, SYMBOL, other) == ""
    assert [capability for *_, capability in driver.codes] == [90, 90, 89]
    assert driver.of_package == [False, True, False]


def test_a_capture_loads_and_links_nothing(driver: Driver) -> None:
    driver.capturing = True
    assert loader.link(BIAS_RELU, SYMBOL, DEVICE) == "" and driver.of_package == [True]
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
    assert driver.of_package == [False] and driver.linked == [SYMBOL]


def test_what_the_driver_refuses_of_what_was_linked_is_left_alone(driver: Driver) -> None:
    """PyTorch's operators then stand in; nothing is linked again and again."""
    driver.refuses = b"ELF"
    for _ in range(2):
        assert loader.link(BIAS_TANH, SYMBOL, DEVICE) == "no kernel image is available"
    assert driver.linked == [SYMBOL]
    assert loader.would_link(BIAS_TANH, SYMBOL, DEVICE) == "no kernel image is available"


def test_code_that_cannot_be_read_is_a_reason(driver: Driver) -> None:
    (driver.folder / SYMBOL).mkdir()
    assert "the open kernel's code cannot be read: " in loader.would_link(BIAS_TANH, SYMBOL, DEVICE)
