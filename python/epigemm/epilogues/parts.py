"""A function with several results, taken apart into what kernels compute: one matrix each, or two beside a product.

The matrix that all results go through is the product's epilogue, in 16 bits as a rule the product itself. It is stored
in x's dtype. Each other matrix is an elementwise function of it, and each reduction is one of a matrix. `Parts` is the
one list of these that a call, `explain` and `precompile` go through. A GEMM that stores a matrix beside its result
computes two of them at once (`Parts.pair`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from epigemm.epilogues.declaration import Traced, TracedResults
from epigemm.epilogues.tracer import source
from epigemm.epilogues.tracer.program import Program, Ref, Value
from epigemm.epilogues.tracer.results import VAR, Result, narrowed

_LONGEST = 48  # of a function's name within a part's


@dataclass(frozen=True)
class Matrix:
    """One matrix.

    Attributes:
        traced: its epilogue: of the product for the first matrix, of the first matrix for the others; None where it is
            that itself.
        places: of the operands that it reads, among the function's.
        is_wide: whether it is fp32 beside an x of 16 bits.
        source: the number of the matrix that it is a function of: the first one, or that in fp32.
    """

    traced: Traced | None
    places: tuple[int, ...] = ()
    is_wide: bool = False
    source: int = 0


class MatrixPair(NamedTuple):
    """Two matrices that one kernel may compute behind the product, both from the accumulator itself."""

    traced: Traced  # of the result, with the second value beside it
    places: tuple[int, ...]  # of the operands that they read, among the function's
    result: int  # the matrices' numbers
    stored: int


class Reduction(NamedTuple):
    """One reduction of a matrix; of `VAR`, the mean of `var_mean` comes with it."""

    matrix: int  # its number
    kind: str
    axis: int
    correction: float


@dataclass(frozen=True)
class Parts:
    """What a call computes, in this order.

    Attributes:
        matrices: the first is that of the product.
        reductions: what they are reduced to.
        sources: of each result, the number of its matrix, or of its reduction.
        pair: two of the matrices, where these are all that are read and have x's dtype; else None.
    """

    matrices: list[Matrix] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    pair: MatrixPair | None = None


def take_apart(traced: TracedResults, *, is_exact: bool) -> Parts:
    """The parts of a function, for tensors of its arithmetic's type (`is_exact`), or of 16 bits.

    In 16 bits a matrix that is reduced and not stored, and one that is stored in fp32, is computed in fp32 from the
    first one; a reduction of a matrix that is stored reads it as it is stored.
    """
    found = _Apart(traced, is_exact)
    return replace(found.parts, pair=found.pair())


class _Apart:
    def __init__(self, traced: TracedResults, is_exact: bool) -> None:
        self._traced, self._is_exact = traced, is_exact
        self._shared = traced.results.shared(is_exact=is_exact)
        self._numbers: dict[tuple[str, bool], int] = {(repr(Ref(self._shared)), False): 0}
        self.parts = Parts()
        self._values: list[Value] = [Ref(self._shared)]  # of each matrix
        first = traced.results.program(Ref(self._shared))
        self.parts.matrices.append(self._matrix(first, "shared", is_wide=False))
        every = traced.results.results
        of_stored = {
            number: self._number(each.value, number, is_wide=each.is_fp32 and not is_exact)
            for number, each in enumerate(every)
            if each.is_stored
        }
        for number, each in enumerate(every):
            source = of_stored[number] if each.is_stored else self._reduced(each, number)
            self.parts.sources.append(source)

    def pair(self) -> MatrixPair | None:
        """Two functions of the accumulator in x's dtype, of which the first is short, if no other matrix is read."""
        parts, every = self.parts, self._traced.results.results
        read = {
            source if result.is_stored else parts.reductions[source].matrix
            for result, source in zip(every, parts.sources, strict=True)
        }
        while (
            more := {self.parts.matrices[each].source for each in read if parts.matrices[each].is_wide} - read
        ):
            read |= more
        narrow = sorted(each for each in read if not parts.matrices[each].is_wide)
        programs = [self._traced.results.program(self._values[each]) for each in narrow]
        if len(narrow) != 2 or not all(0 in each.reads() for each in programs):
            return None
        # The first matrix is the one that all others are functions of: as a rule the shorter program.
        stored, result = narrow
        (of_stored, of_result), places = narrowed(*programs)
        operands = tuple(self._traced.operands[place] for place in places)
        name = f"{self._traced.name[:_LONGEST]}_and_stored"
        both = Traced(name, operands, of_result, stored=of_stored)
        # A long second value would be inlined for each of a thread's sums (csrc/open/contract.h).
        if source.is_long(of_stored, both.kinds, "apply" if self._is_exact else "apply_bfloat16"):
            return None
        return MatrixPair(both, places, result, stored)

    def _reduced(self, result: Result, number: int) -> int:
        wide, as_it_is = (repr(result.value), True), (repr(result.value), False)
        known = next((self._numbers[key] for key in (wide, as_it_is) if key in self._numbers), None)
        if known is None:
            known = self._number(result.value, number, is_wide=not self._is_exact)
        every = self.parts.reductions
        kind = VAR if result.comes_with_var else result.kind
        made = Reduction(known, kind, result.axis, result.correction)
        if made not in every:
            every.append(made)
        return every.index(made)

    def _number(self, value: Value, result: int, *, is_wide: bool) -> int:
        key = (repr(value), is_wide)  # 0 is -0 to a dictionary, and NaN not NaN
        if key not in self._numbers:
            first = Ref(self._shared)
            source = self._number(first, result, is_wide=True) if is_wide and value != first else 0
            program = self._traced.results.rest(value, self._shared)
            self.parts.matrices.append(self._matrix(program, f"result{result}", source, is_wide=is_wide))
            self._values.append(value)
            self._numbers[key] = len(self.parts.matrices) - 1
        return self._numbers[key]

    def _matrix(self, program: Program, name: str, source: int = 0, *, is_wide: bool) -> Matrix:
        if program.result == Ref(0):
            return Matrix(None, (), is_wide)
        (program,), places = narrowed(program)
        operands = tuple(self._traced.operands[place] for place in places)
        traced = Traced(f"{self._traced.name[:_LONGEST]}_{name}", operands, program)
        return Matrix(traced, places, is_wide, source)
