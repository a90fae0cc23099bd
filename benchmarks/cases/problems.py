"""The five models of the public problem set (KernelBench levels 1 and 2) at their real sizes.

Each linear layer with its epilogue, BatchNorm in both modes, and every epilogue as an elementwise operation. `select`
also knows the epilogues from one Python function and the gated pairs of products.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from benchmarks.cases import (
    COLUMN,
    ELEMENTWISE,
    EPS,
    GLU,
    LINEAR,
    MOMENTUM,
    SCALAR,
    Case,
    Operand,
    Problem,
    Setting,
    Shape,
    custom,
    glu,
    matching,
)

_REAL, _LARGE_BATCH, _WIDE = Shape(1024, 8192, 8192), Shape(16384, 4096, 4096), Shape(4096, 393216)
# For a CPU: the sizes that the problem set had earlier.
EARLIER = {LINEAR: Shape(128, 512, 1024), ELEMENTWISE: Shape(16, 16384)}

_NORMAL, _TWO = Operand(COLUMN, std=1.0), Operand(SCALAR, 2.0)
_SCALE, _DIVISOR, _BIAS = {"scale": _TWO}, {"divisor": _TWO}, {"bias": _NORMAL}
_LINEAR_BIAS = {"bias": Operand(COLUMN, of_linear=True)}
# Statistics, weight and bias are random: BatchNorm's initial zeros and ones would hide errors.
_BATCH_NORM = {
    "scale": _NORMAL,
    "running_mean": Operand(COLUMN, std=0.1),
    "running_var": Operand(COLUMN, 0.5, 1.5),
    "weight": _NORMAL,
    "bn_bias": _NORMAL,
}


def _sigmoid_scale_residual(z: Tensor, scale: float) -> Tensor:
    return torch.sigmoid(z) * scale + z


def _scale_batch_norm(
    z: Tensor, scale: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    return F.batch_norm(z * scale, mean, var, weight, bias, False, MOMENTUM, EPS)


def _bias_relu(z: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(z + bias)


def _relu_div(z: Tensor, divisor: float) -> Tensor:
    return torch.relu(z) / divisor


def problems() -> list[Problem]:
    """All of them; our functions are looked up at each call."""
    with_bias = functools.partial(Problem, LINEAR, linear_bias=True)
    alone = functools.partial(Problem, ELEMENTWISE)
    # fmt: off
    batch_norm = with_bias("scale_batch_norm", "batch_norm(scale * z)", _LINEAR_BIAS | _BATCH_NORM, _scale_batch_norm,
                           epigemm.linear_scale_batch_norm, models=(("2/33", _REAL), ("2/39", _LARGE_BATCH)))
    return [
        Problem(LINEAR, "bias_relu", "relu(z + bias)", _BIAS, _bias_relu, epigemm.linear_relu,
                models=(("2/76", _REAL),), quack="relu"),
        with_bias("sigmoid_scale_residual", "z + scale * sigmoid(z)", _LINEAR_BIAS | _SCALE, _sigmoid_scale_residual,
                  epigemm.linear_sigmoid_scale_residual, models=(("2/70", _REAL),)),
        batch_norm,
        # Problems 33 and 39 never call eval(): they train.
        replace(batch_norm, training=True),
        with_bias("relu_div", "relu(z) / divisor", _LINEAR_BIAS | _DIVISOR, _relu_div, epigemm.linear_relu_div,
                  models=(("2/63", _REAL),)),
        alone("bias_relu", "relu(x + bias)", _BIAS, _bias_relu, epigemm.bias_relu),
        alone("sigmoid_scale_residual", "x + scale * sigmoid(x)", _SCALE, _sigmoid_scale_residual,
              epigemm.sigmoid_scale_residual),
        alone("scale_batch_norm", "batch_norm(scale * x)", _BATCH_NORM, _scale_batch_norm, epigemm.scale_batch_norm),
        alone("relu_div", "relu(x) / divisor", _DIVISOR, _relu_div, epigemm.relu_div),
        alone("sigmoid", "sigmoid(x)", {}, torch.sigmoid, epigemm.sigmoid, models=(("1/21", _WIDE),)),
    ]
    # fmt: on


def sizes(problem: Problem, *, real: bool) -> dict[Shape, tuple[str, ...]]:
    """The sizes of a problem, each with the models that have it; without a model, the most common size."""
    found: dict[Shape, tuple[str, ...]] = {}
    for number, shape in problem.models or (("", _WIDE),):
        shape = shape if real else EARLIER.get(problem.kind, EARLIER[LINEAR])
        found[shape] = (*found.get(shape, ()), *filter(None, [number]))
    return found


def select(
    patterns: Sequence[str], shapes: Sequence[Shape], settings: Sequence[Setting], *, real: bool
) -> list[Case]:
    """The cases of a run, the arithmetics of one problem and size next to each other.

    Args:
        patterns: names of problems, see `matching`, or numbers of models; none: those of `problems`.
        shapes: in place of the problems' own.
        settings: elementwise problems have no product: "highest" and "high" are one case for them.
        real: today's sizes, not the earlier ones.

    Raises:
        ValueError: a pattern matches nothing, or no case is left.
    """
    five = problems()
    every = {problem.name: problem for problem in (*five, *custom.problems().values(), *glu.problems())}
    by_number = {number: name for name, problem in every.items() for number, _ in problem.models if number}
    rest = [pattern for pattern in patterns if pattern not in by_number]
    chosen = {name for name, p in every.items() for number, _ in p.models if number in patterns}
    chosen |= set(matching(list(every), rest, "the problems are") if rest else [])
    chosen |= set() if patterns else {problem.name for problem in five}
    cases: dict[str, Case] = {}
    for problem in [problem for name, problem in every.items() if name in chosen]:
        own = sizes(problem, real=real)
        is_linear = problem.kind != ELEMENTWISE
        for shape in [s for s in shapes if (s.k is not None) == is_linear] if shapes else own:
            for setting in settings:
                asked = setting if is_linear else Setting(setting.dtype_name, "highest")
                case = Case(problem, shape, asked, own.get(shape, ()))
                cases.setdefault(case.name, case)
    if odd := [name for name, case in cases.items() if case.problem.kind == GLU and case.shape.n % 2]:
        raise ValueError(f"--sizes: the one product of a pair has an even N, got {odd[0]}")
    if not cases:
        raise ValueError("no case is left: --sizes MxNxK go with linear problems, MxN with elementwise ones")
    return list(cases.values())
