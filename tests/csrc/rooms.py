"""The rooms of csrc, and what each may include. `python -m tests.csrc.rooms` prints what the docs say of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

STANDARD = re.compile(r"[a-z_]+")
OUTSIDE = {
    "CUDA": re.compile(r"cuda\w*\.h|cooperative_groups\.h"),
    "CUTLASS": re.compile(r"(cutlass|cute)/.*"),
    # One binary serves later torches only through the stable headers.
    "torch's stable ABI": re.compile(r"torch/(csrc/stable|csrc/inductor/aoti_torch|headeronly)/.*|dlfcn\.h"),
    "`Python.h`": re.compile(r"(Python|dlfcn)\.h"),
    "`ATen/dlpack.h`": re.compile(r"ATen/dlpack\.h"),
}
"""What lies outside of csrc, beside the C++ standard library."""

SUFFIXES = {".h", ".cuh", ".cpp", ".cu", ".in", ".def"}
# A name that a macro stands for has no mark. It is allowed nowhere.
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"]?)([^>"\s]+)', re.M)
FAMILY = "gemm/FAMILY"


@dataclass(frozen=True)
class Room:
    """A folder of csrc.

    Attributes:
        path: below csrc; `gemm/FAMILY`: every folder there with a `family.cpp`.
        inside: the rooms that it may include.
        outside: names of `OUTSIDE`.
        holds: what a reader finds there.
    """

    path: str
    inside: tuple[str, ...]
    outside: tuple[str, ...]
    holds: str


PLAIN = ("epilogue", "device", "open")
ROOMS = (
    Room("epilogue", (), (), "one functor per file, operand declarations, `registry.def`"),
    Room("device", (), ("CUDA",), "element types; what the planner knows of a device; launching"),
    Room(
        "open", ("epilogue", "device"), (), "the contract of a kernel with the functor that is linked into it"
    ),
    Room(
        "reduce", ("epilogue", "device"), ("CUDA",),
        "sums and statistics of columns: of blocks of rows, and merged",
    ),
    Room("gemm", PLAIN, (), "`problem.h` (plain structs), `families.def`, `launch`"),
    Room("gemm/planner", (*PLAIN, "gemm"), (), "the choice, the fallback, measured times, the plan cache"),
    Room(
        "gemm/sm90", (*PLAIN, "reduce", "gemm", "gemm/planner"), ("CUDA", "CUTLASS"),
        "Hopper: its limits, its cuBLAS, what its families share",
    ),
    Room(
        "gemm/sm80", (*PLAIN, "gemm", "gemm/planner"), (),
        "every GPU since Ampere: its limits, a roofline for its cuBLAS",
    ),
    Room(
        "gemm/fp16_slices", (*PLAIN, "reduce", "gemm", "gemm/planner"), ("CUDA",),
        "fp32 on fp16 slices, whatever the GEMM: layout, split of rows, range check, fixup",
    ),
    Room(
        FAMILY, (*PLAIN, "gemm", "gemm/planner", "gemm/fp16_slices", "gemm/sm90", "gemm/sm80"),
        ("CUDA", "CUTLASS"),
        "a family of kernels: tiles, costs, names, launch. `sm90_tma`: large tiles; `sm90_swap_ab`: few rows or few "
        "tiles; `sm90_fp16x3`: fp32 on fp16 slices; `sm90_few_rows`: fp32 with few rows; `sm80_mma`: every GPU "
        "since Ampere; on Hopper only for rows that TMA refuses",
    ),
    Room("link", ("epilogue", "open"), ("CUDA",), "linked kernels: loaded, and found by name"),
    Room(
        "elementwise", (*PLAIN, "reduce"), ("CUDA",),
        "the elementwise kernel, its derivative, BatchNorm's fold, BatchNorm in training, copies of rows",
    ),
    Room(
        "call", (*PLAIN, "reduce", "gemm", "gemm/planner", "link", "elementwise"), (),
        "a call from tensors to launches; PyTorch as function pointers",
    ),
    Room(
        "torch",
        (*PLAIN, "reduce", "gemm", "gemm/planner", "gemm/fp16_slices", "link", "elementwise", "call"),
        ("torch's stable ABI",), "schemas, argument checks, compiled graphs' operators",
    ),
    Room("python", ("call",), ("`Python.h`", "`ATen/dlpack.h`"), "the entry, a limited-API module"),
)  # fmt: skip
BY_PATH = {room.path: room for room in ROOMS}


def sources(csrc: Path) -> list[Path]:
    return sorted(path for path in csrc.rglob("*") if path.suffix in SUFFIXES)


def _folder(csrc: Path, path: Path) -> str:
    parts = path.relative_to(csrc).parts
    return "/".join(parts[: 2 if parts[0] == "gemm" and len(parts) > 2 else 1])


def _room(csrc: Path, folder: str) -> str:
    return FAMILY if (csrc / folder / "family.cpp").is_file() else folder


def _target(csrc: Path, path: Path, mark: str, name: str) -> Path | None:
    """The file that a compiler takes: beside the source first, then from csrc. None: it lies outside of csrc."""
    places = [path.parent, csrc] if mark == '"' else [csrc]
    found = next(((place / name).resolve() for place in places if (place / name).is_file()), None)
    # Headers of that room are also generated.
    return csrc / "epilogue" / "registry.h" if found is None and name.startswith("epilogue/") else found


def violations(csrc: Path) -> list[str]:
    """Includes that the rooms do not allow, as `file: header`."""
    csrc = csrc.resolve()
    return [
        f"{path.relative_to(csrc)}: {name}"
        for path in sources(csrc)
        for mark, name in INCLUDE.findall(path.read_text())
        if not _is_allowed(csrc, path, name, _target(csrc, path, mark, name))
    ]


def _is_allowed(csrc: Path, path: Path, name: str, target: Path | None) -> bool:
    folder = _folder(csrc, path)
    room = BY_PATH.get(_room(csrc, folder))
    if room is None or (target is not None and not target.is_relative_to(csrc)):
        return False
    if target is None:
        return bool(STANDARD.fullmatch(name)) or any(OUTSIDE[of].fullmatch(name) for of in room.outside)
    return _folder(csrc, target) == folder or _room(csrc, _folder(csrc, target)) in room.inside


def table() -> str:
    """The rooms as docs/internals.md shows them."""
    lines = ["| folder | holds |", "|---|---|"]
    lines += [f"| `csrc/{room.path}/` | {room.holds} |" for room in ROOMS]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
