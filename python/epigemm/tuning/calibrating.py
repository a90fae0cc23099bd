"""`epigemm.calibrate`: measures what the planner otherwise assumes of a GPU."""

from __future__ import annotations

import math
import statistics
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from epigemm import progress
from epigemm._native import ops
from epigemm.arguments.traced import is_exporting, is_traced
from epigemm.calls import elementwise_kernels
from epigemm.cuda_graphs import capturing
from epigemm.planning import architectures, calibrations, plans
from epigemm.planning.calibrations import Figures
from epigemm.tuning.timing import Effort, Run, make_timer

_EFFORT = Effort(rounds=10, min_ms=0.0, max_rounds=10)
_LOOP_US = 5000.0  # what the loop of matrix instructions should take: the clocks have settled by then
_FIRST_STEPS = 256  # to learn how much one step of it computes
_LEAST_COPIED = 256 << 20  # bytes, and at least so many times what L2 holds
_TIMES_L2 = 4
# M, N, K: computation decides of the first four, the memory of the last.
PRODUCTS = (
    (8192, 8192, 4096), (4096, 4096, 4096), (2048, 8192, 2048), (1024, 4096, 4096), (16, 8192, 8192),
)  # fmt: skip
_LEAST_SHARE = 0.25  # of what was assumed: less is measured where another program uses the GPU
_LOCK = threading.Lock()  # one measurement at a time


@dataclass(frozen=True)
class Calibration:
    """What `epigemm.calibrate` measured of a GPU. `print` shows it as text.

    Attributes:
        gpu: its name.
        tensor_tflops: 10^12 operations a second that the tensor cores do by `mma.sync` in 16 bits with fp32 sums.
        memory_gb_per_s: 10^9 bytes a second that a copy moves, reads and writes counted.
        cublas_efficiency: cuBLAS's share of the roofline of the two; None where the planner has no use for it.
        assumed_tflops: what the planner takes for the tensor cores' rate without a calibration: on Hopper that of
            `wgmma`, which is faster.
        assumed_gb_per_s: the same of `memory_gb_per_s`.
        applied: whether the planner goes by these figures from now on.
        why_not: why it does not; empty where it does.
        path: the file that they are kept in; None where they are not.
    """

    gpu: str
    tensor_tflops: float
    memory_gb_per_s: float
    cublas_efficiency: float | None
    assumed_tflops: float
    assumed_gb_per_s: float
    applied: bool
    why_not: str
    path: Path | None

    def __str__(self) -> str:
        """For people, a figure a line."""
        assumed = f"{self.assumed_tflops:.1f}" if self.applied else f"{self.assumed_tflops:.1f} by wgmma"
        lines = [
            f"{self.gpu}, measured (and assumed without that):",
            f"  tensor cores, mma.sync in 16 bits: {self.tensor_tflops:.1f} TFLOPS ({assumed})",
            f"  memory, by a copy: {self.memory_gb_per_s:.0f} GB/s ({self.assumed_gb_per_s:.0f})",
        ]
        if self.cublas_efficiency is not None:
            lines.append(f"  cuBLAS: {self.cublas_efficiency:.2f} of the roofline (0.90)")
        if not self.applied:
            return "\n".join([*lines, f"  not used: {self.why_not}"])
        return "\n".join([*lines, f"  used from now on, and {self.path or 'not kept on disk'}"])


def calibrate(device: torch.device | str | None = None) -> Calibration:
    """Measure a GPU's tensor cores, memory and cuBLAS, so that the planner need not assume them.

    For GPUs other than Hopper. Without it the planner takes NVIDIA's published figures, and a fused plan must be
    predicted to win by a tenth; with it by a twentieth. The figures are kept in
    [the cache](tuning.md#the-cache) for this kind of GPU, driver and CUDA of torch's, and used by later processes. It
    takes about a second. Nothing else should use the GPU meanwhile. Call it before models are fused.

    The cost models of Hopper are fitted to measurements. There it measures the tensor cores and the memory, says so in
    the result, and keeps and changes nothing.

    Neither this function nor the fused kernels of other GPUs than Hopper have been run on one.

    Args:
        device: the GPU; None: the current one.

    Returns:
        A `Calibration`.

    Raises:
        RuntimeError: there is no GPU that epigemm's kernels run on; a quarter or less of a figure is measured, as where
            another program uses the GPU; the current stream is being captured into a CUDA graph, or torch.compile is
            tracing; there is no memory (`torch.OutOfMemoryError`): it takes half a gigabyte, or eight times what L2
            holds.

    Example:
        >>> print(epigemm.calibrate())  # doctest: +SKIP
    """
    if is_traced() or is_exporting():
        raise RuntimeError("calibrate: got a call under tracing; accepted is a plain call")
    place = elementwise_kernels.gpu(device)
    if capturing(place):
        raise RuntimeError("calibrate: got a call during CUDA graph capture; accepted is a plain call")
    gpu = torch.cuda.get_device_name(place)
    with _LOCK, torch.no_grad(), torch.cuda.device(place), progress.doing(f"calibrating {gpu}"):
        return _calibrate(place.index, gpu, Machine(place))


