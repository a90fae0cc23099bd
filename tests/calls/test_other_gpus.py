"""Calls on a pretended GPU other than Hopper: the package has no linked kernel for it, so the first call links one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm._native import ops
from epigemm.calls import entry
from epigemm.linker import cubins, libraries, loader, store
from epigemm.linker.store import Once
from epigemm.packs import weight_packs
from epigemm.planner import plans
from epigemm.planner.gpus import KNOWN
from tests.linker.fakes import KERNEL_IR, FakeNvJitLink, fakes
from tests.support.choices import forget
from tests.support.pieces import pretend_gpu
from tests.support.pretended import Pretended

DEVICE = 44  # of which no test machine has so many
A100 = KNOWN["A100 80 GB"]
MISSING = "nvJitLink was not found"
SIZE = (48, 1024, 64)
"""M, N, K of products in bf16 for which a fused kernel is expected to be faster there."""
FIXUP = "epigemm_open_sm80_fixup"
REAL = {name: getattr(loader, name) for name in ("link", "would_link")}


@dataclass
class Machine:
    """What was linked and loaded, and how often linking was tried."""

    linker: FakeNvJitLink
    module: Pretended
    libraries: Any
    loaded: list[tuple[str, str]] = field(default_factory=list)
    tried: int = 0
    capturing: bool = False

    def lose_libraries(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(libraries, "_found", MISSING)

    @property
    def fused(self) -> int:
        """How many calls ran on a fused kernel, since the last time."""
        count = len(self.module.ran)
        self.module.ran.clear()
        return count


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    _, linker, pair = fakes()
    found = Machine(linker, Pretended(), pair)
    build = cubins.build_cubins

    def ir_path(symbol: str) -> Path:
        (path := tmp_path / symbol).write_bytes(KERNEL_IR)
        return path

    def build_cubins(jobs: Sequence[cubins.Job]) -> list[bytes]:
        found.tried += 1
        return build(jobs)

    def add_kernel(name: str, capability: int, symbol: str, cubin: Tensor) -> None:
        found.loaded.append((name, symbol))

    found.module.is_linked = lambda names: set(names) <= {symbol for _, symbol in found.loaded}
    pretend_gpu(monkeypatch, DEVICE)
    patches: list[tuple[Any, str, Any]] = [
        (plans, "gpu_numbers", lambda device: A100.numbers),
        (entry, "_module", found.module),
        (libraries, "_found", pair),
        (store, "made", Once()),
        (cubins, "_functors", Once()),
        (cubins, "ir_path", ir_path),
        (cubins, "build_cubins", build_cubins),
        (ops, "_add_kernel", add_kernel),
        (torch.cuda, "get_device_capability", lambda device: A100.capability),
        (loader, "_failed", {}),
        (loader, "capturing", lambda device: found.capturing),
        (weight_packs, "capturing", lambda device: found.capturing),
        *((loader, name, function) for name, function in REAL.items()),
    ]
    for where, name, value in patches:
        monkeypatch.setattr(where, name, value)
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path / "cache"))
    forget(DEVICE)
    yield found
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
    ((name, symbol),) = machine.loaded
    assert name == "bias_gelu" and symbol.startswith("epigemm_open_sm80_mma_bfloat16_")
    assert not cubins.is_prelinked(name, symbol, A100.capability)
    assert machine.fused == 3 and machine.tried == 1
    (options,) = machine.linker.calls
    assert "-arch=sm_80 " in f"{options} "


def test_fp32_on_slices_links_the_fixup_too(machine: Machine) -> None:
    x, weight, bias = draw((1024, 1024, 512), torch.float32)
    gelu(x, weight, bias, strict=True)
    symbols = {symbol for _, symbol in machine.loaded}
    assert FIXUP in symbols and len(symbols) == 2
    assert all(symbol.startswith("epigemm_open_sm80_") for symbol in symbols)


def test_without_the_libraries_pytorchs_gemm_runs(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried once, and `explain` says why not, before the first call and after it."""
    machine.lose_libraries(monkeypatch)
    arguments = draw()
    before = epigemm.explain("linear_gelu", *arguments)
    for _ in range(3):
        gelu(*arguments)
    after = epigemm.explain("linear_gelu", *arguments)
    for found in (before, after):
        assert found.path == "gemm+elementwise" and any(MISSING in reason for reason in found.reasons)
        assert found.kernel.startswith("torch GEMM")
    assert machine.tried == 1 and not machine.loaded and machine.fused == 0


def test_without_the_libraries_kernels_of_the_cache_run(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = draw()
    gelu(*arguments)
    store.made.values.clear()  # as in another process
    machine.loaded.clear()
    machine.lose_libraries(monkeypatch)
    assert epigemm.explain("linear_gelu", *arguments).path == "fused"
    gelu(*arguments, strict=True)
    assert machine.fused == 2 and len(machine.loaded) == 1 and len(machine.linker.calls) == 1


def test_a_strict_call_says_what_is_missing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.lose_libraries(monkeypatch)
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
    assert [symbol for _, symbol in machine.loaded] == ["epigemm_open_sm80_mma_bfloat16_4"]


def test_a_batch_invariant_call_without_a_kernel_is_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's GEMM would choose its kernel by M; and fp32 multiply-adds are Hopper's."""
    with epigemm.batch_invariant():
        with pytest.raises(RuntimeError, match=r"batch-invariant mode.*Hopper"):
            epigemm.linear_gelu(*draw(dtype=torch.float32), precision="ieee")
        machine.lose_libraries(monkeypatch)
        with pytest.raises(RuntimeError, match=f"batch-invariant mode.*{MISSING}"):
            epigemm.linear_gelu(*draw())
    assert machine.fused == 0
