"""Calls that autocast or a profiler alone keeps from being plain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm.arguments.calls import LinearCall
from epigemm.calls import one_kernel
from epigemm.epilogues.library import BIAS
from epigemm.planner import dry_runs, plans
from epigemm.planner.reasons import Reason


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "has_gpu_kernels", lambda x: True)


class Asked:
    """Answers one after the other; which circumstances they were asked for in."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.circumstances = list(answers), list[int]()

    def __call__(self, circumstances: int) -> Any:
        self.circumstances.append(circumstances)
        return self.answers.pop(0)


def attempt(asked: Asked, x: Tensor | None = None) -> Any:
    x = torch.ones(2, 4, dtype=torch.bfloat16) if x is None else x
    weight = torch.ones(3, 4, dtype=torch.bfloat16)
    return one_kernel.attempt(LinearCall(BIAS, x, weight), [weight, None], asked)


def test_a_plain_call() -> None:
    asked = Asked(result := torch.ones(2))
    assert attempt(asked) is result and asked.circumstances == [0]


@pytest.mark.parametrize("reason", sorted(Reason))
def test_a_reason_without_autocast(reason: Reason) -> None:
    asked = Asked(int(reason))
    assert attempt(asked) is None and asked.circumstances == [0]


def test_autocast_with_nothing_to_cast() -> None:
    asked = Asked(int(Reason.NOT_PLAIN), result := torch.ones(2))
    with torch.autocast("cpu", torch.bfloat16):
        assert attempt(asked) is result
    assert asked.circumstances == [0, dry_runs.ROUTED]
    with torch.autocast("cpu", torch.bfloat16):
        assert attempt(Asked(int(Reason.NOT_PLAIN), int(Reason.NOT_LINKED))) is None


def test_autocast_that_would_cast() -> None:
    asked = Asked(int(Reason.NOT_PLAIN))
    with torch.autocast("cpu", torch.float16):
        assert attempt(asked) is None
    assert asked.circumstances == [0]


def test_a_call_that_is_recorded_or_transformed() -> None:
    recorded = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
    asked, many = Asked(*[int(Reason.NOT_PLAIN)] * 2), torch.ones(5, 2, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert attempt(asked, recorded) is None
        found = torch.vmap(lambda x: x if attempt(asked, x) is None else 2 * x)(many)
    assert torch.equal(found, many) and asked.circumstances == [0, 0]


def test_a_profiler_sees_the_call() -> None:
    asked = Asked(int(Reason.NOT_PLAIN), result := torch.ones(2))
    with torch.profiler.profile() as profile:
        assert attempt(asked) is result
    assert asked.circumstances == [0, dry_runs.ROUTED]
    assert "epigemm::bias" in [event.key for event in profile.key_averages()]
