"""The Python blocks of a page: what a reader pastes, and what the page says that it prints."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FENCE = re.compile(r"^```(.*)$", re.MULTILINE)
# The sentence by which a page asks for its first block to be pasted ahead of any other.
FIRST = re.compile(r"\bpaste this block first\b", re.IGNORECASE)
BETWEEN = re.compile(r"\s*([^\n]*\bprints?:?)?\s*")
_MATCH = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Fence:
    """One fenced block of a page."""

    language: str
    text: str
    line: int
    start: int
    end: int


@dataclass(frozen=True)
class Block:
    """One Python block: `paste` is the page's first block where the page asks for it, and this one."""

    page: Path
    line: int
    paste: str
    expected: str | None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def fences(text: str) -> list[Fence]:
    """All fenced blocks of a page, in order."""
    marks = list(FENCE.finditer(text))
    if len(marks) % 2:
        raise ValueError(f"page: got {len(marks)} fences; accepted is an even number")
    return [
        Fence(
            language=opening[1].strip(),
            text=text[opening.end() + 1 : closing.start()],
            line=text.count("\n", 0, opening.start()) + 2,
            start=opening.start(),
            end=closing.end(),
        )
        for opening, closing in zip(marks[::2], marks[1::2], strict=True)
    ]


def blocks(page: Path) -> list[Block]:
    """The Python blocks of a page. What one prints is in a `text` block right behind it, or behind "... print"."""
    text = page.read_text(encoding="utf-8")
    found = fences(text)
    python = [fence for fence in found if fence.language == "python"]
    asks = bool(python) and FIRST.search(" ".join(text[: python[0].start].split())) is not None
    first = _placed(python[0]) if asks else ""
    return [
        Block(
            page=page,
            line=fence.line,
            paste=_placed(fence, first if fence is not python[0] else ""),
            expected=_expected(text, fence, found),
        )
        for fence in python
    ]


def _placed(fence: Fence, before: str = "") -> str:
    """The code at the page's own lines, so that an error names them."""
    missing = fence.line - 1 - before.count("\n")
    return before + "\n" * missing + fence.text


def _expected(text: str, fence: Fence, found: list[Fence]) -> str | None:
    behind = next((other for other in found if other.start > fence.start), None)
    if behind is None or behind.language != "text" or not BETWEEN.fullmatch(text[fence.end : behind.start]):
        return None
    return behind.text


def printed(block: Block) -> str:
    """Run a block as it is pasted: in a new namespace, with nothing ahead of it."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(block.paste, str(block.page), "exec"), namespace)
    return output.getvalue()


def as_expected(expected: str | None, got: str) -> bool:
    """Whether a block printed what its page says; `...` stands for any text."""
    return doctest.OutputChecker().check_output(expected or "", got, _MATCH)
