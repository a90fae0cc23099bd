"""The road of fp32 calls on fp16 slices, watched: on a GPU as it is, on a CPU with the kernels written in PyTorch.

What is tested with it is everything around the kernels: which pack a call reads, when it is made, where the result
goes.
The stand-in multiplies what is *in* the pack, so that a stale one gives a wrong result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm._native import ops
from epigemm.calls import entry, weight_slices
from epigemm.epilogues.registry import Epilogue, named
from epigemm.linking import loading
from epigemm.packs import weight_packs
from epigemm.planning import decisions, measured, plans
from epigemm.planning.measured import Entry
from tests.support.cases import fused_unavailable

HOPPER = (90, 132)
INTERLEAVE = 64
DEVICE = 43
"""The index of the GPU that a CPU stands in for: no test machine has so many."""
_PLANS = {"tf32": (0, 0, 0, 1, 1), "split": (2, 0, 0, 1, 1), "scaled": (2, 0, 0, 1, 1)}


@dataclass
class Launch:
    """One call of the native operator."""

    packed: bool
    arithmetic: str
    pack: int | None  # address of the pack
    out: int
    shape: tuple[int, int, int]


@dataclass
class Road:
    """Where calls run, what they have launched, and a problem that dispatch puts on fp16 slices."""

    device: torch.device
    size: tuple[int, int, int]
    launches: list[Launch] = field(default_factory=list)
    capturing: bool = False

    def take(self) -> list[Launch]:
        """What was launched since the last time."""
        taken, self.launches = self.launches, []
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
        measured.install(self.index, entries)

    @property
    def index(self) -> int:
        """Of the GPU, or of the one that a CPU stands in for."""
        return DEVICE if self.device.type == "cpu" else torch.cuda.current_device()

    def forget(self) -> None:
        """Undo `measure`, and have the planner ask its models again."""
        ops._clear_measured(self.index)
        if self.device.type == "cuda":
            measured.load(self.index)

    def rows_worth_a_pack_alone(self) -> int:
        """An M whose product is worth reading a pack for, but not making one."""
        _, n, k = self.size
        for rows in range(16, 4096, 16):
            fused = [
                plans.ask("bias", rows, n, k, "float32", "split", packed=packed, gpu=HOPPER, has_bias=False)[
                    "fused"
                ]
                for packed in (True, False)
            ]
            if fused == [True, False]:
                return rows
        raise AssertionError("dispatch knows no such problem")


AT_HIGHEST: tuple[Any, ...] = (None, [], [], "highest")
"""The rest of the operator `linear`'s arguments for the bare product: bias, operands, scalars, precision."""


