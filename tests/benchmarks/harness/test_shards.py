"""Parts of a long run: everything is in one of them, and parts of different runs are told apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.harness.shards import WHOLE, Selection, Shard, complete

NAMES = [f"tests/test_{file}.py::test_it[{case}]" for file in "abc" for case in range(200)]


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "1/0", "a/b", "1/2/3", "-1/2", " 1/2"])
def test_what_is_no_shard(text: str) -> None:
    with pytest.raises(ValueError, match="--shard: expected I/N"):
        Shard.parse(text)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_name_is_in_exactly_one_shard(count: int) -> None:
    shards = [Shard.parse(f"{index}/{count}") for index in range(1, count + 1)]
    for name in NAMES:
        assert [shard.takes(name) for shard in shards].count(True) == 1
    sizes = [sum(map(shard.takes, NAMES)) for shard in shards]
    assert sum(sizes) == len(NAMES) and min(sizes) > 0.7 * len(NAMES) / count


def test_a_name_decides_alone() -> None:
    """In every process and whatever else there is: neither a seeded hash nor an order."""
    assert [Shard(1, 3).takes(name) for name in "abcdef"] == [True, False, True, True, True, False]
    assert all(map(WHOLE.takes, NAMES))


def selections(count: int) -> list[Selection]:
    shards = [Shard(index, count) for index in range(1, count + 1)]
    return [Selection.of_names(NAMES, shard, len(shard.part(NAMES))) for shard in shards]


def test_all_parts_are_complete() -> None:
    complete(selections(1))
    complete(selections(4)[::-1])
    assert Selection.of_names(NAMES[::-1], WHOLE, 600) == selections(1)[0]


def test_other_parts_are_not() -> None:
    one, two, three = selections(3)
    other = Selection.of_names([*NAMES[1:], "another"], Shard(3, 3), three.chosen)
    for parts, words in (
        ([one, two], r"shards \[1, 2, 3\] once, got \[1, 2\]"),
        ([one, two, two, three], r"got \[1, 2, 2, 3\]"),
        ([one, two, selections(2)[0]], "different runs"),
        ([one, two, other], "different runs"),
        ([one, two, replace(three, chosen=three.chosen - 1)], "hold 599 of 600"),
    ):
        with pytest.raises(ValueError, match=words):
            complete(parts)
