"""`python -m epigemm`: what was built, what is installed, what would run here, and whether it computes."""

from __future__ import annotations

import platform
import sys

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


def wrong_results(device: str) -> list[str]:
    """What a small layer gets wrong: held against float64, K + 4 roundings to fp32 and two to the result's type off."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for dtype, roundoff in ((torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-8)):
        x, weight, bias = (
            torch.randn(shape, generator=generator).to(device, dtype)
            for shape in ((64, 96), (128, 96), (128,))
        )
        result = epigemm.linear_relu(x, weight, bias).double()
        expected = torch.relu(x.double() @ weight.double().t() + bias.double())
        size = x.double().abs() @ weight.double().abs().t() + bias.double().abs()
        bound = (x.shape[1] + 4) * 2.0**-24 * size + 2 * roundoff * size
        if not bool(((result - expected).abs() <= bound).all()):
            found.append(f"linear_relu in {str(dtype).removeprefix('torch.')} on {device}: wrong")
    return found


if __name__ == "__main__":
    print(report())
    wrong = wrong_results("cuda" if torch.cuda.is_available() else "cpu")
    print("\n".join(["", "self-test: " + ("; ".join(wrong) or "results agree with float64")]))
    sys.exit(bool(wrong))
