"""The rooms of the package: imports go down only, and none goes in a circle."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import epigemm

PACKAGE = Path(__file__).parents[1] / "python" / "epigemm"
# From the ground up: a room imports from itself and from those before it. A name without a folder is a file.
ROOMS = (
    *("_native", "compilers", "docstrings", "progress"),
    *("epilogues", "arguments", "planner", "linker", "packs", "calls", "autograd", "operators"),
    *("route", "batch_statistics", "decoration", "results_epilogue", "decorator"),
    *("elementwise", "folds", "functional", "glu", "groups", "precompilation"),
    *("nn", "integrations", "explain", "tuner", "fusion", "explanations", "__init__", "__main__"),
)
MODULES = {
    ".".join(("epigemm", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): file
    for file in sorted(PACKAGE.rglob("*.py"))
}


def imported(text: str) -> Iterator[str]:
    """The package's modules that a source imports, also within functions and for type checkers."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "epigemm")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "epigemm":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else str(node.module)


def room_of(module: str) -> str:
    """The room of a module: its folder's name, or the file's."""
    return module.split(".")[1] if "." in module else "__init__"


def climbs(module: str, text: str) -> list[str]:
    """What a module imports from rooms above its own."""
    place = ROOMS.index(room_of(module))
    return [each for each in imported(text) if ROOMS.index(room_of(each)) > place and each != "epigemm"]


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, if there are some."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_every_room_is_in_the_list() -> None:
    assert {room_of(module) for module in MODULES} == set(ROOMS)


def test_imports_go_down() -> None:
    assert not {module: up for module, file in MODULES.items() if (up := climbs(module, file.read_text()))}


def test_imports_go_in_no_circle() -> None:
    imports = {module: set(imported(file.read_text())) for module, file in MODULES.items()}
    # `from epigemm import name` of a public name: the package's own file imports everything.
    below = {module: each - {"epigemm", module} for module, each in imports.items() if module != "epigemm"}
    assert not circle(below)
    low, high = "epigemm.epilogues.registry", "epigemm.decorator"
    assert {low, high} <= set(circle({**below, low: {*below[low], high}})), "a planted one is found"


@pytest.mark.parametrize("room", [room for room in ROOMS if (PACKAGE / room).is_dir()])
def test_a_room_says_what_it_is_for(room: str) -> None:
    text = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())) or ""
    assert "Imports: " in text
    assert "Taken by " in text


TESTS = Path(__file__).parent
TABLES = {
    **dict.fromkeys(
        ("arguments", "autograd", "batch_statistics", "calls", "elementwise", "folds", "nn", "operators"),
        "ops/table.py",
    ),
    "fusion": "fusion/table.py",
    "packs": "packs/test_packs.py",
    "epigemm.epilogues.tracer.reference": "csrc/test_primitives.py",
    "epigemm.planner.plans": "net/plans.txt",
}
"""Rooms, and modules, that show in what a public call does: where their tests are lines of."""


def has_tests(module: str) -> bool:
    file = MODULES[module].relative_to(PACKAGE)
    name, folder = file.stem.strip("_"), TESTS / file.parent
    if module == "epigemm.functional":
        folder, name = TESTS / "ops", "values"
    return (folder / f"test_{name}.py").is_file() or any(folder.glob(f"test_{name}_*.py"))


def test_tests_mirror_the_rooms() -> None:
    """Those of a module are `test_MODULE.py`, or `test_MODULE_*.py`, in the folder of the same name, or a table's.

    Those of the public functions are the properties in `ops`.
    """
    modules = [name for name, file in MODULES.items() if file.name != "__init__.py"]
    assert [name for name in modules if not has_tests(name) and not {name, room_of(name)} & {*TABLES}] == []
    assert all((TESTS / table).is_file() for table in TABLES.values())


GROUND = {"_native", "compilers", "docstrings", "progress"}
EXACT = ("epilogues", "linker", "packs", "autograd", "operators", "nn", "fusion")


def names_in(text: str) -> set[str]:
    """What stands between backquotes."""
    return set(re.findall(r"`(\w+)`", text))


@functools.cache
def imports_of_rooms() -> set[tuple[str, str]]:
    return {(room_of(m), room_of(each)) for m, file in MODULES.items() for each in imported(file.read_text())}


@pytest.mark.parametrize("room", EXACT)
def test_what_a_room_says_of_its_imports_is_true(room: str) -> None:
    text = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())) or ""
    _, says, rest = text.partition("Imports: ")
    imports, says_who, takers = rest.partition("Taken")
    assert says and says_who
    pairs = imports_of_rooms()
    assert {to for by, to in pairs if by == room} - {room} - GROUND == names_in(imports) - GROUND
    taken_by = {by for by, to in pairs if to == room} - {room, "__init__"}
    assert "everybody" in takers or taken_by <= names_in(takers)


def test_public_names_alone_are_listed() -> None:
    assert dir(epigemm) == sorted(epigemm.__all__)
    assert all(hasattr(epigemm, name) for name in epigemm.__all__)
