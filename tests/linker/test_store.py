"""Entries of the cache: their keys and files; what is in the folder, and that others' files stay there."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from epigemm.linker import store
from epigemm.linker.cubins import Job, cubin, find, key_for
from epigemm.linker.store import MAGIC, SUFFIX, decoded, digest, encoded, key_of
from epigemm.planner import times
from tests.linker.fakes import KERNEL_IR, SOURCE, SYMBOL, FakeNvJitLink, FakeNvrtc, forget

PARTS = ("source", digest(b"b"), "symbol", "sm_90a")
KEY, CUBIN = key_of(*PARTS), b"\x7fELF code\n more"


def test_parts_of_a_key_do_not_run_together() -> None:
    assert key_of("a", "bc", "d", "e") != key_of("ab", "c", "d", "e")


def test_a_file_that_is_changed_anywhere() -> None:
    data = encoded(KEY, CUBIN)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(ValueError, match="it"):
            decoded(bytes(changed), KEY)
    for cut in (0, len(MAGIC), len(data) - 1):
        with pytest.raises(ValueError, match="it"):
            decoded(data[:cut], KEY)
    with pytest.raises(ValueError, match="another"):
        decoded(data, key_of("other", *PARTS[1:]))


# --- what is in the folder, and what `--clear-cache` removes ----------------------------------------------------------


@pytest.fixture
def filled(folder: Path) -> Path:
    """A cache with what the package writes, and files of others."""
    store.write("a" * 64, b"\x7fELF kernel")
    store.write("b" * 64, b"\x7fELF another kernel")
    times.merge("NVIDIA H200", [])
    (folder.parent / f"{times.NAME}.tmp").write_text("half")
    (folder / f"{'0' * 16}.tmp").write_text("half a kernel")
    for name in OTHERS:
        file = folder.parent / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("not epigemm's")
    (folder / "link.cubin").symlink_to(folder.parent / "notes.json")
    return folder


OTHERS = (
    "notes.json",
    "measured.json.old",
    "a.tmp",
    "cubins/readme.txt",
    "cubins/short.cubin",
    "other/x.json",
)


def files(where: Path) -> set[str]:
    return {str(each.relative_to(where)) for each in where.rglob("*") if not each.is_dir()}


def test_contents(filled: Path) -> None:
    found = store.contents()
    outer = filled.parent
    ours = files(outer) - {*OTHERS, "cubins/link.cubin"}
    assert {*found.measured, *(f"cubins/{name}" for name in found.linked)} == ours
    assert found.nbytes == sum((outer / name).stat().st_size for name in ours) > 100
    assert str(found) == f"{outer}: 2 linked kernels, measured choices, {found.nbytes} bytes"


def test_what_others_wrote_stays(filled: Path) -> None:
    found = store.contents()
    assert store.clear() == found
    assert files(filled.parent) == {*OTHERS, "cubins/link.cubin"}
    assert store.contents().nbytes == store.clear().nbytes == 0
    assert store.read("a" * 64) is None


def test_no_folder(folder: Path) -> None:
    assert str(store.contents()) == f"{folder.parent} (not there yet)"
    assert store.clear().nbytes == 0 and not folder.parent.exists()


def test_kernels_that_others_could_have_written_are_left(filled: Path) -> None:
    filled.chmod(0o777)
    found = store.clear()
    assert found.linked == {} and "others may write it" in found.why_not_linked
    assert "others may write it" in str(store.contents())
    assert (filled / f"{'a' * 64}{SUFFIX}").exists() and len(found.measured) == 3


# --- files that other users could have written, and how much is kept --------------------------------------------------


Fakes = tuple[FakeNvrtc, FakeNvJitLink]
JOBS = [Job(f"{SOURCE}// {index}", SYMBOL, KERNEL_IR, (9, 0)) for index in range(6)]
JOB = JOBS[0]
FOREIGN = b"\x7fELF planted"


def file_of(cubin_folder: Path, job: Job = JOB) -> Path:
    return cubin_folder / f"{key_for(job)}.cubin"


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("first", ["kernels", "choices"])
def test_what_is_made_is_this_users_alone(
    first: str, fake: Fakes, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where measured choices, which lie beside the kernels, come first."""
    os.umask(0)
    outer = folder.parent.parent / "not" / "there"
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(outer / "yet"))
    folder = outer / "yet" / folder.name
    if first == "choices":
        times.merge("a GPU", [])
        files = [folder.parent / times.NAME, folder.parent / times.LOCK]
        assert [mode_of(path) for path in files] == [0o600, 0o600]
    cubin(*JOB)
    assert [mode_of(path) for path in (outer.parent, outer, folder.parent, folder)] == [0o700] * 4
    assert mode_of(file_of(folder)) == 0o600


