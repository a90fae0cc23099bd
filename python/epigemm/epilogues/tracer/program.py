"""What a traced epilogue is: a list of steps on scalars, each one primitive of `csrc/epilogue/primitives.h`.

The C++ functor (`source`) and the PyTorch reference (`reference`) are both written from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

REAL = "real"  # a number in the epilogue's arithmetic
BOOL = "bool"
HALF = "half"  # a number in the epilogue's arithmetic, after rounding to fp16: the user cast it
BFLOAT16 = "bfloat16"
FLOAT = "float"  # the same for fp32, with fp64 tensors; in fp32 arithmetic no rounding


def words(text: str) -> tuple[str, ...]:
    """A list of names, written as one text."""
    return tuple(text.split())


@dataclass(frozen=True)
class Ref:
    """A value by its number: 0 is the accumulator, then the operands, then the results of the steps."""

    number: int


Value = Ref | float | bool


@dataclass(frozen=True)
class Step:
    """One primitive."""

    op: str  # its name
    inputs: tuple[Value, ...]  # values by number, numbers and booleans
    kind: str  # of the result; for `HALF`, `BFLOAT16` and `FLOAT` the primitive's result is rounded
    line: str  # `file:line` of the user's code it is from


@dataclass(frozen=True)
class Program:
    """The steps of a function, without those whose results are not used."""

    operands: int  # how many there are beside the accumulator
    steps: tuple[Step, ...]  # in the order of their numbers, from `operands + 1` on
    result: Value  # the value that is returned

    def kind(self, value: Value) -> str:
        """`REAL` or `BOOL`, or one of the rounded kinds."""
        if isinstance(value, bool):
            return BOOL
        if isinstance(value, Ref) and value.number > self.operands:
            return self.steps[value.number - self.operands - 1].kind
        return REAL

    def reads(self) -> frozenset[int]:
        """The numbers of the operands (and 0 for the accumulator) that the result depends on."""
        values = [value for step in self.steps for value in step.inputs] + [self.result]
        return frozenset(v.number for v in values if isinstance(v, Ref) and v.number <= self.operands)

    @property
    def has_derivative(self) -> bool:
        """Whether PyTorch has a derivative of every step; that of one without is an error, which torch raises."""
        return not any(step.op in ("floor_divide", "heaviside") for step in self.steps)

    def with_gradient(self) -> frozenset[int]:
        """The numbers among `reads` whose gradient is not ended by a comparison or by `detach`."""
        return self._reaching(_ends_gradient)

    def typing(self) -> frozenset[int]:
        """The numbers among `reads` whose type the result's is promoted from: no comparison or cast ends it."""
        return self._reaching(lambda step: step.kind != REAL or step.op == "highest")

    def read_by_derivative(self, learning: frozenset[int]) -> frozenset[int]:
        """The numbers among `reads` whose values the derivatives with respect to those of `learning` depend on."""
        reaching, tracked = self._reachings(lambda step: False), self._reachings(_ends_gradient)
        found: frozenset[int] = frozenset()
        live = {self.result}  # what a gradient reaches
        for number, step in reversed([*enumerate(self.steps, self.operands + 1)]):
            if Ref(number) in live and not _ends_gradient(step):
                live.update(step.inputs)
                has_gradient = [
                    isinstance(v, Ref) and bool(tracked[v.number] & learning) for v in step.inputs
                ]
                read = (v for v in _derivative_inputs(step, has_gradient) if isinstance(v, Ref))
                found = found.union(*(reaching[value.number] for value in read))
        return found

    def unread(self, learns: Sequence[bool]) -> frozenset[int]:
        """The operands (and 0 for the accumulator) that no derivative reads; `learns`: which have a gradient."""
        learning = frozenset(number for number, each in enumerate(learns) if each)
        return frozenset(range(len(learns))) - self.read_by_derivative(learning)

    def _reaching(self, is_end: Callable[[Step], bool]) -> frozenset[int]:
        """The numbers among `reads` that the result depends on by other steps than these."""
        found = self._reachings(is_end)
        return found[self.result.number] if isinstance(self.result, Ref) else frozenset()

    def _reachings(self, is_end: Callable[[Step], bool]) -> list[frozenset[int]]:
        """The same for every value."""
        found = [frozenset((number,)) for number in range(self.operands + 1)]
        for step in self.steps:
            inputs = () if is_end(step) else [value.number for value in step.inputs if isinstance(value, Ref)]
            found.append(frozenset().union(*(found[number] for number in inputs)))
        return found

    def bias(self) -> int | None:
        """The number of an operand that is added to the accumulator, if neither of them is read anywhere else."""
        values = [value for step in self.steps for value in step.inputs] + [self.result]
        if values.count(Ref(0)) != 1:
            return None
        step = next((step for step in self.steps if Ref(0) in step.inputs), None)
        if step is None or step.op != "add" or step.kind != REAL:
            return None
        other = step.inputs[1 - step.inputs.index(Ref(0))]
        is_operand = isinstance(other, Ref) and other.number <= self.operands
        return other.number if is_operand and values.count(other) == 1 else None  # type: ignore[union-attr]

    @property
    def is_bias(self) -> bool:
        """Whether it adds its one operand to the accumulator, and does no more."""
        return self.bias() is not None and self.without_bias() == Program(1, (), Ref(0))

    @property
    def is_bias_relu(self) -> bool:
        """Whether it is the ReLU of such a sum."""
        if self.bias() is None:
            return False
        found = self.without_bias()
        relus = tuple(Step("relu", (Ref(0),), REAL, each.line) for each in found.steps)
        return found == Program(1, relus, Ref(2))

    def without_bias(self) -> Program:
        """The same function of an accumulator to which the bias was added."""
        place = self.bias()
        inputs = {Ref(0), Ref(place or 0)}  # of one step alone, a sum

        def change(_: int, step: Step) -> Step | Value:
            return Ref(0) if place is not None and {*step.inputs} == inputs else step

        return rewritten(self, change)


