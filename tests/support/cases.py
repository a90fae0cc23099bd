"""The registry as test parameters, and random operands for whatever epilogue it lists."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from typing import Any

import torch

import epigemm
from tests.support.arithmetic import Arithmetic

assert epigemm.__version__  # importing the package is what defines the operators below

REGISTRY: dict[str, dict[str, Any]] = {
    entry["name"]: entry for entry in json.loads(torch.ops.epigemm._registry())
}
LINEAR = [name for name, entry in REGISTRY.items() if entry["linear"]]
ELEMENTWISE = [name for name, entry in REGISTRY.items() if entry["elementwise"]]


@functools.cache
def cuda_unavailable() -> str:
    """Why no CUDA kernel of ours can run here; "" when one can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return str(torch.ops.epigemm._cuda_status(torch.cuda.current_device()))


@functools.cache
def fused_unavailable() -> str:
    """Why no fused GEMM can run here; "" when one can."""
    return cuda_unavailable() or ("" if torch.cuda.get_device_capability() == (9, 0) else "no Hopper GPU")


def mma_unavailable() -> str:
    """Why not every tile of the mma.sync kernels can run here; "" where all can."""
    if reason := cuda_unavailable():
        return reason
    major, minor = torch.cuda.get_device_capability()
    has_room = major in (9, 10) or (major, minor) in ((8, 0), (8, 7))  # as in csrc/gemm/sm80/architecture.h
    return "" if has_room else "two tiles need 144 KB of shared memory, which this GPU does not have"


@dataclass
class Operands:
    """What an epilogue is given besides the accumulator, exactly as the ops take it."""

    bias: torch.Tensor | None = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    scalars: list[float] = field(default_factory=list)

    def map(self, change: Any) -> Operands:
        """The same operands with `change` applied to every tensor."""
        bias = None if self.bias is None else change(self.bias)
        return Operands(bias, [change(tensor) for tensor in self.tensors], list(self.scalars))


def declared(name: str, kind: str) -> list[str]:
    """Names of the operands of one kind that an epilogue declares."""
    return [operand["name"] for operand in REGISTRY[name]["operands"] if operand["kind"] == kind]


def has_bias(name: str) -> bool:
    return "bias" in declared(name, "per_column")


def signed(shape: tuple[int, ...], rng: torch.Generator, *, mixed: bool = True) -> torch.Tensor:
    """Random float64: both signs and, when mixed, magnitudes over 2^-6 .. 2^1 (no relu acts as identity)."""
    values = torch.randn(shape, generator=rng, dtype=torch.float64)
    if mixed:
        exponents = torch.randint(-6, 2, shape, generator=rng)
        values = torch.ldexp(values, exponents)
    return values


def draw_operands(
    name: str,
    columns: int,
    arithmetic: Arithmetic,
    device: torch.device | str,
    rng: torch.Generator,
    *,
    with_bias: bool = True,
    tensor_scalars: bool = False,
) -> Operands:
    """Signed random operands of the declared kinds. Scalars stay away from 0: dividing by one is tested apart."""
    drawn = Operands()
    if has_bias(name) and with_bias:
        drawn.bias = signed((columns,), rng).to(device, arithmetic.dtype)
    for vector in declared(name, "per_column"):
        if vector != "bias":
            drawn.tensors.append(signed((columns,), rng).to(device, arithmetic.vector_dtype))
    for _ in declared(name, "scalar"):
        value = float(torch.rand((), generator=rng) * 2 + 0.5) * (
            -1 if torch.rand((), generator=rng) < 0.5 else 1
        )
        if tensor_scalars:
            drawn.tensors.append(torch.tensor(value, dtype=arithmetic.vector_dtype, device=device))
        else:
            drawn.scalars.append(value)
    return drawn


def poisoned(
    shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """An output buffer in which an element that was never written shows up as NaN."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)
