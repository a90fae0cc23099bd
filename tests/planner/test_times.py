"""Measured choices on disk: round trips, several processes, and everything that can be wrong with a file."""

from __future__ import annotations

import json
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epigemm._native import build_info, registry
from epigemm.planner import times
from epigemm.planner.times import Entry
from tests.support.choices import forget
from tests.support.pretended import describe
from tools.planner import ask_planner

GPU = "NVIDIA H200"
DEVICE = 41
ENTRY = Entry(
    "bias_relu", "bfloat16", "ieee", False, True, False, 1024, 8192, 4096, (0, 3, 0, 2, 1), 100.5, 99.0
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, for a device that only these tests know."""
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path / "cache"))
    times._warned.clear()
    describe(monkeypatch, (), name=GPU)
    yield times.cache_dir() / times.NAME
    forget(DEVICE)


def source(entry: Entry) -> str:
    """Where the planner's choice for the call that an entry is about comes from."""
    sizes = (entry.epilogue, entry.m, entry.n, entry.k, entry.dtype, entry.arithmetic)
    return str(ask_planner(*sizes, has_bias=entry.bias, gpu=(90, 132), device=DEVICE)["source"])


def by_key(*entries: Entry) -> times.Entries:
    return {entry.key: entry for entry in entries}


# --- where ------------------------------------------------------------------------------------------------------------


def kept(gpu: str = GPU) -> times.Entries:
    """What the file has for a GPU."""
    return times.in_table(times.read(), gpu)


# --- round trips ------------------------------------------------------------------------------------------------------

sizes = st.integers(1, 2**31 - 1)
us = st.floats(1e-3, 1e9) | st.integers(1, 10**9)
on_tensors = st.tuples(
    st.sampled_from([("float16", "ieee"), ("bfloat16", "ieee"), ("float32", "tf32")]), st.sampled_from([0, 1])
)
on_pieces = st.tuples(st.sampled_from([("float32", "split"), ("float32", "scaled")]), st.just(2))


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    (dtype, arithmetic), family = draw(on_tensors | on_pieces)
    packed, bias, tf32_allowed = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    splits = draw(st.sampled_from([1, 2, 4, 8])) if family == 1 else 1
    plan = (family, draw(st.integers(0, 2)), draw(st.integers(0, 1)), draw(st.integers(1, 8)), splits)
    epilogue = draw(st.sampled_from([each["name"] for each in registry()]))
    return Entry(
        *(epilogue, dtype, arithmetic, packed, bias, tf32_allowed),
        *draw(st.tuples(sizes, sizes, sizes)),
        plan,
        *draw(st.tuples(us, us)),
    )


@given(drawn=st.lists(entries(), max_size=20))
def test_what_is_written_is_read(drawn: list[Entry]) -> None:
    (times.cache_dir() / times.NAME).unlink(missing_ok=True)
    times.merge(GPU, drawn)
    assert kept() == by_key(*drawn)
    assert list(times.cache_dir().glob("*.tmp")) == []


def test_what_is_remembered_decides_and_lasts(cache: Path) -> None:
    """On disk as in the planner; a new time replaces the old one."""
    times.remember(DEVICE, [ENTRY, replace(ENTRY, m=64)])
    assert source(ENTRY) == "cache"
    forget(DEVICE)
    assert source(ENTRY) == "model"
    times.load(DEVICE)
    assert source(ENTRY) == "cache"
    better = replace(ENTRY, plan=(0, 2, 1, 1, 1), fused_us=90.0)
    times.remember(DEVICE, [better])
    assert kept() == by_key(better, replace(ENTRY, m=64))
    assert source(better) == source(replace(ENTRY, m=64)) == "cache"


# --- several processes ------------------------------------------------------------------------------------------------

WRITERS, EACH = 4, 12


def write_some(first: int) -> None:
    for i in range(EACH):
        times.merge(GPU, [replace(ENTRY, n=first + i + 1)])


def test_processes_that_write_at_once_lose_nothing(cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_some, args=(i * EACH,)) for i in range(WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert sorted(entry.n for entry in kept().values()) == list(range(1, WRITERS * EACH + 1))
    assert not list(cache.parent.glob("*.tmp"))


# --- what can be wrong ------------------------------------------------------------------------------------------------


def repeat(action: Callable[[], None]) -> None:
    for _ in range(3):
        action()


def damaged(change: Callable[[list[Any]], Any]) -> str:
    """A table that was right before `change` of its entries."""
    entries: list[Any] = [asdict(ENTRY)]
    changed = change(entries)
    return json.dumps({times.build(): {GPU: entries if changed is None else changed}})


def in_entry(**values: Any) -> str:
    return damaged(lambda entries: entries[0].update(values))


DAMAGED = {
    "empty": "",
    "truncated": damaged(lambda entries: None)[:-20],
    "not JSON": "plan: fast",
    "deeply nested": "[" * 100000,
    "a list": "[]",
    "lists": '{"a build": []}',
    "entries of another type": damaged(lambda entries: {"m": 1}),
    "a number of entries": damaged(lambda entries: 3),
    "an entry that is none": damaged(lambda entries: [3]),
    "an entry without a plan": damaged(lambda entries: entries[0].pop("plan") and None),
    "an entry with more": in_entry(extra=1),
    "epilogue of another type": in_entry(epilogue=3),
    "dtype": in_entry(dtype="float64"),
    "arithmetic": in_entry(arithmetic="fast"),
    "flag": in_entry(packed="yes"),
    "n": in_entry(n="8192"),
    "a negative k": in_entry(k=-1),
    "no m": in_entry(m=0),
    "a huge m": in_entry(m=2**70),
    "an m of another type": in_entry(m=1024.0),
    "a time of no kind": in_entry(fused_us=None),
    "a time that is no number": in_entry(torch_us=float("nan")),
    "no time": in_entry(fused_us=0),
    "a short plan": in_entry(plan=[0, 0, 0, 1]),
    "a plan of floats": in_entry(plan=[0, 0, 0, 1.0, 1]),
    "a plan of words": in_entry(plan="0,0,0,1,1"),
    "a family that is not built": in_entry(plan=[4, 0, 0, 1, 1]),
    "the fallback as a family": in_entry(plan=[-1, 0, 0, 1, 1]),
    "another arithmetic's family": in_entry(plan=[2, 0, 0, 1, 1]),
    "a tile that is not built": in_entry(plan=[0, 99, 0, 1, 1]),
    "a wrong entry beside a right one": damaged(
        lambda entries: entries.append({**entries[0], "m": 64, "plan": [0, 3, 0, 9, 1]})
    ),
    "bytes that are no text": "\udcff\udcfe\0",
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_wrong_file_is_ignored_with_one_warning_and_written_anew(text: str, cache: Path) -> None:
    """Never a plan of it, not even of the entries that are right."""
    cache.parent.mkdir(parents=True)
    cache.write_text(text, errors="surrogateescape")
    with pytest.warns(RuntimeWarning, match="are ignored") as caught:
        repeat(lambda: times.load(DEVICE))
    (warning,) = caught
    assert f"epigemm: the measured choices in {cache} are ignored: " in str(warning.message)
    assert "\n" not in str(warning.message)
    assert source(ENTRY) == "model"
    times.remember(DEVICE, [replace(ENTRY, m=64)])
    assert kept() == by_key(replace(ENTRY, m=64))
    assert source(replace(ENTRY, m=64)) == "cache" and source(ENTRY) == "model"


def test_entries_are_of_one_kind_of_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    times.merge(GPU, [ENTRY])
    describe(monkeypatch, (), name="NVIDIA H100 80GB HBM3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        times.load(DEVICE)
    assert source(ENTRY) == "model"
    times.remember(DEVICE, [replace(ENTRY, m=64)])
    assert kept() == by_key(ENTRY) and kept("NVIDIA H100 80GB HBM3") == by_key(replace(ENTRY, m=64))


@pytest.mark.parametrize("key", ["version", "tiles_fingerprint"])
def test_entries_of_another_build_are_ignored_with_one_warning_and_stay(key: str, cache: Path) -> None:
    """Until there are measurements of this build."""
    times.merge(GPU, [ENTRY])
    text = cache.read_text()
    assert text.count(build_info()[key]) == 1, "the build's name has it"
    cache.write_text(
        text.replace(build_info()[key], "0.0.9").replace('"bias_relu"', '"another.0123456789abcdef"')
    )
    with pytest.warns(RuntimeWarning, match=f"{cache.name} are ignored: another version") as caught:
        repeat(lambda: times.load(DEVICE))
    assert len(caught) == 1 and source(ENTRY) == "model"
    times.merge(GPU, [ENTRY])
    assert len(times.read()) == 2
    times._warned.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        times.load(DEVICE)
    assert source(ENTRY) == "cache"


def unwritable(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, target: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", fail)


def no_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.write_text("not a folder")


def too_long(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(cache.parent.parent / ("x" * 300)))


@pytest.mark.parametrize("change", [unwritable, no_folder, too_long])
def test_what_cannot_be_written(
    change: Callable[[Path, pytest.MonkeyPatch], None], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning; choices last as long as the process, no call fails, and what was there stays."""
    if change is unwritable:
        times.merge(GPU, [replace(ENTRY, m=64)])
    change(cache, monkeypatch)
    with pytest.warns(RuntimeWarning, match="cannot be written") as caught:
        repeat(lambda: times.remember(DEVICE, [ENTRY]))
    (warning,) = [each for each in caught if "cannot be written" in str(each.message)]
    assert source(ENTRY) == "cache" and str(times.cache_dir()) in str(warning.message)
    if change is unwritable:
        assert kept() == by_key(replace(ENTRY, m=64))
