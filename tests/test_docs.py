"""The documentation is finished: nothing waits to be filled in, links lead somewhere, lists are complete."""

from __future__ import annotations

import re
import tokenize
from pathlib import Path

import pytest
import torch

from epigemm.epilogues.tracing import aten
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
UNWANTED = re.compile(
    r"second path|torch's own (path|road)|own road|\brivals?\b|\bunfused\b|\bpieces\b|\brepairs?\b|\bfacts\b"
    r"|\bpeers?\b|guard of the split|whose like|\bof theirs\b|stands elsewhere|without further ado",
    re.IGNORECASE,
)
# Of the package's comments and docstrings, by file: what is still to be reworded.
UNWANTED_IN_CODE = re.compile(
    r"second path|torch's own (path|road)|own road|whose like|\bof theirs\b|stands elsewhere|has to see|fp16 pieces",
    re.IGNORECASE,
)
CODE = re.compile(r"```.*?```|`[^`]*`|^    .*?$", re.DOTALL | re.MULTILINE)


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
    prose = CODE.sub("", page.read_text(encoding="utf-8"))
    found = UNWANTED.search(prose)
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


def headings(page: Path) -> set[str]:
    """A page's anchors, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def remarks(path: Path) -> list[str]:
    """Comments and docstrings."""
    with path.open("rb") as file:
        tokens = list(tokenize.tokenize(file.readline))
    return [
        token.string
        for token in tokens
        if token.type == tokenize.COMMENT
        or (token.type == tokenize.STRING and token.string.startswith('"""'))
    ]


def test_old_names_do_not_come_back_in_the_code() -> None:
    files = list((ROOT / "python").rglob("*.py"))
    found = [
        f"{path.name}: {text}" for path in files for text in remarks(path) if UNWANTED_IN_CODE.search(text)
    ]
    assert not found, found[0]
