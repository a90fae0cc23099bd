"""The kinds of an epilogue's operands: what the package knows of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class OperandKind:
    """What an operand is broadcast along.

    Attributes:
        code: its number in csrc/epilogue/operands.h.
        first_slot: of its slots (csrc/link/open.h).
        most: how many slots it has.
        by_row: whether each row of the result has its own.
        by_column: whether each column has.
        letter: in the names of a fused chain's operands.
        accepted: what a caller gives.
    """

    code: int
    first_slot: int
    most: int
    by_row: bool
    by_column: bool
    letter: str
    accepted: str

    def shape(self, lead: Sequence[T], columns: T) -> tuple[T | int, ...]:
        """Its shape beside a result `[*lead, columns]`."""
        if self.by_row:
            return (*lead, columns if self.by_column else 1)
        return (columns,) if self.by_column else ()

    def callers_shape(self, lead: Sequence[T], columns: T) -> tuple[T | int, ...]:
        """The shape that a caller gives: one number for each row comes without a last axis."""
        return tuple(lead) if self.by_row and not self.by_column else self.shape(lead, columns)

    def summed(self, of_elements: Tensor) -> Tensor:
        """The gradient of an operand from those of all elements `[M, N]` that read it."""
        if self.by_row:
            return of_elements if self.by_column else of_elements.sum(1, keepdim=True)
        return of_elements.sum(0) if self.by_column else of_elements.sum()


# Names, which Dynamo compares as constants.
PER_COLUMN, SCALAR, PER_ROW, MATRIX = "per_column", "scalar", "per_row", "matrix"
KINDS = {
    PER_COLUMN: OperandKind(1, 0, 4, False, True, "v", "a tensor [N]"),
    SCALAR: OperandKind(2, 4, 4, False, False, "s", "a number or a 0-dimensional tensor"),
    PER_ROW: OperandKind(3, 8, 2, True, False, "r", "a tensor of x's shape without its last axis"),
    MATRIX: OperandKind(4, 10, 2, True, True, "m", "a tensor of the result's shape"),
}


def too_many(kinds: Sequence[str]) -> tuple[str, int, int] | None:
    """A kind of which there are more than an epilogue can have: its name, how many there are, how many there may be."""
    counts = ((name, kinds.count(name), kind.most) for name, kind in KINDS.items())
    return next((each for each in counts if each[1] > each[2]), None)