class Measured(Protocol):
    """What is timed, in microseconds. Tests have another than `Machine`."""

    def loop(self, steps: int) -> tuple[int, float]:
        """Flops and time of a loop of matrix instructions."""

    def copy(self, size: int) -> float:
        """Of a copy of so many bytes."""

    def product(self, m: int, n: int, k: int) -> float:
        """Of PyTorch's GEMM in bf16."""


class Machine:
    """A CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._timer = make_timer(device)

    def _us(self, run: Run) -> float:
        host_us = self._timer.warm_up(run)
        (samples,) = self._timer.in_turn([run], _EFFORT, host_us)
        return 1e3 * statistics.median(samples)

    def loop(self, steps: int) -> tuple[int, float]:
        """See `Measured`."""
        sums = torch.zeros(1, device=self._device)
        flops = 0

        def run() -> Tensor:
            nonlocal flops
            flops = ops._multiply_bare_out(steps, sums)
            return sums

        us = self._us(run)
        return flops, us

    def copy(self, size: int) -> float:
        """See `Measured`."""
        source = torch.zeros(size, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        return self._us(lambda: target.copy_(source))

    def product(self, m: int, n: int, k: int) -> float:
        """See `Measured`."""
        x, weight = (torch.randn(rows, k, dtype=torch.bfloat16, device=self._device) for rows in (m, n))
        out = torch.empty(m, n, dtype=torch.bfloat16, device=self._device)
        return self._us(lambda: torch.mm(x, weight.t(), out=out))


def _calibrate(device: int, gpu: str, machine: Measured) -> Calibration:
    calibrations.forget(device)
    try:
        told = architectures.of(device=device)
        found = measure(machine, told)
    finally:
        calibrations.load(device)
    is_fitted = told["is_fitted"]
    return Calibration(
        gpu,
        found.tensor_flops_per_us / 1e6,
        found.memory_bytes_per_us / 1e3,
        None if is_fitted else found.cublas_efficiency,
        told["tensor_flops_per_us"] / 1e6,
        told["memory_bytes_per_us"] / 1e3,
        applied=not is_fitted,
        why_not="the cost models of Hopper are fitted to measurements already" if is_fitted else "",
        path=None if is_fitted else calibrations.keep(device, found),
    )


def measure(machine: Measured, told: dict[str, Any]) -> Figures:
    """What a GPU reaches; `told`: what the planner assumes of it, as `architectures.of` tells.

    cuBLAS's efficiency is 1 where the models are fitted: they have none.

    Raises:
        RuntimeError: much less is measured than assumed.
    """
    flops, _ = machine.loop(_FIRST_STEPS)
    steps = math.ceil(_LOOP_US * told["tensor_flops_per_us"] / flops * _FIRST_STEPS)
    flops, us = machine.loop(steps)
    rate = flops / us
    size = max(_LEAST_COPIED, _TIMES_L2 * round(told["l2_bytes"]))
    bandwidth = 2 * size / machine.copy(size)
    _check("tensor cores' rate", rate, told["tensor_flops_per_us"], "TFLOPS", 1e6)
    _check("memory's bandwidth", bandwidth, told["memory_bytes_per_us"], "GB/s", 1e3)
    if told["is_fitted"]:
        return Figures(bandwidth, rate, 1.0)
    gpu = (
        told["capability"],
        told["multiprocessors"],
        round(told["clock_mhz"]),
        round(bandwidth),
        round(told["l2_bytes"]),
        int(told["has_half_rate_sums"]),
        round(rate),
    )
    shares = [_share(gpu, shape, machine.product(*shape)) for shape in PRODUCTS]
    efficiency = statistics.geometric_mean(shares)
    _check("cuBLAS's efficiency", efficiency, 1.0, "of the roofline", 1.0)
    return Figures(bandwidth, rate, efficiency)


def _share(gpu: tuple[int, ...], shape: tuple[int, int, int], us: float) -> float:
    """Of the roofline, what cuBLAS reaches: the efficiency by which the planner would predict this time.

    A prediction is a fixed time and the roofline over the efficiency: two of them tell both.
    """
    whole, half = (
        plans.ask("bias", *shape, "bfloat16", "ieee", has_bias=False, gpu=(*gpu, thousandths))["fallback_us"]
        for thousandths in (1000, 500)
    )
    roofline = half - whole
    fixed = whole - roofline
    return float(roofline / max(us - fixed, roofline / 2))


def _check(what: str, found: float, assumed: float, unit: str, scale: float) -> None:
    if not found > _LEAST_SHARE * assumed:
        raise RuntimeError(
            f"calibrate: got {found / scale:.2f} {unit} for the {what}; accepted is more than "
            f"{_LEAST_SHARE * assumed / scale:.2f}. Does another program use the GPU?"
        )
