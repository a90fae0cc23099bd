"""Epilogues from Python functions: reads a function's declaration, and has it traced.

    def swish_clamp(acc, bias: PerColumn, residual: Matrix, limit: Scalar = 6.0):
        z = acc + bias
        return torch.clamp(z * torch.sigmoid(z), -limit, limit) + residual

    traced = trace(swish_clamp)

The first argument is the accumulator, an fp32 tensor `[M, N]` whatever the type of x (fp64 beside fp64). Numbers that
the function reads from outside, as globals or from a closure, are constants of the epilogue, as they are at decoration.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, overload

from torch import Tensor, fx

from epigemm.epilogues import constants, formulas, hints
from epigemm.epilogues.kinds import ANNOTATIONS, MATRIX, PER_COLUMN, PER_ROW, SCALAR, slots_of, too_many
from epigemm.epilogues.tracer import cost, reference, source
from epigemm.epilogues.tracer.program import Program, words
from epigemm.epilogues.tracer.results import Results, filled
from epigemm.epilogues.tracer.stores import STORED

_ACCEPTED = ", ".join(kind.__name__ for kind in ANNOTATIONS)
_KEYWORDS = words("out precision strict")  # of the calls
_LONGEST_NAME = 64
_MOST_OPTIONAL = 3  # each doubles the number of traces


@dataclass(frozen=True)
class OperandSpec:
    """One operand of a function; `default`: of a scalar."""

    kind: str
    name: str
    default: float | None = None
    is_optional: bool = False  # whether the function accepts None for it


@dataclass(frozen=True, eq=False)
class Declared:
    """What a function has declared."""

    name: str  # the function's
    operands: tuple[OperandSpec, ...]  # in the function's order

    @property
    def kinds(self) -> tuple[str, ...]:
        """The operands' kinds."""
        return tuple(operand.kind for operand in self.operands)


_keys = itertools.count()
TRACED: weakref.WeakValueDictionary[str, Traced] = weakref.WeakValueDictionary()
"""By their keys, which stand for them where Dynamo traces."""


@dataclass(frozen=True, eq=False)
class Traced(Declared):
    """An epilogue made of a Python function."""

    program: Program = field(repr=False)  # its steps
    # the reference as a module: `graph(acc, *operands)`, scalars as 0-d tensors
    graph: fx.GraphModule = field(repr=False)
    source: str = field(repr=False)  # the functor in C++
    digest: str  # of the source and the operands' kinds, the same in every process
    is_own: bool = False  # whether it is the library's (`epigemm.epilogues.library`)
    stored: Program | None = field(default=None, repr=False)  # of a second value, stored beside the result
    # by the numbers of the operands that are None: what the function is of the others
    without: Mapping[tuple[int, ...], Traced] = field(default_factory=dict, repr=False)
    # the epilogues that were made of it, by their operands' types (`registry.typed`)
    forms: dict[tuple[bool, ...], Any] = field(default_factory=dict, repr=False)

    is_choice: bool = field(init=False, default=True, repr=False)  # as of `Epilogue`
    # What follows from these; attributes, for calls ask.
    has_scalar: bool = field(init=False, repr=False)
    key: str = field(init=False, repr=False)  # not a number, because Dynamo makes a symbol of the second one
    slots: tuple[int, ...] = field(
        init=False, repr=False
    )  # in which open kernels read each operand: `kinds.SLOTS`
    reads: tuple[bool, ...] = field(
        init=False, repr=False
    )  # for each operand, whether the result depends on it
    bias_place: int = field(init=False, repr=False)  # as of `Epilogue`
    are_scalars: tuple[bool, ...] = field(init=False, repr=False)  # for each operand
    matrices: tuple[int, ...] = field(init=False, repr=False)  # their places among the operands
    has_rows: bool = field(init=False, repr=False)  # whether it reads a number for each row
    # whether the package has its kernels: it adds a bias, or is the ReLU of that, which PyTorch's GEMM may add, too
    is_compiled: bool = field(init=False, repr=False)
    # where a gradient ends inside the function: numbers of operands, and 0 for the accumulator; PyTorch records none
    ends: tuple[int, ...] = field(init=False, repr=False)
    # the places among the operands whose type the result's is promoted from; the bias has the product's
    typing: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        kinds, program = self.kinds, self.program
        read, bias = program.reads(), program.bias() or 0
        with_gradient = program.with_gradient()
        is_bias = bias > 0 and kinds[bias - 1] == PER_COLUMN
        excepted = {0, bias} if is_bias else {0}
        for name, value in {
            "key": str(next(_keys)),
            "slots": slots_of(kinds),
            "reads": tuple(number in read for number in range(1, len(kinds) + 1)),
            "bias_place": bias if is_bias else 0,
            "has_scalar": SCALAR in kinds,
            "are_scalars": tuple(kind == SCALAR for kind in kinds),
            "matrices": tuple(place for place, kind in enumerate(kinds) if kind == MATRIX),
            "has_rows": PER_ROW in kinds,
            "is_compiled": is_bias and self.stored is None and (program.is_bias or program.is_bias_relu),
            "ends": tuple(number for number in range(1 + len(kinds)) if number not in with_gradient),
            "typing": tuple(number - 1 for number in program.typing() - excepted),
        }.items():
            object.__setattr__(self, name, value)
        TRACED[self.key] = self

    @functools.cached_property
    def behind_bias(self) -> fx.GraphModule:
        """`graph` without the bias, which the accumulator has or which is absent; its argument is not read."""
        return reference.reference_module(self.program.without_bias())

    def reference(self, acc: Tensor, *operands: Tensor | float) -> Tensor:
        """The epilogue in plain PyTorch: differentiable any number of times, and traceable.

        Raises:
            TypeError: for another number of operands.
        """
        if len(operands) != len(self.operands):
            raise TypeError(f"{self.name}: got {len(operands)} operands; accepted are {len(self.operands)}")
        given = [
            operand if isinstance(operand, Tensor) else reference.constant(acc, operand)
            for operand in operands
        ]
        return self.graph.forward(acc, *given)  # type: ignore[no-any-return]

    def kernel_source(
        self,
        elements: Sequence[int],
        parts: Sequence[str] = ("operand", "apply"),
        shared: Sequence[int] = (),
        own: tuple[str, str] | None = None,
    ) -> str:
        """The text for NVRTC, which needs no include path: headers, functor, and what open kernels call.

        `own`: the name of a functor's header in csrc/epilogue and of its struct, in place of that of the program.
        """
        long = {part for part in parts if cost.is_long(self.program, self.kinds, part)}
        functions = source.kernel_functions(
            self.program, self.kinds, elements, parts, long, self.stored, shared
        )
        if own is None:
            return f"{source.prelude()}\n{self.source}\n{functions}"
        header, functor = own
        return f"{source.prelude(f'epilogue/{header}.h')}\n{source.named_functor(functor)}\n{functions}"


