"""Budgets: what a call runs through on the host, how many lines there are, and names that are not to spread.

A budget of `budgets.txt` is a name and a number that may only fall. `python -m tests.net.budgets` prints all, with what
there is now.
"""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import epigemm
from epigemm import PerColumn, Scalar
from epigemm.calls import by_reference, eight_bits
from epigemm.epilogues import registry

ROOT = Path(__file__).parents[2]
PACKAGE = Path(epigemm.__file__).parent


def measured() -> dict[str, int]:
    """Every budget's present figure."""
    return {**_lines(), **_names(), **_calls()}


FOLDERS = {"package": "python/epigemm", "csrc": "csrc", "tests": "tests", "benchmarks": "benchmarks"}
_CODE = (".py", ".h", ".cpp", ".cu", ".cuh", ".def", ".in")
_DATA = (
    ".json",
    ".txt",
    ".csv",
    ".toml",
    ".yaml",
    ".yml",
    ".inc",
    ".inl",
    ".hpp",
    ".cc",
    ".ptx",
    ".pyi",
    ".dat",
)
_LEFT_OUT = ("python/epigemm/include/", "tests/net/", "tests/ops/", "benchmarks/results/")
"""Copies of a build, this net, and records."""
_WIDTH = 120
_MOST_ESCAPED = 3  # line breaks within a string that are no lines of the file


def lines_of(text: str, *, is_python: bool) -> int:
    """The lines of a file. A longer one than `_WIDTH` columns, or a string with line breaks in it, is several."""
    count = sum(max(1, -(-len(line) // _WIDTH)) for line in text.splitlines())
    return count + (sum(_escaped(ast.parse(text))) if is_python else 0)


def _escaped(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            hidden = node.value.count("\n") - ((node.end_lineno or 0) - node.lineno)
            yield hidden if hidden > _MOST_ESCAPED else 0


def _lines() -> dict[str, int]:
    """Of code, and of data beside it, which would hide code."""
    found = {f"{kind} of {room}": 0 for kind in ("lines", "data") for room in FOLDERS}
    for room, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.*"):
            name = str(path.relative_to(ROOT))
            if path.suffix in (*_CODE, *_DATA) and not name.startswith(_LEFT_OUT):
                kind = "lines" if path.suffix in _CODE else "data"
                found[f"{kind} of {room}"] += lines_of(path.read_text(), is_python=path.suffix == ".py")
    return found


_NOUNS = ("timing",)
_IRREGULAR = (
    "kept",
    "made",
    "taken",
    "seen",
    "given",
    "shown",
    "written",
    "found",
    "bound",
    "left",
    "shared",
)
_NO_NOUNS = ("beside", "four", "short", "deeds")
_MOST_MODULES = 4


def is_participle(module: str) -> bool:
    """Whether a module is named after a participle, or by another word that nobody would search for."""
    words = [word for word in module.split("_") if word not in _NOUNS]
    return any(re.search("(ed|ing)$", word) or word in (*_IRREGULAR, *_NO_NOUNS) for word in words)


def _names() -> dict[str, int]:
    """Such modules and folders, and functions whose name more than `_MOST_MODULES` modules give to one of theirs."""
    files = [path for path in PACKAGE.rglob("*.py") if "include" not in path.parts]
    names = {part for path in files for part in path.relative_to(PACKAGE).with_suffix("").parts}
    defined: Counter[str] = Counter()
    for path in files:
        body = ast.parse(path.read_text()).body
        defined.update({each.name for each in body if isinstance(each, ast.FunctionDef)})
    return {
        **{f"module named {name}": 1 for name in sorted(names) if is_participle(name)},
        **{
            f"modules with {name}()": defined[name]
            for name in sorted(defined)
            if defined[name] > _MOST_MODULES
        },
    }


@epigemm.epilogue
def user(acc: Tensor, bias: PerColumn, s: Scalar = 2.0) -> Tensor:
    """Of one result."""
    return torch.tanh(acc + bias) * s


@epigemm.epilogue
def results(acc: Tensor, bias: PerColumn) -> tuple[Tensor, Tensor]:
    """Of two."""
    z = acc + bias
    return torch.relu(z), z * 2.0


def _calls() -> dict[str, int]:
    """Own functions that a call runs, their files, and how often a function of another file is next."""
    found: dict[str, int] = {}
    for name, call in _examples().items():
        call(), call()
        files = [str(path) for path in _frames(call)]
        moves = sum(one != other for one, other in zip(["", *files], files, strict=False))
        found |= {
            f"frames of {name}": len(files),
            f"files of {name}": len(set(files)),
            f"moves of {name}": moves,
        }
    return found


_KERNELS = {
    each.__code__
    for each in (
        by_reference.linear_by_reference,
        by_reference.of_call,
        eight_bits.of_call,
        by_reference.elementwise_by_reference,
        registry.fold_batch_norm_reference,
    )
}
"""PyTorch's operators, which take the place of kernels on a CPU: what runs in these functions is not counted."""


def _is_in_kernel(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code not in _KERNELS:
        frame = frame.f_back
    return frame is not None


def _frames(call: Callable[[], object]) -> list[Path]:
    """The files of the package's functions that run within a call, in the order of their calls."""
    found: list[Path] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE) and not _is_in_kernel(frame):
            found.append(path)

    before = sys.getprofile()
    gc.disable()  # what it finalises would be counted
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
        gc.enable()
    return found


def _examples() -> dict[str, Callable[[], object]]:
    x, weight, row, matrix = torch.ones(16, 64), torch.ones(32, 64), torch.ones(32), torch.ones(16, 32)
    learnt = weight.clone().requires_grad_()
    plain: Any = torch.no_grad()
    layer, gated = epigemm.nn.LinearReLU(64, 32), epigemm.nn.LinearGLU(64, 32)
    norm = epigemm.nn.LinearScaleBatchNorm1d(64, 32)
    fused = epigemm.fuse(nn.Sequential(nn.Linear(64, 32), nn.GELU()), options={"backend": "eager"})

    def under_autocast() -> None:
        with torch.autocast("cpu"):
            epigemm.linear_relu(x, weight, row)

    return {
        "linear_relu": lambda: epigemm.linear_relu(x, weight, row),
        "nn.LinearReLU": plain(lambda: layer(x)),
        "linear_residual": lambda: epigemm.linear_residual(x, weight, row, matrix),
        "linear_gated": lambda: epigemm.linear_gated(x, weight, row, matrix),
        "a user's epilogue": lambda: user(x, weight, row),
        "linear_relu under autocast": under_autocast,
        "nn.LinearGLU": plain(lambda: gated(x)),
        "linear_gelu, recorded": lambda: epigemm.linear_gelu(x, learnt, row),
        "BatchNorm in training, recorded": lambda: norm(x),
        "an epilogue of two results": lambda: results(x, weight, row),
        "a user's epilogue, recorded": lambda: user(x, learnt, row),
        "explain of linear_relu": lambda: epigemm.explain("linear_relu", x, weight, row),
        "explain of a fused model": plain(lambda: epigemm.explain(fused, x)),
    }


if __name__ == "__main__":
    for name, figure in measured().items():
        print(f"{name}: {figure}")
