"""The state of a module that a call changes is restored."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from epigemm.explain.state import kept


class Writes(nn.Module):
    """Writes whatever a forward can."""

    seen: Tensor
    same: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("same", self.seen)
        self.calls, self.log = 0, ["made"]
        self.history: dict[str, int] = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history["calls"] += 1
        self.new = x
        self.seen += 1
        assert self.same is self.seen, "buffers that were one are one"
        self.register_buffer("late", x)
        self.late_parameter = nn.Parameter(x)
        self.inner = nn.Linear(4, 4)
        self.register_forward_hook(lambda *_: None)
        self.eval()
        self.same = torch.ones(4)
        del self.bn.running_mean
        return x + torch.rand(4)


def state_of(module: nn.Module) -> dict[str, Any]:
    """Every attribute, by identity; of dictionaries what they have."""
    return {
        f"{name}.{key}": [(k, id(v)) for k, v in value.items()] if isinstance(value, dict) else id(value)
        for name, each in module.named_modules()
        for key, value in vars(each).items()
    }


@pytest.mark.parametrize("fails", [False, True])
def test_all_of_it_is_put_back(fails: bool) -> None:
    """All but what is inside of other objects, as the docstring says."""
    module = Writes()
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    versions = [buffer._version for buffer in module.buffers()]
    before, x = state_of(module), torch.randn(3, 4)
    generator = torch.get_rng_state()
    try:
        with kept(module):
            module.train()
            module.bn(x)
            module(x)
            module.log.append("called")
            assert state_of(module) != before and not torch.equal(torch.get_rng_state(), generator)
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert state_of(module) == before and module.log == ["made", "called"]
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in module.named_buffers())
    assert [buffer._version for buffer in module.buffers()] == versions, (
        "nothing was written and written back"
    )
    assert all(parameter.grad is None for parameter in module.parameters())


def test_generators_of_others_and_classes_are_put_back() -> None:
    class Counted(Writes):
        calls = 0

    module, state = Counted(), random.getstate()
    numbers = np.random.get_state()[1].tolist()  # type: ignore[index]
    with kept(module):
        random.random(), np.random.rand()
        Counted.calls, Counted.made = 1, 2  # type: ignore[attr-defined]
    assert random.getstate() == state and Counted.calls == 0 and not hasattr(Counted, "made")
    assert np.random.get_state()[1].tolist() == numbers  # type: ignore[index]
