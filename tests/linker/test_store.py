"""Entries of the cache: what their key consists of, what a file contains, and values that are made once."""

from __future__ import annotations

import pytest

from epigemm.linker import store
from epigemm.linker.store import MAGIC, decoded, digest, encoded, key_of

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
