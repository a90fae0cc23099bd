"""What people read in source files: comments and strings, each as one line."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

_DOCTEST = re.compile(r"^\s*(>>>|\.\.\.).*$", re.MULTILINE)
_QUOTED = r'"(?:[^"\\\n]|\\.)*"'
# In this order: a string may hold slashes.
_CPP = re.compile(
    rf"(?P<strings>{_QUOTED}(?:\s*{_QUOTED})*)|/\*(?P<block>.*?)\*/|//(?P<line>[^\n]*)", re.DOTALL
)


def of_file(path: Path) -> list[str]:
    """The comments and strings of a Python or C++ file."""
    text = path.read_text(encoding="utf-8")
    found = of_python(text) if path.suffix == ".py" else of_cpp(text)
    return [_one_line(each) for each in found]


def of_python(text: str) -> Iterator[str]:
    """Strings without the code of their examples, what f-strings say, and runs of comments."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield _DOCTEST.sub("", node.value)
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = ((token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT)
    yield from _runs((line, comment.lstrip("#")) for line, comment in comments)


def of_cpp(text: str) -> Iterator[str]:
    """Strings, adjacent ones as one, and comments, those of consecutive lines as one."""
    lines: list[tuple[int, str]] = []
    for match in _CPP.finditer(text):
        if (strings := match["strings"]) is not None:
            yield re.sub(r'"\s*"', "", strings)
        elif (block := match["block"]) is not None:
            yield re.sub(r"^\s*\*", "", block, flags=re.MULTILINE)
        else:
            lines.append((text.count("\n", 0, match.start()), match["line"]))
    yield from _runs(lines)


def _runs(lines: Iterable[tuple[int, str]]) -> Iterator[str]:
    """What stands on consecutive lines, as one text."""
    run: list[str] = []
    last = -2
    for number, text in lines:
        if number != last + 1 and run:
            yield " ".join(run)
            run = []
        run.append(text)
        last = number
    if run:
        yield " ".join(run)


def _one_line(text: str) -> str:
    return " ".join(text.split())
