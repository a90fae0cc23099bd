"""CUTLASS 2.x's device GEMM, without an epilogue, with its fastest tile: ``gemm.cu``, compiled where it is measured.

It needs CUTLASS's headers and nvcc, found where the build of epigemm finds them: ``build_backend/locate.py``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.baselines import Alternative, Baseline
from benchmarks.cases import Case, Data
from benchmarks.harness.records import CUTLASS
from benchmarks.harness.timing import Effort, in_turn, make_timer
from epigemm.tuner.timing import Run

SOURCE = Path(__file__).with_name("gemm.cu")
VARIABLE = "EPIGEMM_CUTLASS_DIR"
_TOP = SOURCE.parents[2]
_OPTIONS = ("-shared", "-Xcompiler", "-fPIC", "-std=c++17", "-O3", "--expt-relaxed-constexpr")
_TRIAL, _HOST_US, _VECTOR_BYTES = Effort(rounds=3, min_ms=0.0, max_rounds=3), 50.0, 16


def names() -> list[str]:
    """All that the source has: ``bf16_128x256x64``. A function ``gemm_NAME`` is behind each."""
    lines = (line for line in SOURCE.read_text().splitlines() if line.startswith("GEMM("))
    words = (line.removeprefix("GEMM(").split(", ") for line in lines)
    return [f"{kind}_{m}x{n}x{k}" for kind, m, n, k, *_ in words]


@functools.cache
def build(capability: tuple[int, int]) -> tuple[Path | None, str]:
    """Compile the source for a GPU, unless it was compiled before; the file is kept in the checkout's folder build.

    The folder that holds CUTLASS's ``include`` is that of the variable EPIGEMM_CUTLASS_DIR, else PyPI's. The same code
    of Ampere's instructions is compiled for all GPUs.

    Args:
        capability: of the GPU: (9, 0).

    Returns:
        The shared object, or why there is none.
    """
    locate = [sys.executable, str(_TOP / "build_backend" / "locate.py")]
    locate += ["--cutlass-dir", os.environ.get(VARIABLE, "")]
    found = json.loads(subprocess.run(locate, capture_output=True, text=True, check=True).stdout)
    for name in ("cutlass", "nvcc"):
        if problem := found[name]["problem"]:
            return None, problem
    command = [found["nvcc"]["path"], *_OPTIONS, f"-arch=sm_{capability[0]}{capability[1]}"]
    command += ["-I", str(Path(found["cutlass"]["path"], "include")), str(SOURCE)]
    about = [*command, found["nvcc"]["version"], found["cutlass"]["version"], SOURCE.read_text()]
    key = hashlib.sha256("\n".join(about).encode()).hexdigest()[:16]
    library = _TOP / "build" / "benchmarks" / f"gemm-{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}")
        done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
            return None, f"nvcc cannot compile {SOURCE.name}: {lines[0][:300]}"
        partial.replace(library)
    return library, ""


class DeviceGemm(Baseline):
    """The baseline, of bf16 and of TF32."""

    def absent(self) -> str:
        """Why it cannot be built or run here."""
        if not torch.cuda.is_available():
            return "needs a GPU"
        return build(torch.cuda.get_device_capability())[1]

    def applies(self, case: Case, device: torch.device) -> str:
        """Rows are whole vectors of 16 bytes."""
        n, k, size = case.shape.n, case.shape.k, case.setting.dtype.itemsize
        if k is None or n * size % _VECTOR_BYTES or k * size % _VECTOR_BYTES:
            return f"{SOURCE.name} takes products whose rows are whole {_VECTOR_BYTES} bytes"
        return "" if _tiles(case) else f"{SOURCE.name} has no {case.setting}"


def _tiles(case: Case) -> list[str]:
    is_tf32 = case.setting.arithmetic == "tf32"
    return [each for each in names() if each.startswith(f"{'tf32' if is_tf32 else case.setting.dtype_name}_")]


def _prepare(case: Case, data: Data, out: Tensor) -> Alternative:
    """The fastest tile of a few calls."""
    path = build(torch.cuda.get_device_capability())[0]
    assert path is not None and data.weight is not None
    sizes = [ctypes.c_int(size) for size in (case.shape.m, case.shape.n, case.shape.k or 0)]
    pointers = [ctypes.c_void_p(each.data_ptr()) for each in (data.x, data.weight, out)]
    library, tiles = ctypes.CDLL(str(path)), _tiles(case)

    def run(tile: str) -> Tensor:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if status := getattr(library, f"gemm_{tile}")(*sizes, *pointers, stream):
            raise RuntimeError(f"{tile}: cutlass::Status {status}")
        return out

    runs: list[Run] = [functools.partial(run, tile) for tile in tiles]
    samples = in_turn(make_timer(data.x.device), runs, _TRIAL, _HOST_US)
    fastest = min(range(len(runs)), key=lambda index: statistics.median(samples[index]))
    return Alternative(runs[fastest], 0, checked=False, kernel=tiles[fastest])


BASELINE = DeviceGemm(
    CUTLASS, "CUTLASS 2.x's device GEMM, no epilogue", _prepare, slow_on=("cuda",), if_named=True
)
