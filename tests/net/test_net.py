"""What may not change unseen: see the package's docstring, and docs/contributing.md for how to change it on purpose."""

from __future__ import annotations

import difflib
from collections.abc import Callable

import pytest

from tests.net import api, budgets, errors, explanations, plans, update

of_this_torch = pytest.mark.skipif(
    f"torch {update.torch_of_files()};" not in (update.HERE / "errors.txt").read_text().partition("\n")[0],
    reason="messages and calls are those with another version of torch",
)


def differences(name: str, made: Callable[[], list[str]]) -> list[str]:
    """Lines of a file that have changed, for a reader."""
    return list(difflib.unified_diff(errors.written(name), made(), name, "now", n=0, lineterm=""))


def test_the_public_interface() -> None:
    assert not api.missing(errors.written("api"), api.lines(), errors.written("removals"))
    assert not differences("api", api.lines)


@of_this_torch
@pytest.mark.usefixtures("fresh_compiler")
def test_messages_of_errors() -> None:
    assert not differences("errors", errors.lines)


def test_every_bad_call_raises_an_error() -> None:
    """A message that is empty would stand first."""
    assert "" not in (update.HERE / "errors.txt").read_text().splitlines()


@of_this_torch
@pytest.mark.usefixtures("fresh_compiler")
def test_explanations() -> None:
    assert not differences("explanations", explanations.lines)


def test_plans() -> None:
    assert not differences("plans", plans.lines)


@of_this_torch
def test_budgets() -> None:
    assert not update.exceeded(budgets.measured(), update.kept_budgets())


def test_a_name_goes_only_if_it_is_listed() -> None:
    before = [
        "epigemm.a(x: Tensor, *, gpu: Sequence[int] = (1, 2)) -> Tensor",
        "epigemm.B()",
        "epigemm.B.c: attribute",
    ]
    now = ["epigemm.a(x: Tensor) -> Tensor"]
    assert api.missing(before, now, []) == ["epigemm.B", "epigemm.B.c", "epigemm.a(gpu=)"]
    assert api.missing(before, now, ["epigemm.B"]) == ["epigemm.a(gpu=)"]
    assert api.missing(before, now, ["epigemm.B", "epigemm.a(gpu=)"]) == []
    assert api.missing(before, now, ["epigemm.a"]) == ["epigemm.B", "epigemm.B.c"]
    assert api.missing(["environ EPIGEMM_A"], ["environ EPIGEMM_B"], []) == ["environ EPIGEMM_A"]


def test_what_is_not_in_the_budgets_may_not_be() -> None:
    most = {"frames of a": 3, "files of a": 1}
    assert update.exceeded({"frames of a": 3, "module named made": 1}, most) == [
        "module named made: 1, at most 0"
    ]
    assert update.exceeded({"frames of a": 4}, most) == ["frames of a: 4, at most 3"]


def test_lines_are_not_hidden() -> None:
    assert budgets.lines_of("a = 1\n\nb = 2\n", is_python=True) == 3
    assert budgets.lines_of("x" * 300, is_python=False) == 3
    assert budgets.lines_of("code = 'a\\nb\\nc\\nd\\ne\\n'", is_python=True) == 1 + 5
    assert budgets.lines_of("text = '''a\nb\nc\nd\ne\nf\n'''", is_python=True) == 7
    assert budgets.lines_of("text = ' '.join('a\\nb')", is_python=True) == 1


@pytest.mark.parametrize(
    ("name", "found"),
    [("considered", True), ("kept_pack", True), ("four", True), ("timing", False), ("plan_cache", False)],
)
def test_participles(name: str, found: bool) -> None:
    assert budgets.is_participle(name) is found


def test_a_frame_of_another_file_is_counted() -> None:
    found = budgets._frames(budgets._examples()["linear_relu"])
    assert [path.name for path in found][:2] == ["functional.py", "route.py"]
