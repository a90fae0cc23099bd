"""The cache of linked kernels as one file: round trips, and files with something else in them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from epigemm.linking import libraries, store
from epigemm.linking.cubins import Job, cubin, find, key_for
from epigemm.linking.store import Once, export_cache, import_cache
from tests.linking.fakes import KERNEL_IR, SOURCE, SYMBOL, FakeNvJitLink, FakeNvrtc

Fakes = tuple[FakeNvrtc, FakeNvJitLink]
JOBS = [Job(f"{SOURCE}// {index}", SYMBOL, KERNEL_IR, (9, 0)) for index in range(3)]


@pytest.fixture
def other_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], Path]:
    """Go to a machine with an empty cache and without libraries; gives the cache's folder."""

    def go() -> Path:
        monkeypatch.setattr(store, "made", Once())
        monkeypatch.setattr(libraries, "_found", "there are none")
        monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path / "other"))
        return tmp_path / "other" / "cubins"

    return go


def test_to_a_machine_without_libraries(
    fake: Fakes, tmp_path: Path, other_machine: Callable[[], Path]
) -> None:
    codes = [cubin(*job) for job in JOBS]
    assert export_cache(tmp_path / "kernels.zip") == 3
    folder = other_machine()
    assert [find(*job) for job in JOBS] == [None] * 3
    assert import_cache(str(tmp_path / "kernels.zip")) == 3
    assert [cubin(*job) for job in JOBS] == codes
    assert len(list(folder.iterdir())) == 3
    other_machine()  # another process there: from disk
    assert [find(*job) for job in JOBS] == codes


def test_where_nothing_can_be_written(fake: Fakes, tmp_path: Path, other_machine: Callable[[], Path]) -> None:
    code = cubin(*JOBS[0])
    export_cache(tmp_path / "kernels.zip")
    other_machine().parent.write_text("a file")
    with pytest.warns(RuntimeWarning, match="last as long as this process"):
        assert import_cache(tmp_path / "kernels.zip") == 1
    assert find(*JOBS[0]) == code


def test_what_memory_alone_has_is_exported_too(fake: Fakes, tmp_path: Path, folder: Path) -> None:
    cubin(*JOBS[0])
    (path,) = folder.iterdir()
    path.unlink()
    cubin(*JOBS[1])
    assert export_cache(tmp_path / "kernels.zip") == 2


def test_some_entries(fake: Fakes, tmp_path: Path) -> None:
    for job in JOBS:
        cubin(*job)
    only = [key_for(JOBS[1]), key_for(JOBS[1])]
    assert export_cache(tmp_path / "kernels.zip", only) == 1
    assert zipfile.ZipFile(tmp_path / "kernels.zip").namelist() == [f"{only[0]}.cubin"]
    for key in ("0" * 64, "../../etc/passwd"):
        with pytest.raises(ValueError, match="the cache has no linked kernel"):
            export_cache(tmp_path / "none.zip", [*only, key])
    assert not (tmp_path / "none.zip").exists()
    assert export_cache(tmp_path / "empty.zip", []) == import_cache(tmp_path / "empty.zip") == 0


def test_a_damaged_entry_is_not_exported(
    fake: Fakes, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for job in JOBS:
        cubin(*job)
    (folder / f"{key_for(JOBS[0])}.cubin").write_bytes(b"hello")
    (folder / "notes.txt").write_text("not ours")
    monkeypatch.setattr(store, "made", Once())
    with pytest.warns(RuntimeWarning, match="is removed"):
        assert export_cache(tmp_path / "kernels.zip") == 2


def test_a_folder_that_takes_no_file(fake: Fakes, tmp_path: Path) -> None:
    cubin(*JOBS[0])
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        export_cache(tmp_path / "file" / "kernels.zip")
    with pytest.raises(FileNotFoundError):
        import_cache(tmp_path / "none.zip")


def refusal(path: Path) -> str:
    """Why a file is not taken; empty where it is."""
    try:
        import_cache(path)
    except ValueError as error:
        return str(error)
    return ""


def test_a_damaged_file_gives_nothing_or_what_was_in_it(
    fake: Fakes, tmp_path: Path, other_machine: Callable[[], Path]
) -> None:
    """Cut anywhere, and any byte of it changed: never half of the entries, never a wrong one."""
    codes = [cubin(*job) for job in JOBS[:2]]
    path = tmp_path / "kernels.zip"
    export_cache(path)
    whole = path.read_bytes()
    damaged = [whole[:length] for length in range(0, len(whole), 7)]
    damaged += [
        whole[:index] + bytes([whole[index] ^ 0x41]) + whole[index + 1 :] for index in range(0, len(whole), 3)
    ]
    refused = 0
    for data in damaged:
        folder = other_machine()
        path.write_bytes(data)
        said = refusal(path)
        if said:
            refused += 1
            assert f"nothing is taken of {path}" in said
            assert not folder.exists() or not list(folder.iterdir())
        for job, code in zip(JOBS, codes, strict=False):
            assert find(*job) in (None, code)
        if folder.exists():
            for each in folder.iterdir():
                each.unlink()
    assert refused > len(damaged) // 2


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../../evil.cubin", "no linked kernel"),
        ("notes.txt", "no linked kernel"),
        ("0" * 64, "no linked kernel"),
        ("0" * 64 + ".cubin", "no entry of the cache"),
    ],
)
def test_something_else_in_it(
    name: str, why: str, fake: Fakes, tmp_path: Path, other_machine: Callable[[], Path]
) -> None:
    cubin(*JOBS[0])
    path = tmp_path / "kernels.zip"
    export_cache(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, b"hello")
    folder = other_machine()
    with pytest.raises(ValueError, match=why):
        import_cache(path)
    assert not folder.exists() and find(*JOBS[0]) is None


def test_an_entry_that_would_be_huge(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("0" * 64 + ".cubin", bytes(65 << 20))
    path = tmp_path / "kernels.zip"
    path.write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match="too large"):
        import_cache(path)
