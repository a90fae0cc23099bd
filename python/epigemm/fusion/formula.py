"""A chain as a function of the product and its operands, and the epilogue that is made of it.

The nodes of the chain are called once more on the tensors that an epilogue sees: the accumulator `[M, N]`, vectors,
matrices, all in fp32. From there on it is a function of the user's: `custom.traced`.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epigemm import custom
from epigemm.custom import OperandSpec
from epigemm.epilogues import SCALAR
from epigemm.functor_program import Program, Ref
from epigemm.functor_steps import Refusal
from epigemm.user_epilogue import UserEpilogue

_LONGEST_NAME, _LONGEST_TEXT = 40, 160


@dataclass(frozen=True)
class Slot:
    """An argument of a step: a value by its number, 0 the product, then the operands, then the results of the steps."""

    number: int


@dataclass(frozen=True)
class Step:
    """One call of a chain.

    Attributes:
        target: the function, or a method's name.
        args: its arguments, `Slot`s among them.
        kwargs: those by name.
        dtype: of the result, where it is rounded to another type than the product's; else None.
        line: where the model calls it.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    dtype: torch.dtype | None = None
    line: str = ""

    @property
    def name(self) -> str:
        """For people."""
        found = self.target if isinstance(self.target, str) else getattr(self.target, "__name__", "call")
        return found.strip("_")

    @property
    def key(self) -> Any:
        """Equal for steps that compute the same."""
        return self.target, _key(self.args), _key(self.kwargs), self.dtype


@dataclass(frozen=True)
class Formula:
    """The steps of a chain.

    Attributes:
        kinds: of its operands.
        steps: in order; the last one gives the result.
    """

    kinds: tuple[str, ...]
    steps: tuple[Step, ...]

    def __call__(self, acc: Tensor, *operands: Any) -> Tensor:
        """What the chain computes of the product."""
        values: list[Any] = [acc]
        for kind, operand in zip(self.kinds, operands, strict=True):
            # The graph has a tensor there, which functions take that refuse numbers.
            values.append(torch.full_like(acc, operand) if kind == SCALAR else operand)
        for step in self.steps:
            # By name: numbers would be lists of torch.fx's.
            def read(argument: Any) -> Any:
                return values[argument.number] if isinstance(argument, Slot) else argument

            args, kwargs = _map((step.args, dict(step.kwargs)), read)
            result = out_of_place(step.target, args, kwargs)
            if not isinstance(result, Tensor):
                raise Refusal(f"{step.name} gives no tensor")
            if step.dtype is not None and result.dtype != step.dtype:
                raise Refusal(f"{step.name} rounds to the type of another tensor")
            values.append(result)
        found: Tensor = values[-1]
        return found

    @property
    def key(self) -> Any:
        """Equal for formulas that are the same epilogue."""
        return self.kinds, tuple(step.key for step in self.steps)

    @property
    def name(self) -> str:
        """Of the epilogue, an identifier."""
        names = dict.fromkeys(name for step in self.steps if (name := step.name).isidentifier())
        return "_".join(names)[:_LONGEST_NAME].strip("_") or "pointwise"


def _map(value: Any, read: Callable[[Any], Any]) -> Any:
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)(_map(part, read) for part in value)
    if isinstance(value, dict):
        return {key: _map(part, read) for key, part in value.items()}
    return read(value)


def _key(value: Any) -> Any:
    """For a dictionary: numbers by type and text, as 0.0 is -0.0 and 1 is True to one, and NaN is not NaN."""
    if isinstance(value, (tuple, list)):
        return tuple(_key(part) for part in value)
    if isinstance(value, Slot):
        return value
    return type(value), repr(value)


# --- in place, out of place ------------------------------------------------------------------------------------------