@dataclass(frozen=True, eq=False)
class TracedResults(Declared):
    """A Python function that returns more than one matrix, or a reduction: as a whole, before it is taken apart."""

    results: Results = field(repr=False)  # its steps, and what it returns
    without: Mapping[tuple[int, ...], TracedResults] = field(
        default_factory=dict, repr=False
    )  # as of `Traced`


@overload
def trace(function: Callable[..., Tensor]) -> Traced: ...


@overload
def trace(function: Callable[..., Any]) -> Traced | TracedResults: ...


def trace(function: Callable[..., Any]) -> Traced | TracedResults:
    """Makes an epilogue of a Python function.

    Raises:
        TypeError: for a signature, a captured value or a result that no epilogue has.
        ValueError: for too many operands of a kind.
        NotImplementedError: for what is not pointwise, reads a value, a shape, a device or a state, writes in place,
            draws random numbers, has a derivative of its own or takes a captured tensor. The message names the line.
    """
    if not isinstance(function, FunctionType):
        raise TypeError(f"epilogue: got {type(function).__name__}; accepted is a Python function")
    start = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
    # The name is part of the names of kernels, and of a line of explanations.
    name = function.__name__[:_LONGEST_NAME] if function.__name__.isidentifier() else "epilogue"
    operands = _operands(function, f"{name} ({start})")
    constants.check(function)
    optional = [number for number, operand in enumerate(operands) if operand.is_optional]
    of_all = _trace(function, operands, name, start)
    without: Any = {
        absent: _trace(*_without(function, operands, absent), name, start)
        for count in range(1, len(optional) + 1)
        for absent in itertools.combinations(optional, count)
    }
    for absent, each in without.items():
        if _returns(each) != _returns(of_all):
            names = ", ".join(operands[number].name for number in absent)
            raise TypeError(
                f"{name} ({start}): without {names} it returns other results than with all operands"
            )
    return replace(of_all, without=without)


def _without(
    function: Callable[..., Any], operands: tuple[OperandSpec, ...], absent: tuple[int, ...]
) -> tuple[Callable[..., Any], tuple[OperandSpec, ...]]:
    """The function of the remaining operands, and these operands."""

    def of_the_others(acc: Tensor, *given: Tensor | float) -> Any:
        values = iter(given)
        return function(acc, *(None if number in absent else next(values) for number in range(len(operands))))

    return of_the_others, tuple(each for number, each in enumerate(operands) if number not in absent)