def decode(pack: Tensor, rows: int, columns: int, pieces: int) -> Tensor:
    """The fp64 matrix whose pieces a pack holds."""
    roots = pack[: 4 * rows].view(torch.float32).double()
    padded = -(-columns // INTERLEAVE) * INTERLEAVE if pieces == 2 else -(-columns // 8) * 8
    size = 2 * pieces * rows * padded
    # The slices are the last section; sections are whole 256 bytes.
    start = weight_packs.pack_bytes(rows, columns, pieces) - -(-size // 256) * 256
    halves = pack[start : start + size].view(torch.float16).double()
    if pieces == 2:
        halves = halves.view(rows, -1, 2, INTERLEAVE)
        values = (halves[:, :, 0] + halves[:, :, 1] * 2.0**-11).reshape(rows, padded)
    else:
        values = halves.view(rows, padded)
    return values[:, :columns] * (roots * roots)[:, None]


def pack_size(matrix: Tensor, pieces: int) -> int:
    """Bytes of its pack."""
    rows, columns = matrix.shape
    return weight_packs.pack_bytes(rows, columns, pieces)


def held(pack: Tensor, matrix: Tensor, pieces: int) -> bytes:
    """What a pack of `matrix` holds, to be compared."""
    rows, columns = matrix.shape
    return bytes(decode(pack.cpu(), rows, columns, pieces).numpy().tobytes())


def known(epilogue: Epilogue | None) -> Epilogue:
    assert epilogue is not None
    return epilogue


def stand_in(
    epilogue: str,
    x: Tensor,
    weight: Tensor,
    pack: Tensor | None,
    workspace: Tensor,
    bias: Tensor | None,
    operands: list[Tensor] | None,
    scalars: list[float] | None,
    arithmetic: str,
    plan: list[int] | None,
    out: Tensor,
) -> None:
    """The native operator in PyTorch, as strict about its arguments."""
    (m, k), n, pieces = x.shape, weight.shape[0], weight_packs.SLICES[arithmetic]
    x_bytes, weight_bytes = weight_packs.pack_bytes(m, k, pieces), weight_packs.pack_bytes(n, k, pieces)
    assert workspace.shape[0] == x_bytes + (0 if pack is not None else weight_bytes)
    assert out.shape == (m, -(-n // 4) * 4) and out.stride(1) == 1 and out.data_ptr() % 16 == 0
    assert m == 1 or out.stride(0) % 4 == 0
    operands, scalars = operands or [], scalars or []
    assert all(operand.is_contiguous() for operand in (bias, *operands) if operand is not None)
    torch.ops.epigemm._split_rows_out(x, pieces, workspace[:x_bytes])
    if pack is None:
        pack = workspace[x_bytes:]
        torch.ops.epigemm._split_rows_out(weight, pieces, pack)
    exact = (
        decode(workspace[:x_bytes], m, k, pieces) @ decode(pack[:weight_bytes], n, k, pieces).t()
    ).float()
    out.zero_()[:, :n].copy_(known(named(epilogue)).reference(exact, bias, operands, scalars))


def on_cpu(
    name: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor] | None,
    scalars: Sequence[float] | None,
    *decided: Any,
) -> int:
    """`decisions.linear_out` for a GPU that is described: a kernel on the tensors as they are is F.linear."""
    launch, out = decided[-2:]
    decision: int = _linear_out(name, x, weight, bias, operands, scalars, *decided)
    if launch and decisions.way(decision) == decisions.TENSORS:
        exact = torch.nn.functional.linear(x, weight)
        out.copy_(known(named(name)).reference(exact, bias, operands or (), scalars or ()))
    return decision


_linear_out = decisions.linear_out


@contextmanager
def watched(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Road]:
    """A `Road` on a device; on a CPU with the stand-in in place of the kernels."""
    on_gpu = device.type == "cuda"
    if on_gpu and (reason := fused_unavailable()):
        pytest.skip(f"gpu: {reason}")
    road = Road(device, (4096, 2048, 1024) if on_gpu else (2048, 1024, 512))
    native: Any = weight_slices.launch if on_gpu else stand_in

    def record(name: str, x: Tensor, weight: Tensor, pack: Tensor | None, *others: Any) -> None:
        native(name, x, weight, pack, *others)
        address = None if pack is None else pack.data_ptr()
        shape = (x.shape[0], weight.shape[0], x.shape[1])
        road.launches.append(Launch(pack is not None, others[4], address, others[-1].data_ptr(), shape))

    monkeypatch.setattr(weight_slices, "launch", record)
    # The kernels written in PyTorch, and the record of launches, stand behind the cold path alone.
    monkeypatch.setattr(entry, "_module", None)
    if not on_gpu:
        monkeypatch.setattr(plans, "has_gpu_kernels", lambda tensor: tensor.is_cpu)
        monkeypatch.setattr(plans, "gpu_numbers", lambda device: HOPPER)
        monkeypatch.setattr(plans, "no_gemm_kernels", lambda: "")
        monkeypatch.setattr(loading, "link", lambda *call: "")
        monkeypatch.setattr(loading, "would_link", lambda *call: "")
        monkeypatch.setattr(Tensor, "get_device", lambda tensor: DEVICE)
        monkeypatch.setattr(decisions, "linear_out", on_cpu)
        monkeypatch.setattr(weight_packs, "capturing", lambda device: road.capturing)
    weight_slices._shortages.clear()
    try:
        yield road
    finally:
        weight_slices._shortages.clear()
        road.forget()


@pytest.fixture
def road(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Road]:
    """fp32 calls on fp16 slices, on each device."""
    with watched(device, monkeypatch) as watching:
        yield watching


assert epigemm.__version__  # importing the package is what defines the operators above
