"""CUTLASS 2.x's device GEMM of the same tiles, beside the mma.sync kernels: ``gemm.cu``, compiled where it is measured.

It needs CUTLASS's headers and nvcc, found where the build of epigemm finds them: ``build_backend/locate.py``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.baselines import Alternative, Baseline
from benchmarks.cases import Case, Data
from benchmarks.harness.records import CUTLASS

SOURCE = Path(__file__).with_name("gemm.cu")
VARIABLE = "EPIGEMM_CUTLASS_DIR"
_TOP = SOURCE.parents[2]
_OPTIONS = ("-shared", "-Xcompiler", "-fPIC", "-std=c++17", "-O3", "--expt-relaxed-constexpr")


@dataclass(frozen=True)
class Built:
    """The shared object, or why there is none."""

    path: Path | None = None
    problem: str = ""


def name_of(case: Case) -> str:
    """How the source names a case's type and tile: ``bf16_128x256x64``."""
    is_tf32 = case.setting.arithmetic == "tf32"
    return f"{'tf32' if is_tf32 else case.setting.dtype_name}_{case.problem.epilogue}"


def names() -> list[str]:
    """All that the source has. A function ``gemm_NAME`` is behind each."""
    lines = (line for line in SOURCE.read_text().splitlines() if line.startswith("GEMM("))
    words = (line.removeprefix("GEMM(").split(", ") for line in lines)
    return [f"{kind}_{m}x{n}x{k}" for kind, m, n, k, *_ in words]


@functools.cache
def build(directory: str, capability: tuple[int, int]) -> Built:
    """Compile the source for a GPU, unless it was compiled before; the file is kept in the checkout's folder build.

    Args:
        directory: the folder that holds CUTLASS's ``include``; "": as EPIGEMM_CUTLASS_DIR says, else that of PyPI.
        capability: of the GPU: (9, 0). The same code of Ampere's instructions is compiled for all.
    """
    directory = directory or os.environ.get(VARIABLE, "")
    locate = [sys.executable, str(_TOP / "build_backend" / "locate.py"), "--cutlass-dir", directory]
    found = json.loads(subprocess.run(locate, capture_output=True, text=True, check=True).stdout)
    for name in ("cutlass", "nvcc"):
        if problem := found[name]["problem"]:
            return Built(problem=problem)
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
            return Built(problem=f"nvcc cannot compile {SOURCE.name}: {lines[0][:300]}")
        partial.replace(library)
    return Built(library)


@dataclass(frozen=True)
class DeviceGemm(Baseline):
    """The alternative, of a case whose problem is named after a tile.

    Attributes:
        directory: see `build`.
    """

    directory: str = ""

    def absent(self) -> str:
        """Why it cannot be built or run here."""
        return self._built().problem if torch.cuda.is_available() else "needs a GPU"

    def applies(self, case: Case, device: torch.device) -> str:
        """At the types and tiles of the source."""
        name = name_of(case)
        return "" if name in names() else f"{SOURCE.name} has no {name}"

    def _built(self) -> Built:
        return build(self.directory, torch.cuda.get_device_capability())


def _prepare(directory: str, case: Case, data: Data, out: Tensor) -> Alternative:
    path = build(directory, torch.cuda.get_device_capability()).path
    assert path is not None and data.weight is not None
    function = getattr(ctypes.CDLL(str(path)), f"gemm_{name_of(case)}")
    sizes = [ctypes.c_int(size) for size in (case.shape.m, case.shape.n, case.shape.k or 0)]
    pointers = [ctypes.c_void_p(each.data_ptr()) for each in (data.x, data.weight, out)]

    def run() -> Tensor:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if status := function(*sizes, *pointers, stream):
            raise RuntimeError(f"cutlass::Status {status}")
        return out

    return Alternative(run, 0)


def baseline(directory: str) -> Baseline:
    """CUTLASS's GEMM of the headers in a folder; "": those that the build would take."""
    prepare = functools.partial(_prepare, directory)
    return DeviceGemm(CUTLASS, "CUTLASS 2.x's device GEMM, no epilogue", prepare, directory=directory)
