"""Pages in a real browser: Debian's chromium, without a window, by playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

WIDE, NARROW = 1280, 400
_NAMES = ("chromium", "chromium-browser", "google-chrome")

# What a reader would see, as texts: figures without a picture, tables and code of which a part is hidden, words on two
# lines. What a program prints may be wider than the page.
_LOOK = """
() => {
  const faults = [];
  const name = (element) => element.outerHTML.slice(0, 80);
  for (const image of document.images)
    if (!image.complete || !image.naturalWidth) faults.push(`no picture: ${image.src}`);
  for (const block of document.querySelectorAll(".mermaid, .language-mermaid"))
    faults.push(`source text in place of a figure: ${name(block)}`);
  for (const code of document.querySelectorAll("pre > code"))
    if (!code.closest(".language-text") && code.scrollWidth > code.clientWidth + 1)
      faults.push(`cut: ${code.innerText.slice(0, 60)}`);
  for (const table of document.querySelectorAll("table")) {
    const text = table.closest("article") ?? document.body;
    const edge = text.getBoundingClientRect().right + 1;
    for (let box = table; box !== text; box = box.parentElement)
      if (box.scrollWidth > box.clientWidth + 1) { faults.push(`clipped: ${table.innerText.slice(0, 60)}`); break; }
    if (table.getBoundingClientRect().right > edge) faults.push(`too wide: ${table.innerText.slice(0, 60)}`);
    const texts = document.createTreeWalker(table, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      const range = document.createRange();
      for (const word of texts.currentNode.data.matchAll(/[^\\s-]+/g)) {
        range.setStart(texts.currentNode, word.index);
        range.setEnd(texts.currentNode, word.index + word[0].length);
        const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
        if (lines.size > 1) faults.push(`broken inside: ${word[0]}`);
      }
    }
  }
  return faults;
}
"""
# Letters of 14 pixels, drawn at half their size, cannot be read.
_FIGURES = """
() => {
  const faults = [];
  for (const figure of document.querySelectorAll(".figure")) {
    const picture = figure.querySelector("svg");
    const box = picture?.getBoundingClientRect();
    if (!box || box.width < 100 || box.height < 100) faults.push(`no figure: ${figure.outerHTML.slice(0, 80)}`);
    else if (box.width < 0.7 * picture.viewBox.baseVal.width) faults.push(`too small: ${picture.id}`);
  }
  return faults;
}
"""
_OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


class Browser:
    """One window, and what goes wrong in it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self._told: list[str] = []
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self._told.append(str(error)))
        page.on("request", self._on_request)

    def _on_console(self, message: Any) -> None:
        if message.type == "error":
            self._told.append(message.text)

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "about:", "blob:")):
            self._told.append(f"fetches {request.url}")

    def open(self, url: str, width: int = WIDE) -> None:
        """Go to a page, and forget what the last one said."""
        self._told.clear()
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.goto(url, wait_until="load")

    def errors(self) -> list[str]:
        """What scripts said since `open`."""
        return list(self._told)

    def faults(self) -> list[str]:
        """What is wrong with the page that is open.

        In a narrow window tables, code and figures may be scrolled, but the page not.
        """
        found = [*self._told, *self.page.evaluate(_FIGURES)]
        if self.page.viewport_size["width"] >= WIDE:
            found += self.page.evaluate(_LOOK)
        if (pixels := self.page.evaluate(_OVERFLOW)) > 1:
            found.append(f"the page is {pixels} pixels wider than the window")
        return found


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser; the test is skipped where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="the extra `docs` is not installed")
    program = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("no chromium here")
    with api.sync_playwright() as playwright:
        # No sandbox: it cannot start as root, and the pages are our own.
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield Browser(opened.new_page())
        opened.close()
