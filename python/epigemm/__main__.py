"""`python -m epigemm`: what was built, what is installed, and what would run here."""

from __future__ import annotations

import platform

import torch

import epigemm
from epigemm._native import cuda_status, registry


def report() -> str:
    """The lines that `python -m epigemm` prints."""
    lines = [f"epigemm {epigemm.__version__}"]
    lines += [f"  {key.replace('_', ' ')}: {value}" for key, value in epigemm.build_info().items()]
    lines += [f"  epilogues: {', '.join(epilogue['name'] for epilogue in registry())}", ""]
    lines += [
        f"torch {torch.__version__} (CUDA {torch.version.cuda or 'not built in'}), Python {platform.python_version()}"
    ]
    lines += [f"  fp32 matmul setting: {torch.backends.cuda.matmul.fp32_precision}", ""]
    lines += _devices()
    lines += ["", "what would run here:"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.empty(1024, 4096, dtype=dtype, device=device)
        weight = torch.empty(4096, 4096, dtype=dtype, device=device)
        lines += [f"[{str(dtype).removeprefix('torch.')}, 1024 x 4096 x 4096]"]
        lines += str(epigemm.explain(epigemm.linear_relu, x, weight)).splitlines()
    return "\n".join(lines)


def _devices() -> list[str]:
    if not torch.cuda.is_available():
        return ["devices:", "  cpu (torch sees no CUDA device)"]
    lines = ["devices:"]
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        status = cuda_status(index) or "epigemm's kernels run here"
        lines.append(
            f"  cuda:{index}: {torch.cuda.get_device_name(index)}, capability {major}.{minor}: {status}"
        )
    return lines


if __name__ == "__main__":
    print(report())
