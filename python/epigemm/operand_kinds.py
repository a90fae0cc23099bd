"""The kinds of an epilogue's operands: what the package knows of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class OperandKind(str):
    """What an operand is broadcast along, by its name: programs and caches know it by that alone.

    `code` is its number in csrc/epilogue/operands.h, `slots` its first slot and how many there are (csrc/link/open.h).
    """

    code: int
    slots: tuple[int, int]
    by_row: bool  # whether each row of the result has its own
    by_column: bool
    letter: str  # in the names of fused chains
    accepted: str  # of a caller

    def __new__(
        cls,
        name: str,
        code: int,
        slots: tuple[int, int],
        by_row: bool,
        by_column: bool,
        text: tuple[str, str],
    ) -> OperandKind:
        """One row of the table; `text`: `letter` and `accepted`."""
        kind = super().__new__(cls, name)
        kind.code, kind.slots, kind.by_row, kind.by_column = code, slots, by_row, by_column
        kind.letter, kind.accepted = text
        return kind

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies are the table's own row."""
        return _named, (str(self),)

    def shape(self, lead: Sequence[T], columns: T) -> tuple[T | int, ...]:
        """Its shape beside a result `[*lead, columns]`."""
        if self.by_row:
            return (*lead, columns if self.by_column else 1)
        return (columns,) if self.by_column else ()

    def callers_shape(self, lead: Sequence[T], columns: T) -> tuple[T | int, ...]:
        """The shape that a caller gives: one number for each row comes without a last axis."""
        return self.shape(lead, columns) if self.by_column or not self.by_row else tuple(lead)

    def summed(self, of_elements: Tensor) -> Tensor:
        """The gradient of an operand from those of all elements `[M, N]` that read it."""
        if self.by_row:
            return of_elements if self.by_column else of_elements.sum(1, keepdim=True)
        return of_elements.sum(0) if self.by_column else of_elements.sum()


ACCUMULATOR = OperandKind("accumulator", 0, (0, 0), True, True, ("z", ""))
PER_COLUMN = OperandKind("per_column", 1, (0, 4), False, True, ("v", "a tensor [N]"))
SCALAR = OperandKind("scalar", 2, (4, 4), False, False, ("s", "a number or a 0-dimensional tensor"))
PER_ROW = OperandKind("per_row", 3, (8, 2), True, False, ("r", "a tensor of x's shape without its last axis"))
MATRIX = OperandKind("matrix", 4, (10, 2), True, True, ("m", "a tensor of the result's shape"))


def _named(name: str) -> OperandKind:
    return next(kind for kind in KINDS if kind == name)


KINDS = (ACCUMULATOR, PER_COLUMN, SCALAR, PER_ROW, MATRIX)