def _trace(
    function: Callable[..., Any],  # takes the accumulator and the operands
    operands: tuple[OperandSpec, ...],  # its operands
    name: str,  # an identifier
    start: str,  # `file:line` of where it begins, for messages
) -> Traced | TracedResults:
    """`trace`, for a function whose operands are known, and whose captured values are checked."""
    from epigemm.epilogues.tracer import trace

    found = trace.trace_results(function, [operand.kind for operand in operands], name, start)
    if found.is_one_matrix:
        return made(name, operands, found.program(found.results[0].value))
    return TracedResults(name, operands, found.merged())


def _returns(found: Traced | TracedResults) -> object:
    """What a caller gets."""
    if isinstance(found, Traced):
        return None
    return filled(found.results.structure, [each.about for each in found.results.results])


def traced(
    function: Callable[..., Tensor], operands: tuple[OperandSpec, ...], name: str, start: str
) -> Traced:
    """`trace` of a function that returns one matrix and has captured nothing, with its operands."""
    found = _trace(function, operands, name, start)
    assert isinstance(found, Traced)
    return found


def made(
    name: str,
    operands: tuple[OperandSpec, ...],
    program: Program,
    *,
    is_own: bool = False,
    stored: Program | None = None,
) -> Traced:
    """The epilogue of a program; `stored`: that of a second value for each element."""
    kinds = tuple(operand.kind for operand in operands)
    text = source.functor_text(program, kinds)
    if stored is not None:
        text += source.functor_text(stored, kinds, STORED)
    graph = reference.reference_module(program)
    about = formulas.digest(text, kinds)
    return Traced(name, operands, program, graph, text, about, is_own, stored)


def _operands(function: FunctionType, place: str) -> tuple[OperandSpec, ...]:
    parameters = list(inspect.signature(function).parameters.values())
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(
                f"{place}: *{parameter.name} is not supported; declare each operand as {_ACCEPTED}"
            )
        if parameter.kind == parameter.KEYWORD_ONLY:
            raise TypeError(f"{place}: {parameter.name!r} is keyword-only; operands are positional")
    if not parameters:
        raise TypeError(f"{place}: it takes no argument; the first is the accumulator")
    if _annotation(function, parameters[0], place, "Tensor or none") not in (inspect.Parameter.empty, Tensor):
        raise TypeError(
            f"{place}: {parameters[0].name!r} is the accumulator, which has no annotation (or Tensor); got "
            f"{parameters[0].annotation!r}"
        )
    if parameters[0].default is not inspect.Parameter.empty:
        raise TypeError(f"{place}: {parameters[0].name!r} is the accumulator, which has no default")
    operands = tuple(_operand(function, parameter, place) for parameter in parameters[1:])
    if found := too_many([operand.kind for operand in operands]):
        kind, count, most = found
        raise ValueError(f"{place}: got {count} operands of kind {kind}; accepted are at most {most}")
    count = sum(operand.is_optional for operand in operands)
    if count > _MOST_OPTIONAL:
        raise ValueError(f"{place}: got {count} operands that may be None; accepted are {_MOST_OPTIONAL}")
    return operands


def _operand(function: FunctionType, parameter: inspect.Parameter, place: str) -> OperandSpec:
    if parameter.name in _KEYWORDS:
        raise TypeError(
            f"{place}: an operand is called {parameter.name!r}; accepted is any name but {', '.join(_KEYWORDS)}, which "
            "are keywords of the epilogue's calls"
        )
    annotation = _annotation(function, parameter, place, _ACCEPTED)
    if not isinstance(annotation, type) or annotation not in ANNOTATIONS:
        found = "no annotation" if annotation is inspect.Parameter.empty else f"{parameter.annotation!r}"
        raise TypeError(f"{place}: {parameter.name!r} has {found}; accepted is {_ACCEPTED}")
    kind, default = ANNOTATIONS[annotation], parameter.default
    if default is inspect.Parameter.empty:
        return OperandSpec(kind, parameter.name)
    if kind != SCALAR and default is None:
        return OperandSpec(kind, parameter.name, is_optional=True)
    number = isinstance(default, (int, float)) and not isinstance(default, bool)
    if kind != SCALAR or not number:
        raise TypeError(
            f"{place}: {parameter.name!r} has a default of type {type(default).__name__}; accepted is a number for a "
            "Scalar, None for others"
        )
    try:
        return OperandSpec(kind, parameter.name, float(default))
    except OverflowError:
        raise ValueError(
            f"{place}: {parameter.name!r} has a default beyond fp64; accepted is one of at most "
            f"{sys.float_info.max:.4g}"
        ) from None


def _annotation(function: FunctionType, parameter: inspect.Parameter, place: str, accepted: str) -> object:
    """The value of a parameter's annotation, which may be a string."""
    try:
        return hints.evaluated(function, parameter.annotation)
    except hints.UnknownError as error:
        raise TypeError(
            f"{place}: {parameter.name!r} has the annotation {parameter.annotation!r}, which names nothing here "
            f"({error}); accepted is {accepted}, by a name that is there when the function is decorated"
        ) from None
