"""Rules of the source tree that no compiler checks: who may include what, and what the registry says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from epigemm._native import build_info
from tests.csrc import rooms
from tests.support.cases import REGISTRY

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"

pytestmark = pytest.mark.skipif(not CSRC.is_dir(), reason="sources are not at hand")


def test_rooms_include_what_they_may() -> None:
    assert rooms.violations(CSRC) == []


PLANTED = [
    ("call/x.cpp", "gemm/sm90_tma/open_kernel.h"),  # a CUTLASS kernel
    ("call/x.cpp", "cuda_runtime.h"),
    ("device/x.h", "torch/linear.h"),
    ("device/x.h", "gemm/problem.h"),
    ("epilogue/x.h", "open/contract.h"),
    ("epilogue/x.h", "cuda_runtime.h"),
    ("elementwise/x.cuh", "gemm/problem.h"),
    ("gemm/x.h", "link/kernels.h"),
    ("gemm/planner/x.h", "gemm/sm90_tma/costs.h"),
    ("gemm/sm90/x.h", "gemm/sm90_tma/tiles.h"),
    ("gemm/sm90_tma/x.h", "../sm90_swap_ab/tiles.h"),  # another family, by a path
    ("gemm/sm90_tma/x.h", "call/linear.h"),
    ("link/x.h", "gemm/families.def"),
    ("link/x.h", "cutlass/cutlass.h"),
    ("open/x.h", "gemm/problem.h"),
    ("python/x.cpp", "torch/csrc/stable/library.h"),
    ("torch/x.cpp", "Python.h"),
    ("torch/x.cpp", "torch/extension.h"),  # no part of the stable ABI
    ("torch/x.cpp", "ATen/ATen.h"),
    ("newroom/x.cpp", "vector"),
]


@pytest.mark.parametrize(("file", "header"), PLANTED)
def test_a_planted_include_is_found(tmp_path: Path, file: str, header: str) -> None:
    for path in rooms.sources(CSRC):
        copy = tmp_path / path.relative_to(CSRC)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.touch()
    planted = tmp_path / file
    planted.parent.mkdir(exist_ok=True)
    planted.write_text(f'#include "{header}"\n')
    assert rooms.violations(tmp_path) == [f"{file}: {header}"]


def test_the_page_shows_these_rooms() -> None:
    """`python -m tests.csrc.rooms` prints them."""
    assert rooms.table() in (ROOT / "docs/architecture.md").read_text()


def test_no_second_spelling_of_a_formula() -> None:
    """exp, sigmoid and relu are spelled in csrc/epilogue alone; kernels only call `apply`."""
    calls = re.compile(r"\b(?:std::|::)?(expf?|__expf|tanhf?|fmaxf|erff?)\s*\(")
    for path in rooms.sources(CSRC):
        if path.relative_to(CSRC).parts[0] in {"epilogue", "torch"}:
            continue
        code = re.sub(r"//.*", "", path.read_text())
        assert not calls.findall(code), path.relative_to(ROOT)


def test_nothing_waits_for_the_device() -> None:
    """Calls only launch: torch allocates and copies, and whoever reads a result waits for it."""
    waits = re.compile(
        r"\bcu(?:da)?(?:\w*Synchronize|(?:Malloc|Free|MemAlloc|MemFree|Memcpy|Memset)(?!\w*Async)\w*)\s*\("
    )
    assert waits.search("cudaStreamSynchronize(stream)") and waits.search("cudaMemcpy(a, b, n, kind)")
    assert waits.search("cuMemFree(p)") and not waits.search("cudaMemcpyAsync(a, b, n, kind, stream)")
    for path in rooms.sources(CSRC):
        assert not waits.findall(without_comments(path)), path.relative_to(ROOT)


def test_registry_file_equals_the_module() -> None:
    """The installed module was built from this very list (else: rebuild)."""
    lines = re.findall(
        r"^EPIGEMM_EPILOGUE\((\w+), (\w+), (\w+)\)$", (CSRC / "epilogue/registry.def").read_text(), re.M
    )
    assert {name: forms != "ELEMENTWISE_ONLY" for name, _, forms in lines} == {
        name: entry["linear"] for name, entry in REGISTRY.items()
    }
    for name, functor, _ in lines:
        header = (CSRC / "epilogue" / f"{name}.h").read_text()
        assert re.search(rf"\bstruct {functor}\b", header)


PLANNER = CSRC / "gemm/planner"
PLANNER_SOURCES = [path for path in rooms.sources(CSRC) if path.is_relative_to(PLANNER)]
FAMILIES = (
    re.findall(r"^EPIGEMM_FAMILY\((\w+)\)$", (CSRC / "gemm/families.def").read_text(), re.M)
    if CSRC.is_dir()
    else []
)


def without_comments(path: Path) -> str:
    return re.sub(r"//[^\n]*|/\*[\s\S]*?\*/", "", path.read_text())


def test_the_planner_names_no_family() -> None:
    """It asks all of them alike: a new one is a line of families.def and a folder."""
    assert len(FAMILIES) >= 3 and len(PLANNER_SOURCES) > 8
    names = re.compile(
        "|".join([*FAMILIES, r"sm_?\d\d", "narrow", "swap_?ab", "swap-ab", "fp16x3", "tma", "hopper"]), re.I
    )
    for path in PLANNER_SOURCES:
        assert not names.search(without_comments(path)), path.relative_to(ROOT)


def test_the_planner_knows_no_capability() -> None:
    """But for 0, which is no CUDA device: what runs where the families say."""
    for path in PLANNER_SOURCES:
        for line in without_comments(path).splitlines():
            if "capability" in line:
                assert not re.search(r"[1-9]", line), f"{path.relative_to(ROOT)}: {line.strip()}"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_a_folder_of_the_same_files(family: str) -> None:
    folder = CSRC / "gemm" / family
    for name in ("family.cpp", "tiles.h", "costs.h", "open.cu", "open.cmake"):
        assert (folder / name).is_file(), name
    assert f"namespace epigemm::{family} {{" in (folder / "family.cpp").read_text()


def test_every_family_is_in_the_module() -> None:
    """In the order of families.def, which plans on disk count by; with as many tiles as tiles.h lists."""
    families = build_info()["families"]
    assert list(families) == FAMILIES
    for family, tiles in families.items():
        rows = re.findall(r"^ *\{\d+, \d+, .*\},", (CSRC / "gemm" / family / "tiles.h").read_text(), re.M)
        assert sum(tiles.values()) == len(rows), family


def test_every_folder_with_a_family_is_listed() -> None:
    assert sorted(path.parent.name for path in (CSRC / "gemm").glob("*/family.cpp")) == sorted(FAMILIES)


def test_no_number_of_multiprocessors_in_the_code() -> None:
    """Devices differ: the count is read at run time. Only the cost model's constants may say where they were taken."""
    for path in rooms.sources(CSRC):
        code = re.sub(r"//.*", "", path.read_text())
        for line in code.splitlines():
            if re.search(r"(?<![\w.])(132|114|108|78)(?![\w.])", line):
                assert "constexpr double" in line, f"{path.relative_to(ROOT)}: {line.strip()}"
