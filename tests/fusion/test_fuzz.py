"""Some of the random forwards of `fuzz.py`, and whether it would find what is wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from epigemm.fusion import rewrite
from epigemm.fusion.chains import Chain
from epigemm.fusion.site import Site
from tests.fusion import fuzz
from tests.fusion.forwards import program
from tests.support.thorough import a_third

AT_ONCE = 25
# 100 models in all, or 300; more of them by the command.
PARTS = [
    *a_third([("eager", part) for part in range(9)]),
    *a_third([("aot_eager", part) for part in range(3)]),
]


@pytest.mark.parametrize(("backend", "part"), PARTS)
def test_forwards(backend: str, part: int) -> None:
    """Other ones in each run: the seed is printed, and repeats them."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"python -m tests.fusion.fuzz --models {AT_ONCE} --seed {seed} --backend {backend}")
    said: list[str] = []
    seen = fuzz.run(range(seed, seed + AT_ONCE), backend, said.append)
    assert not seen[fuzz.DIFFERS], "\n".join(said)
    assert seen["with a fused chain"] >= AT_ONCE // 3, seen


def test_a_seed_is_always_the_same_program() -> None:
    first, second = program(5), program(5)
    assert first == second and str(first) == str(second) and first != program(6)
    assert len({program(seed).source for seed in range(50)}) == 50


@pytest.fixture
def few() -> Iterator[int]:
    """Until one is found that differs."""
    return iter(range(12))


def differs(seeds: Iterator[int], backend: str) -> bool:
    return any(fuzz.run([seed], backend, lambda text: None)[fuzz.DIFFERS] for seed in seeds)


def test_finds_wrong_values(few: Iterator[int], monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Site.__call__
    monkeypatch.setattr(Site, "__call__", lambda *given: compute(*given) * 1.001)
    assert differs(few, "eager")


def test_finds_operands_in_the_wrong_order(few: Iterator[int], monkeypatch: pytest.MonkeyPatch) -> None:
    sources: Any = Chain.sources
    turned = property(lambda chain: (*sources.fget(chain)[:2], *reversed(sources.fget(chain)[2:])))
    monkeypatch.setattr(Chain, "sources", turned)
    assert differs(few, "aot_eager")


def test_finds_calls_of_erased_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the pass did once: it replaced the last product first, whatever its chain read."""
    monkeypatch.setattr(rewrite, "sorted", lambda chains, **_: list(chains), raising=False)
    assert differs(iter(range(19, 40)), "eager")  # of those before, none has such a chain
