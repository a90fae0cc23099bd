"""Print the requirements of one of the project's extras, for pip: installing an extra alone would build the project."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def requirements(extra: str) -> list[str]:
    """The requirements of `extra` in pyproject.toml (which Python 3.10's standard library cannot parse)."""
    text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split("[project.optional-dependencies]", 1)[1].split("\n[", 1)[0]
    listed = re.search(rf"^{re.escape(extra)} = \[(.*?)\]$", section, re.MULTILINE | re.DOTALL)
    if listed is None:
        raise SystemExit(f"pyproject.toml has no extra named {extra!r}")
    return re.findall(r'"([^"]+)"', listed.group(1))


if __name__ == "__main__":
    print(*requirements(sys.argv[1]))
