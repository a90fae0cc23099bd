"""calibrate(): of GPUs that are pretended, whose times follow from what they reach."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import epigemm
from epigemm._native import ops
from epigemm.calls import elementwise_kernels
from epigemm.planning import architectures, calibrations
from epigemm.planning.calibrations import Figures
from epigemm.planning.gpus import KNOWN
from epigemm.tuning import calibrating
from epigemm.tuning.calibrating import PRODUCTS, Calibration, measure

DEVICE = torch.device("cuda", 3)
FLOPS_OF_STEP = 4096 * 8 * 16 * 72


@dataclass
class Pretended:
    """A GPU of these figures."""

    figures: Figures
    name: str = "A10"
    jitter: dict[tuple[int, int, int], float] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)

    @property
    def told(self) -> dict[str, Any]:
        return architectures.of(KNOWN[self.name].numbers)

    def loop(self, steps: int) -> tuple[int, float]:
        self.steps.append(steps)
        flops = FLOPS_OF_STEP * steps
        return flops, flops / self.figures.tensor_flops_per_us

    def copy(self, size: int) -> float:
        self.copied.append(size)
        return 2 * size / self.figures.memory_bytes_per_us

    def product(self, m: int, n: int, k: int) -> float:
        """The model's formula, written down once more."""
        compute = 2 * m * n * k / self.figures.tensor_flops_per_us
        memory = 2 * (m * k + n * k + m * n) / self.figures.memory_bytes_per_us
        us = 5 + (compute**4 + memory**4) ** 0.25 / self.figures.cublas_efficiency
        return float(us * self.jitter.get((m, n, k), 1.0))


FIGURES = Figures(523_000.0, 118e6, 0.83)


def test_it_finds_what_a_gpu_reaches() -> None:
    machine = Pretended(FIGURES)
    found = measure(machine, machine.told)
    assert found.tensor_flops_per_us == pytest.approx(118e6)
    assert found.memory_bytes_per_us == pytest.approx(523_000)
    assert found.cublas_efficiency == pytest.approx(0.83, abs=0.002)


def test_it_takes_about_a_second() -> None:
    """The loop settles the clocks; what is copied is not in L2."""
    for name in KNOWN:
        told = architectures.of(KNOWN[name].numbers)
        machine = Pretended(Figures(told["memory_bytes_per_us"], told["tensor_flops_per_us"], 0.9), name)
        measure(machine, told)
        last = machine.loop(machine.steps[-1])[1]
        assert 5000 <= last < 5100
        (size,) = machine.copied
        assert size >= max(256 << 20, 4 * KNOWN[name].l2_mb * 1e6)
        total = last + machine.copy(size) + sum(machine.product(*shape) for shape in PRODUCTS)
        assert 13 * total < 1e6, "microseconds; ten rounds behind three calls that warm up"


def test_the_efficiency_is_a_mean_of_products() -> None:
    slow = dict.fromkeys(PRODUCTS[:2], 1.2)
    machine = Pretended(FIGURES, jitter=slow)
    found = measure(machine, machine.told).cublas_efficiency
    assert found == pytest.approx(0.83 * 1.2 ** (-2 / len(PRODUCTS)), rel=0.01)
    machine = Pretended(FIGURES, jitter=dict.fromkeys(PRODUCTS, 1e-3))
    assert measure(machine, machine.told).cublas_efficiency == pytest.approx(2.0), "no times below nothing"


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        (Figures(523_000, 30e6, 0.83), r"got 30.00 TFLOPS for the tensor cores' rate; .* more than 31.24"),
        (Figures(100_000, 118e6, 0.83), r"got 100.00 GB/s for the memory's bandwidth; .* more than 133.50"),
        (Figures(523_000, 118e6, 0.2), r"got 0.20 of the roofline for the cuBLAS's efficiency"),
    ],
)
def test_a_gpu_that_others_use(figures: Figures, words: str) -> None:
    machine = Pretended(figures)
    with pytest.raises(RuntimeError, match=f"calibrate: {words}.*Does another program use the GPU"):
        measure(machine, machine.told)


