"""Calls on a pretended GPU other than Hopper: the package has no linked kernel for it, so the first call links one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm.linker import cubins, store
from epigemm.planner.gpus import KNOWN
from tests.linker.fakes import REAL, Linking
from tests.support.choices import forget
from tests.support.pretended import Pretended, pretend_gpu

DEVICE = 44  # of which no test machine has so many
A100 = KNOWN["A100 80 GB"]
MISSING = "nvJitLink was not found"
SIZE = (48, 1024, 64)
"""M, N, K of products in bf16 for which a fused kernel is expected to be faster there."""
FIXUP = "epigemm_open_sm80_fixup"


class Machine(Linking):
    """What was linked and loaded, and how many calls ran on a fused kernel."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        super().__init__(patch, folder, A100.capability)
        self.module = Pretended()
        self.module.is_linked = self.has
        pretend_gpu(patch, DEVICE, self.module, lambda: self.capturing, A100.numbers, REAL)

    @property
    def fused(self) -> int:
        """Since the last time."""
        count = len(self.module.ran)
        self.module.ran.clear()
        return count


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path / "cache"))
    forget(DEVICE)
    yield Machine(monkeypatch, tmp_path)
    forget(DEVICE)


def draw(size: tuple[int, int, int] = SIZE, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    m, n, k = size
    return torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)


def gelu(x: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> Tensor:
    """The call, which has to be right whatever computes it."""
    found = epigemm.linear_gelu(x, weight, bias, **options)
    expected = torch.nn.functional.gelu(
        torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    )
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=0.2)
    return found


def test_a_built_in_epilogue_is_linked_once(machine: Machine) -> None:
    """For the GPU's own architecture."""
    arguments = draw()
    assert epigemm.explain("linear_gelu", *arguments).path == "fused" and not machine.loaded
    for _ in range(3):
        gelu(*arguments, strict=True)
    (symbol,) = machine.loaded
    assert symbol.startswith("epigemm_open_sm80_mma_bfloat16_")
    assert not cubins.is_prelinked("bias_gelu", symbol, A100.capability)
    assert machine.fused == 3 and machine.tried == 1
    (options,) = machine.linker.calls
    assert "-arch=sm_80 " in f"{options} "


def test_fp32_on_slices_links_the_fixup_too(machine: Machine) -> None:
    x, weight, bias = draw((1024, 1024, 512), torch.float32)
    gelu(x, weight, bias, strict=True)
    symbols = machine.loaded.keys()
    assert FIXUP in symbols and len(symbols) == 2
    assert all(symbol.startswith("epigemm_open_sm80_") for symbol in symbols)


def test_without_the_libraries_pytorchs_gemm_runs(machine: Machine) -> None:
    """It is tried once, and `explain` says why not, before the first call and after it."""
    machine.lose_libraries()
    arguments = draw()
    before = epigemm.explain("linear_gelu", *arguments)
    for _ in range(3):
        gelu(*arguments)
    after = epigemm.explain("linear_gelu", *arguments)
    for found in (before, after):
        assert found.path == "gemm+elementwise" and any(MISSING in reason for reason in found.reasons)
        assert found.kernel.startswith("torch GEMM")
    assert machine.tried == 1 and not machine.loaded and machine.fused == 0


def test_without_the_libraries_kernels_of_the_cache_run(machine: Machine) -> None:
    arguments = draw()
    gelu(*arguments)
    store.made.values.clear()  # as in another process
    machine.loaded.clear()
    machine.lose_libraries()
    assert epigemm.explain("linear_gelu", *arguments).path == "fused"
    gelu(*arguments, strict=True)
    assert machine.fused == 2 and len(machine.loaded) == 1 and len(machine.linker.calls) == 1


def test_a_strict_call_says_what_is_missing(machine: Machine) -> None:
    machine.lose_libraries()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"strict: got True .*{MISSING}"):
            epigemm.linear_gelu(*draw(), strict=True)
    assert machine.tried == 1


def test_nothing_is_linked_during_a_capture(machine: Machine) -> None:
    """PyTorch's GEMM is captured then. What a capture had to leave is linked by the next call outside of one."""
    arguments = draw()
    machine.capturing = True
    explained = epigemm.explain("linear_gelu", *arguments)
    assert explained.path == "gemm+elementwise" and any("captured" in each for each in explained.reasons)
    gelu(*arguments)
    with pytest.raises(RuntimeError, match=r"strict: got True .*while a CUDA graph is captured"):
        epigemm.linear_gelu(*arguments, strict=True)
    assert machine.tried == machine.fused == 0
    machine.capturing = False
    gelu(*arguments)
    machine.capturing = True
    gelu(*arguments, strict=True)
    assert machine.fused == 2 and machine.tried == 1


@pytest.mark.parametrize("size", [(48, 1024, 64), (33, 255, 61)], ids=["whole 16 bytes", "copies"])
def test_a_batch_invariant_call_runs_one_tile(machine: Machine, size: tuple[int, int, int]) -> None:
    """On copies where rows are not whole 16 bytes: it never loads by elements."""
    with epigemm.batch_invariant():
        for rows in (1, size[0]):
            gelu(*draw((rows, *size[1:])))
    assert machine.fused == 2
    assert list(machine.loaded) == ["epigemm_open_sm80_mma_bfloat16_4"]


def test_a_batch_invariant_call_without_a_kernel_is_refused(machine: Machine) -> None:
    """PyTorch's GEMM would choose its kernel by M; and fp32 multiply-adds are Hopper's."""
    with epigemm.batch_invariant():
        with pytest.raises(RuntimeError, match=r"batch-invariant mode.*Hopper"):
            epigemm.linear_gelu(*draw(dtype=torch.float32), precision="ieee")
        machine.lose_libraries()
        with pytest.raises(RuntimeError, match=f"batch-invariant mode.*{MISSING}"):
            epigemm.linear_gelu(*draw())
    assert machine.fused == 0
