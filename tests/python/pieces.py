"""The road of fp32 calls on fp16 pieces, watched: on a GPU as it is, on a CPU with the kernels written in PyTorch.

What is tested with it is everything around the kernels: which pack a call reads, when it is made, where the result
goes.
The stand-in multiplies what is *in* the pack, so that a stale one gives a wrong result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import entry, execution, packs, plans, split
from epigemm.epilogues import EPILOGUES
from tests.support.cases import fused_unavailable

HOPPER = (90, 132)
INTERLEAVE = 64


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
    """Where calls run, what they have launched, and a problem that dispatch puts on fp16 pieces."""

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


def asked_of_a_large_product(ask: Any, epilogue: str, *problem: Any, **options: Any) -> dict[str, Any]:
    """`plans.ask` about 8192 x 8192 x 8192 in place of what the call is about: one that runs on fp16 pieces."""
    answer: dict[str, Any] = ask(epilogue, 8192, 8192, 8192, *problem[3:], **options)
    return answer


AT_HIGHEST: tuple[Any, ...] = (None, [], [], "highest")
"""The rest of the operator `linear`'s arguments for the bare product: bias, operands, scalars, precision."""


def decode(pack: Tensor, rows: int, columns: int, pieces: int) -> Tensor:
    """The fp64 matrix whose pieces a pack holds."""
    section = -(-4 * rows // 256) * 256
    roots = pack[: 4 * rows].view(torch.float32).double()
    padded = -(-columns // INTERLEAVE) * INTERLEAVE if pieces == 2 else -(-columns // 8) * 8
    halves = pack[2 * section : 2 * section + 2 * pieces * rows * padded].view(torch.float16).double()
    if pieces == 2:
        halves = halves.view(rows, -1, 2, INTERLEAVE)
        values = (halves[:, :, 0] + halves[:, :, 1] * 2.0**-11).reshape(rows, padded)
    else:
        values = halves.view(rows, padded)
    return values[:, :columns] * (roots * roots)[:, None]


def pack_size(matrix: Tensor, pieces: int) -> int:
    """Bytes of its pack."""
    rows, columns = matrix.shape
    return packs.pack_bytes(rows, columns, pieces)


def held(pack: Tensor, matrix: Tensor, pieces: int) -> bytes:
    """What a pack of `matrix` holds, to be compared."""
    rows, columns = matrix.shape
    return bytes(decode(pack.cpu(), rows, columns, pieces).numpy().tobytes())


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
    (m, k), n, pieces = x.shape, weight.shape[0], packs.PIECES[arithmetic]
    x_bytes, weight_bytes = packs.pack_bytes(m, k, pieces), packs.pack_bytes(n, k, pieces)
    assert workspace.shape[0] == x_bytes + (0 if pack is not None else weight_bytes)
    assert out.shape == (m, -(-n // 4) * 4) and out.stride(1) == 1 and out.data_ptr() % 16 == 0
    assert m == 1 or out.stride(0) % 4 == 0
    operands, scalars = operands or [], scalars or []
    assert all(operand.is_contiguous() for operand in (bias, *operands) if operand is not None)
    torch.ops.epigemm._split_rows_out(x, pieces, workspace[:x_bytes])
    if pack is None:
        pack = workspace[x_bytes:]
        torch.ops.epigemm._split_rows_out(weight, pieces, pack)
    product = (
        decode(workspace[:x_bytes], m, k, pieces) @ decode(pack[:weight_bytes], n, k, pieces).t()
    ).float()
    out.zero_()[:, :n].copy_(EPILOGUES[epilogue].reference(product, bias, operands, scalars))


@contextmanager
def watched(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Road]:
    """A `Road` on a device; on a CPU with the stand-in in place of the kernels."""
    on_gpu = device.type == "cuda"
    if on_gpu and (reason := fused_unavailable()):
        pytest.skip(f"gpu: {reason}")
    road = Road(device, (4096, 2048, 1024) if on_gpu else (2048, 1024, 512))
    native: Any = split.launch if on_gpu else stand_in

    def record(name: str, x: Tensor, weight: Tensor, pack: Tensor | None, *others: Any) -> None:
        native(name, x, weight, pack, *others)
        address = None if pack is None else pack.data_ptr()
        shape = (x.shape[0], weight.shape[0], x.shape[1])
        road.launches.append(Launch(pack is not None, others[4], address, others[-1].data_ptr(), shape))

    monkeypatch.setattr(split, "launch", record)
    # The kernels written in PyTorch, and the record of launches, stand behind the cold path alone.
    monkeypatch.setattr(entry, "_module", None)
    if not on_gpu:
        monkeypatch.setattr(plans, "has_gpu_kernels", lambda tensor: tensor.is_cpu)
        monkeypatch.setattr(plans, "gpu_numbers", lambda device: HOPPER)
        monkeypatch.setattr(plans, "no_gemm_kernels", lambda: "")
        monkeypatch.setattr(execution, "_fused_linear_out", lambda *_: False)
        monkeypatch.setattr(packs, "capturing", lambda device: road.capturing)
    remembered = (plans.split_plan, plans.tf32_microseconds)
    for asked in remembered:
        asked.cache_clear()
    split._shortages.clear()
    try:
        yield road
    finally:
        split._shortages.clear()
        for asked in remembered:
            asked.cache_clear()


@pytest.fixture
def road(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Road]:
    """fp32 calls on fp16 pieces, on each device."""
    with watched(device, monkeypatch) as watching:
        yield watching


assert epigemm.__version__  # importing the package is what defines the operators above
