"""Each test begins with a compiler that has seen nothing; a launcher of graphs for the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from epigemm.fusion import replayed
from tests.fusion.launchers import StandIn


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Graphs are replayed on the CPU."""
    made = StandIn()
    monkeypatch.setattr(replayed, "launcher_of", lambda device: made)
    return made
