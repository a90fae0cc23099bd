"""Random functions with several results, as epilogues: the few of each run of the suite, and that faults are found."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from epigemm import ResultsEpilogue
from epigemm.epilogues.tracer.results import MEAN, STORE, SUM, VAR, Result
from tests.support.thorough import a_third_of
from tools import random_functions

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("gradients", [False, True])
def test_random_functions(gradients: bool) -> None:
    """Other ones in each run: the seed is printed, and repeats them."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"python -m tools.random_functions --seed {seed}{' --gradients' * gradients}")
    count = a_third_of(90 if gradients else 210)
    found = random_functions.run(range(seed, seed + count), CPU, gradients=gradients)
    assert not found["failed"], found["failed"]


def off(results: Any) -> Any:
    return tree_map(lambda each: each * 1.01, results)


def once(results: Any) -> Any:
    """Equal tensors become one."""
    leaves = tree_leaves(results)
    return tree_map(lambda each: next(one for one in leaves if torch.equal(one, each)), results)


@pytest.mark.parametrize(
    ("fault", "words"), [(off, "are off"), (once, "what is one tensor, and what are two")]
)
def test_faults_are_found(fault: Callable[[Any], Any], words: str) -> None:
    class Faulty(ResultsEpilogue):
        def __call__(self, *given: Any, **named: Any) -> Any:
            return fault(super().__call__(*given, **named))

    class Made(random_functions.Made):
        def epilogue(self) -> ResultsEpilogue:
            right = super().epilogue()
            found = Faulty(right.traced)
            vars(found).update(vars(right))
            return found

    failed = random_functions.run(range(15, 55), CPU, gradients=False, make=Made)["failed"]
    assert any(words in why for why in failed.values())


def test_how_far_a_result_may_be_off() -> None:
    """What errors of elements do to sums, means and variances, by trying the worst signs."""
    value = torch.randn(50, 3, dtype=torch.float64)
    error = torch.full_like(value, 1e-3)
    for kind, function in (
        (STORE, lambda z: z),
        (SUM, lambda z: z.sum(0)),
        (MEAN, lambda z: z.mean(0)),
        (VAR, lambda z: z.var(0)),
    ):
        result = Result(0.0, kind, 0, correction=1.0)
        bound = random_functions.off(result, value, error, torch.float64)
        for sign in (torch.ones_like(value), (value - value.mean(0)).sign()):
            change = (function(value + sign * error) - function(value)).abs()  # type: ignore[no-untyped-call]
            assert bool((change <= bound * (1 + 1e-9)).all()), kind
    assert bool((bound < 0.02).all())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "record.json"
    assert (
        random_functions.main(["--count", "4", "--shard", "2/2", "--seed", "7", "--output", str(file)]) == 0
    )
    assert "2 functions from seed 7, 0 wrong" in capsys.readouterr().out
    assert json.loads(file.read_text())["ran"] == 2
    assert random_functions.main(["--count", "4", "--time-budget", "0"]) == 0
    assert "0 functions from seed 0, 0 wrong, 4 left out: the time was up" in capsys.readouterr().out
