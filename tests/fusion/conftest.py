"""Each test begins with a compiler that has seen nothing. A GPU that is described to the planner."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.support.pretended import describe


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """An H200 that is described, with all kernels at hand; and a tensor that stands for one there."""
    describe(monkeypatch, linked=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return torch.empty(0)
