"""Link the mma.sync kernels for GPUs that are not here, and print what their machine code has.

    python -m tools.link_every_gpu
    python -m tools.link_every_gpu --gpu sm_80 sm_120 --epilogue bias

Takes NVRTC and nvJitLink (pip install 'epigemm[jit]') and nvdisasm (PyPI's nvidia-cuda-nvdisasm), no GPU and no driver.
Exits with 1 where a kernel spills, takes more shared memory than the GPU has, or lacks the instructions that it is for.
The fixup of fp32 on fp16 slices, which multiplies in fp32, is linked beside them.
"""

from __future__ import annotations

import argparse
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from epigemm.epilogues.registry import EPILOGUES
from epigemm.linker import cubins
from epigemm.linker.libraries import compile_functor, link
from tools.check_wheel import cuda_tool
from tools.planner import ask_planner

FAMILY = "sm80_mma"
OPERANDS = {
    "float16": ("float16", "ieee"),
    "bfloat16": ("bfloat16", "ieee"),
    "tf32": ("float32", "tf32"),
    "split": ("float32", "split"),
    "scaled": ("float32", "scaled"),
}
"""The kernels by what they multiply: dtype and arithmetic."""
FIXUP = "epigemm_open_sm80_fixup"
FIXUPS_SPILLS = 14
"""In code for sm_100 and sm_120. It is bound to 128 registers for the sake of its check, and seldom goes on."""
SHARED_KB = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_100": 227, "sm_120": 99}
"""The GPUs, and the largest CTA's shared memory in each (CUDA's programming guide, technical specifications)."""
MULTIPLY, COPY, SPILLS = "HMMA", "LDGSTS", ("LDL", "STL")
_SIZED, _REGISTER_COUNT = 4, 0x2F  # EIFMT_SVAL, EIATTR_REGCOUNT
_ANY_TILE_FITS = (100, 148)  # a GPU: capability and multiprocessors


class Tile(NamedTuple):
    """A tile as the planner describes it."""

    text: str
    schedule: str
    shared_bytes: int


class Found(NamedTuple):
    """What the machine code of a kernel has."""

    registers: int
    instructions: dict[str, int]


def tiles(operand: str) -> dict[int, Tile]:
    """All tiles of an operand by number: those for rows of whole 16 bytes, and in 16 bits those for other rows."""
    every = {}
    for columns in (128, 127):
        answer = ask_planner(
            "bias", 128, 128, columns, *OPERANDS[operand], any_family=True, gpu=_ANY_TILE_FITS
        )
        for each in answer["candidates"]:
            if each["family"] == FAMILY:
                every[each["plan"][1]] = Tile(each["tile"], each["schedule"], each["shared_bytes"])
    return dict(sorted(every.items()))


def registers(cubin: bytes) -> int:
    """Of a thread, from the section `.nv.info`: each of its entries has a format, a number, and often a size."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + size * i) for i in range(count)]
    text = headers[names][4]
    found = 0
    for header in headers:
        place, length = header[4], header[5]
        if not cubin.startswith(b".nv.info\0", text + header[0]):
            continue
        end = place + length
        while place < end:
            form, number, bytes_behind = struct.unpack_from("<BBH", cubin, place)
            place += 4
            if form == _SIZED:
                if number == _REGISTER_COUNT:
                    found = max(found, struct.unpack_from("<II", cubin, place)[1])
                place += bytes_behind
    return found


def inspect(cubin: bytes) -> Found:
    """A linked kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [cuda_tool("nvdisasm"), "-c", file.name]
        text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    counts = {name: len(re.findall(rf"\b{name}\b", text)) for name in (MULTIPLY, COPY, *SPILLS)}
    return Found(registers(cubin), counts)


def problems(tile: Tile, found: Found) -> Iterator[str]:
    """What is wrong with a kernel. A tile that the GPU has no room for is never planned there, and is linked alike."""
    counts = found.instructions
    if any(counts[name] for name in SPILLS):
        yield f"spills ({', '.join(f'{counts[name]} {name}' for name in SPILLS)})"
    if not counts[MULTIPLY]:
        yield f"no {MULTIPLY}"
    if bool(counts[COPY]) != (tile.schedule == "multistage"):
        yield f"{counts[COPY]} {COPY}"
    if tile.shared_bytes > 1024 * max(SHARED_KB.values()):
        yield f"{tile.shared_bytes} bytes of shared memory, which no GPU has"
    if not 0 < found.registers <= 255:
        yield f"{found.registers} registers"


def problems_of_fixup(found: Found) -> Iterator[str]:
    """The same for the fixup."""
    spills = sum(found.instructions[name] for name in SPILLS)
    if spills > FIXUPS_SPILLS:
        yield f"{spills} spills"
    if found.instructions[MULTIPLY] or not found.instructions[COPY]:
        yield f"{found.instructions[MULTIPLY]} {MULTIPLY} and {found.instructions[COPY]} {COPY}"


def linked(symbol: str, epilogue: str, gpu: str) -> bytes:
    """The machine code of a kernel."""
    path = cubins.ir_path(symbol)
    if path is None:
        raise SystemExit(f"link_every_gpu: this build has no kernel {symbol}")
    functor = compile_functor(EPILOGUES[epilogue].source(symbol), gpu)
    return link(path.read_bytes(), functor, symbol, gpu)


def kernels(gpu: str, epilogue: str) -> Iterator[tuple[str, Tile | None, Found]]:
    """The symbol, the tile and what the machine code of each has. The fixup has no tile."""
    for operand in OPERANDS:
        for number, tile in tiles(operand).items():
            symbol = f"epigemm_open_{FAMILY}_{operand}_{number}"
            yield symbol, tile, inspect(linked(symbol, epilogue, gpu))
    yield FIXUP, None, inspect(linked(FIXUP, epilogue, gpu))


def main() -> int:
    """Print a line a kernel; 1 where something is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", nargs="+", choices=list(SHARED_KB), default=list(SHARED_KB))
    parser.add_argument("--epilogue", choices=sorted(EPILOGUES), default="bias_gelu")
    given = parser.parse_args()
    wrong = []
    print(
        f"{'GPU':<8}{'kernel':<40}{'tile':<12}{'registers':>9}{'shared':>8}  fits  {MULTIPLY:>5}{COPY:>8}  spills"
    )
    for gpu in given.gpu:
        for symbol, tile, found in kernels(gpu, given.epilogue):
            counts = found.instructions
            text, shared = ("", 0) if tile is None else (tile.text, tile.shared_bytes)
            fits = "yes" if shared <= 1024 * SHARED_KB[gpu] else "no"
            print(
                f"{gpu:<8}{symbol:<40}{text:<12}{found.registers:>9}{shared:>8}  {fits:<4}  "
                f"{counts[MULTIPLY]:>5}{counts[COPY]:>8}  {sum(counts[name] for name in SPILLS)}"
            )
            of_kernel = problems_of_fixup(found) if tile is None else problems(tile, found)
            wrong += [f"{gpu}: {symbol} has {each}" for each in of_kernel]
    for each in wrong:
        print(f"link_every_gpu: {each}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
