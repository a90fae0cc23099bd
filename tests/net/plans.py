"""What dry runs choose on GPUs that are described in figures, a line a plan: the kernels, and the predicted time.

A line is GPU, function, type, M x N x K, what is special of the call, and behind the colon what would be launched:
a tile as `explain` writes it (its family, tile, cluster, schedule, raster, swizzle, parts of K), `mm` and `addmm` for
PyTorch's GEMM, and microseconds.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn, Scalar
from tests.support.pretended import explain_as_on

# Compute capability, multiprocessors, clock in MHz, memory in bytes a microsecond, bytes of L2, and whether fp32 sums
# take the tensor cores twice as long.
GPUS = {
    "H200": (90, 132, 1980, 4272000, 60000000, 0),
    "H100": (90, 132, 1980, 2981500, 50000000, 0),
    "A100": (80, 108, 1410, 1814710, 40000000, 0),
    "RTX 3090": (86, 82, 1695, 833040, 6000000, 1),
    "RTX 4090": (89, 128, 2520, 897120, 72000000, 1),
}
_OTHERS = [name for name in GPUS if name != "H200"]

_SIZES = [
    *((4096, 4096, 4096), (8192, 8192, 1024), (2048, 512, 2048), (16384, 1024, 1024), (512, 16384, 4096)),
    *((1024, 1024, 8192), (256, 256, 65536), (16384, 8192, 8192), (256, 256, 256), (64, 64, 64)),
    *((1, 4096, 4096), (7, 11008, 4096), (16, 1024, 4096), (33, 1024, 512), (128, 32000, 4096)),
    *((1000, 1000, 1000), (1023, 1023, 1023), (333, 129, 65), (8193, 256, 255), (100, 4095, 4095)),
    *((4096, 4095, 4096), (2048, 50257, 768), (3, 5, 7), (128, 128, 48), (77, 1280, 640), (50000, 64, 64)),
    *((4096, 11008, 4096), (4096, 4096, 11008), (2, 4096, 4096), (192, 768, 3072)),
]
_TYPES: dict[str, tuple[torch.dtype, str | None]] = {
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "fp32": (torch.float32, None),
    "fp32 ieee": (torch.float32, "ieee"),
    "fp32 tf32": (torch.float32, "tf32"),
}
_FEW = ("fp16", "fp32 ieee")  # chosen as for bf16, and always the fallback


@epigemm.epilogue
def user(acc: Tensor, bias: PerColumn, m: Matrix, s: Scalar = 2.0) -> Tensor:
    """Longer than what the library has."""
    return torch.tanh(acc + bias) * torch.sigmoid(m) * s + torch.exp(-acc * acc)


_FUNCTIONS: dict[str, Any] = {
    "linear": epigemm.linear,
    "linear_relu": epigemm.linear_relu,
    "linear_gelu": epigemm.linear_gelu,
    "linear_residual": epigemm.linear_residual,
    "linear_gated": epigemm.linear_gated,
    "linear_glu": epigemm.linear_glu,
    "linear_scale_batch_norm": epigemm.linear_scale_batch_norm,
    "user": user,
}
_SPECIAL = (
    "weight transposed",
    "x in padded rows",
    "off by an element",
    "3-d x",
    "recorded",
    "invariant",
    "no bias",
)


@contextlib.contextmanager
def described(gpu: tuple[int, ...]) -> Iterator[None]:
    """Have dry runs of calls on a CPU decide as on this GPU: the only place here that knows how.

    Nothing reads the results of an explained call. To fill them with zeros takes 30 times as long as all the rest.
    """
    with pytest.MonkeyPatch.context() as patch:
        explain_as_on(patch, gpu)
        patch.setattr(Tensor, "new_zeros", Tensor.new_empty)
        yield


def lines() -> list[str]:
    """All plans, in the order of the tables."""
    found = []
    for name, group in itertools.groupby(
        sorted(_cases(), key=lambda case: list(GPUS).index(case[0])), lambda c: c[0]
    ):
        with described(GPUS[name]):
            for _, function, kind, size, special in group:
                about = " ".join((name, function, kind, "x".join(map(str, size)), special)).strip()
                found.append(f"{about}: {_plan(function, kind, size, special)}")
    return found


def _cases() -> Iterator[tuple[str, str, str, tuple[int, int, int], str]]:
    """Each on an H200, and on two of the other GPUs in turn."""
    every = [(*case, "") for case in itertools.product(_FUNCTIONS, _TYPES, _SIZES)]
    every = [case for case in every if case[1] not in _FEW or case[0] in ("linear_gelu", "linear_glu")]
    every += itertools.product(("linear_relu", "linear_gelu"), ("bf16", "fp32"), _SIZES[::3], _SPECIAL)
    for number, case in enumerate(every):
        yield from ((gpu, *case) for gpu in ("H200", _OTHERS[number % 4], _OTHERS[(number + 1) % 4]))


def _plan(function: str, kind: str, size: tuple[int, int, int], special: str) -> str:
    (dtype, precision), called = _TYPES[kind], _FUNCTIONS[function]
    try:
        with epigemm.batch_invariant(special == "invariant"):
            found = epigemm.explain(called, *_arguments(function, dtype, size, special), precision=precision)
    except RuntimeError:  # invariant, where no kernel is
        return "refused"
    launches = [_short(each) for each in found.kernels]
    us = "" if found.us is None else f" {found.us:.6g} us"
    family = next((each["family"] for each in found.candidates), "")
    return f"{family + ' ' if found.path == 'fused' else ''}{'; '.join(launches)}{us}"


def _arguments(function: str, dtype: torch.dtype, size: tuple[int, int, int], special: str) -> list[Any]:
    m, n, k = size

    def empty(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=dtype, requires_grad=special == "recorded")

    x, weight, row, matrix = empty(m, k), empty(n, k), empty(n), empty(m, n)
    if special == "weight transposed":
        weight = empty(k, n).t()
    elif special == "x in padded rows":
        x = empty(m, k + 8)[:, :k]
    elif special == "off by an element":
        x = empty(m * k + 1)[1:].view(m, k)
    elif special == "3-d x":
        x = empty(1, m, k)
    others: dict[str, list[Any]] = {
        "linear_residual": [matrix],
        "linear_gated": [matrix],
        "linear_scale_batch_norm": [row] * 5,
        "user": [matrix],
    }
    if function == "linear_glu":
        weight, row = empty(2 * n, k), empty(2 * n)
    return [x, weight, None if special == "no bias" else row, *others.get(function, [])]


_WORDS = (
    (r".*fold of .*", "fold"),
    (r"(epigemm \w+ loop|PyTorch reference), .*", "elementwise"),
    (r"epigemm fused GEMM(,| in)?|epigemm CUDA kernel, |, epilogue .*", ""),
    (r"torch GEMM \(_?(\w+).*?\)", r"\1"),
    (r"\b(tile|cluster|swizzle|the|of) ", ""),
    (r"raster along_", ""),
    (r"K in (\d+) parts", r"K/\1"),
    (r" (is|are) copied to padded rows", ""),
    (r" (into fp16 slices|on fp16 slices|what range check rejected.*)", ""),
    (r"(copy result)[:,]? .*", r"\1"),
    (r"[,:]", ""),
    (r"  +", " "),
)


def _short(launch: str) -> str:
    """A launch without the words that all of its kind have."""
    for pattern, word in _WORDS:
        launch = re.sub(pattern, word, launch)
    return launch.strip()
