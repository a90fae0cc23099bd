"""Some of the random forwards of `fuzz.py`, and whether it would find what is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

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


def scaled(graph: fx.Graph) -> None:
    """Wrong values of a site."""
    for site in sites(graph):
        with graph.inserting_after(site):
            wrong = graph.call_function(torch.mul, (site, 1.001))
        site.replace_all_uses_with(wrong)
        wrong.args = (site, 1.001)


def turned(graph: fx.Graph) -> None:
    """Operands in the wrong order."""
    for site in sites(graph):
        x, weight, *operands = site.args
        site.args = (x, weight, *reversed(operands))


def sites(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if isinstance(node.target, Site)]


@pytest.mark.parametrize("plant", [scaled, turned])
def test_finds(plant: Callable[[fx.Graph], None]) -> None:
    """What is wrong with a rewritten graph, before its backend runs it; few programs are needed."""

    def backend(graph_module: fx.GraphModule, _: Any) -> Any:
        plant(graph_module.graph)
        graph_module.recompile()
        return graph_module.forward

    assert any(fuzz.run([seed], backend, lambda text: None)[fuzz.DIFFERS] for seed in range(40))
