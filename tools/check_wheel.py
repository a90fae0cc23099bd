"""Check a wheel with CUDA kernels: size, exports, libraries, undefined symbols, wgmma in GEMM kernels, open kernels.

Usage: `python check_wheel.py WHEEL [--expect-kernels N]`

Needs readelf and nm (binutils), cuobjdump and nvdisasm (on PATH or PyPI's nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "build_backend"))

import locate

MODULE = "epigemm/_C.so"
OPEN_KERNELS = "epigemm/ir/"
LARGEST_WHEEL_MB = 40
GEMM_ARCHITECTURE = "sm_90a"
GEMM_KERNELS = ("cutlass13device_kernel", "epigemm12sm90_swap_ab6kernel")
ALLOWED_LIBRARIES = re.compile(
    r"libtorch_cpu\.so|libstdc\+\+\.so\.6|libgcc_s\.so\.1|ld-linux-[\w-]+\.so\.\d|lib(c|m|dl|rt|pthread)\.so\.\d"
)
# What the module may leave to be found when it is loaded: torch's C functions, the C and C++ run times, and symbols
# that the linker marks weak.
TORCH_SYMBOL = re.compile(r"aoti_torch_\w+|torch_\w+")


def output_of(*command: str) -> str:
    """What a command prints; its failure is an error."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def cuda_tool(name: str) -> str:
    """A program of the CUDA toolkit, from PATH or from PyPI's packages."""
    candidates = [shutil.which(name), f"/usr/local/cuda/bin/{name}"]
    candidates += [str(site / "nvidia" / "cu13" / "bin" / name) for site in locate.site_directories()]
    for candidate in candidates:
        if candidate and Path(candidate).is_file():
            return candidate
    raise SystemExit(f"check_wheel: {name} is missing: pip install 'nvidia-cuda-{name}==13.*'")


def size_problems(wheel: Path) -> Iterator[str]:
    """The wheel's size."""
    megabytes = wheel.stat().st_size / 1e6
    print(f"wheel: {wheel.name}, {megabytes:.1f} MB")
    if megabytes > LARGEST_WHEEL_MB:
        yield f"the wheel is larger than {LARGEST_WHEEL_MB} MB"


def export_problems(module: Path) -> Iterator[str]:
    """The module's operators register themselves: it exports nothing."""
    exported = output_of("nm", "-D", "--defined-only", str(module)).split("\n")
    exported = [line.split()[-1] for line in exported if line.strip()]
    print(f"exported symbols: {len(exported)}")
    if exported:
        yield f"the module exports {', '.join(exported[:10])}"


def library_problems(module: Path) -> Iterator[str]:
    """It must load under a CPU-only torch, and look for torch where torch is, not where it was built."""
    dynamic = output_of("readelf", "-dW", str(module))
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    print(f"needed libraries: {', '.join(needed)}")
    for library in needed:
        if not ALLOWED_LIBRARIES.fullmatch(library):
            yield f"the module needs {library}"
    for path in re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic):
        yield f"the module carries the library path {path}"


def symbol_problems(module: Path) -> Iterator[str]:
    """Undefined symbols: versioned ones are the run times', the others must be torch's."""
    lines = output_of("nm", "-D", "--undefined-only", str(module)).splitlines()
    undefined = [line.split()[-1] for line in lines if line.split()[-2] == "U"]
    torch_symbols = [name for name in undefined if "@" not in name]
    print(f"symbols taken from torch: {len(torch_symbols)}")
    for name in torch_symbols:
        if not TORCH_SYMBOL.fullmatch(name):
            yield f"undefined symbol {name} is not one of torch's stable ABI"


# What the disassembly of every Hopper GEMM must contain: wgmma, and the wait for the kernel ahead, without which a
# programmatic dependent launch reads inputs that are still being written (CUTLASS leaves it out unless a macro asks).
REQUIRED_INSTRUCTIONS = ("HGMMA", "ACQBULK")


def instruction_counts(module: Path) -> dict[str, dict[str, int]]:
    """For each GEMM kernel of GEMM_ARCHITECTURE, how often its disassembly has each required instruction.

    cuobjdump prints sm_90's elementwise kernels along with sm_90a's: the name tells a GEMM.
    """
    cuobjdump = cuda_tool("cuobjdump")
    folder = Path(cuda_tool("nvdisasm")).parent
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    command = [cuobjdump, "-arch", GEMM_ARCHITECTURE, "-sass", str(module)]
    counts: dict[str, dict[str, int]] = {}
    kernel = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as disassembly:
        assert disassembly.stdout is not None
        for line in disassembly.stdout:
            head = re.match(r"\s*Function : (\S+)", line)
            if head:
                kernel = head.group(1)
                if any(name in kernel for name in GEMM_KERNELS):
                    counts[kernel] = dict.fromkeys(REQUIRED_INSTRUCTIONS, 0)
            elif kernel in counts:
                for instruction in REQUIRED_INSTRUCTIONS:
                    counts[kernel][instruction] += instruction in line
    if disassembly.returncode != 0:
        raise SystemExit(f"check_wheel: {' '.join(command)} failed")
    return counts


def kernel_problems(module: Path, expected: int | None) -> Iterator[str]:
    """Every Hopper GEMM kernel uses wgmma and waits for the kernel ahead."""
    counts = instruction_counts(module)
    complete = sum(all(found.values()) for found in counts.values())
    print(
        f"{GEMM_ARCHITECTURE} GEMM kernels: {len(counts)}, with {' and '.join(REQUIRED_INSTRUCTIONS)}: {complete}"
    )
    if not counts:
        yield f"the module has no GEMM kernel for {GEMM_ARCHITECTURE}"
    if expected is not None and len(counts) != expected:
        yield f"the module has {len(counts)} GEMM kernels for {GEMM_ARCHITECTURE}, expected are {expected}"
    for kernel, found in counts.items():
        for instruction, count in found.items():
            if count == 0:
                yield f"no {instruction} in {kernel}"


def open_kernel_problems(archive: zipfile.ZipFile) -> Iterator[str]:
    """Every open kernel of the index has its file of IR."""
    files = {
        info.filename: info.file_size for info in archive.infolist() if info.filename.startswith(OPEN_KERNELS)
    }
    index = OPEN_KERNELS + "index.json"
    if index not in files:
        yield f"{index} is missing"
        return
    kernels: dict[str, str] = json.loads(archive.read(index))
    print(f"open kernels: {len(kernels)}, {sum(files.values()) / 1e6:.1f} MB of IR")
    for kernel, file in kernels.items():
        if not files.get(OPEN_KERNELS + file):
            yield f"{kernel}: {OPEN_KERNELS}{file} is missing or empty"


def main() -> int:
    """Print what was found; 1 when something is wrong."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--expect-kernels", type=int, help="how many GEMM kernels the module must hold")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(arguments.wheel) as archive:
            module = Path(archive.extract(MODULE, folder))
            open_problems = [*open_kernel_problems(archive)]
        problems = [
            *open_problems,
            *size_problems(arguments.wheel),
            *export_problems(module),
            *library_problems(module),
            *symbol_problems(module),
            *kernel_problems(module, arguments.expect_kernels),
        ]
    for problem in problems:
        print(f"check_wheel: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
