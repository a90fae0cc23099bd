"""A problem in its harness, of a made-up checkout: seeds, modes, verdicts, what is timed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.models import kernelbench
from benchmarks.models.kernelbench import Prepared, Problem, tree_hashes
from benchmarks.models.measures import QUICK
from benchmarks.models.worker import NotMeasured

CPU = torch.device("cpu")
HEAD = """
import torch
from torch import nn

def get_init_inputs():
    return [64, 32]

def get_inputs():
    SEEDS.append(torch.initial_seed())
    return [torch.rand(16, 64)]

SEEDS = []

class Model(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.linear = nn.Linear(a, b)
        self.norm = nn.BatchNorm1d(b)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))
"""
LINEAR = "return torch.nn.functional.gelu(self.linear(x))"
FORWARDS = {
    "1_plain": LINEAR,
    "2_norm": "assert self.training; return self.norm(self.linear(x))",
    "3_state": "self.count = (self.count + 1).clamp(max=3); return torch.relu(self.linear(x)) + self.count",
    "4_dropout": "return self.drop(self.linear(x))",
    "5_tuple": "return self.linear(x), x",
    "6_cancels": "return (x + 1e4) - 1e4",
    "7_raises": "return x @ x",
}


def source(forward: str) -> str:
    return f"{HEAD}\n    def forward(self, x):\n        {forward}\n"


def make_checkout(folder: Path) -> Path:
    """Two levels; of the first one a problem that cannot be loaded and one whose inputs are integers."""
    level1, level2 = (folder / "KernelBench" / f"level{level}" for level in (1, 2))
    for level in (level1, level2):
        level.mkdir(parents=True)
    for name, forward in FORWARDS.items():
        (level2 / f"{name}.py").write_text(source(forward))
    (level1 / "1_no_module.py").write_text("import no_such_module")
    whole = source("assert x.dtype is torch.float32; return self.linear(x)")
    (level1 / "2_integers.py").write_text(whole.replace("torch.rand(16, 64)", "torch.randint(9, (16, 64))"))
    return folder


def prepare(folder: Path, name: str) -> Prepared:
    make_checkout(folder)
    return kernelbench.prepare(Problem(folder / "KernelBench" / f"{name}.py"), CPU, quick=True)


@pytest.mark.parametrize(
    ("name", "right", "products"),
    [
        ("level2/1_plain", True, 1),
        ("level2/2_norm", True, 1),
        ("level2/3_state", True, 1),
        ("level2/4_dropout", None, 1),
        ("level2/6_cancels", True, 0),
        ("level1/2_integers", True, 1),
    ],
)
def test_a_problem(name: str, right: bool | None, products: int, tmp_path: Path) -> None:
    found = prepare(tmp_path, name).measure(CPU, QUICK)
    assert (found["right"], found["products"]) == (right, products) and found["errors"] == {}
    assert set(found["turns_ms"]) == {"eager", "compile", "fuse", "backend"}
    # What fails against itself is listed, and timed.
    assert ("eager" in found["not_passed"]) == (right is None)
    assert right is None or found["not_passed"] == {}


@pytest.mark.parametrize("name", ["level2/5_tuple", "level2/7_raises", "level1/1_no_module"])
def test_what_raises_in_eager_is_not_ours(name: str, tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match=r"fails its own harness in eager: .*(tuple|shapes|no_such_module)"):
        prepare(tmp_path, name)


def test_seeds_are_those_of_the_suite(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, "level2/1_plain")
    draw: Any = prepared.draw
    seeds = list(draw.__globals__["SEEDS"])
    torch.manual_seed(42)
    assert seeds == [torch.randint(0, 2**32 - 1, (1,)).item() for _ in range(5)]
    torch.manual_seed(42)
    weight = torch.nn.Linear(64, 32).weight
    assert torch.equal(prepared.reference.get_parameter("linear.weight"), weight)


Way = Callable[[Tensor], Tensor]


def raises(x: Tensor) -> Tensor:
    raise RuntimeError("not here")


@pytest.mark.parametrize(
    ("way", "changed", "right", "said"),
    [
        # Eager loses what float64 keeps.
        ("fuse", lambda x: x.clone(), True, "differs by up to 0.000"),
        ("backend", lambda x: x.clone(), True, "differs by up to 0.000"),
        ("compile", lambda x: x.clone(), True, "differs by up to 0.000"),
        ("fuse", lambda x: x + 0.01, False, "differs by up to 0.01"),
        ("backend", lambda x: x[:1], False, "shape (1, 64) in place of (16, 64)"),
        ("fuse", lambda x: x * torch.nan, False, "differs by up to nan"),
        ("backend", raises, False, "RuntimeError: not here"),
        ("compile", raises, True, "RuntimeError: not here"),
    ],
)
def test_verdicts(way: str, changed: Way, right: bool, said: str, tmp_path: Path) -> None:
    prepared = prepare(tmp_path, "level2/6_cancels")
    if way == "fuse":  # a function has no report
        changed.fusion_report = prepared.ways[way].fusion_report  # type: ignore[attr-defined]
    prepared.ways[way] = changed
    prepared.trial(prepared.inputs(1))
    found = prepared.measure(CPU, QUICK)
    assert found["right"] == right
    assert found["not_passed"][way].startswith(f"2 of 7 trials, the first: {said}")
    assert (way in found["turns_ms"]) == (right and changed is not raises)
    # Against float64 where one of ours does not pass, and what has a result.
    ways = {"eager", "compile", "fuse", "backend"} if way != "compile" else set()
    assert set(found["errors"]) == (ways - {way} if changed is raises else ways)
    if ways and right:
        assert found["errors"][way] < 0.1 * found["errors"]["eager"]


@torch.no_grad()
def test_an_eager_that_sometimes_fails_excuses_nothing(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, "level2/1_plain")
    right = dict(prepared.ways)
    prepared.ways["backend"] = lambda x: right["backend"](x) + 1
    prepared.trial(prepared.inputs(1))
    prepared.ways = {**right, "eager": lambda x: right["eager"](x) + 1}
    found = prepared.measure(CPU, QUICK)
    assert found["right"] is False and set(found["not_passed"]) == {"eager", "backend"}
    assert set(found["turns_ms"]) == {"eager", "compile", "fuse"}


def test_what_becomes_wrong_while_it_is_timed_is_wrong(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, "level2/1_plain")
    right, calls = prepared.ways["backend"], []

    def later(x: Tensor) -> Any:
        calls.append(1)
        return right(x) + (len(calls) > 2)

    prepared.ways["backend"] = later
    found = prepared.measure(CPU, QUICK)
    assert found["right"] is False and set(found["turns_ms"]) == {"eager", "compile", "fuse"}


def test_hashes_are_those_of_git(tmp_path: Path) -> None:
    make_checkout(tmp_path)

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", tmp_path, *words], check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    git("add", ".")
    listed = git("ls-tree", f"{git('write-tree').strip()}:KernelBench")
    levels = {line.split("\t")[1]: line.split()[2] for line in listed.splitlines()}
    assert tree_hashes(tmp_path) == levels and len(levels) == 2
