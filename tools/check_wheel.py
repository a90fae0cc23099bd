"""Check a wheel with CUDA kernels: size, exports, libraries, undefined symbols, open kernels, wgmma in prelinked ones.

Usage: `python check_wheel.py WHEEL [--expect-kernels N] [--pairs ZIP]`

Needs readelf and nm (binutils) and nvdisasm (on PATH or PyPI's nvidia-cuda-nvdisasm).
"""

from __future__ import annotations

import argparse
import json
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
LARGEST_WHEEL_MB = 30
PRELINKED = "epigemm/cubins/"
GEMM_KERNEL = re.compile("epigemm_open_(sm90|as_it_lies)_")
OF_MULTIPLY_ADDS = re.compile("epigemm_open_sm90_few_rows_")
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
# Loads and stores of local memory: spilled registers. A thread of the tiles with 192 accumulators has none left for a
# longer epilogue: there it may spill a few, outside of the mainloop.
FORBIDDEN_INSTRUCTIONS = ("LDL", "STL")
# Of the large tiles' kernel with CUTLASS's mainloop besides: a fence of the whole GPU would stall the mainloop at every
# stage, and a wait behind every wgmma means that the compiler has serialised them. Two waits are the mainloop's own.
LARGE_TILE = re.compile(r"epigemm_open_sm90_(tma|fp16x3_scaled)_")
MOST_OF_LARGE_TILES = {"MEMBAR.ALL.GPU": 0, "WARPGROUP.DEPBAR": 2}
CROWDED_KERNEL = re.compile(r"epigemm_open_sm90_tma_\w+_[235]$")
MOST_SPILLED = 32
# The warps beside the multiplying ones have 40 registers. There they keep a value or two of a tile, outside of the
# loops over stages: scalars of an epilogue on slices.
HELPED_KERNEL = re.compile(r"epigemm_open_sm90_fp16x3_scaled_0$")
MOST_SPILLED_BY_HELPERS = 2


def instruction_counts(cubin: Path) -> dict[str, int]:
    """How often a kernel's disassembly has each instruction that is asked about."""
    text = output_of(cuda_tool("nvdisasm"), "-c", str(cubin))
    return {
        instruction: text.count(instruction)
        for instruction in (*REQUIRED_INSTRUCTIONS, *FORBIDDEN_INSTRUCTIONS, *MOST_OF_LARGE_TILES)
    }


def is_right(symbol: str, instruction: str, count: int) -> bool:
    """Whether a kernel may have an instruction so often."""
    if instruction in REQUIRED_INSTRUCTIONS:
        return count > 0 or (instruction == "HGMMA" and bool(OF_MULTIPLY_ADDS.match(symbol)))
    if instruction in FORBIDDEN_INSTRUCTIONS:
        crowded = MOST_SPILLED if CROWDED_KERNEL.match(symbol) else 0
        return count <= max(crowded, MOST_SPILLED_BY_HELPERS if HELPED_KERNEL.match(symbol) else 0)
    return not LARGE_TILE.match(symbol) or count <= MOST_OF_LARGE_TILES[instruction]


def code_problems(kernels: zipfile.ZipFile, symbols: list[str], epilogue: str, folder: Path) -> Iterator[str]:
    """What the machine code of kernels lacks, and what it must not have."""
    for symbol in symbols:
        for instruction, count in instruction_counts(Path(kernels.extract(symbol, folder))).items():
            if not is_right(symbol, instruction, count):
                yield f"{count} times {instruction} in {symbol} of {epilogue}"


def pair_problems(file: Path, folder: Path) -> Iterator[str]:
    """The kernels of pairs of products, which the build links one epilogue into for this alone."""
    with zipfile.ZipFile(file) as kernels:
        symbols = kernels.namelist()
        print(f"kernels of pairs: {len(symbols)}")
        if not symbols:
            yield f"{file} has no kernels"
        yield from code_problems(kernels, symbols, file.stem, folder)


def kernel_problems(archive: zipfile.ZipFile, folder: Path, expected: int | None) -> Iterator[str]:
    """Every prelinked epilogue has all kernels; every GEMM uses wgmma and waits for the kernel ahead."""
    files = [name for name in archive.namelist() if name.startswith(PRELINKED) and name.endswith(".zip")]
    total = 0
    for file in files:
        epilogue = Path(file).stem
        with zipfile.ZipFile(archive.extract(file, folder)) as kernels:
            symbols = kernels.namelist()
            gemms = [symbol for symbol in symbols if GEMM_KERNEL.match(symbol)]
            total += len(symbols)
            if expected is not None and len(gemms) != expected:
                yield f"{file} has {len(gemms)} GEMM kernels, expected are {expected}"
            yield from code_problems(kernels, gemms, epilogue, folder)
    print(f"prelinked epilogues: {len(files)}, kernels: {total}")
    if expected and not files:
        yield "no epilogue is prelinked"


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
    parser.add_argument(
        "--expect-kernels", type=int, help="how many GEMM kernels every prelinked epilogue must have"
    )
    parser.add_argument(
        "--pairs", type=Path, help="kernels of pairs of products, with an epilogue (a zip file)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(arguments.wheel) as archive:
            module = Path(archive.extract(MODULE, folder))
            open_problems = [
                *open_kernel_problems(archive),
                *kernel_problems(archive, Path(folder), arguments.expect_kernels),
                *(pair_problems(arguments.pairs, Path(folder)) if arguments.pairs else ()),
            ]
        problems = [
            *open_problems,
            *size_problems(arguments.wheel),
            *export_problems(module),
            *library_problems(module),
            *symbol_problems(module),
        ]
    for problem in problems:
        print(f"check_wheel: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
