"""Measured choices on disk: round trips, several processes, and everything that can be wrong with a file."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epigemm import plans, tables
from epigemm._native import build_info, ops, registry
from epigemm.tables import Entry

GPU = "NVIDIA H200"
DEVICE = 41
ENTRY = Entry(
    "bias_relu", "bfloat16", "ieee", False, True, False, 8192, 4096, 1024, (3, 0, 2, 1), 100.5, 99.0
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache and no shipped table, for a device that only these tests know."""
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "tuned")
    monkeypatch.setattr(tables, "_warned", set())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    yield tables.cache_path(GPU)
    ops._clear_tuned(DEVICE)


def source(entry: Entry) -> str:
    """Where dispatch's choice for the call that an entry is about comes from."""
    n, k = entry.n, entry.k
    numbers = (entry.m, n, k, k, k, n, 256)
    text = ops._plan_linear(
        entry.epilogue, *numbers, entry.dtype, entry.arithmetic, 90, 132, entry.bias, DEVICE
    )
    return str(json.loads(text)["source"])


def by_key(*entries: Entry) -> tables.Entries:
    return {entry.key: entry for entry in entries}


# --- where ------------------------------------------------------------------------------------------------------------


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", "/chosen")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert tables.cache_dir() == Path("/chosen")
    monkeypatch.delenv("EPIGEMM_CACHE_DIR")
    assert tables.cache_dir() == Path("/xdg/epigemm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert tables.cache_dir() == Path("/home/someone/.cache/epigemm")


def test_a_file_belongs_to_a_gpu_a_version_and_its_kernels() -> None:
    name = tables.cache_path(GPU).name
    info = build_info()
    for part in ("nvidia-h200", info["version"], info["tiles_fingerprint"]):
        assert part in name
    assert tables.slug("NVIDIA GH200 480GB") == "nvidia-gh200-480gb"
    assert tables.shipped_path(GPU).name == "nvidia-h200.json"


# --- round trips ------------------------------------------------------------------------------------------------------

sizes = st.integers(1, 2**31 - 1)
times = st.floats(1e-3, 1e9) | st.integers(1, 10**9)
on_tensors = st.tuples(st.sampled_from(tables.ELEMENTS), st.sampled_from(["ieee", "tf32"]))
on_pieces = st.tuples(st.just("float32"), st.sampled_from(["split", "scaled"]))


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    dtype, arithmetic = draw(on_tensors | on_pieces)
    packed, bias, tf32_allowed = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    m = int(ops._tuned_bucket(draw(st.integers(1, 70000))))
    plan = (draw(st.integers(0, 2)), draw(st.integers(0, 1)), draw(st.integers(1, 8)), 1)
    epilogue = draw(st.sampled_from([each["name"] for each in registry()]))
    return Entry(
        epilogue,
        dtype,
        arithmetic,
        packed,
        bias,
        tf32_allowed,
        draw(sizes),
        draw(sizes),
        m,
        plan,
        draw(times),
        draw(times),
    )


@given(drawn=st.lists(entries(), max_size=20))
def test_what_is_written_is_read(tmp_path: Path, drawn: list[Entry]) -> None:
    path = tmp_path / "table.json"
    tables.write(path, GPU, by_key(*drawn))
    assert tables.read(path) == by_key(*drawn)
    assert list(tmp_path.glob("*.tmp")) == []


def test_entries_are_merged(cache: Path) -> None:
    other, better = replace(ENTRY, m=2048), replace(ENTRY, plan=(2, 1, 1, 1), fused_us=90.0)
    tables.merge(cache, GPU, [ENTRY])
    tables.merge(cache, GPU, [other])
    tables.merge(cache, GPU, [better])
    assert tables.read(cache) == by_key(better, other)


def test_what_is_remembered_decides_and_lasts(cache: Path) -> None:
    tables.remember(DEVICE, [ENTRY])
    assert source(ENTRY) == "cache"
    ops._clear_tuned(DEVICE)
    assert source(ENTRY) == "model"
    tables.load(DEVICE)
    assert source(ENTRY) == "cache"


def test_the_users_cache_comes_before_the_shipped_table(cache: Path) -> None:
    other = replace(ENTRY, m=2048)
    tables.write(tables.shipped_path(GPU), GPU, by_key(ENTRY, other))
    tables.merge(cache, GPU, [ENTRY])
    tables.load(DEVICE)
    assert (source(ENTRY), source(other)) == ("cache", "default")


def test_what_source_texts_say() -> None:
    assert tables.source_text("cache", 0) == "measured on this GPU (cache)"
    assert tables.source_text("default", 0) == "measured on an H200 (default table)"
    assert tables.source_text("model", 0) == "cost model"


def test_the_first_question_about_a_device_loads_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[int] = []
    monkeypatch.setattr(plans, "cuda_status", lambda device: "" if device == DEVICE else "too old")
    monkeypatch.setattr(tables, "load", loaded.append)
    plans._usable.cache_clear()
    try:
        assert [plans._usable(device) for device in (DEVICE, DEVICE, DEVICE + 1)] == [True, True, False]
    finally:
        plans._usable.cache_clear()
    assert loaded == [DEVICE]


# --- several processes ------------------------------------------------------------------------------------------------

WRITERS, EACH = 4, 12


def write_some(path: str, first: int) -> None:
    for i in range(EACH):
        tables.merge(Path(path), GPU, [replace(ENTRY, n=first + i + 1)])


def test_processes_that_write_at_once_lose_nothing(cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_some, args=(str(cache), i * EACH)) for i in range(WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert sorted(entry.n for entry in tables.read(cache).values()) == list(range(1, WRITERS * EACH + 1))
    assert not list(cache.parent.glob("*.tmp"))


# --- what can be wrong ------------------------------------------------------------------------------------------------


def repeat(action: Callable[[], None]) -> None:
    for _ in range(3):
        action()


def damaged(change: Callable[[dict[str, Any]], Any]) -> str:
    """A table that was right before `change`."""
    about = {"format": tables.FORMAT, "kernels": build_info()["tiles_fingerprint"]}
    table = {**about, "entries": [ENTRY.to_json()]}
    changed = change(table)
    return json.dumps(table if changed is None else changed)


def in_entry(**values: Any) -> str:
    return damaged(lambda table: table["entries"][0].update(values))


DAMAGED = {
    "empty": "",
    "truncated": damaged(lambda table: None)[:-20],
    "not JSON": "plan: fast",
    "deeply nested": "[" * 100000,
    "a list": "[]",
    "no format": damaged(lambda table: {"entries": []}),
    "format of another type": damaged(lambda table: {**table, "format": "1"}),
    "no entries": damaged(lambda table: {**table, "entries": None}),
    "an entry that is none": damaged(lambda table: {**table, "entries": [3]}),
    "an entry without a plan": damaged(lambda table: table["entries"][0].pop("plan") and None),
    "an entry with more": in_entry(extra=1),
    "epilogue": in_entry(epilogue="no_such"),
    "epilogue of another type": in_entry(epilogue=3),
    "dtype": in_entry(dtype="float64"),
    "arithmetic": in_entry(arithmetic="fast"),
    "flag": in_entry(packed=1),
    "n": in_entry(n="8192"),
    "a negative k": in_entry(k=-1),
    "an m that is no edge": in_entry(m=1000),
    "a huge m": in_entry(m=2**70),
    "a time of no kind": in_entry(fused_us=None),
    "a time that is no number": in_entry(torch_us=float("nan")),
    "no time": in_entry(fused_us=0),
    "a short plan": in_entry(plan=[0, 0, 1]),
    "a plan of floats": in_entry(plan=[0, 0, 1.0, 1]),
    "a tile that is not built": in_entry(plan=[99, 0, 1, 1]),
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_ignored_with_one_warning_and_written_anew(text: str, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(text)
    with pytest.warns(RuntimeWarning, match="are ignored") as caught:
        repeat(lambda: tables.load(DEVICE))
    assert len(caught) == 1 and str(cache) in str(caught[0].message)
    assert source(ENTRY) == "model"
    tables.remember(DEVICE, [replace(ENTRY, m=64)])
    assert tables.read(cache) == by_key(replace(ENTRY, m=64))
    assert source(replace(ENTRY, m=64)) == "cache"


def test_bytes_that_are_no_text(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(b"\xff\xfe\x00")
    with pytest.warns(RuntimeWarning, match="are ignored"):
        tables.load(DEVICE)


OTHER = {
    "format": damaged(lambda table: {**table, "format": tables.FORMAT + 1, "entries": "anything"}),
    "kernels": damaged(lambda table: {**table, "kernels": "0" * 16}),
}


@pytest.mark.parametrize("text", OTHER.values(), ids=OTHER)
@pytest.mark.parametrize("shipped", [False, True])
def test_another_version_is_ignored_silently(text: str, shipped: bool, cache: Path) -> None:
    path = tables.shipped_path(GPU) if shipped else cache
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tables.load(DEVICE)
    assert source(ENTRY) == "model"


def test_a_folder_that_cannot_be_written(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning; choices last as long as the process."""
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(blocked))
    with pytest.warns(RuntimeWarning, match="cannot be written") as caught:
        repeat(lambda: tables.remember(DEVICE, [ENTRY]))
    assert len(caught) == 1
    assert source(ENTRY) == "cache"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        with pytest.warns(RuntimeWarning, match="cannot be written"):
            tables.remember(DEVICE, [ENTRY])
    finally:
        cache.parent.chmod(stat.S_IRWXU)
    assert source(ENTRY) == "cache"


def test_a_write_that_fails_leaves_the_old_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables.merge(cache, GPU, [ENTRY])

    def fail(self: Path, target: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.warns(RuntimeWarning, match="no space left"):
        tables.remember(DEVICE, [replace(ENTRY, m=64)])
    assert tables.read(cache) == by_key(ENTRY)
    assert not list(cache.parent.glob("*.tmp"))
