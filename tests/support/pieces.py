"""Watches the fp32 calls that multiply fp16 slices: on a GPU as they are, on a CPU with kernels written in PyTorch.

It is for testing everything around the kernels: which pack a call reads, where the result goes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm.calls import entry, weight_slices
from epigemm.planner import times
from epigemm.planner.times import Entry
from tests.support.cases import fused_unavailable
from tests.support.choices import forget
from tests.support.packs import decode as decode
from tests.support.packs import held as held
from tests.support.packs import pack_size as pack_size
from tests.support.pretended import HOPPER, Launch, Pretended, pretend_gpu, replace_entry
from tools.planner import ask_planner

DEVICE = 43
"""The index of the GPU that a CPU stands in for: no test machine has so many."""
_PLANS = {"tf32": (0, 0, 0, 1, 1), "split": (2, 0, 0, 1, 1), "scaled": (2, 0, 0, 1, 1)}


@dataclass
class Road:
    """A device with a size of product that fp32 calls compute on fp16 slices, and the launches of those calls."""

    device: torch.device
    size: tuple[int, int, int]
    module: Pretended
    capturing: bool = False

    def take(self) -> list[Launch]:
        """What was launched since the last `take`."""
        taken, self.module.launches = self.module.launches, []
        return taken

    def x(self, rows: int | None = None) -> Tensor:
        return torch.randn(rows or self.size[0], self.size[2]).to(self.device)

    def weight(self) -> Tensor:
        drawn = torch.randn(self.size[1], self.size[2]) / math.sqrt(self.size[2])
        return drawn.to(self.device)

    def check(self, actual: Tensor, x: Tensor, weight: Tensor) -> None:
        """`actual` is x @ weight.T to fp32's accuracy, for the weight as it is now."""
        expected = x.detach().double() @ weight.detach().double().t()
        bound = 2e-6 * (x.detach().double().abs() @ weight.detach().double().abs().t())
        assert bool(((actual.detach().double() - expected).abs() <= bound).all())

    def measure(
        self,
        us: float,
        torch_us: float,
        *,
        arithmetics: Sequence[str] = ("split", "scaled"),
        tf32_allowed: Sequence[bool] = (False, True),
        size: tuple[int, int, int] | None = None,
    ) -> None:
        """Have the planner take these times of the bare product of `size`, packed or not, for measured ones."""
        m, n, k = size or self.size
        entries = [
            Entry(
                "bias", "float32", arithmetic, packed, True, tf32, m, n, k, _PLANS[arithmetic], us, torch_us
            )
            for arithmetic, tf32, packed in product(arithmetics, tf32_allowed, (False, True))
        ]
        times.install(self.index, entries)

    @property
    def index(self) -> int:
        """Of the GPU, or of the one that a CPU stands in for."""
        return DEVICE if self.device.type == "cpu" else torch.cuda.current_device()

    def forget(self) -> None:
        """Undo `measure`, and have the planner ask its models again."""
        forget(self.index)
        if self.device.type == "cuda":
            times.load(self.index)

    def rows_worth_a_pack_alone(self) -> int:
        """An M whose product is worth reading a pack for, but not making one."""
        _, n, k = self.size
        for rows in range(16, 4096, 16):
            fused = [
                ask_planner(
                    "bias", rows, n, k, "float32", "split", packed=packed, gpu=HOPPER, has_bias=False
                )["fused"]
                for packed in (True, False)
            ]
            if fused == [True, False]:
                return rows
        raise AssertionError("dispatch knows no such problem")


AT_HIGHEST: tuple[Any, ...] = (None, [], [], "highest")
"""The rest of the operator `linear`'s arguments for the bare product: bias, operands, scalars, precision."""


@contextmanager
def watched(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Road]:
    """A `Road` on a device; on a CPU with the stand-in in place of the kernels."""
    on_gpu = device.type == "cuda"
    if on_gpu and (reason := fused_unavailable()):
        pytest.skip(f"gpu: {reason}")
    native = entry._module if on_gpu else None
    road = Road(device, (4096, 2048, 1024) if on_gpu else (1024, 1024, 512), Pretended(native))
    if on_gpu:
        replace_entry(monkeypatch, road.module, lambda: road.capturing)
    else:
        pretend_gpu(monkeypatch, DEVICE, road.module, lambda: road.capturing)
    weight_slices.shortages.clear()
    try:
        yield road
    finally:
        weight_slices.shortages.clear()
        road.forget()


@pytest.fixture
def road(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Road]:
    """The launches of fp32 calls on fp16 slices, watched on each device."""
    with watched(device, monkeypatch) as watching:
        yield watching


assert epigemm.__version__  # importing the package is what defines the operators above
