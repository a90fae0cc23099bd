"""Entries of the cache: their keys and files; what is in the folder, and that others' files stay there."""

from __future__ import annotations

from pathlib import Path

import pytest

from epigemm.linker import store
from epigemm.linker.store import MAGIC, SUFFIX, decoded, digest, encoded, key_of
from epigemm.planner import times

PARTS = ("source", digest(b"b"), "symbol", "sm_90a")
KEY, CUBIN = key_of(*PARTS), b"\x7fELF code\n more"


def test_a_new_format_has_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FORMAT", store.FORMAT + 1)
    assert key_of(*PARTS) != KEY


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
def filled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
