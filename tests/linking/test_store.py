"""Entries of the cache: what their key is made of, what a file says, and values that are made once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from epigemm.linking import store
from epigemm.linking.store import MAGIC, Entry, Once, decode, digest, key_of

ENTRY = Entry(digest(b"a"), digest(b"b"), "symbol", "sm_90a", (13, 0), (13, 2), b"\x7fELF code\n more")
OTHER: dict[str, Any] = {
    "source_digest": digest(b"c"),
    "ir_digest": digest(b"c"),
    "symbol": "other",
    "architecture": "sm_80",
    "nvrtc": (13, 1),
    "nvjitlink": (13, 3),
    "cubin": b"\x7fELF",
}
IN_THE_KEY = {"source_digest", "ir_digest", "symbol", "architecture"}


def test_every_field_is_read_back() -> None:
    assert decode(ENTRY.encode(), ENTRY.key) == ENTRY
    assert set(OTHER) == {field.name for field in fields(Entry)}
    for name, value in OTHER.items():
        other = replace(ENTRY, **{name: value})
        assert decode(other.encode(), other.key) == other != ENTRY


@pytest.mark.parametrize("name", OTHER)
def test_what_a_key_is_made_of(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sources, and nothing of the libraries: newer ones do not make everything again."""
    assert (replace(ENTRY, **{name: OTHER[name]}).key != ENTRY.key) == (name in IN_THE_KEY)


def test_a_new_format_has_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ENTRY.key
    monkeypatch.setattr(store, "FORMAT", store.FORMAT + 1)
    assert ENTRY.key != before


def test_parts_of_a_key_do_not_run_together() -> None:
    assert key_of("a", "bc", "d", "e") != key_of("ab", "c", "d", "e")


def test_a_file_that_is_changed_anywhere() -> None:
    data = ENTRY.encode()
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(ValueError, match=r"no entry|checksum"):
            decode(bytes(changed), ENTRY.key)
    for cut in (0, len(MAGIC), len(data) - 1):
        with pytest.raises(ValueError, match=r"no entry|checksum"):
            decode(data[:cut], ENTRY.key)
    with pytest.raises(ValueError, match="another entry's"):
        decode(data, replace(ENTRY, symbol="other").key)


def test_an_entry_on_disk(folder: Path) -> None:
    assert store.read(ENTRY.key) is None
    store.write(ENTRY)
    assert store.read(ENTRY.key) == ENTRY
    assert [each.name for each in folder.iterdir()] == [f"{ENTRY.key}.cubin"]
    (folder / f"{ENTRY.key}.cubin").write_bytes(b"damaged")
    with pytest.warns(RuntimeWarning, match="removed and made again: it is no entry of the cache"):
        assert store.read(ENTRY.key) is None
    assert not list(folder.iterdir())


def test_threads_make_a_value_once() -> None:
    once, calls, barrier = Once[int](), list[int](), threading.Barrier(8)

    def ask() -> int:
        barrier.wait(60)
        return once.get("key", lambda: calls.append(1) or len(calls))  # type: ignore[func-returns-value]

    with ThreadPoolExecutor(8) as threads:
        assert [each.result() for each in [threads.submit(ask) for _ in range(8)]] == [1] * 8
    assert calls == [1] and once.values == {"key": 1}


def test_what_cannot_be_made_is_tried_again() -> None:
    once = Once[int]()

    def fail() -> int:
        raise OSError("none")

    with pytest.raises(OSError, match="none"):
        once.get("key", fail)
    assert once.values == {} and once.get("key", lambda: 3) == 3 and once.get("key", fail) == 3