_OF_NO_INPUT = words("add sub neg copy floor ceil round trunc frac sign trunc_div floor_div")


def _ends_gradient(step: Step) -> bool:
    return step.kind == BOOL or step.op in ("detach", "highest")


def _derivative_inputs(step: Step, has_gradient: Sequence[bool]) -> Sequence[Value]:
    """The inputs that the derivative of a step depends on; `has_gradient`: to which of them a gradient flows."""
    if step.op in _OF_NO_INPUT or not any(has_gradient):
        return ()
    if step.op == "where":
        return step.inputs[:1]
    if step.op == "mul":
        return [value for value, is_read in zip(step.inputs, reversed(has_gradient), strict=True) if is_read]
    return step.inputs if step.op != "div" or has_gradient[1] else step.inputs[1:]


def rewritten(
    program: Program,
    change: Callable[[int, Step], Step | Value],
    operands: int | None = None,
    places: Mapping[Value, Value] | None = None,
) -> Program:
    """The program with `change(number, step)`, a step or a value, in place of each step; `step` has the new inputs.

    `operands`: how many there are then, if they are others; `places`: what stands for the former ones.
    """
    operands = program.operands if operands is None else operands
    moved: dict[Value, Value] = dict(places or {})
    steps: list[Step] = []
    for number, step in enumerate(program.steps, program.operands + 1):
        made = change(number, replace(step, inputs=tuple(moved.get(value, value) for value in step.inputs)))
        if isinstance(made, Step):
            steps.append(made)
            made = Ref(operands + len(steps))
        moved[Ref(number)] = made
    return Program(operands, tuple(steps), moved.get(program.result, program.result))


def without_dead_steps(program: Program) -> Program:
    """The same program with only the steps that its result depends on."""
    live = {program.result}
    for number, step in reversed([*enumerate(program.steps, program.operands + 1)]):
        live.update(step.inputs if Ref(number) in live else ())
    return rewritten(program, lambda number, step: step if Ref(number) in live else 0.0)
