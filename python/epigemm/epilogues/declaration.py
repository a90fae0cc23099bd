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
from types import FunctionType
from typing import Any, overload

from torch import Tensor, fx

from epigemm.epilogues import constants, formulas, signatures
from epigemm.epilogues.kinds import (
    ANNOTATIONS,
    MATRIX,
    PER_COLUMN,
    PER_ROW,
    SCALAR,
    Operand,
    slots_of,
    too_many,
)
from epigemm.epilogues.tracer import reference, source
from epigemm.epilogues.tracer.program import Program, words
from epigemm.epilogues.tracer.results import Results, filled

_ACCEPTED = ", ".join(kind.__name__ for kind in ANNOTATIONS)
# Of the calls.
_KEYWORDS = words("out precision strict x_scale weight_scale out_dtype out_scale accumulate offs")
_KERNELS = "open/functor.h"
_LONGEST_NAME = 64
_MOST_OPTIONAL = 3  # each doubles the number of traces


class Declared:
    """What a function has declared.

    Attributes:
        name: the function's.
        operands: in the function's order.
        kinds: theirs.
        without: by the places of the operands that are None, what the function is of the others.
        is_own: whether it is the library's (`epigemm.epilogues.library`).
    """

    without: Mapping[tuple[int, ...], Any]
    bias_place: int
    is_own = False

    def __init__(self, name: str, operands: tuple[Operand, ...]) -> None:
        self.name, self.operands = name, operands
        self.kinds = tuple(operand.kind for operand in operands)
        self.without = {}

    def _place_of_bias(self, bias: int | None) -> int:
        return bias if bias and self.kinds[bias - 1] == PER_COLUMN else 0

    def _typing(self, program: Program) -> tuple[int, ...]:
        return tuple(number - 1 for number in program.typing() - {0, self.bias_place})


_keys = itertools.count()
TRACED: weakref.WeakValueDictionary[str, Traced] = weakref.WeakValueDictionary()
"""By their keys, which stand for them where Dynamo traces."""


class Traced(Declared):
    """An epilogue made of a Python function, or of its steps.

    What follows from its steps are attributes, for calls ask.

    Attributes:
        program: its steps.
        stored: those of a second value for each element, stored beside the result.
        graph: the reference as a module: `graph(acc, *operands)`, scalars as 0-d tensors.
        source: the functor in C++.
        digest: of the source and the operands' kinds, the same in every process.
        key: not a number, because Dynamo makes a symbol of the second one.
        forms: the epilogues that were made of it, by their operands' types (`registry.typed`).
        is_choice: as of `Epilogue`; has_scalar, bias_place, too.
        is_compiled: whether the package has its kernels: it adds a bias, or is the ReLU of that, which PyTorch's GEMM
            may add, too.
        slots: in which open kernels read each operand: `kinds.SLOTS`.
        reads: for each operand, whether the result depends on it.
        are_scalars: for each operand.
        matrices: their places among the operands.
        has_rows: whether it reads a number for each row.
        ends: where a gradient ends inside the function: numbers of operands, and 0 for the accumulator; PyTorch records
            none of these.
        typing: the places among the operands whose type the result's is promoted from; the bias has the product's.
    """

    without: Mapping[tuple[int, ...], Traced]
    is_choice = True

    def __init__(
        self,
        name: str,
        operands: tuple[Operand, ...],
        program: Program,
        *,
        is_own: bool = False,
        stored: Program | None = None,
    ) -> None:
        super().__init__(name, operands)
        self.program, self.stored, self.is_own = program, stored, is_own
        self.graph = reference.reference_module(program)
        self.source = source.functor_text(program, self.kinds)
        if stored is not None:
            self.source += source.functor_text(stored, self.kinds, source.STORED)
        self.digest = formulas.digest(self.source, self.kinds)
        self.key = str(next(_keys))
        self.forms: dict[tuple[bool, ...], Any] = {}
        TRACED[self.key] = self
        numbers = range(1, len(operands) + 1)
        self.bias_place = self._place_of_bias(program.bias())
        is_torchs = program.is_bias or program.is_bias_relu
        self.is_compiled = self.bias_place > 0 and stored is None and is_torchs
        self.slots = slots_of(self.kinds)
        self.reads = tuple(number in program.reads() for number in numbers)
        self.are_scalars = tuple(kind == SCALAR for kind in self.kinds)
        self.has_scalar, self.has_rows = SCALAR in self.kinds, PER_ROW in self.kinds
        self.matrices = tuple(place for place, kind in enumerate(self.kinds) if kind == MATRIX)
        self.ends = tuple(number for number in (0, *numbers) if number not in program.with_gradient())
        self.typing = self._typing(program)

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
        functions = source.kernel_functions(self.program, self.kinds, elements, parts, self.stored, shared)
        if own is None:
            return f"{source.prelude(_KERNELS)}\n{self.source}\n{functions}"
        header, functor = own
        return f"{source.prelude(_KERNELS, f'epilogue/{header}.h')}\n{source.named_functor(functor)}\n{functions}"


