"""Rules of the source tree that no compiler checks: who may include what, and what the registry says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from epigemm._native import build_info
from tests.csrc import rooms
from tests.support.cases import REGISTRY

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"

FAMILIES = (
    re.findall(r"^EPIGEMM_FAMILY\((\w+)\)$", (CSRC / "gemm/families.def").read_text(), re.M)
    if CSRC.is_dir()
    else []
)

pytestmark = pytest.mark.skipif(not CSRC.is_dir(), reason="sources are not at hand")


def test_rooms_include_what_they_may() -> None:
    assert rooms.violations(CSRC) == []


def test_the_page_shows_these_rooms() -> None:
    """`python -m tests.csrc.rooms` prints them."""
    assert rooms.table() in (ROOT / "docs/internals.md").read_text()


# --- what the text of a source may not say: each rule gives the lines that break it ---------------------------------

Rule = Callable[[Path], list[str]]


def without_comments(path: Path) -> str:
    return re.sub(r"//[^\n]*|/\*[\s\S]*?\*/", "", path.read_text())


def lines_with(csrc: Path, pattern: str, is_meant: Callable[[Path], bool] = lambda path: True) -> list[str]:
    """`file: line` for all code with the pattern, of the files that are meant."""
    return [
        f"{path.relative_to(csrc)}: {line.strip()}"
        for path in rooms.sources(csrc)
        if is_meant(path.relative_to(csrc))
        for line in without_comments(path).splitlines()
        if re.search(pattern, line)
    ]


def second_spellings(csrc: Path) -> list[str]:
    """exp, sigmoid and relu are spelled in csrc/epilogue alone; kernels only call `apply`."""
    return lines_with(
        csrc,
        r"\b(?:std::|::)?(expf?|__expf|tanhf?|fmaxf|erff?)\s*\(",
        lambda path: path.parts[0] not in {"epilogue", "torch"},
    )


def waits(csrc: Path) -> list[str]:
    """Calls only launch: torch allocates and copies, and whoever reads a result waits for it."""
    return lines_with(
        csrc,
        r"\bcu(?:da)?(?:\w*Synchronize|(?:Malloc|Free|MemAlloc|MemFree|Memcpy|Memset)(?!\w*Async)\w*)\s*\(",
    )


def families_in_the_planner(csrc: Path) -> list[str]:
    """It asks all of them alike: a new one is a line of families.def and a folder."""
    names = [*FAMILIES, r"sm_?\d\d", "narrow", "swap_?ab", "swap-ab", "fp16x3", "tma", "hopper"]
    return lines_with(csrc, f"(?i){'|'.join(names)}", is_the_planners)


def capabilities_in_the_planner(csrc: Path) -> list[str]:
    """But for 0, which is no CUDA device: what runs where the families say."""
    return lines_with(csrc, r"capability.*[1-9]|[1-9].*capability", is_the_planners)


def multiprocessors(csrc: Path) -> list[str]:
    """Devices differ: the count is read at run time. Only constants of cost models may say where they were taken."""
    found = lines_with(csrc, r"(?<![\w.])(132|114|108|78)(?![\w.])")
    return [line for line in found if "constexpr double" not in line]


def is_the_planners(path: Path) -> bool:
    return path.parts[:2] == ("gemm", "planner")


RULES: list[Rule] = [
    second_spellings,
    waits,
    families_in_the_planner,
    capabilities_in_the_planner,
    multiprocessors,
]
rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)


@rules
def test_a_rule_holds(rule: Rule) -> None:
    assert rule(CSRC) == []


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
        text = (CSRC / "gemm" / family / "tiles.h").read_text()
        rows = re.findall(r"^ *\{\d+, \d+, .*\},", text, re.M)
        # Those of TF32 are the first of 16 bits, but where it has rows of its own; those of pairs and 8-bit results
        # with scales of blocks are those of promoted sums.
        has_own = family in ("sm80_mma", "sm90_few_rows")
        listed = [
            count
            for arithmetic, count in tiles.items()
            if (arithmetic != "tf32" or has_own) and not arithmetic.startswith("blocks_")
        ]
        assert sum(listed) == len(rows), family


def test_every_folder_with_a_family_is_listed() -> None:
    assert sorted(path.parent.name for path in (CSRC / "gemm").glob("*/family.cpp")) == sorted(FAMILIES)
