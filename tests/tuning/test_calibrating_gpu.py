"""calibrate() on a GPU: its figures are what such a GPU can have, and Hopper's plans stay what they are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import epigemm
from epigemm._native import ops
from epigemm.planning import architectures, calibrations, plans
from epigemm.planning.calibrations import Figures
from epigemm.tuning.calibrating import Calibration
from tests.support.cases import cuda_unavailable
from tests.support.threads import processes

pytestmark = pytest.mark.gpu

FIGURES = Figures(1e6, 1e8, 0.8)


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if reason := cuda_unavailable():
        pytest.skip(f"gpu: {reason}")
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path))
    plans.usable(0)
    calibrations.forget(0)
    yield
    calibrations.forget(0)
    monkeypatch.undo()
    calibrations.load(0)


def is_fitted() -> bool:
    return bool(architectures.of(device=0)["is_fitted"])


def answers() -> list[object]:
    """Plans and predicted times of this GPU, but for measured choices."""
    sizes = [(1, 4096, 4096), (300, 1024, 1024), (2048, 4096, 4096), (8192, 8192, 8192)]
    return [
        plans.ask("bias_gelu", *shape, dtype, arithmetic, device=0)
        for shape in sizes
        for dtype, arithmetic in (("bfloat16", "ieee"), ("float32", "tf32"), ("float32", "split"))
    ]


IS_ALONE = processes() == 1
CALLS = 2 if IS_ALONE else 20


def measured(calls: int = CALLS) -> list[Calibration]:
    """Calibrations in turn. Those that other processes of the tests slow down to a quarter raise, and are left out."""
    if IS_ALONE:
        return [epigemm.calibrate() for _ in range(calls)]
    found = []
    for _ in range(calls):
        try:
            found.append(epigemm.calibrate())
        except RuntimeError as error:
            if "Does another program use the GPU?" not in str(error):
                raise
    if len(found) < min(calls, 2):
        pytest.skip("gpu: other processes of the tests load it")
    return found


def test_it_measures_what_a_gpu_can_have(tmp_path: Path) -> None:
    began = time.perf_counter()
    every = measured()
    assert time.perf_counter() - began < 3 * (CALLS + 1) * processes(), "3 s each, and 3 to load the kernels"
    told = architectures.of(device=0)
    # No instruction of Hopper's is faster than wgmma; of others what mma.sync reaches is not published everywhere.
    most = 1.05 * told["cublas_flops_per_us"] / 1e6 if told["is_fitted"] else 2.1 * every[0].assumed_tflops
    for found in every:
        assert found.memory_gb_per_s < 1.15 * found.assumed_gb_per_s
        assert 0.25 * found.assumed_tflops < found.tensor_tflops < most
        assert found.applied != is_fitted()
        if found.applied:
            most_efficient = 1.3 if IS_ALONE else 2  # the rate may be measured under more load than cuBLAS
            assert found.cublas_efficiency is not None and 0.25 < found.cublas_efficiency <= most_efficient
            assert found.path is not None and list(tmp_path.glob("*-calibrated-*.json")) == [found.path]
            assert architectures.of(device=0)["is_calibrated"]
        else:
            assert found.cublas_efficiency is None and found.path is None and not list(tmp_path.iterdir())
    assert max(each.memory_gb_per_s for each in every) > 0.5 * every[0].assumed_gb_per_s


def test_twice_gives_the_same_but_for_noise() -> None:
    """Other processes make a GPU slower, not faster: the two largest of several figures are those of the GPU alone."""
    every = measured()
    for figure in ("tensor_tflops", "memory_gb_per_s"):
        *_, second, first = sorted(getattr(each, figure) for each in every)
        assert second == pytest.approx(first, rel=0.1)


def test_hoppers_plans_stay_what_they_are() -> None:
    if not is_fitted():
        pytest.skip("gpu: no Hopper")
    before = answers()
    measured(calls=2)
    with pytest.raises(RuntimeError, match="the cost models of sm90 are fitted: they take no figures"):
        ops._calibrate(0, FIGURES.numbers)
    assert answers() == before


def test_figures_come_and_go() -> None:
    if is_fitted():
        pytest.skip("gpu: Hopper takes no figures")
    before = answers()
    calibrations.install(0, FIGURES)
    assert answers() != before and architectures.of(device=0)["memory_bytes_per_us"] == 1e6
    calibrations.forget(0)
    assert answers() == before


@pytest.mark.parametrize(("tf32", "k"), [(False, 16), (True, 8)])
@pytest.mark.parametrize("steps", [1, 3, 1000])
def test_the_loop_of_matrix_instructions_counts_what_it_computes(steps: int, tf32: bool, k: int) -> None:
    sums = torch.full((1,), -1.0, device="cuda")
    flops = ops._multiply_bare_out(steps, sums, tf32)
    torch.cuda.synchronize()
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    assert flops == 2 * 16 * 8 * k * 8 * 8 * 2 * multiprocessors * steps
    assert sums.item() == -1.0, "no sum is infinite"


def test_what_the_loop_does_not_take() -> None:
    sums = torch.zeros(1, device="cuda")
    for steps in (0, -1, 1 << 25):
        with pytest.raises(RuntimeError, match="steps must be in"):
            ops._multiply_bare_out(steps, sums)
    with pytest.raises(RuntimeError, match="sums must have fp32 numbers"):
        ops._multiply_bare_out(1, sums.double())
    with pytest.raises(RuntimeError, match="sums must have fp32 numbers"):
        ops._multiply_bare_out(1, sums[:0])


def test_under_a_capture() -> None:
    counted = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counted.add_(1)
        with pytest.raises(RuntimeError, match="during CUDA graph capture"):
            epigemm.calibrate()
    graph.replay()
    assert counted.item() == 1