def out_of_place(target: Any, args: Any, kwargs: Any) -> Any:
    """A call of a function or method of PyTorch's, of one that writes in place the one that does not."""
    if kwargs.get("inplace") or _has_inplace(target, args):
        bound = inspect.signature(target).bind(*args, **kwargs)
        bound.arguments["inplace"] = False
        args, kwargs = bound.args, bound.kwargs
    if isinstance(target, str):
        name = target[:-1] if target.endswith("_") and not target.endswith("__") else target
        return getattr(args[0], name)(*args[1:], **kwargs)
    name = getattr(target, "__name__", "")
    if getattr(operator, name, None) is target and name.startswith("i") and hasattr(operator, name[1:]):
        return getattr(operator, name[1:])(*args, **kwargs)
    if name.endswith("_") and not name.endswith("__"):
        for place in (torch, torch.nn.functional):
            if getattr(place, name, None) is target and hasattr(place, name[:-1]):
                return getattr(place, name[:-1])(*args, **kwargs)
    return target(*args, **kwargs)


def _has_inplace(target: Any, args: Sequence[Any]) -> bool:
    """Whether `inplace` is given by its place."""
    if not inspect.isfunction(target):
        return False
    parameters = list(inspect.signature(target).parameters)
    return "inplace" in parameters and bool(args[parameters.index("inplace") :][:1] == (True,))


# --- epilogues -------------------------------------------------------------------------------------------------------

_made: dict[Any, UserEpilogue | str] = {}


def epilogue_of(formula: Formula) -> UserEpilogue | str:
    """The epilogue of a formula, or why there is none. Equal formulas have one, in all graphs."""
    found = _made.get(formula.key)
    if found is None:
        found = _made[formula.key] = _make(formula)
    return found


def _make(formula: Formula) -> UserEpilogue | str:
    seen: dict[str, int] = {}
    specs = []
    for kind in formula.kinds:
        seen[kind] = seen.get(kind, 0) + 1
        specs.append(OperandSpec(kind, f"{_SHORT[kind]}{seen[kind]}"))
    line = formula.steps[-1].line or "graph:1"

    # A function of this package's, but torch.fx counts the arguments of what it traces.
    def function(*given: Any) -> Tensor:
        return formula(*given)

    try:
        # Nothing of what surrounds the compiler is an epilogue's: its fake tensors, autocast, no_grad.
        with (
            torch._guards.tracing(None),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
        ):
            return UserEpilogue(custom.traced(function, tuple(specs), formula.name, line))
    except Exception as error:  # whatever the function raises on such tensors
        text = re.sub(r"^\w+ \([^)]*\): ", "", str(error).split("\n")[0])
        return "it is not pointwise" if text.startswith("it fails while it is traced") else text


_SHORT = {"per_column": "v", "per_row": "r", "scalar": "s", "matrix": "m"}
_INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "eq": "==",
    "gt": ">",
    "lt": "<",
    "ge": ">=",
    "le": "<=",
}


def text_of(epilogue: UserEpilogue) -> str:
    """What an epilogue computes, for people: `relu(acc + v1)`."""
    traced = epilogue.traced
    names = {0: "acc"} | {number: spec.name for number, spec in enumerate(traced.operands, 1)}
    text = _value_text(traced.program, traced.program.result, names, outer=True)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


def _value_text(program: Program, value: Any, names: dict[int, str], *, outer: bool = False) -> str:
    if not isinstance(value, Ref):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if value.number not in names:
        step = program.steps[value.number - program.operands - 1]
        inputs = [_value_text(program, part, names) for part in step.inputs]
        if step.op in _INFIX and len(inputs) == 2:
            text = f"({inputs[0]} {_INFIX[step.op]} {inputs[1]})"
        else:
            text = f"{step.op}({', '.join(inputs)})"
            if len(inputs) == 1 and _is_whole(inputs[0]):
                text = f"{step.op}{inputs[0]}"
        names[value.number] = text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT]
    found = names[value.number]
    return found[1:-1] if outer and _is_whole(found) else found


def _is_whole(text: str) -> bool:
    """Whether it is in parentheses, of which the first closes at the end."""
    if not text.startswith("("):
        return False
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return place == len(text) - 1
    return False
