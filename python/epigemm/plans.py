"""What dispatch says about an fp32 product on fp16 pieces, asked once for each problem and remembered."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epigemm import tables
from epigemm._native import build_info, cuda_status, ops

_REMEMBERED = 8192  # problems; beyond, the oldest are asked for again

_COPY_LAUNCH_US = 3.0
_BYTES_PER_US = 4.3e6  # device memory of an H200


class SplitPlan(NamedTuple):
    """Dispatch's answer, for a weight that is packed already or not.

    Attributes:
        why_not: what rules the kernels out, or why they are not the fastest; empty where they run.
        predicted_us: the whole call on fp16 pieces; infinite where it cannot run.
        second_path_us: torch's GEMM, in TF32 where that is allowed, and the elementwise kernel.
        numbers: the plan, as the native operator takes it.
        source: "model", or where the times were measured: "cache" or "default".

    The times are measured ones where there are such.
    """

    why_not: str
    predicted_us: float
    second_path_us: float
    numbers: tuple[int, ...] = ()
    source: str = "model"


def has_gpu_kernels(tensor: Tensor) -> bool:
    """Whether epigemm's CUDA kernels run where `tensor` is."""
    return tensor.is_cuda and _usable(tensor.get_device())


@functools.cache
def _usable(device: int) -> bool:
    """Whether the kernels run on a CUDA device; the first question brings in what was measured on it."""
    if cuda_status(device):
        return False
    tables.load(device)
    return True


@functools.cache
def no_gemm_kernels() -> str:
    """Why this build cannot run any GEMM kernel; empty when it can."""
    return "" if build_info()["gemm_kernels"] else "epigemm was built without the Hopper GEMM kernels"


@functools.cache
def device_numbers(device: int) -> tuple[int, int]:
    """Compute capability (90 for 9.0) and number of multiprocessors of a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    return 10 * properties.major + properties.minor, properties.multi_processor_count


def ask(
    epilogue: str,
    m: int,
    n: int,
    k: int,
    packed: bool,
    arithmetic: str,
    tf32_allowed: bool,
    capability: int,
    multiprocessors: int,
    has_bias: bool = True,
    device: int = -1,
) -> dict[str, Any]:
    """All that dispatch says, candidates included.

    `tf32_allowed`: to torch's GEMM, which would take over. `device`: whose measured choices count; -1: nobody's.
    """
    gpu = (capability, multiprocessors)
    answer: dict[str, Any] = json.loads(
        ops._plan_split(epilogue, m, n, k, packed, arithmetic, tf32_allowed, *gpu, has_bias, device)
    )
    return answer


_forgetting: list[Callable[[], None]] = []


def on_forget(clear: Callable[[], None]) -> None:
    """Have a memory of what dispatch said cleared by `forget` too."""
    _forgetting.append(clear)


def forget() -> None:
    """Ask dispatch again for everything: it has learned something."""
    split_plan.cache_clear()
    tf32_microseconds.cache_clear()
    for clear in _forgetting:
        clear()


@functools.lru_cache(maxsize=_REMEMBERED)
def split_plan(
    epilogue: str,
    m: int,
    n: int,
    k: int,
    packed: bool,
    arithmetic: str,
    tf32_allowed: bool,
    device: int,
    has_bias: bool = True,
) -> SplitPlan:
    """The plan of a product of [M, K] and [N, K] in "split" or "scaled" arithmetic on a CUDA device."""
    problem = (epilogue, m, n, k, packed, arithmetic, tf32_allowed)
    answer = ask(*problem, *device_numbers(device), has_bias, device)
    why_not = no_gemm_kernels() or str(answer["why_not"])
    numbers = tuple(answer.get("plan", ()))
    return SplitPlan(why_not, fused_us(answer), second_path_us(answer), numbers, str(answer["source"]))


def fused_us(answer: dict[str, Any]) -> float:
    """What dispatch says a fused call takes: as measured, else as predicted; infinite where it does not run."""
    return float(answer.get("measured_us", answer.get("predicted_us", "inf")))


def second_path_us(answer: dict[str, Any]) -> float:
    """The same of torch's own path."""
    return float(answer.get("second_path_measured_us", answer["second_path_us"]))


@functools.lru_cache(maxsize=_REMEMBERED)
def tf32_microseconds(
    epilogue: str,
    m: int,
    n: int,
    k: int,
    strides: tuple[int, int, int],
    alignment: int,
    device: int,
    has_bias: bool = True,
) -> float:
    """The measured or predicted time of the fused TF32 kernel; infinite where it does not run.

    Args:
        epilogue: its name.
        m: rows of x.
        n: rows of the weight.
        k: columns of both.
        strides: row strides of x, weight and out, in elements.
        alignment: bytes by which the addresses of all three divide.
        device: the CUDA device.
        has_bias: whether there is one, where the epilogue takes it.
    """
    problem = (epilogue, m, n, k, *strides, alignment, "float32", "tf32")
    answer = json.loads(ops._plan_linear(*problem, *device_numbers(device), has_bias, device))
    return fused_us(answer)


@functools.lru_cache(maxsize=_REMEMBERED)
def invariant_plan(
    epilogue: str, m: int, n: int, k: int, dtype: str, arithmetic: str, device: int
) -> dict[str, Any]:
    """The plan of a batch-invariant product of aligned tensors in 16 bits or TF32 on a CUDA device."""
    answer: dict[str, Any] = json.loads(
        ops._plan_linear_invariant(epilogue, m, n, k, dtype, arithmetic, *device_numbers(device))
    )
    return answer


@functools.lru_cache(maxsize=_REMEMBERED)
def invariant_split_plan(
    epilogue: str, m: int, n: int, k: int, arithmetic: str, device: int
) -> dict[str, Any]:
    """The plan of a batch-invariant product in "split" or "scaled" arithmetic on a CUDA device."""
    answer: dict[str, Any] = json.loads(
        ops._plan_split_invariant(epilogue, m, n, k, True, arithmetic, *device_numbers(device))
    )
    return answer


def copy_microseconds(m: int, n: int) -> float:
    """What it costs to copy an fp32 result from a padded temporary."""
    return _COPY_LAUNCH_US + 8 * m * n / _BYTES_PER_US
