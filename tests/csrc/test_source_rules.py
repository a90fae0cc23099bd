"""Rules of the source tree that no compiler checks: who may include what, and what the registry says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from epigemm._native import build_info
from tests.support.cases import REGISTRY

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"

pytestmark = pytest.mark.skipif(not CSRC.is_dir(), reason="sources are not at hand")

SUFFIXES = {".h", ".hpp", ".cuh", ".cpp", ".cu", ".in", ".def", ".inc"}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.M)


def sources() -> list[Path]:
    return sorted(path for path in CSRC.rglob("*") if path.suffix in SUFFIXES)


def sources_in(folder: Path) -> list[Path]:
    return [path for path in sources() if path.is_relative_to(folder)]


def includes(path: Path) -> list[str]:
    """What a file includes from outside of the source tree."""
    return [name for name in INCLUDE.findall(path.read_text()) if not (CSRC / name).exists()]


def violations(pattern: str, allowed: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources()
        for name in includes(path)
        if re.match(pattern, name) and path.relative_to(CSRC).parts[0] != allowed
    ]


def test_the_tree_is_being_read() -> None:
    assert len(sources()) > 10
    assert any(re.match(r"torch/", name) for path in sources() for name in includes(path))
    assert any(re.match(r"(cutlass|cute)/", name) for path in sources() for name in includes(path))


def test_torch_headers_only_in_csrc_torch() -> None:
    assert violations(r"(torch|c10|caffe2)/", "torch") == []
    # Plain C: the structs of DLPack.
    assert violations(r"ATen/dlpack\.h", "python") == violations(r"ATen/(?!dlpack\.h)", "") == []


def test_only_the_stable_part_of_torch() -> None:
    """One binary serves later torches only through the stable headers."""
    stable = re.compile(r"torch/(csrc/stable/|csrc/inductor/aoti_torch/|headeronly/)")
    for path in sources():
        for name in includes(path):
            if name.startswith("torch/"):
                assert stable.match(name), f"{path.relative_to(ROOT)}: {name}"


def test_cutlass_headers_only_in_csrc_gemm() -> None:
    assert violations(r"(cutlass|cute)/", "gemm") == []


def test_python_headers_only_in_csrc_python() -> None:
    assert violations(r"(Python\.h|pybind11)", "python") == []


def test_the_call_is_plain() -> None:
    """Both bindings call it, and it runs where there is no CUDA."""
    for path in sources_in(CSRC / "call"):
        assert all(re.fullmatch(r"[a-z_]+", name) for name in includes(path)), path


def test_no_second_spelling_of_a_formula() -> None:
    """exp, sigmoid and relu are spelled in csrc/epilogue alone; kernels only call `apply`."""
    calls = re.compile(r"\b(?:std::|::)?(expf?|__expf|tanhf?|fmaxf|erff?)\s*\(")
    for path in sources():
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
    for path in sources():
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
FAMILIES = (
    re.findall(r"^EPIGEMM_FAMILY\((\w+)\)$", (CSRC / "gemm/families.def").read_text(), re.M)
    if CSRC.is_dir()
    else []
)


def without_comments(path: Path) -> str:
    return re.sub(r"//[^\n]*|/\*[\s\S]*?\*/", "", path.read_text())


def test_the_planner_names_no_family() -> None:
    """It asks all of them alike: a new one is a line of families.def and a folder."""
    assert len(FAMILIES) >= 3 and len(sources_in(PLANNER)) > 8
    names = re.compile(
        "|".join([*FAMILIES, r"sm_?\d\d", "narrow", "swap_?ab", "swap-ab", "fp16x3", "tma", "hopper"]), re.I
    )
    for path in sources_in(PLANNER):
        assert not names.search(without_comments(path)), path.relative_to(ROOT)


def test_the_planner_knows_no_capability() -> None:
    """But for 0, which is no CUDA device: what runs where the families say."""
    for path in sources_in(PLANNER):
        for line in without_comments(path).splitlines():
            if "capability" in line:
                assert not re.search(r"[1-9]", line), f"{path.relative_to(ROOT)}: {line.strip()}"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_a_folder_of_the_same_files(family: str) -> None:
    folder = CSRC / "gemm" / family
    for name in ("family.cpp", "tiles.h", "costs.h", "open.cu"):
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
    for path in sources():
        code = re.sub(r"//.*", "", path.read_text())
        for line in code.splitlines():
            if re.search(r"(?<![\w.])(132|114|108|78)(?![\w.])", line):
                assert "constexpr double" in line, f"{path.relative_to(ROOT)}: {line.strip()}"
