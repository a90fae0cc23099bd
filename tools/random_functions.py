"""Random functions with several results, as epilogues: values and gradients against the functions in float64.

    python -m tools.random_functions --count 2000 --output functions.json
    python -m tools.random_functions --count 1000 --gradients
    python -m tools.random_functions --device cuda --count 2000 --shard 1/16 --time-budget 60

A function that goes wrong is reported with its number; `--seed S --only NUMBER` repeats it. How far a result may be off
follows from the function: each step adds a rounding, and passes on the errors of its inputs times its steepest slope.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.harness.report import write_json
from benchmarks.harness.shards import Shard
from epigemm import Matrix, PerColumn, PerRow, ResultsEpilogue, Scalar
from epigemm.epilogues import declaration
from epigemm.epilogues.kinds import ANNOTATIONS, Operand
from epigemm.epilogues.tracer.results import AMAX, AMIN, MEAN, STORE, SUM, Result, structured
from tests.support.results import Given, draw, dtype_of, wanted

SCALAR = 0.75  # as `draw` gives it
# Each with its steepest slope by each argument.
UNARY: list[tuple[Callable[[Any], Any], float]] = [
    (torch.tanh, 1.0),
    (torch.sigmoid, 0.25),
    (torch.relu, 1.0),
    (torch.sin, 1.0),
    (torch.abs, 1.0),
    (F.gelu, 1.13),
    (F.silu, 1.1),
    (lambda z: torch.clamp(z, -1.5, 2.0), 1.0),
    (lambda z: z * 0.5, 0.5),
    (lambda z: -z, 1.0),
    (lambda z: z + 0.25, 1.0),
    (lambda z: torch.tanh(z) ** 2, 0.77),
    (lambda z: F.leaky_relu(z, 0.1), 1.0),
    (lambda z: z.clone(), 1.0),
    (lambda z: torch.where(z.detach() * 0.0 == 0.0, 1.0, 0.1) * z, 1.0),
]
BINARY: list[tuple[Callable[[Any, Any], Any], float, float]] = [
    (lambda a, b: torch.tanh(a) * torch.sigmoid(b), 1.0, 0.25),
    (lambda a, b: (a + b) * 0.5, 0.5, 0.5),
    (torch.maximum, 1.0, 1.0),
    (torch.minimum, 1.0, 1.0),
    (lambda a, b: torch.where(a.detach() * 0.0 + 1.0 > 0.5, a, b), 1.0, 1.0),
    (lambda a, b: a - torch.sigmoid(b), 1.0, 0.25),
    (lambda a, b: a + b, 1.0, 1.0),
    (lambda a, b: a - b, 1.0, 1.0),
]
_BY_SCALAR = (lambda z, s: torch.tanh(z) * s, SCALAR, 0.0)
REDUCTIONS: list[Callable[[Any], Any]] = [
    lambda z: z.sum(0),
    lambda z: z.sum(1),
    lambda z: z.mean(0),
    lambda z: z.mean(0, keepdim=True),
    lambda z: z.mean(-1),
    lambda z: z.amax(0),
    lambda z: z.amin(1, keepdim=True),
    lambda z: torch.var_mean(z, 0, correction=0),
    lambda z: torch.var_mean(z, 1),
    lambda z: z.var(0, correction=0),
    lambda z: z.var(1),
]
LARGE = 1e4
"""What some operands are multiplied by, so that sums with them cancel in what follows."""
DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


class Made:
    """A random function, in its steps."""

    def __init__(self, seed: int) -> None:
        rng, self.seed = random.Random(seed), seed
        kinds: list[Any] = [PerColumn, PerRow, Matrix, Scalar]
        self.kinds = [kind for kind in (*kinds, PerColumn) if rng.random() < 0.6]
        self.are_large = [kind is not Scalar and rng.random() < 0.25 for kind in self.kinds]
        self.steps: list[tuple[Any, tuple[int, ...]]] = []
        count = 1 + len(self.kinds)
        # Tensors [M, N] alone are reduced and returned: the first value is one, and so is what reads one.
        whole = [0]
        for number in range(count, count + rng.randint(1, 8)):
            first = rng.choice(whole[-3:])
            scalars = [place for place, kind in enumerate(self.kinds, 1) if kind is Scalar]
            others = [place for place in range(number) if place not in scalars]
            operator: Any = rng.choice([*UNARY, *BINARY, *BINARY])
            inputs: tuple[int, ...] = (first,) if len(operator) == 2 else (first, rng.choice(others))
            if scalars and rng.random() < 0.2:
                operator, inputs = _BY_SCALAR, (first, scalars[0])
            self.steps.append((operator, inputs))
            whole.append(number)
        returned = [
            (rng.choice(whole), rng.choice([None, None, *REDUCTIONS]), rng.random() < 0.2)
            for _ in range(rng.randint(1, 5))
        ]
        # Some are returned twice, and some are equal.
        self.returned = returned + [rng.choice(returned) for _ in range(rng.choice((0, 0, 1, 2)))]
        self.is_list = rng.random() < 0.3

    def __call__(self, acc: Tensor, *operands: Any) -> Any:
        """What the epilogue is made of."""
        values = [acc, *operands]
        for (operator, *_), inputs in self.steps:
            values.append(operator(*(values[place] for place in inputs)))
        found = []
        for place, reduction, in_fp32 in self.returned:
            value = values[place].float() if in_fp32 else values[place]
            found.append(value if reduction is None else reduction(value))
        return found if self.is_list else tuple(found)

    def epilogue(self) -> ResultsEpilogue:
        """The function as an epilogue: its operands and what it reads from outside are known."""
        operands = tuple(
            Operand(ANNOTATIONS[kind], f"operand{number}") for number, kind in enumerate(self.kinds)
        )
        found = declaration._trace(self.__call__, operands, "random", f"{__file__}:1")
        assert isinstance(found, declaration.TracedResults)
        epilogue = ResultsEpilogue(found)
        vars(epilogue)["__wrapped__"] = self.__call__
        return epilogue

    def bounds(self, given: Given, acc: Tensor, error: Tensor, dtype: torch.dtype, unit: float) -> list[Any]:
        """How far each result may be off, as many as `Result`s: of what is reduced, and its values in float64.

        `acc`, `error`: the accumulator `[M, N]` in float64, and how far it may be off; `unit`: a step's relative error.
        """
        rows, columns = acc.shape
        values: list[Any] = [acc]
        for kind, each in zip(self.kinds, given.operands, strict=True):
            value = each.double() if isinstance(each, Tensor) else each
            by_row = kind in (Matrix, PerRow)
            values.append(value.reshape(rows, columns if kind is Matrix else 1) if by_row else value)
        errors: list[Any] = [error, *(0.0 for _ in self.kinds)]
        for (operator, *slopes), inputs in self.steps:
            made = operator(*(values[place] for place in inputs))
            passed = sum(slope * errors[place] for slope, place in zip(slopes, inputs, strict=True))
            values.append(made)
            errors.append(passed + unit * (made.abs() + 1.0))
        stored = {place for place, reduction, in_fp32 in self.returned if reduction is None and not in_fp32}
        found = []
        for place, reduction, in_fp32 in self.returned:
            value, error = values[place], errors[place]
            # Equal steps are one: what is reduced may be stored under another number.
            is_stored = any(torch.equal(values[each], value) for each in stored)
            if is_stored and not (reduction is None and in_fp32):
                error = error + torch.finfo(dtype).eps / 2 * value.abs() + torch.finfo(dtype).tiny
            if in_fp32:
                error = error + 2.0**-24 * value.abs()
            found += [(value, error)] * len(tree_leaves(None if reduction is None else reduction(value)))
        return found


def off(result: Result, value: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    """How far a result may be off, whose elements may be by `error`: an order of sums is one rounding for each half."""
    unit = 2.0**-44 if dtype == torch.float64 and not result.is_fp32 else 2.0**-20
    axis, keeps, count = result.axis, result.keeps_axis, value.shape[result.axis]
    if result.kind == STORE:
        return error
    if result.kind in (AMAX, AMIN):
        return error.amax(axis, keeps) + unit * value.abs().amax(axis, keeps)
    total = error.sum(axis, keeps) + unit * value.abs().sum(axis, keeps)
    if result.kind == SUM:
        return total
    if result.kind == MEAN:
        return total / count
    mean = value.mean(axis, keepdim=True)
    each = error + (error.mean(axis, keepdim=True) + unit * value.abs().mean(axis, keepdim=True))
    squares = (2 * (value - mean).abs() * each + each * each + unit * (value - mean) ** 2).sum(axis, keeps)
    return squares / max(count - result.correction, 1.0)


def _unit(dtype: torch.dtype, device: torch.device) -> float:
    """The largest relative error of a step: of a short function of 16 bits on a GPU (docs/epilogues.md)."""
    if dtype == torch.float64:
        return 2.0**-48
    short = {torch.bfloat16: 2.0**-10, torch.float16: 2.0**-15} if device.type == "cuda" else {}
    return short.get(dtype, 2.0**-21)


def _given(
    made: Made, function: Any, rng: torch.Generator, dtype: torch.dtype, device: torch.device
) -> Given:
    number = rng.initial_seed()
    if device.type == "cuda":
        lead, n, k = [((1537,), 264, 512), ((4, 512), 1024, 256), ((640,), 2048, 1024)][number % 3]
    else:
        lead, n, k = [((9,), 12, 16), ((2, 5), 12, 16), ((33,), 8, 5)][number % 3]
    given = draw(function, rng, dtype, device, lead, n, k)
    for each, is_large in zip(given.operands, made.are_large, strict=True):
        if is_large:
            each.mul_(LARGE)
    return given


def values_of(made: Made, device: torch.device) -> None:
    """Check a function, in two types. Raises AssertionError with what is wrong."""
    seed = made.seed
    function = made.epilogue()
    for dtype in (DTYPES[seed % 4], DTYPES[(seed + 1) % 4]):
        given = _given(made, function, torch.Generator().manual_seed(seed), dtype, device)
        acc = given.product.reshape(-1, given.weight.shape[0])
        about = f"{dtype}, x {list(given.x.shape)}"
        is_narrow = dtype.itemsize == 2
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        sums = given.x.double().abs().reshape(-1, given.x.shape[-1]) @ given.weight.double().abs().t()
        error = given.x.shape[-1] * torch.finfo(wide).eps * sums
        error = error + torch.finfo(dtype).eps / 2 * acc.abs() if is_narrow else error
        _compare(
            made, function, given, acc, error, function(given.x, given.weight, *given.operands), dtype, about
        )
        z = given.product.to(dtype)
        flat = z.double().reshape(acc.shape)
        found = function.elementwise(z, *given.operands)
        _compare(made, function, given, flat, torch.zeros_like(flat), found, dtype, f"elementwise, {about}")
        for place, special in enumerate((math.nan, math.inf, -math.inf)):
            z.reshape(acc.shape)[place::5, place] = special
        _compare_special(made, function, given, z, f"elementwise, special values, {about}")


def _compare(
    made: Made,
    function: Any,
    given: Given,
    acc: Tensor,
    error: Tensor,
    got: Any,
    dtype: torch.dtype,
    about: str,
) -> None:
    lead = given.x.shape[:-1]
    want = wanted(function, acc.reshape(*lead, -1), given.operands)
    leaves, structure = structured(got)
    assert structure == function.traced.results.structure, f"{about}: what is one tensor, and what are two"
    _, places = structured(tree_leaves(made(acc, *_seen(made, given, acc))))
    bounds = made.bounds(given, acc, error, dtype, _unit(dtype, acc.device))
    first = {number: bounds[leaf] for leaf, number in reversed(list(enumerate(places)))}  # type: ignore[arg-type]
    for number, (result, one, other) in enumerate(zip(function.results, leaves, want, strict=True)):
        where = f"{about}: result {number}, {result}"
        assert one.dtype == dtype_of(result, dtype) and one.shape == other.shape, where
        value, spread = first[number]
        bound = off(result, value, spread, dtype).reshape(other.shape)
        assert torch.equal(one.isnan(), other.isnan()), f"{where}: NaN"
        wrong = (one.double() - other).abs() > 1.01 * bound + torch.finfo(one.dtype).tiny
        worst = ((one.double() - other).abs() / bound).nan_to_num(0.0).max() if one.numel() else 0.0
        assert not bool(wrong.any()), (
            f"{where}: {int(wrong.sum())} of {wrong.numel()} are off, by {worst:.3g} bounds"
        )
    before = [each.clone() for each in leaves]
    for number, each in enumerate(leaves):
        each.fill_(float(number))
        for other_number in range(number + 1, len(leaves)):
            same = torch.equal(leaves[other_number].nan_to_num(), before[other_number].nan_to_num())
            assert same, f"{about}: writing result {number} changes result {other_number}"


def _seen(made: Made, given: Given, acc: Tensor) -> list[Any]:
    """The operands as the function sees them, in float64."""
    shapes = {Matrix: acc.shape, PerRow: (acc.shape[0], 1), PerColumn: acc.shape[1:]}
    pairs = zip(made.kinds, given.operands, strict=True)
    return [each if kind is Scalar else each.double().reshape(shapes[kind]) for kind, each in pairs]


def _compare_special(made: Made, function: Any, given: Given, z: Tensor, about: str) -> None:
    """NaN and infinities are where the function itself has them, in the arithmetic's type."""
    leaves, _ = structured(function.elementwise(z, *given.operands))
    wide = torch.float64 if z.dtype == torch.float64 else torch.float32
    flat = z.reshape(-1, z.shape[-1]).to(wide)
    seen = [each.to(wide) if isinstance(each, Tensor) else each for each in _seen(made, given, flat)]
    want, _ = structured(made(flat, *seen))
    if len(want) < len(leaves):  # `float()` of fp32 is the tensor itself
        want = tree_leaves(made(flat, *seen))
        leaves = tree_leaves(function.elementwise(z, *given.operands))
    for number, (one, other) in enumerate(zip(leaves, want, strict=True)):
        other = other.reshape(one.shape)
        assert torch.equal(one.isnan(), other.isnan()), f"{about}: result {number}: NaN"
        inf = torch.finfo(one.dtype).max
        clipped = one.double().nan_to_num(0.0, inf, -inf).clamp(-inf, inf)
        is_inf = other.isinf()
        assert bool((clipped[is_inf] == other[is_inf].sign().double() * inf).all()), (
            f"{about}: result {number}: inf"
        )
        assert not bool((one.isinf() & ~is_inf & (other.abs() < 6e4)).any()), (
            f"{about}: result {number}: an inf more"
        )


