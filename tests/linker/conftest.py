"""An empty cache of linked kernels, and libraries that are fakes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from epigemm.planner import times
from tests.linker.fakes import FakeNvJitLink, FakeNvrtc, fakes, forget
from tests.support.pretended import pretend_linking


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of linked kernels, not made yet; nothing in memory, nothing found yet."""
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    times._warned.clear()
    before = os.umask(0o022)  # what a test plants, nobody else may write unless the test says so
    yield tmp_path / "cache" / "cubins"
    os.umask(before)
    forget()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeNvrtc, FakeNvJitLink]:
    """NVRTC and nvJitLink of CUDA 13.0 that are fakes."""
    nvrtc, linker, pair = fakes()
    pretend_linking(monkeypatch, found=pair)
    return nvrtc, linker


@pytest.fixture
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without them."""
    pretend_linking(monkeypatch, found="nvJitLink was not found")
