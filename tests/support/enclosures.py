"""The greatest and the least value that a traced epilogue may give, whatever the last bits of its steps are.

`enclosure` goes through a program with intervals: each step's result is known up to what its inputs are known to, plus
the few units in the last place that the step itself may be off by. A step function near its step is an interval from
one side of it to the other. `slopes_and_spread` does the like of derivatives, by disturbing every step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from epigemm.epilogues.declaration import Traced
from epigemm.epilogues.tracer.program import Program, Ref, Step, Value, words
from epigemm.epilogues.tracer.reference import constant, function_of, round_to
from epigemm.epilogues.tracer.steps import ROUNDED

EXACT = frozenset(
    words("neg abs relu maximum minimum fmin fmax floor sign clamp clamp_min clamp_max hardtanh copy")
)
ROUNDED_ONCE = frozenset(words("add sub mul div sqrt leaky_relu remainder reciprocal"))
LIBRARY = frozenset(words("tanh sigmoid sin atan erf exp gelu softplus logaddexp pow floor_div floor_divide"))
# Where an interval's ends do not enclose what lies between them: how fast the function changes at most.
STEEPEST = {"abs": 1.0, "sin": 1.0, "gelu": 1.13}
# Where torch or the dual numbers subtract to get the slope: its error is relative to 1, not to itself.
SLOPES_THAT_CANCEL = frozenset(words("tanh sigmoid gelu logaddexp softplus sin"))


class Enclosure(NamedTuple):
    """Every number from `low` to `high`; both NaN where the result is NaN; not `known`: anything."""

    low: Tensor
    high: Tensor
    known: Tensor

    def has(self, values: Tensor) -> Tensor:
        """Which values lie within."""
        wide = values.double()
        nan = self.low.isnan() & wide.isnan()
        return nan | ((self.low <= wide) & (wide <= self.high)) | ~self.known

    def is_sharp(self, within: float) -> Tensor:
        """Where it says something: ends that differ by no more than `within` of their size, of 1 at least."""
        size = torch.maximum(self.low.abs(), self.high.abs()).clamp(min=1.0)
        return self.known & (
            (self.low == self.high) | self.low.isnan() | (self.high - self.low <= within * size)
        )


def units(op: str) -> float:
    """How many units in the last place two implementations of a step may be off together."""
    if op in EXACT:
        return 0.0
    return 1.0 if op in ROUNDED_ONCE else 8.0


def enclosure(program: Program, inputs: Sequence[Tensor], dtype: torch.dtype) -> Enclosure:
    """What the program gives in arithmetic of `dtype`.

    Args:
        program: of steps that this file knows.
        inputs: the accumulator and the operands, fp64 tensors of one shape whose numbers `dtype` has, too.
        dtype: fp32 or fp64.
    """
    numbers = torch.finfo(dtype)
    known = torch.ones_like(inputs[0], dtype=torch.bool)
    ends: list[tuple[Tensor, Tensor]] = [(given, given) for given in inputs]

    def ends_of(value: Value) -> tuple[Tensor, Tensor]:
        if isinstance(value, Ref):
            return ends[value.number]
        filled = torch.full_like(inputs[0], float(value)).to(dtype).double()
        return filled, filled

    for step in program.steps:
        given = [ends_of(value) for value in step.inputs]
        if step.op in QUESTIONS or step.op == "where":
            low, high, sure = _chosen(given) if step.op == "where" else _answered(step.op, given)
        elif step.op == "highest":
            low = high = torch.full_like(inputs[0], numbers.max)
            sure = torch.ones_like(known)
        else:
            low, high, sure = _from_ends(step, given)
            size = torch.maximum(low.abs(), high.abs())
            if step.op in ("gelu", "logaddexp"):  # sums whose terms may cancel
                size = size + sum(torch.maximum(one.abs(), other.abs()) for one, other in given)
            margin = units(step.op) * (numbers.eps * size + numbers.tiny)
            margin = torch.where(size.isfinite(), margin, 0.0)
            low, high = low - margin, high + margin
            sure &= ~(torch.maximum(low.abs(), high.abs()) > numbers.max) | (low == high)
        known &= sure
        ends.append((low, high))
    low, high = ends_of(program.result)
    return Enclosure(low, high, known)


def _from_ends(step: Step, given: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """The least and the greatest of what the ends of the arguments give: each step here is monotonous in each."""
    assert step.op in EXACT | ROUNDED_ONCE | LIBRARY, step.op
    function = function_of("clamp" if step.op == "hardtanh" else step.op)  # of bounds that are tensors
    corners = []
    ends = [list(dict.fromkeys(pair)) for pair in given]
    if step.op == "pow":  # of even exponents, between a negative and a positive base
        ends[0].append(torch.minimum(torch.maximum(given[0][0], torch.zeros(())), given[0][1]))
    for corner in itertools.product(*ends):
        result = function(*corner)
        if step.kind in ROUNDED:
            result = round_to(result, ROUNDED[step.kind])
        corners.append(result)
    stacked = torch.stack(corners)
    is_nan = stacked.isnan()
    low, high = stacked.amin(0), stacked.amax(0)
    sure = is_nan.all(0) | ~is_nan.any(0)
    if step.op in STEEPEST:
        start, end = given[0]
        change = torch.where(start == end, 0.0, STEEPEST[step.op] * (end - start)).nan_to_num(0.0)
        low, high = low - change, high + change
    if step.op in ("div", "reciprocal", "floor_div", "floor_divide", "remainder"):
        least, most = given[-1]
        sure &= ~((least <= 0) & (most >= 0)) | (least == most)
    is_sharp = torch.stack([(start == end) | start.isnan() for start, end in given]).all(0)
    if step.op == "pow":  # of a negative base and exponents that are not known it is everything between
        sure &= is_sharp | (given[0][0] >= 0) | (given[1][0] == given[1][1])
    if (
        step.op == "remainder"
    ):  # where the quotient is not known as a whole number, it is all that a remainder can be
        wholes = torch.stack(
            [torch.div(*corner, rounding_mode="floor") for corner in itertools.product(*given)]
        )
        is_open = ~is_sharp & ~low.isnan() & ~((wholes == wholes[0]).all(0) & wholes[0].isfinite())
        low = torch.where(is_open, given[1][0].clamp(max=0.0), low)
        high = torch.where(is_open, given[1][1].clamp(min=0.0), high)
    return low, high, sure


QUESTIONS = frozenset(words("gt lt ge le eq ne isnan"))


def _answered(op: str, given: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Of a boolean the ends are: is it certainly true, may it be."""
    low, high = given[0]
    sure = torch.ones_like(low, dtype=torch.bool)
    if op == "isnan":
        return low.isnan(), high.isnan(), sure
    other_low, other_high = given[1]
    if op in ("lt", "le"):
        (low, high), (other_low, other_high) = given[1], given[0]
    if op in ("gt", "lt"):
        return low > other_high, high > other_low, sure
    if op in ("ge", "le"):
        return low >= other_high, high >= other_low, sure
    may_be = (low <= other_high) & (other_low <= high)
    must_be = may_be & (low == high) & (other_low == other_high)
    return (must_be, may_be, sure) if op == "eq" else (~may_be, ~must_be, sure)


