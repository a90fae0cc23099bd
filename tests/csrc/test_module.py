"""The built module: what it exports, what it needs to load, what it says about itself."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import epigemm

MODULE = Path(epigemm.__file__).parent / "_C.so"

INFO_TYPES = {
    "version": str,
    "cuda": bool,
    "cuda_toolkit": str,
    "cutlass": str,
    "torch_headers": str,
    "torch_floor": str,
    "elementwise_architectures": str,
    "gemm_architectures": str,
    "compiler": str,
    "gemm_kernels": int,
}


def tool(name: str, *arguments: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return subprocess.run([path, *arguments, str(MODULE)], check=True, capture_output=True, text=True).stdout


def test_build_info() -> None:
    info = epigemm.build_info()
    for key, kind in INFO_TYPES.items():
        assert type(info[key]) is kind, (key, info[key])
    assert info["version"] == epigemm.__version__
    assert info["torch_floor"] == "2.10"
    assert info["compiler"]
    if info["cuda"]:
        assert info["gemm_kernels"] > 0 or not info["gemm_architectures"]
        assert re.match(r"\d+\.\d+", info["cuda_toolkit"])
        assert info["elementwise_architectures"]
    else:
        assert info["gemm_kernels"] == 0


def test_exports_nothing_but_its_entry_point() -> None:
    """Symbols of ours must not meet another library's: torch finds the operators by static initialisers."""
    lines = tool("nm", "-D", "--defined-only").splitlines()
    exported = [line.split()[-1] for line in lines if line.strip()]
    ours = [
        name.partition("@")[0]
        for name in exported
        if not name.startswith(("_init", "_fini", "_edata", "_end", "__bss"))
    ]
    assert len(ours) <= 1, ours


def test_needs_no_cuda_and_no_python_library_to_load() -> None:
    needed = re.findall(r"\(NEEDED\).*\[([^\]]+)\]", tool("readelf", "-d"))
    assert any(name.startswith(("libtorch_cpu", "libtorch.")) for name in needed), needed
    for name in needed:
        assert not re.match(r"libcud|libtorch_cuda|libc10_cuda|libtorch_python|libpython|libnv", name), name


def test_carries_no_path_of_the_machine_that_built_it() -> None:
    assert not re.findall(r"\((?:RPATH|RUNPATH)\).*\[/", tool("readelf", "-d"))


def test_cuda_status_says_why_not() -> None:
    status = torch.ops.epigemm._cuda_status(0)
    if not epigemm.build_info()["cuda"]:
        assert "CUDA" in status
    elif torch.cuda.is_available():
        assert status == ""
    else:
        assert status


def test_import_is_quiet_and_light() -> None:
    """It prints nothing, and loads no library of CUDA, no optional package, no part of torch that torch leaves."""
    late = ("rich", "matplotlib", "triton", "torch.utils.flop_counter", "torch.fx.experimental.proxy_tensor")
    loaded = f"import sys; print([name for name in {late} if name in sys.modules])"
    nothing = (
        "from epigemm.linker import libraries; import epigemm.epilogues.declaration\n"
        "assert libraries._found is None and libraries._load.cache_info().currsize == 0\n"
    )
    runs = [
        subprocess.run([sys.executable, "-c", text + loaded], capture_output=True, text=True, check=True)
        for text in (f"import epigemm\n{nothing}", "import torch\n")
    ]
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stderr == runs[1].stderr
