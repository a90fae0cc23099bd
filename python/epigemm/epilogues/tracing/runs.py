"""Runs a function on plain tensors. Each run must make the same calls of torch as the trace, on the same values.

This finds decisions that the trace does not notice: by the types of arguments, which are a tracer's in the trace; by
sizes of 0 and 1, which torch's symbols exclude; and by dtypes, which are compared by identity. The tensors are on the
meta device, so nothing is computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from epigemm.epilogues.kinds import KINDS, MATRIX, SCALAR
from epigemm.epilogues.tracing.lines import user_line
from epigemm.epilogues.tracing.results import structured

ROWS, COLUMNS = 5, 7  # different primes, so that a size in the wrong place is noticed
_FIXED = ("dim", "ndim", "ndimension")  # the same in all calls


def name_of(function: Any) -> str:
    """The name of a function or method of torch, or of the property that it reads."""
    name = getattr(function, "__name__", "")
    return name if name != "__get__" else getattr(getattr(function, "__self__", None), "__name__", "")


def scalar(number: int) -> float:
    """The number for a scalar operand in a trace: not 0 or 1, which a trace would take for constants."""
    return 1.7 + number


@dataclass
class Call:
    """One call of torch, tensors among its arguments as `_Places`."""

    line: str
    about: Any  # the function and its arguments
    # whether its result is a property of a tensor: a size, a dtype, or that it is an argument
    asks: bool = False


@dataclass(frozen=True)
class _Places:
    """The positions of a tensor among arguments and results; several if a cast returned its argument."""

    places: frozenset[int]


@dataclass
class Transcript:
    """The calls of torch that a function makes, in their order."""

    line: str  # of the present call; before the first call that of the function
    tensors: list[Any]  # the function's arguments, then the results
    calls: list[Call] = field(default_factory=list)
    error: Exception | None = None  # the error that has ended the run
    in_torch: bool = False  # whether the last call of torch raised it
    shapes: list[list[int]] = field(default_factory=list)  # of the results, as they were traced
    _takes_tensors: bool = False

    def begin(self, function: Any, arguments: Any) -> None:
        """A call of torch begins. The user's code is two frames up."""
        self.line = user_line(sys._getframe(2), self.line)
        self._takes_tensors = False
        self.calls.append(Call(self.line, (function, self._described(arguments))))

    def end(self, result: Any) -> None:
        """The call ends with this result."""
        parts = result if isinstance(result, (tuple, list)) else [result]
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if not tensors and not self._takes_tensors:
            self.calls.pop()  # a call of torch itself, for a symbolic number
            return
        is_known = any(each is tensor for each in self.tensors for tensor in tensors)
        self.tensors += tensors
        call = self.calls[-1]
        call.asks = is_known or (not tensors and name_of(call.about[0]) not in _FIXED)

    def returns(self, result: Any, shapes: list[list[int]] | None = None) -> None:
        """The run ends with this result, whose shapes are compared with those that it should have."""
        leaves, _ = structured(result)
        self.shapes = [_shape(each) for each in leaves]
        self.calls.append(Call(self.line, (self._described(result), shapes is None or shapes == self.shapes)))

    def _described(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self._takes_tensors = True
            return _Places(frozenset(place for place, each in enumerate(self.tensors) if each is value))
        if isinstance(value, (tuple, list)):
            return tuple(map(self._described, value))
        if isinstance(value, dict):
            return {key: self._described(part) for key, part in value.items()}
        if isinstance(value, slice):
            return tuple(map(self._described, (value.start, value.stop, value.step)))
        return value.node.hint if isinstance(value, (torch.SymFloat, torch.SymBool)) else value


class Recorder(TorchFunctionMode):
    """Records every call of torch that a function makes."""

    def __init__(self, transcript: Transcript) -> None:
        super().__init__()
        self.transcript = transcript

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.transcript.begin(func, (args, kwargs or {}))
        self.transcript.in_torch = True  # reset below if it returns
        result = self.run(func, args, kwargs or {})
        self.transcript.in_torch = False
        self.transcript.end(result)
        return result

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Make a call."""
        return func(*args, **kwargs)


@dataclass(frozen=True)
class _Arguments:
    """The arguments of a run."""

    rows: int = ROWS
    columns: int = COLUMNS
    dtype: torch.dtype = torch.float32
    of_operands: torch.dtype | None = None  # if it differs
    is_view: bool = False  # transposed, and a view of a larger tensor
    scalar: Callable[[int], float] = scalar

    def make(self, kinds: Sequence[str]) -> Iterator[Any]:
        """The accumulator and the operands."""
        for place, kind in enumerate((MATRIX, *kinds)):
            if kind == SCALAR:
                yield self.scalar(place)
                continue
            dtype = self.dtype if place == 0 else self.of_operands or self.dtype
            shape = KINDS[kind].shape((self.rows,), self.columns)
            made = torch.empty(shape, dtype=dtype, device="meta")
            if self.is_view:
                made = torch.empty(1 + made.numel(), dtype=dtype, device="meta")[1:].view(shape[::-1]).t()
            yield made


_PLAIN = _Arguments()
_CHANCE = (
    "it is run twice, and computes two things; random numbers, the time and the like would become constants of the "
    "epilogue"
)
_TYPES = "the type of an argument decides what is computed; a Scalar is any number, a tensor any tensor"
_SHAPE = (
    "the shape or the strides of a tensor decide what is computed; an epilogue is one function, for all sizes"
)
_DTYPE = "a tensor's dtype decides what is computed; an epilogue is one function, for all dtypes"
_OTHERS = (
    *((_Arguments(*sizes), _SHAPE) for sizes in ((1, COLUMNS), (ROWS, 1), (1, 1))),
    (_Arguments(is_view=True), _SHAPE),
    *((_Arguments(dtype=dtype), _DTYPE) for dtype in (torch.float16, torch.bfloat16, torch.float64)),
    (_Arguments(dtype=torch.float16, of_operands=torch.float32), _DTYPE),
)


def check(function: Callable[..., Any], kinds: Sequence[str], start: str, traced: Transcript) -> None:
    """Compares runs with the transcript of a trace.

    Raises:
        Different: one of the runs differs.
    """

    def run(arguments: _Arguments) -> Transcript:
        transcript = Transcript(start, list(arguments.make(kinds)))
        try:
            with torch.device("meta"), Recorder(transcript):
                result = function(*transcript.tensors)
            sizes = {ROWS: arguments.rows, COLUMNS: arguments.columns}
            shapes = [[sizes.get(size, size) for size in shape] for shape in traced.shapes]
            transcript.returns(result, shapes)
        except Exception as error:
            transcript.error = error
        return transcript

    plain = run(_PLAIN)
    if plain.error is not None:
        raise Different(plain.line, f"it fails on plain tensors: {plain.error}")
    if line := _difference(traced, plain, torch.float32):
        raise Different(line, _CHANCE if _difference(plain, run(_PLAIN), torch.float32) else _TYPES)
    if SCALAR in kinds:
        whole = run(_Arguments(scalar=lambda number: 1.0 + number))
        if line := _difference(whole, run(_Arguments(scalar=lambda number: 1 + number)), torch.float32):
            raise Different(line, _TYPES)
    for arguments, what in _OTHERS:
        if line := _difference(traced, run(arguments), arguments.dtype):
            raise Different(line, what)


def _shape(result: Any) -> list[int]:
    """The sizes of a result; of what is no tensor none."""
    if not isinstance(result, Tensor):
        return []
    return [size.node.hint if isinstance(size, torch.SymInt) else size for size in result.shape]


class Different(Exception):
    """The error: what decides, and at which line."""

    def __init__(self, line: str, what: str) -> None:
        super().__init__(what)
        self.line = line


def _difference(one: Transcript, other: Transcript, dtype: torch.dtype) -> str:
    """The line at which two runs differ, the second one with tensors of `dtype`; empty if they are the same."""
    asked = ""
    for call, same in zip_longest(one.calls, other.calls):
        if same is None and other.error is not None and other.in_torch:
            break  # PyTorch itself has no result for these tensors
        if call is None or same is None or not _same(call.about, same.about, dtype):
            return asked or (call or same).line
        asked = call.line if call.asks else asked
    return ""


def _same(one: Any, other: Any, dtype: torch.dtype) -> bool:
    if isinstance(one, torch.SymInt):  # decisions by it leave a guard, and as a number it is refused
        return isinstance(other, int)
    if isinstance(one, torch.dtype):  # a dtype such as torch.float32 may be written, or be read from a tensor
        return one is other or (one is torch.float32 and other is dtype)
    if isinstance(one, _Places) and isinstance(other, _Places):
        return bool(one.places & other.places)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(_same(*pair, dtype) for pair in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key], dtype) for key in one)
    return bool(one == other) or (one != one and other != other)
