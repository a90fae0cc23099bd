"""`python -m tests.net.update` writes the files of the net again, and refuses what may not change.

A public name may go if `removals.txt` has it. A budget falls to what there is now; those of lines are set by hand. What
has changed is shown by `git diff`, and is for a reader to judge.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from tests.net import api, budgets, errors, explanations, plans

HERE = Path(__file__).parent
MADE: dict[str, Callable[[], list[str]]] = {
    "api": api.lines,
    "errors": errors.lines,
    "explanations": explanations.lines,
    "plans": plans.lines,
}


def kept_budgets() -> dict[str, int]:
    """Budgets by their names."""
    return {
        name: int(most) for name, _, most in (line.rpartition(": ") for line in errors.written("budgets"))
    }


def exceeded(now: Mapping[str, int], most: Mapping[str, int]) -> list[str]:
    """Budgets that are exceeded; one that is not listed is 0."""
    return [
        f"{name}: {count}, at most {most.get(name, 0)}"
        for name, count in now.items()
        if count > most.get(name, 0)
    ]


def torch_of_files() -> str:
    """The version of torch that messages and calls are those of."""
    return torch.__version__.rpartition(".")[0]


def main() -> int:
    """Write all files; 1 where something may not change, which is said."""
    refused = api.missing(errors.written("api"), api.lines(), errors.written("removals"))
    now, most = budgets.measured(), kept_budgets()
    above = exceeded(now, most)
    for name in refused:
        print(f"{name} is gone, and not listed in removals.txt")
    for line in above:
        print(f"budget exceeded: {line}")
    if refused or above:
        return 1
    for name, made in MADE.items():
        (HERE / f"{name}.txt").write_text("\n".join([f"# {_WHAT[name]}", *made(), ""]))
    fallen = [
        f"{name}: {bound if name.startswith('lines') else now[name]}"
        for name, bound in most.items()
        if now.get(name)
    ]
    (HERE / "budgets.txt").write_text("\n".join([f"# {_WHAT['budgets']}", *fallen, ""]))
    return 0


_WHAT = {
    "api": "The public interface; tests/net/api.py reads it.",
    "errors": f"Messages of bad calls, with torch {torch_of_files()}; tests/net/errors.py makes them.",
    "explanations": f"What explain says, with torch {torch_of_files()}; tests/net/explanations.py asks it.",
    "plans": "Plans of dry runs; tests/net/plans.py says what a line has.",
    "budgets": "Upper bounds that may only fall; tests/net/budgets.py measures them.",
}

if __name__ == "__main__":
    sys.exit(main())
