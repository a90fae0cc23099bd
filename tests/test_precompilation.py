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
from epigemm.epilogues.registry import Epilogue, typed
from epigemm.linker import cubins, libraries, loader, store
from epigemm.planner.gpus import KNOWN
from tools.planner import ask_planner


@epigemm.epilogue
def mixed(acc: Tensor, bias: PerColumn, gain: PerRow, other: Matrix, limit: Scalar = 1.0) -> Tensor:
    return torch.clamp(acc + bias, -limit, limit) * gain + other


class Linker:
    """Stands for `loader.link_for`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[str], tuple[int, int]]] = []
        self.reason = ""

    def __call__(
        self, epilogue: Epilogue, symbols: list[str], capability: tuple[int, int]
    ) -> tuple[list[str], str]:
        self.asked.append((epilogue.name, symbols, capability))
        return symbols[:1], self.reason


@pytest.fixture
def linker(monkeypatch: pytest.MonkeyPatch) -> Linker:
    """In place of the loader's."""
    stands = Linker()
    monkeypatch.setattr(loader, "link_for", stands)
    return stands


COUNTS = {"tf32": 3, "split": 2, "scaled": 3}
OF_FP32 = [f"epigemm_open_sm80_mma_{name}_{tile}" for name, count in COUNTS.items() for tile in range(count)]
OF_FP32 += ["epigemm_open_sm80_fixup"]
TRAINED = ("elementwise", "derivative", "derivative_sums")  # where a bias is added


def test_precompile_for_a_gpu_that_is_not_here(linker: Linker) -> None:
    assert epigemm.precompile(mixed, arch="sm_120") == ["epigemm_open_elementwise_bfloat16"]
    ((name, symbols, capability),) = linker.asked
    tiles = [f"epigemm_open_sm80_mma_bfloat16_{tile}" for tile in range(10)]
    assert name == typed(mixed.traced, [False, False, False, True]).name and capability == (12, 0)
    assert symbols == ["epigemm_open_elementwise_bfloat16", *tiles]
    epigemm.precompile(mixed, dtype=torch.float32, training=True, arch="sm_86")
    alone = [f"epigemm_open_{kind}_float32" for kind in TRAINED]
    assert linker.asked[-1][1:] == ([*alone, *OF_FP32], (8, 6))
    epigemm.precompile(mixed, dtype=torch.float64, arch="sm_86")
    assert linker.asked[-1][1] == ["epigemm_open_elementwise_float64"]
    linker.reason = "no libraries"
    with pytest.raises(RuntimeError, match="mixed: no libraries"):
        epigemm.precompile(mixed, arch="sm_80")


@epigemm.epilogue
def several(acc: Tensor, bias: PerColumn, other: Matrix | None = None) -> tuple[Tensor, Tensor, Tensor]:
    z = acc + bias if other is None else (acc + bias) * other
    return F.gelu(z), z, (z * z).sum(0)


def test_of_several_results_each_is_linked(linker: Linker) -> None:
    """Alone, in 16 bits, where each is computed from the product; what is reduced and not stored in fp32."""
    for arch, sizes in (("sm_80", []), ("sm_90", [ALIGNED])):
        epigemm.precompile(several, *sizes, arch=arch, training=True)
        alone = [f"epigemm_open_{kind}_bfloat16" for kind in TRAINED]
        wide = [name.replace("bfloat16", "float32") for name in alone]
        asked = [(name.partition(".")[0], symbols) for name, symbols, _ in linker.asked]
        every = [("several_result0", alone), ("several_result1", alone), ("several_result2", wide)]
        # Without the other operand the second result is acc + bias, of which the package has the kernels.
        assert asked == [*every, every[0], every[2]]
        linker.asked.clear()


ALONE = "epigemm_open_elementwise_bfloat16"
SIZES = [(1, 4096, 4096), (2048, 4096, 4096), (300, 1001, 513)]
ALIGNED = [*SIZES[:2], (8192, 4096, 1024), (16, 8192, 8192)]


HOPPER = [KNOWN["H100"], KNOWN["H200"]]


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_100", "sm_120"])
def test_sizes_on_other_gpus_than_hopper(arch: str, linker: Linker) -> None:
    """The elementwise kernel, and what the planner chooses on any of them, once, for the architecture."""
    epigemm.precompile(mixed, SIZES, arch=arch, training=True)
    ((_, names, capability),) = linker.asked
    linker.asked.clear()
    assert names[:3] == [f"epigemm_open_{kind}_bfloat16" for kind in TRAINED]
    assert all(name.startswith("epigemm_open_sm80_mma_bfloat16_") for name in names[3:])
    assert f"sm_{capability[0]}{capability[1]}" == arch and len(names) == len(set(names))
    for precision in ("highest", "ieee", "high"):
        epigemm.precompile(mixed, SIZES, dtype=torch.float32, precision=precision, arch=arch)
        _, names, capability = linker.asked.pop()
        assert names[0] == "epigemm_open_elementwise_float32" and f"sm_{capability[0]}{capability[1]}" == arch
        assert all(name.startswith("epigemm_open_sm80_") for name in names[1:])
        assert precision != "ieee" or len(names) == 1
    assert not linker.asked


def test_sizes_on_hopper_without_a_gpu(caplog: pytest.LogCaptureFixture, linker: Linker) -> None:
    """What the planner chooses for every size on each of its GPUs, and nothing twice."""
    caplog.set_level("INFO", "epigemm")
    epigemm.precompile(mixed, ALIGNED, arch="sm_90")
    ((name, symbols, capability),) = linker.asked
    assert capability == (9, 0) and symbols[0] == ALONE and len(set(symbols)) == len(symbols)
    wanted, expected = {ALONE}, []
    for (m, n, k), gpu in itertools.product(ALIGNED, HOPPER):
        found = ask_planner(name, m, n, k, "bfloat16", "ieee", gpu=gpu.numbers)
        what = "a fused kernel" if found["fused"] else "PyTorch's GEMM and one elementwise kernel"
        expected.append(f"mixed: ({m}, {n}, {k}) in torch.bfloat16 on {gpu.name} is {what}")
        if found["fused"]:
            wanted.add(f"epigemm_open_{found['family']}_bfloat16_{found['plan'][1]}")
    assert set(symbols) == wanted and len(wanted) > 2
    assert [text for text in caplog.messages if text.startswith("mixed: ")] == expected


def test_for_training_on_hopper_the_product_is_stored_beside_the_result(linker: Linker) -> None:
    """And both matrices of a function that returns two, where no gradient is recorded."""
    for training in (False, True):
        epigemm.precompile(mixed, ALIGNED, arch="sm_90", training=training)
        asked = {name.partition(".")[0]: symbols for name, symbols, _ in linker.asked}
        assert ("mixed_with_product" in asked) == training
        if training:
            assert asked["mixed_with_product"] and all(
                "_sm90_" in each for each in asked["mixed_with_product"]
            )
        linker.asked.clear()


@pytest.mark.skipif(bool(libraries.unavailable()), reason="NVRTC or nvJitLink is missing")
@pytest.mark.skipif(cubins.ir_path(ALONE) is None, reason="a build without open kernels")
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_100", "sm_120"])
def test_it_is_linked_without_a_driver(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(store, "made", type(store.made)())
    assert epigemm.precompile(mixed, SIZES, arch=arch) == [ALONE]
    assert len(list((tmp_path / "cubins").glob("*.cubin"))) == 1
    assert epigemm.precompile(mixed, SIZES, arch=arch) == []