def gradients_of(made: Made, device: torch.device) -> None:
    """Check a function's gradients in fp64 of every tensor: those of the function itself. Raises AssertionError."""
    seed = made.seed
    function: Any = made.epilogue()
    rng = torch.Generator().manual_seed(seed)
    given = draw(function, rng, torch.float64, device, (7,), 6, 5)
    leaves = given.leaves()
    got, _ = structured(function(given.x, given.weight, *given.operands))
    want = wanted(function, given.product, given.operands)
    pairs = [(a, b) for a, b in zip(got, want, strict=True) if b.requires_grad]
    assert all(a.requires_grad for a, _ in pairs), "a result requires no gradient"
    weights = [torch.randn(b.shape, generator=rng, dtype=torch.float64).to(device) for _, b in pairs]
    if not pairs:
        return
    mine, others = (
        torch.autograd.grad(
            sum((pair[side] * weight).sum() for pair, weight in zip(pairs, weights, strict=True)),  # type: ignore[arg-type]
            leaves,
            allow_unused=True,
            materialize_grads=True,
        )
        for side in (0, 1)
    )
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def run(
    seeds: Sequence[int],
    device: torch.device,
    *,
    gradients: bool,
    budget_s: float = math.inf,
    make: Callable[[int], Made] = Made,
) -> dict[str, Any]:
    """What a record holds: how many functions ran, and by its seed what is wrong with each that is."""
    check = gradients_of if gradients else values_of
    failed: dict[str, str] = {}
    ran, end = 0, time.monotonic() + budget_s
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a variance without a degree of freedom
        for seed in itertools.takewhile(lambda _: time.monotonic() < end, seeds):
            ran += 1
            try:
                check(make(seed), device)
            except Exception as error:
                failed[str(seed)] = f"{type(error).__name__}: {error}"
    return {"ran": ran, "left_out": len(seeds) - ran, "failed": failed}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the functions; 1 if anything is wrong."""
    p = argparse.ArgumentParser(
        prog="python -m tools.random_functions", description=(__doc__ or "").split("\n")[0]
    )
    p.add_argument("--seed", type=int, default=0, help="of the first function (default: 0)")
    p.add_argument("--count", type=int, default=2000, help="number of functions (default: 2000)")
    p.add_argument("--only", type=int, metavar="NUMBER", help="check the function of this number alone")
    p.add_argument("--gradients", action="store_true", help="gradients in place of values")
    p.add_argument("--device", type=torch.device, default="cpu", help="cpu (default), cuda")
    p.add_argument("--shard", type=Shard.parse, default="1/1", help="I/N: the I-th of N parts")
    p.add_argument(
        "--time-budget", type=float, default=math.inf, metavar="S", help="begin none after so many seconds"
    )
    p.add_argument("--output", type=Path, metavar="FILE", help="write the record to it, as JSON")
    given = p.parse_args(arguments)
    numbers = range(given.count) if given.only is None else [given.only]
    seeds = [given.seed + number for number in given.shard.part(list(numbers))]
    found = run(seeds, given.device, gradients=given.gradients, budget_s=given.time_budget)
    about = {
        "seed": given.seed,
        "count": given.count,
        "gradients": given.gradients,
        "device": str(given.device),
    }
    if given.output:
        print(f"wrote {write_json(about | {'shard': str(given.shard)} | found, given.output)}")
    for seed, why in found["failed"].items():
        print(f"FAILED: --seed {seed} --only 0: {why}")
    left_out = f", {found['left_out']} left out: the time was up" * bool(found["left_out"])
    print(
        f"{found['ran']} functions from seed {given.seed}, {len(found['failed'])} wrong{left_out}", flush=True
    )
    return int(bool(found["failed"]))


if __name__ == "__main__":
    sys.exit(main())
