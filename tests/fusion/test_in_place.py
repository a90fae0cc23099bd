"""Augmented assignments: every operator, onto a product, and onto all that may share memory with something else.

Everything that has the same memory is returned: a write that is lost, done twice or done at another time shows.
"""

from __future__ import annotations

import pytest

from tests.fusion import fuzz
from tests.fusion.forwards import WIDTH
from tests.fusion.table import Row
from tests.support.thorough import in_turn, is_thorough

OF_FLOATS = {
    **{f"{sign}=": ("2", "self.vector", "z.sum(0).abs() + 1") for sign in ("+", "-", "*", "/", "//", "%")},
    "**=": ("2", "self.plain + 1"),
    "@=": ("self.square",),
}
OF_INTEGERS = {
    f"{sign}=": ("2", "(self.vector * 4).int()", "z.sum(0).abs() % 5") for sign in ("&", "|", "^", "<<", ">>")
}
# What stands before, what is written, and all that has its memory.
PLACES = {
    "nothing else": ("pass", "h", "h"),
    "alias": ("kept = h", "h", "h, kept"),
    "written alias": ("kept = h", "kept", "h, kept"),
    "view": ("view = h.view(-1)", "h", "h, view"),
    "row": ("row = h[0]", "row", "h, row"),
    "slice": ("rows = h[1:]", "rows", "h, rows"),
    "unpacked": ("a, b = h.chunk(2, 0)", "a", "h, a, b"),  # an error where there are gradients
    "buffer": ("buffer = self.vector", "buffer", "h, buffer, self.vector"),
    "row of a buffer": ("row = self.square[0]", "row", "h, row, self.square"),
    "argument": ("kept = y", "y", "h, y, kept"),
    "row of an argument": ("row = y[0]", "row", "h, y, row"),
    "data of an argument": ("data = y.data", "data", "h, y, data"),
    "before the product": ("kept = z = y", "y", "h, y, kept"),
}


def rows() -> list[Row]:
    """Pairs of a place and an operator, a third of them, each with one of its right sides."""
    made = []
    for p, (before, target, seen) in enumerate(PLACES.values()):
        for o, (sign, operands) in enumerate({**OF_FLOATS, **OF_INTEGERS}.items()):
            is_integer = sign in OF_INTEGERS
            if (is_integer and "h" not in before + target) or not (is_thorough() or p % 3 == o % 3):
                continue
            cast, back = (".int()", ".float()") if is_integer else ("", "")
            write = f"{target} {sign} {operands[(p // 3 + o // 3) % len(operands)]}"
            last = f"torch.relu(self.fc1(h{back})) + torch.relu(self.fc0(y))"
            source = f"z = h = self.fc0(x){cast}; {before}; {write}; last = {last}; return last, {seen}"
            made.append(Row(source, rows=(WIDTH, WIDTH), axes=2, learns="parameters"))
    return made


@pytest.mark.parametrize(
    ("row", "way"), in_turn(rows(), [("eager", False), ("eager", True), ("aot_eager", False)]), ids=str
)
def test_augmented_assignments(row: Row, way: tuple[str, bool]) -> None:
    backend, learns = way
    made = row.program() if learns else row.program(learns=(False,) * 3)
    verdict = fuzz.check(made, backend)
    assert verdict.word != fuzz.DIFFERS, verdict.text
    is_error = learns and "chunk" in row.source
    assert is_error or len(verdict.report.sites) >= 2, verdict.report
