"""What a traced function returns: its results, each a matrix that is stored or a reduction of one, over shared steps.

Kernels of today compute one matrix. So a function with several results is taken apart here: the step that all of them
go through (`Results.shared`), the program of it, and for each matrix the program of what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from epigemm.epilogues.tracer.program import (
    BOOL,
    REAL,
    Program,
    Ref,
    Step,
    Value,
    rewritten,
    without_dead_steps,
)

T = TypeVar("T")
Structure = int | tuple[Any, ...] | list[Any]
"""How results are returned: the number of one, or a tuple or list of such."""

STORE = "store"
SUM, MEAN, AMAX, AMIN, VAR = "sum", "mean", "amax", "amin", "var"
REDUCTIONS = (SUM, MEAN, AMAX, AMIN, VAR)
ACCEPTED = "sum, mean, amax, amin, var and var_mean of [M, N] along one axis, as results alone"


@dataclass(frozen=True)
class Result:
    """One result of a function.

    Attributes:
        value: what its elements are, or those that are reduced.
        kind: `STORE`, or one of `REDUCTIONS`.
        axis: of a reduction the axis of `[M, N]` that it goes along: 0 for one number a column, 1 for one a row.
        keeps_axis: whether that axis stays, with one element.
        correction: of `VAR`, what is subtracted from the number of elements that it divides by.
        comes_with_var: of `MEAN`, whether it is that of `torch.var_mean`, whose correction it has.
        is_fp32: whether it is fp32 whatever x is; else a matrix has x's dtype, a reduction that of the arithmetic.
    """

    value: Value
    kind: str = STORE
    axis: int = 0
    keeps_axis: bool = False
    correction: float = 0.0
    comes_with_var: bool = False
    is_fp32: bool = False

    @property
    def is_stored(self) -> bool:
        """Whether it is a matrix."""
        return self.kind == STORE

    @property
    def about(self) -> Result:
        """The same without its value: what callers get."""
        return replace(self, value=0.0)

    def shape(self, lead: Sequence[T], columns: T) -> tuple[T | int, ...]:
        """Its shape beside a product `[*lead, columns]`."""
        if self.is_stored:
            return (*lead, columns)
        kept = (1,) if self.keeps_axis else ()
        return (*lead, *kept) if self.axis else (*kept, columns)

    def __str__(self) -> str:
        dtype = "fp32" if self.is_fp32 else "x's dtype" if self.is_stored else "fp32 (fp64 beside fp64)"
        of = "" if self.is_stored else f" of each {'row' if self.axis else 'column'}"
        shape = ", ".join(map(str, self.shape(("...",), "N")))
        return f"{'a matrix' if self.is_stored else self.kind}{of}, [{shape}], {dtype}"


@dataclass(frozen=True)
class Results:
    """A function's steps, and what it returns."""

    operands: int  # how many there are beside the accumulator
    steps: tuple[Step, ...]
    results: tuple[Result, ...]
    structure: Structure  # by their numbers, of which one stands twice if one tensor is returned twice

    @property
    def is_one_matrix(self) -> bool:
        """Whether the function returns one matrix, and no tuple of it."""
        return self.structure == 0 and self.results[0].is_stored

    def program(self, value: Value) -> Program:
        """The steps of one value."""
        return without_dead_steps(Program(self.operands, self.steps, value))

    def shared(self, *, is_exact: bool) -> int:
        """The number of the last value that all results go through; 0, the accumulator, where there is no other.

        It is stored in x's dtype, and the results read it from there. In 16 bits, where that rounds (not `is_exact`),
        it is the product, or a matrix that is a result itself and whose rounded numbers all others are made of.
        """
        every = self._passed()
        of_it = [each for each in self.results if isinstance(each.value, Ref) and every[each.value.number]]
        passed = [every[each.value.number] for each in of_it]  # type: ignore[union-attr]
        common = frozenset[int]().union(*passed).intersection(*passed) if passed else frozenset((0,))
        if is_exact:
            whole = Program(self.operands, self.steps, 0.0)
            return max(number for number in common if whole.kind(Ref(number)) != BOOL)
        is_one = len({each.value for each in of_it}) == 1 and not any(each.is_fp32 for each in of_it)
        is_stored = any(each.is_stored for each in of_it)
        return of_it[0].value.number if is_one and is_stored else 0  # type: ignore[union-attr]

    def rest(self, value: Value, shared: int) -> Program:
        """The steps from a shared value, in the accumulator's place, to another one."""
        whole = Program(self.operands, self.steps, value)
        program = rewritten(whole, lambda number, step: Ref(0) if number == shared else step)
        return without_dead_steps(program)

    def _passed(self) -> list[frozenset[int]]:
        """Of each value those that every way from the accumulator to it goes through; none where there is no way."""
        found = [frozenset((0,)), *[frozenset[int]()] * self.operands]
        for number, step in enumerate(self.steps, self.operands + 1):
            inputs = [found[each.number] for each in step.inputs if isinstance(each, Ref)]
            ways = [each for each in inputs if each]
            found.append(frozenset((number,)).union(ways[0].intersection(*ways)) if ways else frozenset())
        return found

    def bias(self) -> int | None:
        """The number of an operand that is added to the accumulator, if no result reads either anywhere else."""
        read = Step("results", tuple(each.value for each in self.results), REAL, "")
        last = Ref(self.operands + len(self.steps) + 1)
        return without_dead_steps(Program(self.operands, (*self.steps, read), last)).bias()


def narrowed(*programs: Program) -> tuple[list[Program], tuple[int, ...]]:
    """Programs of the operands alone that some of them reads, and the places of these."""
    read = sorted(frozenset[int]().union(*(each.reads() for each in programs)) - {0})
    moved: dict[Value, Value] = {Ref(number): Ref(place) for place, number in enumerate(read, 1)}
    narrow = [rewritten(each, lambda _, step: step, len(read), moved) for each in programs]
    return narrow, tuple(number - 1 for number in read)


def structured(returned: object) -> tuple[list[Any], Structure]:
    """What a function returns: each part of a tuple or list, of such too, once, and how it is returned."""
    leaves: list[Any] = []

    def structure_of(part: Any) -> Structure:
        if type(part) not in (tuple, list) or not part:
            known = (number for number, each in enumerate(leaves) if each is part)
            number = next(known, len(leaves))
            leaves[number:] = leaves[number:] or [part]
            return number
        made = [structure_of(each) for each in part]
        return made if isinstance(part, list) else tuple(made)

    structure = structure_of(returned)
    return leaves, structure


def described(returned: Any) -> str:
    """The types of what a function returns."""
    if type(returned) not in (tuple, list):
        name = f"{type(returned).__module__}.{type(returned).__name__}".removeprefix("builtins.")
        return "Tensor" if isinstance(returned, Tensor) else name
    return f"a {type(returned).__name__} of {', '.join(map(described, returned)) or 'nothing'}"


def filled(structure: Structure, values: Sequence[T]) -> Any:
    """The results as the function returns them."""
    if isinstance(structure, int):
        return values[structure]
    made = [filled(each, values) for each in structure]
    return made if isinstance(structure, list) else tuple(made)


def written(structure: Structure, names: Sequence[str]) -> str:
    """The same of names, as text."""
    if isinstance(structure, int):
        return names[structure]
    parts = ", ".join(written(each, names) for each in structure)
    if isinstance(structure, list):
        return f"[{parts}]"
    return f"({parts}{',' * (len(structure) == 1)})"
