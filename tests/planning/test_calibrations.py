"""What was measured of a GPU: its file, and what the planner is told."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from epigemm._native import ops
from epigemm.linking import cache
from epigemm.planning import architectures, calibrations, measured
from epigemm.planning.calibrations import Figures
from epigemm.planning.gpus import KNOWN

DEVICE = 7
GPU = "NVIDIA A10"
FIGURES = Figures(523_000.0, 118e6, 0.83)


class Planner:
    """In place of the native module: what it was told of which device."""

    def __init__(self) -> None:
        self.told: list[tuple[int, list[int]]] = []
        self.gpu = "A10"

    def calibrate(self, device: int, figures: list[int]) -> None:
        if architectures.of(KNOWN[self.gpu].numbers)["is_fitted"]:
            raise RuntimeError("the cost models of sm90 are fitted: they take no figures")
        self.told.append((device, figures))

    def architecture(self, device: int) -> dict[str, Any]:
        return {"is_fitted": KNOWN[self.gpu].capability == (9, 0)}


@pytest.fixture
def planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planner:
    planner = Planner()
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 2025\n")
    monkeypatch.setattr(calibrations, "_DRIVER", version)
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(measured, "_warned", set())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    asked = architectures.of

    def of(gpu: tuple[int, ...] = (), device: int = -1) -> dict[str, Any]:
        return asked(gpu) if gpu else planner.architecture(device)

    monkeypatch.setattr(architectures, "of", of)
    monkeypatch.setattr(ops, "_calibrate", planner.calibrate)
    return planner


def quietly(run: Callable[[], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()


def test_it_is_kept_for_later_processes(planner: Planner, tmp_path: Path) -> None:
    path = calibrations.keep(DEVICE, FIGURES)
    assert path == tmp_path / "cache" / "nvidia-a10-calibrated-580.65.06-cuda13.0-1.json"
    assert planner.told == [(DEVICE, [523_000, 118_000_000, 830])]
    assert calibrations.read(path, GPU) == FIGURES
    quietly(lambda: calibrations.load(DEVICE))
    assert planner.told == 2 * [(DEVICE, [523_000, 118_000_000, 830])]
    calibrations.forget(DEVICE)
    assert planner.told[2:] == [(DEVICE, [])] and path.exists()


def test_nothing_is_there(planner: Planner) -> None:
    quietly(lambda: calibrations.load(DEVICE))
    assert planner.told == []


@pytest.mark.parametrize("other", ["driver", "cuda", "gpu"])
def test_it_is_for_one_gpu_driver_and_cuda(
    planner: Planner, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = calibrations.keep(DEVICE, FIGURES)
    if other == "driver":
        calibrations._DRIVER.write_text("Kernel Module  590.10")
    elif other == "cuda":
        monkeypatch.setattr(torch.version, "cuda", "13.2")
    else:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A10G")
    after = calibrations.path_of(torch.cuda.get_device_name(DEVICE))
    assert before is not None and after != before
    quietly(lambda: calibrations.load(DEVICE))
    assert len(planner.told) == 1, "by `keep`"
    after.write_bytes(before.read_bytes())
    with pytest.warns(RuntimeWarning, match=f"is ignored: it is for {other} '"):
        calibrations.load(DEVICE)
    assert len(planner.told) == 1


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no object": lambda table: [table],
    "format": lambda table: {**table, "format": 2},
    "no figures": lambda table: {**table, "figures": None},
    "a figure less": lambda table: {**table, "figures": {"cublas_efficiency": 0.8}},
    "one more": lambda table: {**table, "figures": {**table["figures"], "clock": 1}},
    "text": lambda table: {**table, "figures": {**table["figures"], "cublas_efficiency": "0.8"}},
    "zero": lambda table: {**table, "figures": {**table["figures"], "tensor_flops_per_us": 0}},
    "not a number": lambda table: {
        **table,
        "figures": {**table["figures"], "tensor_flops_per_us": float("nan")},
    },
    "infinite": lambda table: {**table, "figures": {**table["figures"], "memory_bytes_per_us": float("inf")}},
    "true": lambda table: {**table, "figures": {**table["figures"], "memory_bytes_per_us": True}},
    "deep": lambda table: None,
    "cut": lambda table: None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_ignored_with_one_warning(planner: Planner, damage: str) -> None:
    path = calibrations.keep(DEVICE, FIGURES)
    assert path is not None
    text = json.dumps(DAMAGES[damage](json.loads(path.read_text())))
    path.write_text({"deep": "[" * 100_000, "cut": path.read_text()[:50]}.get(damage, text))
    with pytest.warns(RuntimeWarning, match=f"the calibration in {path} is ignored: "):
        calibrations.load(DEVICE)
    quietly(lambda: calibrations.load(DEVICE))
    assert len(planner.told) == 1


def test_hopper_takes_none(planner: Planner) -> None:
    """Nor one that was put there by hand."""
    path = calibrations.keep(DEVICE, FIGURES)
    planner.gpu = "H200"
    quietly(lambda: calibrations.load(DEVICE))
    assert path is not None and path.exists() and len(planner.told) == 1
    with pytest.raises(RuntimeError, match="are fitted"):
        calibrations.keep(DEVICE, FIGURES)
    calibrations.forget(DEVICE)
    assert len(planner.told) == 1


def test_a_folder_that_cannot_be_written(
    planner: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning; the figures last as long as the process."""
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="lasts as long as this process: .* cannot be written") as caught:
        assert [calibrations.keep(DEVICE, FIGURES) for _ in range(2)] == [None, None]
    assert len(caught) == 1 and len(planner.told) == 2


def test_the_cache_tells_of_it_and_removes_it(planner: Planner) -> None:
    path = calibrations.keep(DEVICE, FIGURES)
    assert path is not None
    assert "0 files of measured choices, 1 calibrations, " in str(cache.contents())
    cache.clear()
    assert not path.exists()


def test_figures_that_no_gpu_has() -> None:
    for name in asdict(FIGURES):
        for value in (0, -1.0, float("nan"), float("inf"), "1", None):
            with pytest.raises(ValueError, match=f"{name}: got"):
                Figures(**{**asdict(FIGURES), name: value})


@pytest.mark.parametrize(
    ("device", "figures", "words"),
    [
        (64, [], "device must be the index of a CUDA device, got 64"),
        (-1, [1, 2], "figures must be none or three, got 2"),
        (-1, [1, 0, 3], "figures must be positive, got 0"),
    ],
)
def test_the_native_module_takes_three_positive_figures(device: int, figures: list[int], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        ops._calibrate(device, figures)
    ops._calibrate(-1, FIGURES.numbers)
