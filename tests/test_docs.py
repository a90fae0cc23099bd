"""The documentation is finished: nothing waits to be filled in, links lead somewhere, lists are complete."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from epigemm.epilogues import formulas
from epigemm.epilogues.tracer import aten
from tests.csrc.test_open_names import names_of_the_build
from tests.support import pages, prose
from tests.support.pretended import without_gpu
from tests.support.primitives import ACTIVATIONS

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks" / "results").rglob("notes.md")),
]

# Each of these things has one name (a fallback, a plan, slices, a fixup, row statistics, the range check, a baseline).
# The others must not come back, nor phrases that take a guide.
_UNWANTED = (
    r"second path|torch's own (path|road)|own road|\brivals?\b|\bunfused\b|\bpieces\b|\brepair(s|ed)?\b|\bfacts\b"
    r"|range guard|guard of the split|whose like|\bof theirs\b|stands? elsewhere|without further ado"
)
UNWANTED = re.compile(rf"{_UNWANTED}|\bpeers?\b", re.IGNORECASE)
# Beside an option of the benchmarks, `--peers`.
UNWANTED_IN_CODE = re.compile(rf"{_UNWANTED}|has to see", re.IGNORECASE)
FOLDERS = ("python", "csrc", "benchmarks", "build_backend", "examples", "tools")
TREES = (*FOLDERS, "cmake", "docs", "tests")
SUFFIXES = {".py", ".h", ".cuh", ".cpp", ".cu", ".in", ".def"}
CODE = re.compile(r"```.*?```|`[^`]*`|^    .*?$", re.DOTALL | re.MULTILINE)


GUIDES = [PAGES[0], *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("block", [block for page in GUIDES for block in pages.blocks(page)], ids=str)
def test_a_block_runs_as_pasted(
    block: pages.Block, monkeypatch: pytest.MonkeyPatch, fresh_compiler: None
) -> None:
    """On a CPU, also where there is a GPU: the pages show what is printed there."""
    without_gpu(monkeypatch)
    torch.manual_seed(0)
    got = pages.printed(block)
    assert pages.as_expected(block.expected, got), got


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_a_fence_names_its_language(page: Path) -> None:
    """So no Python escapes the test above."""
    for fence in pages.fences(page.read_text(encoding="utf-8")):
        assert fence.language, fence.line
        assert fence.language == "python" or ">>> " not in fence.text, fence.line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_placeholders_are_left(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    left = [f"{number}: {line}" for number, line in enumerate(lines, 1) if "{{" in line or "}}" in line]
    assert not left, left[0]


def test_epilogues_lists_what_an_epilogue_may_be_made_of() -> None:
    """Every primitive, and the activations that the tests compare."""
    text = (ROOT / "docs" / "epilogues.md").read_text(encoding="utf-8")
    part = text.partition("### What an epilogue may be made of")[2].partition("###")[0]
    listed = set(re.findall(r"`([^`]*)`", part))
    primitives = {*aten.UNARY, *aten.BINARY, *aten.PREDICATES}
    activations = {name for name in ACTIVATIONS if hasattr(torch.nn.functional, name)}
    assert not (primitives | activations) - listed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_no_wider_than_a_screen(page: Path) -> None:
    """Tables, links and code may be."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "    ", "!["))]
    assert not [line for line in lines if len(line) > 100]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_old_names_do_not_come_back(page: Path) -> None:
    """In prose: what a program prints or takes is quoted as it is."""
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    found = UNWANTED.search(" ".join(text.split()))
    assert found is None, found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    """Files, and headings of them."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if anchor:
            assert anchor in headings(file), target


# Patterns, files of others, and the example of a new epilogue.
NO_FILES = re.compile(r"NAME|FAMILY|ROOM|MODULE|\*|Python\.h|ATen/dlpack\.h|bias_leaky_relu\.h")
A_FILE = re.compile(r"[\w./*]*\w\.(?:py|h|cuh|cu|cpp|def|cmake|in)\b(?![\w.])")


@pytest.mark.parametrize("page", PAGES[:1] + sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    """By the end of their path, as pages name them."""
    files = [f"/{path.relative_to(ROOT)}" for folder in TREES for path in (ROOT / folder).rglob("*.*")]
    named = A_FILE.findall(page.read_text(encoding="utf-8"))
    missing = {
        name
        for name in named
        if not NO_FILES.search(name) and not any(file.endswith(f"/{name}") for file in files)
    }
    assert not missing


def test_the_page_counts_the_kernels() -> None:
    """That the build links of an epilogue, and the epilogues that it links."""
    prelink: Any = importlib.import_module("build_backend.prelink")
    kernels = prelink.wanted(names_of_the_build(), reads_matrices=False)
    page = " ".join((ROOT / "docs" / "contributing.md").read_text(encoding="utf-8").split())
    assert f"({len(kernels)} kernels," in page
    lines = (ROOT / "csrc" / "epilogue" / "registry.def").read_text().splitlines()
    prelinked = [line for line in lines if line.startswith("EPIGEMM_") and "PRELINKED" in line]
    assert len(prelinked) + len(formulas.PRELINKED) == 9
    assert "Nine built-in epilogues are then linked" in page


def headings(page: Path) -> set[str]:
    """A page's anchors, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("folder", FOLDERS)
def test_old_names_do_not_come_back_in_the_code(folder: str) -> None:
    """Comments and strings: errors, reasons, docstrings."""
    sources = [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
    found = [
        (path, text) for path in sources for text in prose.of_file(path) if UNWANTED_IN_CODE.search(text)
    ]
    assert not found