def _chosen(given: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    (certainly, perhaps), (low, high), (other_low, other_high) = given
    open_ = perhaps & ~certainly
    least = torch.where(open_, torch.minimum(low, other_low), torch.where(certainly, low, other_low))
    most = torch.where(open_, torch.maximum(high, other_high), torch.where(certainly, high, other_high))
    return least, most, ~open_ | (low.isnan() == other_low.isnan())


class _RoundedInPassing(torch.autograd.Function):
    """A cast to 16 bits and back whose gradient is not rounded, as the functor's is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return round_to(x, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Disturbed(fx.Interpreter):
    """The reference with a relative error of `size` in each step, and in each slope that is a difference."""

    def __init__(self, module: fx.GraphModule, size: float, generator: torch.Generator) -> None:
        super().__init__(module)
        self.size = size
        self.generator = generator

    def _noise(self, like: Tensor) -> Tensor:
        return self.size * torch.randn(like.shape, generator=self.generator, dtype=like.dtype)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is round_to:
            return _RoundedInPassing.apply(*args)  # type: ignore[no-untyped-call]
        result = super().call_function(target, args, kwargs)
        is_exact = target in (constant, torch.floor, torch.sign)  # whole numbers stay whole
        if is_exact or not result.is_floating_point() or not self.size:
            return result
        if any(target is function_of(op) for op in SLOPES_THAT_CANCEL):
            for given in args:
                if isinstance(given, Tensor):
                    slope = self._noise(given) * (1.0 + given.detach().abs())
                    result = result + (given - given.detach()) * slope
        return result * (1.0 + self._noise(result))


def slopes_and_spread(
    traced: Traced, inputs: Sequence[Tensor], generator: torch.Generator, samples: int = 8
) -> tuple[list[Tensor], list[Tensor]]:
    """The derivatives by each input, and how far they go with errors of a few units in each step.

    Args:
        traced: the epilogue.
        inputs: the accumulator and the operands, fp64 tensors of one shape.
        generator: of the errors, which are normally distributed.
        samples: so many tries; the spread is that of the worst.
    """
    eps = torch.finfo(torch.float64).eps

    def slopes(size: float) -> list[Tensor]:
        leaves = [given.detach().clone().requires_grad_() for given in inputs]
        result = _Disturbed(traced.graph, size, generator).run(*leaves)
        found = torch.autograd.grad(result.sum(), leaves, allow_unused=True)
        return [
            torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, found, strict=True)
        ]

    plain = slopes(0.0)
    tries = [slopes(4.0 * eps) for _ in range(samples)]
    spread = [
        torch.stack([(one[place] - expected).abs() for one in tries]).amax(0)
        for place, expected in enumerate(plain)
    ]
    return plain, [8.0 * wide + 16.0 * eps * one.abs() for wide, one in zip(spread, plain, strict=True)]
