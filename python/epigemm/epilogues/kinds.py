"""The kinds of an epilogue's operands: their annotations, and what the package knows of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    # For type checkers these are the types that a user's function sees, so that they can check its body.
    PerColumn = Tensor
    PerRow = Tensor
    Matrix = Tensor
    Scalar = float
else:

    class PerColumn:
        """Annotation of an operand `[N]`, one number for each column of the result, broadcast along the rows."""

    class PerRow:
        """Annotation of an operand with one number for each row: x's shape less its last axis, seen as `[M, 1]`."""

    class Scalar:
        """Annotation of one number or 0-d tensor. It stays a run-time value: a new one compiles nothing."""

    class Matrix:
        """Annotation of an operand of the result's shape, seen as `[M, N]`.

        It may have 1 in place of the last leading axes, as `[B, 1, N]` beside `[B, L, N]`: a row for each batch.
        """


T = TypeVar("T")


@dataclass(frozen=True)
class OperandKind:
    """What an operand is broadcast along.

    Attributes:
        code: its number in csrc/epilogue/operands.h.
        most: how many of them an epilogue may read, a slot each.
        by_row: whether each row of the result has its own.
        by_column: whether each column has.
        letter: in the names of slots, and of a fused chain's operands.
        accepted: what a caller gives.
    """

    code: int
    most: int
    by_row: bool
    by_column: bool
    letter: str
    accepted: str

    @property
    def lacks_last_axis(self) -> bool:
        """Whether callers pass it without the last axis: one number for each row."""
        return self.by_row and not self.by_column

    @property
    def is_of_columns(self) -> bool:
        """Whether it is a vector along the columns, of which each group of rows has one."""
        return self.by_column and not self.by_row

    def shape(self, lead: Sequence[T], columns: T) -> tuple[T | int, ...]:
        """Its shape beside a result `[*lead, columns]`."""
        if self.by_row:
            return (*lead, columns if self.by_column else 1)
        return (columns,) if self.by_column else ()

    def callers_shape(self, lead: Sequence[T], columns: T) -> tuple[T | int, ...]:
        """The shape that a caller gives."""
        return tuple(lead) if self.lacks_last_axis else self.shape(lead, columns)

    def fits(self, shape: Sequence[Any], lead: Sequence[Any], columns: Any) -> bool:
        """Whether an operand of this shape is one beside a result `[*lead, columns]`."""
        return tuple(shape) == self.shape(lead, columns) or self.shares_rows(shape, lead, columns)

    def shares_rows(self, shape: Sequence[Any], lead: Sequence[Any], columns: Any) -> bool:
        """Whether it is a matrix with 1 in place of the last leading axes: rows of the result read the same row."""
        is_matrix = self.by_row and self.by_column
        if not is_matrix or len(shape) != len(lead) + 1 or shape[-1] != columns:
            return False
        kept = len(lead)
        while kept > 0 and shape[kept - 1] == 1:
            kept -= 1
        return tuple(shape[:kept]) == tuple(lead[:kept]) and tuple(shape) != self.shape(lead, columns)

    def shapes(self, lead: Sequence[T], columns: T) -> list[tuple[T | int, ...]]:
        """The shapes that a caller may give: a matrix may have 1 in place of the last leading axes."""
        found = [self.callers_shape(lead, columns)]
        for kept in range(len(lead) - 1, -1, -1) if self.by_row and self.by_column else ():
            ones: tuple[T | int, ...] = (1,) * (len(lead) - kept)
            shape = (*lead[:kept], *ones, columns)
            if shape != found[-1]:
                found.append(shape)
        return found

    def summed(self, of_elements: Tensor, rows: int) -> Tensor:
        """The gradient of an operand with `rows` rows: the sum of those of the elements `[M, N]` that read it."""
        if not self.by_row:
            return of_elements.sum(0) if self.by_column else of_elements.sum()
        if not self.by_column:
            return of_elements.sum(1, keepdim=True)
        if rows == of_elements.shape[0]:
            return of_elements
        return of_elements.reshape(rows, -1, of_elements.shape[1]).sum(1)


@dataclass(frozen=True)
class Operand:
    """One operand of an epilogue.

    Attributes:
        kind: what it is broadcast along.
        name: the function's.
        default: of a scalar.
        is_optional: whether the function accepts None for it.
        folded: of an epilogue for operands of given types: whether it has the type of the epilogue's arithmetic
            (`registry.compute_dtype`), and not that of x.
        shared: of the same, whether it is a matrix that may have 1 in place of its last leading axes
            (`OperandKind.shares_rows`).
    """

    kind: str
    name: str
    default: float | None = None
    is_optional: bool = False
    folded: bool = False
    shared: bool = False


# Strings, because Dynamo compares them as constants.
PER_COLUMN, SCALAR, PER_ROW, MATRIX = "per_column", "scalar", "per_row", "matrix"
KINDS = {
    PER_COLUMN: OperandKind(1, 4, False, True, "c", "a tensor [N]"),
    SCALAR: OperandKind(2, 4, False, False, "s", "a number or a 0-dimensional tensor"),
    PER_ROW: OperandKind(3, 2, True, False, "r", "a tensor of x's shape without its last axis"),
    MATRIX: OperandKind(
        4, 2, True, True, "m", "a tensor of the result's shape, or [B, 1, N] beside a result [B, L, N]"
    ),
}
ANNOTATIONS: dict[Any, str] = {PerColumn: PER_COLUMN, PerRow: PER_ROW, Scalar: SCALAR, Matrix: MATRIX}

SLOTS = tuple(f"{kind.letter}{number}" for kind in KINDS.values() for number in range(kind.most))
"""Names of the slots of csrc/open/contract.h, in their order."""


def slots_of(kinds: Sequence[str]) -> tuple[int, ...]:
    """The slot of each operand: the operands of a kind have that kind's slots, in order."""
    names = (f"{KINDS[kind].letter}{kinds[:place].count(kind)}" for place, kind in enumerate(kinds))
    return tuple(SLOTS.index(name) for name in names)


def too_many(kinds: Sequence[str]) -> tuple[str, int, int] | None:
    """A kind with too many operands: its name, how many there are, how many there may be; None if there is none."""
    counts = ((name, kinds.count(name), kind.most) for name, kind in KINDS.items())
    return next((each for each in counts if each[1] > each[2]), None)