class Stage:
    """`calibrate` on a pretended GPU: what the planner was told, and what is on disk."""

    def __init__(self, machine: Pretended, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.told: list[list[int]] = []
        self.machine = machine
        self.asked = architectures.of
        patch.setenv("EPIGEMM_CACHE_DIR", str(folder))
        patch.setattr(elementwise_kernels, "gpu", lambda device: DEVICE)
        patch.setattr(calibrating, "capturing", lambda device: False)
        patch.setattr(calibrating, "Machine", lambda device: machine)
        patch.setattr(torch.cuda, "get_device_name", lambda device: KNOWN[machine.name].name)
        patch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
        patch.setattr(ops, "_calibrate", self.calibrate)
        patch.setattr(architectures, "of", self.of)

    def calibrate(self, device: int, figures: list[int]) -> None:
        assert device == DEVICE.index
        if self.asked(KNOWN[self.machine.name].numbers)["is_fitted"]:
            raise RuntimeError("are fitted")
        self.told.append(figures)

    def of(self, gpu: tuple[int, ...] = (), device: int = -1) -> dict[str, Any]:
        if gpu:
            return self.asked(gpu)
        assert device == DEVICE.index
        figures = self.told[-1] if self.told else []
        numbers = KNOWN[self.machine.name].numbers
        return self.asked((*numbers[:3], figures[0], *numbers[4:], *figures[1:]) if figures else numbers)


def test_the_planner_goes_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(Pretended(FIGURES), monkeypatch, tmp_path)
    found = epigemm.calibrate()
    assert isinstance(found, Calibration) and found.applied and found.why_not == ""
    assert stage.told[0] == [] and stage.told[-1] == [523_000, 118_000_000, 830]
    assert found.path is not None and calibrations.read(found.path, "NVIDIA A10") is not None
    assert stage.of(device=3)["least_gain"] == 1.05
    assert str(found).splitlines() == [
        "NVIDIA A10, measured (and assumed without that):",
        "  tensor cores, mma.sync in 16 bits: 118.0 TFLOPS (125.0)",
        "  memory, by a copy: 523 GB/s (534)",
        "  cuBLAS: 0.83 of the roofline (0.90)",
        f"  used from now on, and {found.path}",
    ]


def test_it_is_measured_against_what_is_assumed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second calibration does not build on the first; one that fails leaves the first."""
    stage = Stage(Pretended(FIGURES), monkeypatch, tmp_path)
    first = epigemm.calibrate()
    assert epigemm.calibrate() == first
    stage.machine.figures = Figures(523_000.0, 10e6, 0.83)
    with pytest.raises(RuntimeError, match="Does another program use the GPU"):
        epigemm.calibrate()
    assert stage.told[-1] == [523_000, 118_000_000, 830]


@pytest.mark.parametrize("name", ["H100", "H200"])
def test_on_hopper_it_tells_and_changes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(Pretended(Figures(3.0e6, 600e6, 0.5), name), monkeypatch, tmp_path)
    found = epigemm.calibrate()
    assert not found.applied and found.path is None and found.cublas_efficiency is None
    assert found.tensor_tflops == pytest.approx(600) and found.memory_gb_per_s == pytest.approx(3000)
    assert stage.told == [] and list(tmp_path.iterdir()) == []
    assert "600.0 TFLOPS (1070.5 by wgmma)" in str(found)
    assert "not used: the cost models of Hopper are fitted to measurements already" in str(found)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"device: got cuda, .*no CUDA GPUs are available"):
        epigemm.calibrate()
    with pytest.raises(
        RuntimeError, match=r"device: got cpu, where no kernel of epigemm's runs .it is no GPU"
    ):
        epigemm.calibrate("cpu")


def test_in_a_capture_or_under_tracing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(Pretended(FIGURES), monkeypatch, tmp_path)
    monkeypatch.setattr(calibrating, "capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="calibrate: got a call during CUDA graph capture"):
        epigemm.calibrate()
    monkeypatch.setattr(calibrating, "is_exporting", lambda: True)
    with pytest.raises(RuntimeError, match="calibrate: got a call under tracing"):
        epigemm.calibrate()
    assert stage.told == [] and not stage.machine.steps


def test_every_product_takes_long_enough() -> None:
    """Beside the fixed time of a call, which is assumed, on the fastest GPU."""
    told = architectures.of(KNOWN["B200"].numbers)
    for m, n, k in PRODUCTS:
        compute = 2 * m * n * k / told["cublas_flops_per_us"]
        memory = 2 * (m * k + n * k + m * n) / told["memory_bytes_per_us"]
        assert math.hypot(compute, memory) > 15