def test_the_lock_of_the_choices_is_no_link(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    times.make_folder(folder.parent)
    (folder.parent / times.LOCK).symlink_to(other)
    with pytest.raises(OSError, match=times.LOCK):
        times.merge("a GPU", [])
    assert not other.exists()


# --- planted ---------------------------------------------------------------------------------------------------------


def chmod(mode: int) -> Callable[[Path, pytest.MonkeyPatch], None]:
    return lambda path, _: path.chmod(mode)


def of_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inode, look = path.stat().st_ino, os.fstat
    if path.is_file():
        # Or the file that replaces it might get its number.
        path.parents[2].joinpath("held").hardlink_to(path)

    def fstat(descriptor: int) -> os.stat_result:
        about = list(look(descriptor))
        if about[stat.ST_INO] == inode:
            about[stat.ST_UID] += 1
        return os.stat_result(about)

    monkeypatch.setattr(os, "fstat", fstat)


def behind_a_link(path: Path, _: pytest.MonkeyPatch) -> None:
    target = path.parent.parent / f"elsewhere-{path.name}"
    path.rename(target)
    path.symlink_to(target)


PLANTED: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], None], str]] = {
    "the group": (chmod(0o770), "others may write it (mode 770)"),
    "all": (chmod(0o707), "others may write it (mode 707)"),
    "all, in a folder as /tmp": (chmod(0o1777), "others may write it (mode 1777)"),
    "another user": (of_another_user, "it belongs to another user"),
    "a link": (behind_a_link, "symbolic link"),
}
FOLDERS = [
    pytest.param(plant, why, where, id=f"{where} folder, {name}")
    for name, (plant, why) in PLANTED.items()
    for where in ("outer", "inner")
    if (name, where) != ("a link", "outer")  # the user's own choice: test_a_link_to_the_cache
]


@pytest.fixture
def foreign(fake: Fakes, folder: Path) -> bytes:
    """An entry on disk that is whole, with other machine code; gives the code that is linked here."""
    code = cubin(*JOB)
    path = file_of(folder)
    path.write_bytes(encoded(key_for(JOB), FOREIGN))
    forget()
    assert find(*JOB) == FOREIGN  # what is planted would be taken
    forget()
    return code


@pytest.mark.parametrize(("plant", "why", "where"), FOLDERS)
def test_a_planted_folder_is_neither_read_nor_written(
    plant: Callable[[Path, pytest.MonkeyPatch], None],
    why: str,
    where: str,
    foreign: bytes,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = folder.parent if where == "outer" else folder
    plant(path, monkeypatch)
    planted_entry = file_of(folder).read_bytes()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cubin(*JOB) == foreign
        forget()
        assert find(*JOB) is None
        cubin(*JOBS[1])
    (warning,) = caught
    assert str(path) in str(warning.message) and why in str(warning.message)
    assert file_of(folder).read_bytes() == planted_entry
    assert [each.name for each in folder.iterdir()] == [file_of(folder).name]


@pytest.mark.parametrize(("plant", "why"), PLANTED.values(), ids=PLANTED)
def test_a_planted_file_is_replaced(
    plant: Callable[[Path, pytest.MonkeyPatch], None],
    why: str,
    foreign: bytes,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = file_of(folder)
    plant(path, monkeypatch)
    target = path.resolve()
    before = target.read_bytes()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cubin(*JOB) == foreign
    (warning,) = caught
    assert f"{path} is removed and made again" in str(warning.message) and why in str(warning.message)
    forget()
    assert find(*JOB) == foreign and mode_of(path) == 0o600 and not path.is_symlink()
    assert target == path or target.read_bytes() == before


def test_a_pipe_is_not_waited_for(fake: Fakes, folder: Path) -> None:
    folder.mkdir(parents=True)
    os.mkfifo(file_of(folder))
    with pytest.warns(RuntimeWarning, match="it is no file"):
        cubin(*JOB)
    assert file_of(folder).is_file()


def test_a_link_to_the_cache(fake: Fakes, folder: Path, tmp_path: Path) -> None:
    """The folder around may be elsewhere, where that is as safe."""
    (tmp_path / "large-disk").mkdir(mode=0o700)
    folder.parent.symlink_to(tmp_path / "large-disk")
    code = cubin(*JOB)
    forget()
    assert find(*JOB) == code and file_of(tmp_path / "large-disk" / "cubins").exists()


def test_what_was_checked_is_what_is_read(fake: Fakes, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is exchanged between the check and the read is not the one that is read."""
    code = cubin(*JOB)
    path, look = file_of(folder), os.fstat
    forget()

    def fstat(descriptor: int) -> os.stat_result:
        about = look(descriptor)
        if stat.S_ISREG(about.st_mode):
            path.unlink()
            path.write_bytes(encoded(key_for(JOB), FOREIGN))
        return about

    monkeypatch.setattr(os, "fstat", fstat)
    assert find(*JOB) == code


# --- the limit -------------------------------------------------------------------------------------------------------


def test_the_oldest_used_go_first(fake: Fakes, folder: Path) -> None:
    """Of more than 1 GiB."""
    cubin(*JOB)
    large = [f"{number}" * 64 + SUFFIX for number in range(2)]
    for time, name in enumerate(("notes.txt", "left.tmp", file_of(folder).name, *large)):
        with (folder / name).open("ab") as file:
            file.truncate(file.tell() or 600 << 20)
        os.utime(folder / name, (0, 1000 + time))
    forget()
    assert find(*JOB) is not None  # the last used one from now on
    cubin(*JOBS[1])
    left = {file_of(folder, job).name for job in JOBS[:2]}
    assert {each.name for each in folder.iterdir()} == {*left, large[1], "notes.txt"}
