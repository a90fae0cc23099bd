"""A chain as a function of the product and its operands, and the epilogue that is made of it.

The function calls the chain's nodes again, with the tensors that an epilogue gets: the accumulator `[M, N]`, vectors,
matrices, all in fp32. It is traced like a user's function: `declaring.traced`.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from epigemm.decorator import UserEpilogue
from epigemm.epilogues import declaration
from epigemm.epilogues.kinds import KINDS, SCALAR, Operand
from epigemm.epilogues.tracer.program import Ref, words
from epigemm.epilogues.tracer.steps import Refusal

_LONGEST_NAME, _LONGEST_TEXT = 40, 160


@dataclass(frozen=True)
class Slot:
    """An argument of a step: 0 is the product, 1.. are the results of the steps, -1.. the operands."""

    number: int


@dataclass(frozen=True)
class ChainStep:
    """One call of a chain.

    Attributes:
        target: the function, or a method's name.
        args: its arguments, `Slot`s among them.
        kwargs: those by name.
        dtype: the result's type if it is rounded to another type than the product's; else None.
        line: where the model calls it.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    dtype: torch.dtype | None = None
    line: str = field(default="", repr=False)

    @property
    def name(self) -> str:
        """For people."""
        found = self.target if isinstance(self.target, str) else getattr(self.target, "__name__", "call")
        return found.strip("_")


@dataclass(frozen=True)
class ChainFormula:
    """The steps of a chain.

    Attributes:
        kinds: of its operands.
        steps: in order; the last one gives the result.
    """

    kinds: tuple[str, ...]
    steps: tuple[ChainStep, ...]

    def __call__(self, acc: Tensor, *operands: Any) -> Tensor:
        """Apply the chain to the product."""
        values: dict[int, Any] = {0: acc}
        for number, (kind, operand) in enumerate(zip(self.kinds, operands, strict=True), 1):
            # The graph has a tensor here, and some functions refuse a number in its place.
            values[-number] = torch.full_like(acc, operand) if kind == SCALAR else operand
        result = acc
        for number, step in enumerate(self.steps, 1):

            def read(argument: Any) -> Any:
                return values[argument.number] if isinstance(argument, Slot) else argument

            args, kwargs = tree_map(read, (step.args, dict(step.kwargs)))
            result = values[number] = out_of_place(step.target, args, kwargs)
            if not isinstance(result, Tensor):
                raise Refusal(f"{step.name} gives no tensor")
            # In an fp64 trace the operands are fp64, too.
            if step.dtype is not None and result.dtype != step.dtype and acc.dtype != torch.float64:
                raise Refusal(f"{step.name} rounds to the type of another tensor")
        return result

    @property
    def key(self) -> Any:
        """Equal for formulas with one epilogue. Numbers are compared as text: 0.0 == -0.0 and NaN != NaN."""
        return tuple(step.target for step in self.steps), repr(self)


@dataclass(frozen=True)
class Composed:
    """A chain's formula, with another one applied to one of its operands, whose operands and steps come first."""

    first: ChainFormula
    place: int  # of that operand
    second: ChainFormula

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of the operands of both."""
        return (*self.second.kinds, *self.first.kinds)

    @property
    def steps(self) -> tuple[ChainStep, ...]:
        """Of both, with their own numbers."""
        return (*self.second.steps, *self.first.steps)

    def __call__(self, acc: Tensor, *operands: Any) -> Tensor:
        """Apply both."""
        others, own = operands[: len(self.second.kinds)], [*operands[len(self.second.kinds) :]]
        own[self.place] = self.second(own[self.place], *others)
        return self.first(acc, *own)

    @property
    def key(self) -> Any:
        """As of its parts."""
        return self.first.key, self.place, self.second.key


def name_of(steps: Sequence[ChainStep]) -> str:
    """An identifier for an epilogue of some steps."""
    names = dict.fromkeys(name for step in steps if (name := step.name).isidentifier())
    return "_".join(names)[:_LONGEST_NAME].strip("_") or "pointwise"


# --- in place, out of place ------------------------------------------------------------------------------------------


def out_of_place(target: Any, args: Any, kwargs: Any) -> Any:
    """A call of a function or method of PyTorch; for one that writes in place, the out-of-place form."""
    if inspect.isfunction(target):
        bound = inspect.signature(target).bind(*args, **kwargs)
        if bound.arguments.get("inplace"):
            bound.arguments["inplace"] = False
            args, kwargs = bound.args, bound.kwargs
    if isinstance(target, str):
        name = target[:-1] if target.endswith("_") and not target.endswith("__") else target
        return getattr(args[0], name)(*args[1:], **kwargs)
    name = getattr(target, "__name__", "")
    of_torch = name.removesuffix("_")
    places = (operator, name.removeprefix("i")), (torch, of_torch), (torch.nn.functional, of_torch)
    for place, plain in places:
        if getattr(place, name, None) is target and hasattr(place, plain):
            return getattr(place, plain)(*args, **kwargs)
    return target(*args, **kwargs)


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """PReLU with a slope for each column, or one; PyTorch's refuses the tensors that stand for one number."""
    return torch.where(input > 0, input, weight * input)


# --- epilogues -------------------------------------------------------------------------------------------------------

_made: dict[Any, UserEpilogue | str] = {}


def epilogue_of(formula: ChainFormula | Composed) -> UserEpilogue | str:
    """The epilogue of a formula, or why there is none. Equal formulas share one epilogue in all graphs."""
    found = _made.get(formula.key)
    if found is None:
        found = _made[formula.key] = _make(formula)
    return found


def _make(formula: ChainFormula | Composed) -> UserEpilogue | str:
    seen: dict[str, int] = {}
    specs = []
    for kind in formula.kinds:
        seen[kind] = seen.get(kind, 0) + 1
        specs.append(Operand(kind, f"{KINDS[kind].letter}{seen[kind]}"))
    line = formula.steps[-1].line or "graph:1"
    try:
        return UserEpilogue(declaration.traced(formula, tuple(specs), name_of(formula.steps), line))
    except Exception as error:  # any error of the function with such tensors
        text = re.sub(r"^\w+ \([^)]*\): ", "", str(error).split("\n")[0])
        return "it is not pointwise" if text.startswith("it fails while it is traced") else text


_INFIX = dict(zip(words("add sub mul div eq gt lt ge le"), words("+ - * / == > < >= <="), strict=True))


def text_of(epilogue: UserEpilogue) -> str:
    """The formula as text: `relu(acc + c1)`."""
    traced = epilogue.traced
    texts = ["acc", *(spec.name for spec in traced.operands)]
    compound: set[int] = set()  # the texts that need parentheses next to an operator

    def text(value: Any, *, beside: bool = False) -> str:
        if not isinstance(value, Ref):
            return f"{value:g}" if isinstance(value, float) else str(value)
        found = texts[value.number]
        return f"({found})" if beside and value.number in compound else found

    for step in traced.program.steps:
        if step.op in _INFIX and len(step.inputs) == 2:
            left, right = (text(part, beside=True) for part in step.inputs)
            compound.add(len(texts))
            made = f"{left} {_INFIX[step.op]} {right}"
        else:
            made = f"{step.op}({', '.join(map(text, step.inputs))})"
        texts.append(made[:_LONGEST_TEXT])
    found = text(traced.program.result)
    return found if len(found) < _LONGEST_TEXT else f"{found}..."
