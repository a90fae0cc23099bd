"""`python -m epigemm`: what was built, what is installed, what would run here, and whether it computes."""

from __future__ import annotations

import argparse
import platform
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

import epigemm
from epigemm._native import registry
from epigemm.arguments.calls import LinearCall
from epigemm.calls import elementwise_kernels
from epigemm.calls.forecast import consider
from epigemm.epilogues.library import BIAS_RELU
from epigemm.linker import libraries, store

_DRIVER = Path("/proc/driver/nvidia/version")
_K = 4096
_CALLS = (
    ("fp16 and bf16", torch.bfloat16, "default"),
    ("fp32 at highest", torch.float32, "highest"),
    ("fp32 at high", torch.float32, "high"),
)


def report() -> str:
    """The lines that `python -m epigemm` prints."""
    lines = [f"epigemm {epigemm.__version__}"]
    lines += [f"  {key.replace('_', ' ')}: {_text(value)}" for key, value in epigemm.build_info().items()]
    lines += [f"  epilogues: {', '.join(epilogue['name'] for epilogue in registry())}", ""]
    cuda = torch.version.cuda or "not built in"
    lines += [f"torch {torch.__version__} (CUDA {cuda}), Python {platform.python_version()}"]
    setting = torch.backends.cuda.matmul.fp32_precision
    lines += [f"  fp32 matmul setting: {setting}{' (as highest)' if setting == 'none' else ''}"]
    lines += [f"  driver: {_driver()}", ""]
    lines += [*_devices(), "", *_libraries(), "", f"cache: {store.contents()}", ""]
    lines += ["what would run here:"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.empty(1024, 4096, dtype=dtype, device=device)
        weight = torch.empty(4096, 4096, dtype=dtype, device=device)
        lines += [f"[{str(dtype).removeprefix('torch.')}, 1024 x 4096 x 4096]"]
        lines += str(epigemm.explain(epigemm.linear_relu, x, weight)).splitlines()
    return "\n".join(lines)


def _driver() -> str:
    """The version of NVIDIA's driver, as the kernel's module tells it."""
    try:
        found = re.search(r"\b\d{3}\.\d+(\.\d+)*", _DRIVER.read_text(encoding="utf-8"))
    except OSError:
        return "none"
    return found.group() if found else "unknown"


def _text(value: object) -> str:
    """A value of `build_info`. Of the families of kernels: how many tiles each has, by arithmetic."""
    if isinstance(value, dict):
        of_family = {
            name: ", ".join(f"{kind} {tiles}" for kind, tiles in of.items()) for name, of in value.items()
        }
        return "; ".join(f"{name} ({tiles})" for name, tiles in of_family.items())
    return str(value) or "none"


def _devices() -> list[str]:
    lines = ["devices, and which kernels run there:"]
    if not torch.cuda.is_available():
        return [*lines, "  cpu (torch sees no CUDA device)", *_kernels(torch.device("cpu"))]
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        lines.append(f"  cuda:{index}: {torch.cuda.get_device_name(index)}, capability {major}.{minor}")
        lines += _kernels(torch.device("cuda", index))
    return lines


def _kernels(device: torch.device) -> list[str]:
    """Each kind of kernel, and why it does not run on a device where it does not."""
    like = torch.empty(0, device=device)
    why_none = elementwise_kernels.why_none(like)
    name = "elementwise kernels" if device.type == "cuda" else "elementwise functions, by PyTorch's operators"
    lines = [f"    {name}: {why_none or 'run'}"]
    for words, dtype, precision in _CALLS:
        if not (why_not := why_none):
            x, weight = (torch.empty(rows, _K, dtype=dtype, device=device) for rows in (1024, 4096))
            considered = consider(LinearCall(BIAS_RELU, x, weight, precision=precision))
            reasons = [considered.why_not(tried) for tried in considered.found.tried]
            why_not = "" if considered.taken else "; ".join(dict.fromkeys(reasons))
        lines.append(f"    fused GEMMs, {words}: {why_not or 'run'}")
    return lines


def _libraries() -> list[str]:
    """What links epilogues into kernels."""
    lines = ["libraries that link epilogues into kernels:"]
    if why_not := libraries.unavailable():
        lines.append(f"  none is linked in here: {why_not}")
        with suppress(libraries.LibrariesMissingError):
            lines.append(_library("nvJitLink", libraries.nvjitlink()))
        return lines
    found = libraries.libraries()
    return [*lines, _library("NVRTC", found.nvrtc), _library("nvJitLink", found.nvjitlink)]


def _library(name: str, found: libraries.Library) -> str:
    return f"  {name} {libraries.text(found.version)}: {found.path}"


def wrong_results(device: str) -> list[str]:
    """What a small layer gets wrong."""
    generator = torch.Generator().manual_seed(0)
    found, sizes = [], ((64, 96), (128, 96), (128,))
    for dtype in (torch.float32, torch.bfloat16):
        given = [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]
        if not is_right(epigemm.linear_relu(*given), *given):
            found.append(f"linear_relu in {str(dtype).removeprefix('torch.')} on {device}: wrong")
    return found


def is_right(result: Tensor, *given: Tensor) -> bool:
    """Of `linear_relu`, against float64: K + 4 roundings to fp32 and two to the result's type off."""
    x, weight, bias = (each.double() for each in given)
    size = x.abs() @ weight.abs().t() + bias.abs()
    bound = ((x.shape[1] + 4) * 2.0**-24 + torch.finfo(result.dtype).eps) * size
    return bool(((result.double() - torch.relu(x @ weight.t() + bias)).abs() <= bound).all())


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m epigemm",
        description="Says what epigemm was built with, what it finds on this machine (GPUs, driver, the libraries that "
        "link epilogues into kernels, its cache), which of its kernels run here and why others do not, and computes "
        "two small layers. The exit status is 1 where a result is wrong.",
        epilog="Environment: EPIGEMM_CACHE_DIR, the cache's folder; EPIGEMM_CUDA_LIBRARIES, a folder with NVRTC and "
        "nvJitLink; EPIGEMM_PROGRESS=0, no line in the terminal for what takes long; TORCH_LOGS=+epigemm, log it.",
    )
    parser.add_argument(
        "--clear-cache",
        action="store_true",
        help="remove the linked kernels and the measured choices that epigemm has kept on disk, and exit",
    )
    if parser.parse_args(arguments).clear_cache:
        removed = store.clear()
        print(
            f"removed {len(removed.linked) + len(removed.measured)} files, {removed.nbytes} bytes: {removed.where}"
        )
        print(removed.why_not_linked, end="\n" if removed.why_not_linked else "")
        return bool(removed.why_not_linked)
    print(report())
    wrong = wrong_results("cuda" if torch.cuda.is_available() else "cpu")
    print("\n".join(["", "self-test: " + ("; ".join(wrong) or "results agree with float64")]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
