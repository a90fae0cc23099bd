"""Kernels that are in the package: found by their names for Hopper, and damaged files are reported."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from epigemm.linker import cubins
from tests.linker.fakes import packaged

HOPPER, CODE = (9, 0), b"\x7fELF machine code"


@pytest.fixture
def folder_of_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of kernels of the package's: of one epilogue, with one kernel."""
    with zipfile.ZipFile(tmp_path / "bias.zip", "w") as archive:
        archive.writestr("kernel", CODE)
        archive.writestr("text", b"no machine code")
    for _ in packaged(monkeypatch, tmp_path):
        yield tmp_path


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
