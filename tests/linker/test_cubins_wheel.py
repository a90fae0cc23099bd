"""Kernels that are in the package: found by their names for Hopper, and damaged files are reported."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from epigemm.linker import cubins
from epigemm.linker.cubins import DamagedError

HOPPER, CODE = (9, 0), b"\x7fELF machine code"


@pytest.fixture
def folder_of_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of kernels of the package's: of one epilogue, with one kernel."""
    monkeypatch.setattr(cubins, "_FOLDER", tmp_path)
    monkeypatch.setattr(cubins, "_given_up", set())
    monkeypatch.delenv("EPIGEMM_IR_DIR", raising=False)
    with zipfile.ZipFile(tmp_path / "bias.zip", "w") as archive:
        archive.writestr("kernel", CODE)
        archive.writestr("text", b"no machine code")
    cubins._names.cache_clear()
    yield tmp_path
    cubins._names.cache_clear()


def test_what_is_there(folder_of_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For Hopper, of epilogues that are not given up, as long as no other open kernels are chosen."""
    assert (
        cubins.is_prelinked("bias", "kernel", HOPPER) and cubins.prelinked("bias", "kernel", HOPPER) == CODE
    )
    for question in (
        ("bias", "other", HOPPER),
        ("relu_div", "kernel", HOPPER),
        ("bias", "kernel", (8, 0)),
        ("bias", "kernel", (10, 0)),
    ):
        assert not cubins.is_prelinked(*question) and cubins.prelinked(*question) is None
    monkeypatch.setenv("EPIGEMM_IR_DIR", "/elsewhere")  # other open kernels: everything is linked anew
    assert not cubins.is_prelinked("bias", "kernel", HOPPER)


def test_what_is_damaged(folder_of_package: Path) -> None:
    with pytest.raises(DamagedError, match=r"bias\.zip: it has no machine code"):
        cubins.prelinked("bias", "text", HOPPER)
    data = bytearray((folder_of_package / "bias.zip").read_bytes())
    data[data.index(CODE)] ^= 1
    (folder_of_package / "bias.zip").write_bytes(data)
    with pytest.raises(DamagedError, match=r"bias\.zip: .*CRC"):
        cubins.prelinked("bias", "kernel", HOPPER)
    (folder_of_package / "relu_div.zip").write_bytes(b"no archive")
    assert cubins.is_prelinked("relu_div", "kernel", HOPPER), "to be said when it is read"
    with pytest.raises(DamagedError, match=r"relu_div\.zip: "):
        cubins.prelinked("relu_div", "kernel", HOPPER)
