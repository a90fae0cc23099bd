"""What the first call of an alternative takes, in a process of its own: ``-m benchmarks.kinds.first_call``.

torch is imported, CUDA initialised by a small product, the function decorated or given to torch.compile, the tensors
made and an fp32 weight's slices, too; then the first call is timed until the device is done: compiling, linking and
running. In a second process it finds in the caches on disk what the first one has made.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.baselines import of_kind
from benchmarks.cases import CUSTOM, Shape, make_data
from benchmarks.cases.custom import select
from benchmarks.harness.records import OURS
from benchmarks.harness.runner import matmul_precision
from epigemm.tuning.timing import make_timer

# Where one fused kernel is planned in every type: at the first of `benchmarks.cases.custom.SIZES` bf16 goes
# to PyTorch's GEMM, and a small kernel is linked.
_SIZE, _CPU_SIZE = Shape(16384, 4096, 4096), Shape(16, 64, 48)
_TIMEOUT_S = 120


def seconds(dtype: str, shape: Shape, device: torch.device, alternative: str) -> float:
    """The first call's, in this process."""
    (prepare,) = (baseline.prepare for baseline in of_kind(CUSTOM) if baseline.name == alternative)
    case = select(["bias_gelu"], [shape], [dtype], device)[0]
    timer = make_timer(device)
    with torch.no_grad(), matmul_precision(case.setting):
        data = make_data(case, device, seed=0)
        assert data.weight is not None
        torch.mm(data.x[:16], data.weight[:16].t())
        out = torch.empty(case.shape.m, case.shape.n, dtype=case.setting.dtype, device=device)
        call = prepare(case, data, out).run
        timer.synchronize()
        start = time.perf_counter()
        call()
        timer.synchronize()
        return time.perf_counter() - start


def in_process(dtype: str, shape: Shape, device: torch.device, cache: str, alternative: str = OURS) -> float:
    """The first call's seconds in a new process with its caches in a folder; a failure of it is one of the run."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.kinds.first_call",
        dtype,
        str(shape),
        str(device),
        alternative,
    ]
    # NVRTC and nvJitLink keep results of their own in the driver's cache: those of other processes must not count.
    environment = {**os.environ, "EPIGEMM_CACHE_DIR": cache, "CUDA_CACHE_PATH": f"{cache}/driver"}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"}
    path = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, check=True
    )
    return float(done.stdout.split()[-1])


def measure(
    dtypes: Sequence[str], shape: Shape | None, device: torch.device, alternative: str = OURS
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of the first call with an empty cache, milliseconds with a full one; by dtype."""
    shape = shape or (_SIZE if device.type == "cuda" else _CPU_SIZE)
    first, cached = {}, {}
    for dtype in dtypes:
        with tempfile.TemporaryDirectory(prefix="epigemm-first-call-") as cache:
            first[dtype] = round(in_process(dtype, shape, device, cache, alternative), 4)
            cached[dtype] = round(1e3 * in_process(dtype, shape, device, cache, alternative), 2)
    return first, cached


if __name__ == "__main__":
    print(seconds(sys.argv[1], Shape.parse(sys.argv[2]), torch.device(sys.argv[3]), sys.argv[4]))
