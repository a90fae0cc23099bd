"""`precompile(arch=...)` beside a GPU of that architecture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn
from epigemm.linker import store
from epigemm.planner.gpus import KNOWN

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

SIZES = [(1, 4096, 4096), (512, 1024, 1024), (2048, 4096, 4096), (8192, 4096, 1024)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_an_architecture_has_what_this_gpu_takes(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of kernels that are loaded here already; the cache that is made so serves the calls."""
    here = torch.cuda.get_device_name()
    if not any(name in here for name in KNOWN):
        pytest.skip(f"gpu: {here} is none of the known ones")

    @epigemm.epilogue
    def told(acc: Tensor, bias: PerColumn, other: Matrix) -> Tensor:
        return torch.tanh(acc + bias) * 0.75 + other

    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path))
    store.made.values.clear()
    by_device = epigemm.precompile(told, SIZES, dtype=dtype)
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path / "other"))
    store.made.values.clear()
    major, minor = torch.cuda.get_device_capability()
    by_name = epigemm.precompile(told, SIZES, dtype=dtype, arch=f"sm_{major}{minor}")
    assert set(by_name) >= set(by_device)
