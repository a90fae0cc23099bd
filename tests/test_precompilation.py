"""`precompile`: its arguments, and its answer without a GPU. See test_decorator_user_epilogue_gpu.py, too."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn, PerRow, Scalar
from epigemm.epilogues.registry import typed
from epigemm.linker import cubins, libraries, store
from epigemm.planner.gpus import KNOWN
from tests.linker.fakes import Linking
from tools.planner import ask_planner


@epigemm.epilogue
def mixed(acc: Tensor, bias: PerColumn, gain: PerRow, other: Matrix, limit: Scalar = 1.0) -> Tensor:
    return torch.clamp(acc + bias, -limit, limit) * gain + other


@pytest.fixture
def linking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Linking:
    """An empty cache, and libraries that are fakes: what is asked for is what is linked now."""
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path / "cache"))
    return Linking(monkeypatch, tmp_path)


COUNTS = {"tf32": 3, "split": 2, "scaled": 3}
OF_FP32 = [f"epigemm_open_sm80_mma_{name}_{tile}" for name, count in COUNTS.items() for tile in range(count)]
OF_FP32 += ["epigemm_open_sm80_fixup"]
TRAINED = ("elementwise", "derivative", "derivative_sums")  # where a bias is added


def test_precompile_for_a_gpu_that_is_not_here(linking: Linking) -> None:
    tiles = [f"epigemm_open_sm80_mma_bfloat16_{tile}" for tile in range(10)]
    assert epigemm.precompile(mixed, arch="sm_120") == [ALONE, *tiles]
    assert all("-arch=sm_120 " in options for options in linking.linker.calls)
    alone = [f"epigemm_open_{kind}_float32" for kind in TRAINED]
    assert epigemm.precompile(mixed, dtype=torch.float32, training=True, arch="sm_86") == [*alone, *OF_FP32]
    assert epigemm.precompile(mixed, dtype=torch.float64, arch="sm_86") == [
        ALONE.replace("bfloat16", "float64")
    ]
    reason = linking.lose_libraries()
    with pytest.raises(RuntimeError, match=f"mixed: {reason}"):
        epigemm.precompile(mixed, arch="sm_80")


@epigemm.epilogue
def several(acc: Tensor, bias: PerColumn, other: Matrix | None = None) -> tuple[Tensor, Tensor, Tensor]:
    z = acc + bias if other is None else (acc + bias) * other
    return F.gelu(z), z, (z * z).sum(0)


def test_of_several_results_each_is_linked(linking: Linking) -> None:
    """Alone, in 16 bits, where each is computed from the product; what is reduced and not stored in fp32."""
    for arch, sizes in (("sm_80", []), ("sm_90", [ALIGNED])):
        alone = [f"epigemm_open_{kind}_bfloat16" for kind in TRAINED]
        wide = [name.replace("bfloat16", "float32") for name in alone]
        # Without the other operand the second result is acc + bias, of which the package has the kernels.
        every = [*alone, *alone, *wide, *alone, *wide]
        assert epigemm.precompile(several, *sizes, arch=arch, training=True) == every


ALONE = "epigemm_open_elementwise_bfloat16"
SIZES = [(1, 4096, 4096), (2048, 4096, 4096), (300, 1001, 513)]
ALIGNED = [*SIZES[:2], (8192, 4096, 1024), (16, 8192, 8192)]


HOPPER = [KNOWN["H100"], KNOWN["H200"]]


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_100", "sm_120"])
def test_sizes_on_other_gpus_than_hopper(arch: str, linking: Linking) -> None:
    """The elementwise kernel, and what the planner chooses on any of them, once, for the architecture."""
    names = epigemm.precompile(mixed, SIZES, arch=arch, training=True)
    assert names[:3] == [f"epigemm_open_{kind}_bfloat16" for kind in TRAINED]
    assert all(name.startswith("epigemm_open_sm80_mma_bfloat16_") for name in names[3:])
    assert len(names) == len(set(names))
    for precision in ("ieee", "highest", "high"):
        names = epigemm.precompile(mixed, SIZES, dtype=torch.float32, precision=precision, arch=arch)
        assert (names == [ALONE.replace("bfloat16", "float32")]) == (precision == "ieee")
        assert precision == "ieee" or all(name.startswith("epigemm_open_sm80_") for name in names)
    assert all(f"-arch={arch} " in options for options in linking.linker.calls)


def test_sizes_on_hopper_without_a_gpu(caplog: pytest.LogCaptureFixture, linking: Linking) -> None:
    """What the planner chooses for every size on each of its GPUs, and nothing twice."""
    caplog.set_level("INFO", "epigemm")
    symbols = epigemm.precompile(mixed, ALIGNED, arch="sm_90")
    assert symbols[0] == ALONE and len(set(symbols)) == len(symbols)
    wanted, expected, name = {ALONE}, [], typed(mixed.traced, [False, False, False, True]).name
    for (m, n, k), gpu in itertools.product(ALIGNED, HOPPER):
        found = ask_planner(name, m, n, k, "bfloat16", "ieee", gpu=gpu.numbers)
        what = "a fused kernel" if found["fused"] else "PyTorch's GEMM and one elementwise kernel"
        expected.append(f"mixed: ({m}, {n}, {k}) in torch.bfloat16 on {gpu.name} is {what}")
        if found["fused"]:
            wanted.add(f"epigemm_open_{found['family']}_bfloat16_{found['plan'][1]}")
    assert set(symbols) == wanted and len(wanted) > 2
    assert [text for text in caplog.messages if text.startswith("mixed: (")] == expected


def test_for_training_on_hopper_the_product_is_stored_beside_the_result(linking: Linking) -> None:
    """By kernels of another epilogue."""
    first = epigemm.precompile(mixed, ALIGNED, arch="sm_90")
    more = epigemm.precompile(mixed, ALIGNED, arch="sm_90", training=True)
    stored = [name for name in more if "_sm90_" in name]
    assert more == [*(ALONE.replace("elementwise", kind) for kind in TRAINED[1:]), *stored]
    assert stored and {*stored} & {*first}


@pytest.mark.skipif(bool(libraries.unavailable()), reason="NVRTC or nvJitLink is missing")
@pytest.mark.skipif(cubins.ir_path(ALONE) is None, reason="a build without open kernels")
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_100", "sm_120"])
def test_it_is_linked_without_a_driver(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path))
    store.made.values.clear()
    assert epigemm.precompile(mixed, SIZES, arch=arch) == [ALONE]
    assert len(list((tmp_path / "cubins").glob("*.cubin"))) == 1
    assert epigemm.precompile(mixed, SIZES, arch=arch) == []
