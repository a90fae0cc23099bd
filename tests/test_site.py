"""The site of `make docs`: all names, nothing from the internet, and what a browser shows of it from a folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import epigemm
from tests.support.browser import NARROW, WIDE, Browser, browser

ROOT = Path(__file__).parents[1]
PAGES = ["index", *sorted(path.stem for path in (ROOT / "docs").glob("*.md"))]
NOT_CALLED = {"__version__", "fusion", "nn"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as by `make docs`: what leads nowhere is an error."""
    for module in ("mkdocs", "material", "mkdocstrings_handlers.python", "mermaidx"):
        pytest.importorskip(module, reason="the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


class Resources(HTMLParser):
    """What a browser loads for a page: not where its links lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        if tag == "link" and values.get("rel") != "canonical":
            self.found.append(values.get("href", ""))
        self.found += [values[name] for name in ("src", "srcset", "data", "poster") if name in values]


def from_elsewhere(texts: list[str]) -> list[str]:
    return [text for text in texts if re.match(r"(https?:)?//", text)]


def test_nothing_is_fetched_from_the_internet(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not from_elsewhere(Resources(text).found), page
        assert "unpkg.com" not in text, page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


PUBLIC = {
    *(f"epigemm.{name}" for name in epigemm.__all__ if name not in NOT_CALLED),
    *(f"epigemm.nn.{name}" for name in epigemm.nn.__all__),
}


def test_the_reference_names_what_users_call() -> None:
    """What has a heading of its own there: each public name, and no other."""
    text = (ROOT / "docs" / "functions.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^::: (\S+)", text, re.MULTILINE)) - {"epigemm.functional", "epigemm.nn"}
    # `epigemm.explain` is a package, too: Griffe finds that.
    headings = dict(re.findall(r"^::: (\S+)\n    options:\n      heading: (\S+)", text, re.MULTILINE))
    assert {headings.get(name, name) for name in named} == PUBLIC


def test_the_reference_has_signatures_with_types(site: Path) -> None:
    """And arguments, results, errors and examples; nothing of an epilogue but what is called."""
    text = (site / "functions.html").read_text(encoding="utf-8")
    shown = set(re.findall(r'id="(epigemm\.[\w.]+)"', text))
    of_epilogues = {name for name in shown if name.startswith("epigemm.UserEpilogue.")}
    assert of_epilogues == {"epigemm.UserEpilogue.__call__", "epigemm.UserEpilogue.elementwise"}
    linear = text.partition('id="epigemm.linear_relu"')[2].partition("<h4")[0]
    plain = re.sub(r"<[^>]+>", "", linear)
    assert "precision: str | None = None" in plain and "see epigemm.functional" in plain
    assert "&gt;&gt;&gt; epigemm.linear_relu(" in plain and "TypeError" in plain
    layer = text.partition('id="epigemm.nn.LinearGELU"')[2].partition("<h4")[0]
    assert "precision: str | None = ..." in re.sub(r"<[^>]+>", "", layer)


def test_figures_are_drawn(site: Path) -> None:
    """One for each block of Mermaid, each with an id of its own."""
    for name in PAGES:
        source = ROOT / ("README.md" if name == "index" else f"docs/{name}.md")
        count = source.read_text(encoding="utf-8").count("```mermaid")
        page = (site / f"{name}.html").read_text(encoding="utf-8")
        assert len(set(re.findall(r'<div class="figure"><svg id="([\w-]+)"', page))) == count


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_pages_in_a_browser(site: Path, window: Browser, width: int) -> None:
    found = {}
    for name in (*PAGES, "CHANGELOG"):
        window.open((site / f"{name}.html").as_uri(), width)
        if faults := window.faults():
            found[name] = faults
    assert not found


def test_search_in_a_browser(site: Path, window: Browser) -> None:
    """From a folder, in which a browser starts no worker."""
    window.open((site / "index.html").as_uri())
    window.page.click("[data-md-component=search-query]")
    window.page.keyboard.type("batch invariant")
    window.page.wait_for_selector(".md-search-result__item", timeout=30_000)
    links = window.page.eval_on_selector_all(".md-search-result__link", "all => all.map(one => one.href)")
    assert any("numerics.html" in link for link in links)
    assert not window.errors()
