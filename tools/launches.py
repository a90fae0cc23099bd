"""One random launch: drawn from a seed and a number alone, made, and held against float64.

Shapes are ragged, tensors begin anywhere, rows have gaps, matrices are transposed. All that surrounds them is NaN, and
so is the result before the launch: what is read or written beside its place shows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import (
    COLUMN,
    CUSTOM,
    MATRIX,
    ROW,
    SCALAR,
    Case,
    Data,
    Operand,
    Parameters,
    Problem,
    Setting,
    Shape,
    make_data,
)
from benchmarks.cases import custom as custom_cases
from benchmarks.cases import problems as built_in
from benchmarks.cases.random import below, log_uniform
from benchmarks.gradings.products import SCALED, SPLIT, TF32, forced_into
from benchmarks.harness.runner import describe_error, matmul_precision
from benchmarks.harness.sampling import SampledReference
from epigemm.arguments import precision
from epigemm.epilogues.registry import EPILOGUES, typed
from epigemm.tuner.tuner import ONE_ORDER
from tools.run_every_kernel import divides_k, family_number, kernels
from tools.run_linked_kernels import everything

LARGEST = 4096
SETTINGS = {
    "bf16": Setting("bf16", "highest"),
    "fp16": Setting("fp16", "highest"),
    TF32: Setting("fp32", "high"),
    SPLIT: Setting("fp32", "highest"),
    SCALED: Setting("fp32", "high"),
}
"""By the arithmetic of the kernels that are forced."""
_FORCED_SHARE, _ALIGNED_SHARE, _PLAIN_SHARE, _ALIGNED = 0.75, 0.6, 0.5, 8
_OFFSETS, _GAPS = (0, 1, 2, 8, 24), (0, 1, 4, 8, 40)
_BYTES_OF_PADDING = 16
_LEAST_K_OF_SPLIT = 128  # below, no call chooses it: csrc/gemm/fp16_slices/coverage.cpp
_FUSED_ROUNDINGS, _FALLBACK_ROUNDINGS = 0, 3  # to the output's type, before the last one


@dataclass(frozen=True)
class Layout:
    """Where a tensor lies in its memory: elements before it, elements behind each row, and which axis has the rows."""

    offset: int = 0
    gap: int = 0
    transposed: bool = False

    def memory(self, like: Tensor) -> Tensor:
        """Enough for a tensor, all NaN."""
        count, length = self._lines(like.shape)
        size = self.offset + count * (length + self.gap) + _BYTES_OF_PADDING
        return torch.full((size,), float("nan"), dtype=like.dtype, device=like.device)

    def view(self, memory: Tensor, shape: Sequence[int], behind: int = 0) -> Tensor:
        """The tensor in that memory; `behind`: with so many elements behind each row, as far as gaps hold them.

        Behind a single row there is no other one.
        """
        count, length = self._lines(shape)
        pitch = length + self.gap
        held = length + behind if count == 1 else min(length + behind, pitch)
        lines = memory.as_strided((count, held), (pitch, 1), self.offset)
        if len(shape) == 1:
            return lines[:, 0]
        return lines.t() if self.transposed else lines

    def _lines(self, shape: Sequence[int]) -> tuple[int, int]:
        """How many, and of how many elements; each element of a vector is one."""
        first, second = (*shape, 1)[:2]
        return (second, first) if self.transposed and len(shape) == 2 else (first, second)

    def placed(self, value: Tensor) -> Tensor:
        """A copy of a tensor that lies so."""
        return self.view(self.memory(value), value.shape).copy_(value)


@dataclass(frozen=True)
class Launch:
    """What is launched.

    Attributes:
        number: among those of a seed.
        problem: what is computed, by name.
        kernel: which of the arithmetic's kernels, as a share of their list; None: what the planner chooses.
        order: raster, and the exponents of the swizzle and of the parts of K where a kernel splits it.
        layouts: of x, the weight, the result, and each operand in turn.
    """

    seed: int
    number: int
    problem: str
    shape: Shape
    arithmetic: str
    kernel: float | None
    order: tuple[int, int, int]
    layouts: tuple[Layout, ...]

    @property
    def case(self) -> Case:
        """The problem, its size and its arithmetic."""
        return Case(PROBLEMS[self.problem], self.shape, SETTINGS[self.arithmetic])

    def plan(self) -> tuple[int, ...] | None:
        """Family, tile, raster, swizzle and splits; None where the planner chooses, or where there are no kernels."""
        is_16_bits = self.arithmetic in ("bf16", "fp16")
        every = kernels("16_bits" if is_16_bits else self.arithmetic)
        if self.kernel is None or not every:
            return None
        family, tile = every[int(self.kernel * len(every))]
        raster, swizzle, splits = self.order
        if family in map(family_number, ONE_ORDER):
            return family, tile, 0, 1, 1 << splits
        divides = divides_k(family, tile, "16_bits" if is_16_bits else self.arithmetic)
        return family, tile, raster, 1 << swizzle, 1 << splits if divides else 1

    def __str__(self) -> str:
        layouts = ", ".join(f"{each.offset}+{each.gap}{'t' * each.transposed}" for each in self.layouts)
        return f"seed {self.seed} number {self.number}: {self.case.name} {self.arithmetic}, layouts {layouts}"


def _everything(acc: Tensor, *given: Tensor) -> Tensor:
    a, b, r, m, n, s, t = given
    return (acc + a) * b + r * s + m * t + torch.tanh(n)


_VECTOR, _ROW, _MATRIX = (Operand(kind, -1.0, 1.0) for kind in (COLUMN, ROW, MATRIX))
_SEVERAL = {"a": _VECTOR, "b": _VECTOR, "r": _ROW, "m": _MATRIX, "n": _MATRIX}
_SEVERAL |= {"s": Operand(SCALAR, 0.5), "t": Operand(SCALAR, -2.0)}


def _problems() -> dict[str, Problem]:
    """All epilogues of products: our own, those of a Python function, and one with operands of every kind."""
    own = {p.name: p for p in built_in.problems() if p.kind == "linear" and not p.training}
    functions = {p.name: p for p in custom_cases.problems().values()}
    last = Problem(CUSTOM, "everything", everything.__doc__ or "", _SEVERAL, _everything, cancels=True)
    return own | functions | {last.name: last}


def _decorated(problem: Problem) -> Any:
    return everything if problem.operands is _SEVERAL else custom_cases.decorated(problem.epilogue)


PROBLEMS = _problems()


def draw(seed: int, number: int, largest: int = LARGEST) -> Launch:
    """A launch; no side of it is above `largest`."""
    rng = random.Random(f"launch {seed} {number}")
    name = list(PROBLEMS)[below(rng, len(PROBLEMS))]
    arithmetic = list(SETTINGS)[below(rng, len(SETTINGS))]
    m, n, k = (int(log_uniform(rng, 1, largest + 1)) for _ in range(3))
    if rng.random() < _ALIGNED_SHARE:
        n, k = (-(-side // _ALIGNED) * _ALIGNED for side in (n, k))
    kernel = rng.random()
    return Launch(
        seed,
        number,
        name,
        Shape(m, n, k),
        arithmetic,
        kernel if rng.random() < _FORCED_SHARE else None,
        (below(rng, 2), below(rng, 4), below(rng, 4)),
        tuple(_layout(rng) for _ in range(3 + len(PROBLEMS[name].operands))),
    )


def _layout(rng: random.Random) -> Layout:
    is_plain, offset, gap = rng.random() < _PLAIN_SHARE, below(rng, len(_OFFSETS)), below(rng, len(_GAPS))
    is_transposed = rng.random() < 0.25
    return Layout() if is_plain else Layout(_OFFSETS[offset], _GAPS[gap], is_transposed)


@dataclass(frozen=True)
class Outcome:
    """What came of a launch.

    Attributes:
        kernel: that was forced; empty where the planner chose.
        refused: why another one was not.
        wrong: what is wrong; empty where nothing is.
        raised: whether that is an exception, which may have broken the process's CUDA context.
    """

    kernel: str = ""
    refused: str = ""
    wrong: str = ""
    raised: bool = False


def run(launch: Launch, device: torch.device) -> Outcome:
    """Make the launch, and check what it has written."""
    case = launch.case
    with torch.no_grad(), matmul_precision(case.setting):
        data = placed(launch, device)
        out_layout = launch.layouts[2]
        shape = (case.shape.m, case.shape.n)
        memory = out_layout.memory(torch.empty(shape, dtype=case.setting.dtype, device=device))
        out = out_layout.view(memory, shape)
        kernel, refused = _forced(launch, data, out) if device.type == "cuda" else ("", "")
        if not kernel:
            planned(case.problem, data, out)
        return Outcome(kernel, refused, why_wrong(launch, kernel, data, memory))


def why_wrong(launch: Launch, kernel: str, data: Data, memory: Tensor) -> str:
    """What is wrong with the result in this memory, or beside it, where nothing but NaN may be."""
    layout, shape = launch.layouts[2], (launch.shape.m, launch.shape.n)
    out, roundings = layout.view(memory, shape), _FUSED_ROUNDINGS if kernel else _FALLBACK_ROUNDINGS
    found = SampledReference(held_to(launch, kernel), data, launch.seed).compare(out, roundings)
    wrong = (
        "" if found.ok else found.problem or f"{found.wrong_elements} elements, {found.fraction_of_bound:.3g}"
    )
    layout.view(memory, shape, padding(launch, kernel)).fill_(float("nan"))
    # By their bits: a NaN that a kernel wrote is another one.
    if not torch.equal(memory.view(torch.uint8), layout.memory(out).view(torch.uint8)):
        wrong = f"{wrong}; " * bool(wrong) + "written beside the result"
    return wrong


def padding(launch: Launch, kernel: str) -> int:
    """Elements behind each row that may be written: by force, kernels on slices fill up its last 16 bytes."""
    may_pad = kernel and launch.arithmetic in (SPLIT, SCALED) and not launch.layouts[2].transposed
    return -launch.shape.n % (_BYTES_OF_PADDING // launch.case.setting.dtype.itemsize) if may_pad else 0


def held_to(launch: Launch, kernel: str) -> Case:
    """The case whose bound holds: by force a split runs where K is too short for its 22 bits to be as good as 24.

    There it is held to the bound of TF32, which a wrong tile or operand still leaves.
    """
    is_too_short = launch.arithmetic == SPLIT and (launch.shape.k or 0) < _LEAST_K_OF_SPLIT
    return replace(launch.case, setting=SETTINGS[TF32]) if kernel and is_too_short else launch.case


def described(launch: Launch, device: torch.device) -> Outcome:
    """The same; an exception is wrong."""
    try:
        return run(launch, device)
    except Exception as error:  # whatever it is, the launch is at fault
        return Outcome(wrong=describe_error(error), raised=True)


def placed(launch: Launch, device: torch.device) -> Data:
    """Its tensors, as they are to lie."""
    data = make_data(launch.case, device, launch.number)
    data.refill(signed=True, seed=launch.number + 1)
    assert data.weight is not None
    of_x, of_weight, _, *others = launch.layouts
    vectors = dict(data.parameters.vectors)
    # Scalars come last, and lie nowhere.
    for (name, value), layout in zip(vectors.items(), others, strict=False):
        vectors[name] = layout.placed(value)
    return Data(of_x.placed(data.x), of_weight.placed(data.weight), replace(data.parameters, vectors=vectors))


def planned(problem: Problem, data: Data, out: Tensor) -> None:
    """The public function."""
    values = problem.given(data.parameters)
    if problem.kind == CUSTOM:
        _decorated(problem)(data.x, data.weight, **values, out=out)
    else:
        assert problem.ours is not None
        problem.ours(data.x, data.weight, *values.values(), out=out)


def _forced(launch: Launch, data: Data, out: Tensor) -> tuple[str, str]:
    """The kernel that has run under the launch's plan, or why none has."""
    plan, problem = launch.plan(), launch.case.problem
    if plan is None:
        return "", ""
    given = native(problem, data.parameters)
    if given is None:
        return "", "its vectors are folded first"
    name, bias, operands, scalars = given
    arithmetic = precision.IEEE if launch.arithmetic in ("bf16", "fp16") else launch.arithmetic
    assert data.weight is not None
    more: dict[str, Any] = {"bias": bias, "operands": operands, "scalars": scalars, "plan": plan}
    try:
        forced_into(out, name, data.x, data.weight, arithmetic, **more)
    except RuntimeError as error:
        # A plan that is refused, or kernels on slices that cannot read or write a tensor as it lies.
        if not str(error).startswith("plan: ") and not str(error).endswith(("NOT_READABLE", "NOT_STORABLE")):
            raise
        return "", str(error)
    return f"{launch.arithmetic} family {plan[0]} tile {plan[1]}", ""


def native(
    problem: Problem, parameters: Parameters
) -> tuple[str, Tensor | None, list[Tensor], list[float]] | None:
    """Name, bias, operands and scalars as the native module takes them; None where it takes others.

    It reads matrices by rows: a call copies others first.
    """
    values = problem.values(parameters)
    if problem.kind == CUSTOM:
        specs = problem.operands.values()
        epilogue = typed(_decorated(problem).traced, [spec.kind == SCALAR for spec in specs])
        given: list[Any] = [*values.values()]
    else:
        epilogue = EPILOGUES[problem.epilogue]
        names = {operand.name for operand in epilogue.operands}
        if not values.keys() <= names or len(names - values.keys() - {"bias"}) > 0:
            return None
        given = [values.get(operand.name) for operand in epilogue.operands]
    given = [_by_rows(value) if isinstance(value, Tensor) else value for value in given]
    return epilogue.name, *epilogue.apart(given)


def _by_rows(operand: Tensor) -> Tensor:
    is_by_columns = operand.dim() == 2 and operand.shape[1] > 1 and operand.stride(1) != 1
    return operand.contiguous() if is_by_columns else operand
