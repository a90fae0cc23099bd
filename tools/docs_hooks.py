"""Hooks of mkdocs: README.md is the first page, and pages may link to files of the repository outside of docs/.

On the repository's page a link from docs/ leads to `../benchmarks/...`. The site holds a copy of each such file below
`repository/`, and the links lead there.

A page that went leaves a page at its address that leads to where its text is now: `moved` in mkdocs.yml.

In tables a size, M x N x K, stays on one line, as does a name: code without a space. A long name is broken behind a
dot or the like.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FIRST = {ROOT / "README.md": "index.md", ROOT / "CHANGELOG.md": "CHANGELOG.md"}
NAME = re.compile(r"<code>([^\s<]+)</code>")
LONG_NAME = 32
CELL, BETWEEN_SIDES = re.compile(r"<td.*?</td>", re.DOTALL), re.compile(r"(?<=\d) x (?=\d)")
LINK = re.compile(r"(\]\()([^)\s#]+)")
MOVED = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Moved</title>
<script>location.replace("{page}" + (location.hash || "{anchor}"))</script>
<meta http-equiv="refresh" content="0; url={page}{anchor}">
</head><body><a href="{page}{anchor}">This page has moved.</a></body></html>
"""


def place(path: Path) -> str:
    """Where the site has a file of the repository."""
    if path in FIRST:
        return FIRST[path]
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return f"repository/{path.relative_to(ROOT).as_posix()}"


def target(page: Path, link: str) -> Path | None:
    """The file that a page's link leads to; of a folder, the one that describes it."""
    path = (page.parent / link).resolve()
    files = [path, *(path / name for name in ("notes.md", "tables.md", "summary.json"))]
    return next((file for file in files if file.is_file() and file.is_relative_to(ROOT)), None)


def linked(page: Path) -> set[Path]:
    """The files that a page links to."""
    links = (link for _, link in LINK.findall(page.read_text(encoding="utf-8")))
    return {path for link in links if (path := target(page, link)) is not None}


def on_files(files: Any, config: Any) -> Any:
    """Add the README, the changelog, and all files that pages link to."""
    from mkdocs.structure.files import File  # type: ignore[import-not-found, unused-ignore]

    waiting, seen = [*FIRST, *DOCS.glob("*.md")], set[Path]()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        if files.get_file_from_path(place(path)) is None:
            files.append(File.generated(config, place(path), abs_src_path=str(path)))
        if path.suffix == ".md":
            waiting += linked(path)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between files of the site."""
    source = Path(page.file.abs_src_path or "").resolve()

    def relative(match: re.Match[str]) -> str:
        path = target(source, match[2])
        if path is None:
            return match[0]
        return match[1] + os.path.relpath(place(path), Path(place(source)).parent)

    return LINK.sub(relative, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Say where names and sizes may be broken."""

    def marked(match: re.Match[str]) -> str:
        if len(match[1]) < LONG_NAME:
            return f'<code class="name">{match[1]}</code>'
        return "<code>" + re.sub("(?<=[./_=])", "<wbr>", match[1]) + "</code>"

    html = CELL.sub(lambda cell: BETWEEN_SIDES.sub("&nbsp;x&nbsp;", cell[0]), html)
    return NAME.sub(marked, html)


def on_post_build(config: Any, **_: Any) -> None:
    """Lead old addresses to new ones, with the heading that a link names.

    Raises:
        ValueError: The new page has no such heading.
        FileNotFoundError: The site has no such page.
    """
    site = Path(config["site_dir"])
    for old, new in config["extra"]["moved"].items():
        page, mark, heading = new.partition("#")
        text = (site / page).read_text(encoding="utf-8")
        if mark and f'id="{heading}"' not in text:
            raise ValueError(f"moved: got {old}: {new}; accepted is a heading of {page}")
        (site / old).write_text(MOVED.format(page=page, anchor=mark + heading), encoding="utf-8")
