"""A CPU with scripted times and kernels in PyTorch in place of a GPU, for the tests of tuning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm.planner import dry_runs
from epigemm.tuner.timing import Run
from tests.support.choices import forget
from tests.support.pretended import Pretended, pretend_gpu, pretend_times

DEVICE = 42
TORCH_US = 100.0
PIECES = 2
"""The family of kernels on fp16 slices."""


@dataclass
class Stage:
    """A pretended Hopper GPU: times are what `us` says of a plan, and every plan that runs is noted."""

    us: Callable[[tuple[int, ...]], float] = lambda plan: (
        (40.0 if plan[0] == PIECES else 50.0) + plan[1] + plan[2] / 2 + plan[3] / 10 + plan[4] / 100
    )
    module: Pretended = field(default_factory=Pretended)
    capturing: bool = False
    torch_us: float = TORCH_US

    def timer(self, device: torch.device) -> Stage:
        return self

    def host_us(self, run: Run) -> float:
        return 1.0

    def in_turn(self, runs: Sequence[Run], rounds: int, host_us: float) -> list[list[float]]:
        """The first half of the rounds is too fast: the load has not lowered the clocks yet."""
        return [
            [self.time_of(run) / 1e3 * (0.9 if 2 * i < rounds - 1 else 1.0) for i in range(rounds)]
            for run in runs
        ]

    def time_of(self, run: Any) -> float:
        plan = self.plan_of(run)
        return self.torch_us if plan is None else self.us(plan)

    @property
    def ran(self) -> list[tuple[str, tuple[int, ...]]]:
        return self.module.ran

    @staticmethod
    def plan_of(run: Any) -> tuple[int, ...] | None:
        return None if run.__self__.plan == dry_runs.FALLBACK else tuple(run.__self__.plan[1:])


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    stage = Stage()

    pretend_gpu(monkeypatch, DEVICE, stage.module, lambda: stage.capturing)
    pretend_times(monkeypatch, stage.timer)
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path))
    yield stage
    forget(DEVICE)


def draw(m: int = 40, n: int = 256, k: int = 128, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)]


def plans_tried(stage: Stage) -> int:
    """How many plans were run by a measurement since the last time; calls themselves pass none."""
    tried = sum(plan != () for _, plan in stage.ran)
    stage.ran.clear()
    return tried