class TracedResults(Declared):
    """A Python function that returns more than one matrix, or a reduction: as a whole, before it is taken apart.

    Attributes:
        results: its steps, and what it returns.
        bias_place: as of `Traced`.
        typing: as of `Traced`, of each result; of a reduction none.
    """

    without: Mapping[tuple[int, ...], TracedResults]

    def __init__(self, name: str, operands: tuple[Operand, ...], results: Results) -> None:
        super().__init__(name, operands)
        self.results = results
        self.bias_place = self._place_of_bias(results.bias())
        self.typing = [
            self._typing(results.program(each.value)) if each.is_stored else () for each in results.results
        ]


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
    of_all.without = without
    return of_all


def _without(
    function: Callable[..., Any], operands: tuple[Operand, ...], absent: tuple[int, ...]
) -> tuple[Callable[..., Any], tuple[Operand, ...]]:
    """The function of the remaining operands, and these operands."""

    def of_the_others(acc: Tensor, *given: Tensor | float) -> Any:
        values = iter(given)
        return function(acc, *(None if number in absent else next(values) for number in range(len(operands))))

    return of_the_others, tuple(each for number, each in enumerate(operands) if number not in absent)


def _trace(
    function: Callable[..., Any],  # takes the accumulator and the operands
    operands: tuple[Operand, ...],  # its operands
    name: str,  # an identifier
    start: str,  # `file:line` of where it begins, for messages
) -> Traced | TracedResults:
    """`trace`, for a function whose operands are known, and whose captured values are checked."""
    from epigemm.epilogues.tracer import trace

    found = trace.trace_results(function, [operand.kind for operand in operands], name, start)
    if found.is_one_matrix:
        return Traced(name, operands, found.program(found.results[0].value))
    return TracedResults(name, operands, found)


def _returns(found: Traced | TracedResults) -> object:
    """What a caller gets."""
    if isinstance(found, Traced):
        return None
    return filled(found.results.structure, [each.about for each in found.results.results])


def traced(function: Callable[..., Tensor], operands: tuple[Operand, ...], name: str, start: str) -> Traced:
    """`trace` of a function that returns one matrix and has captured nothing, with its operands."""
    found = _trace(function, operands, name, start)
    assert isinstance(found, Traced)
    return found


def _operands(function: FunctionType, place: str) -> tuple[Operand, ...]:
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


def _operand(function: FunctionType, parameter: inspect.Parameter, place: str) -> Operand:
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
        return Operand(kind, parameter.name)
    if kind != SCALAR and default is None:
        return Operand(kind, parameter.name, is_optional=True)
    number = isinstance(default, (int, float)) and not isinstance(default, bool)
    if kind != SCALAR or not number:
        raise TypeError(
            f"{place}: {parameter.name!r} has a default of type {type(default).__name__}; accepted is a number for a "
            "Scalar, None for others"
        )
    try:
        return Operand(kind, parameter.name, float(default))
    except OverflowError:
        raise ValueError(
            f"{place}: {parameter.name!r} has a default beyond fp64; accepted is one of at most "
            f"{sys.float_info.max:.4g}"
        ) from None


def _annotation(function: FunctionType, parameter: inspect.Parameter, place: str, accepted: str) -> object:
    """The value of a parameter's annotation, which may be a string."""
    try:
        return signatures.evaluated(function, parameter.annotation)
    except signatures.UnknownError as error:
        raise TypeError(
            f"{place}: {parameter.name!r} has the annotation {parameter.annotation!r}, which names nothing here "
            f"({error}); accepted is {accepted}, by a name that is there when the function is decorated"
        ) from None
