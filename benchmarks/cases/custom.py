"""Epilogues that models have, each as one Python function.

The same function is given to `epigemm.epilogue`, and to eager PyTorch and its compilers behind ``F.linear``. Where it
adds a bias first, the baselines get that bias inside ``F.linear``, as users write it, and the rest of the function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from benchmarks.cases import COLUMN, CUSTOM, MATRIX, ROW, SCALAR, Operand, Problem, Shape

SIZES = (Shape(1024, 8192, 8192), Shape(16384, 4096, 4096), Shape(4096, 1024, 4096))


_BIAS, _SHORTCUT = {"bias": Operand(COLUMN, -2.0, 2.0)}, Operand(MATRIX, -1.0, 1.0)


def _problem(
    name: str,
    formula: str,
    operands: dict[str, Operand],
    function: Callable[..., Tensor],
    after: Callable[..., Tensor] | None = None,
    **more: Any,
) -> Problem:
    """With `after`: what follows a bias in `function`; the baselines then give the bias to ``F.linear``."""
    inside = after is not None
    more |= {"linear_bias": inside, "function": function, "models": tuple(("", size) for size in SIZES)}
    return Problem(CUSTOM, name, formula, operands, after or function, **more)


def _sigmoid_scale_residual(acc: Tensor, bias: Tensor, scale: float) -> Tensor:
    z = acc + bias
    return torch.sigmoid(z) * scale + z


def problems() -> dict[str, Problem]:
    """By name, the most telling first: a budget of time cuts the last."""
    # fmt: off
    found = (
        _problem("bias_relu", "relu(z + bias)", _BIAS,
                 lambda acc, bias: torch.relu(acc + bias), torch.relu,
                 quack="relu", ours=epigemm.linear_relu),
        # Of transformers' feed-forward layers.
        _problem("bias_gelu", "gelu(z + bias)", _BIAS,
                 lambda acc, bias: F.gelu(acc + bias), F.gelu, quack="gelu_erf", cancels=True),
        _problem("residual", "z + bias + matrix", _BIAS | {"shortcut": _SHORTCUT},
                 lambda acc, bias, shortcut: acc + bias + shortcut, torch.add, quack="add"),
        # SwiGLU: the gate's product beside the other's result.
        _problem("gate", "silu(z + bias) * matrix", _BIAS | {"up": _SHORTCUT},
                 lambda acc, bias, up: F.silu(acc + bias) * up, lambda z, up: F.silu(z) * up),
        # Of vision transformers.
        _problem("layer_scale_residual", "(z + bias) * column + matrix",
                 _BIAS | {"gamma": Operand(COLUMN, 0.1, 1.0), "shortcut": _SHORTCUT},
                 lambda acc, bias, gamma, shortcut: (acc + bias) * gamma + shortcut,
                 lambda z, gamma, shortcut: z * gamma + shortcut),
        _problem("sigmoid_scale_residual", "sigmoid(z + bias) * scale + z + bias",
                 _BIAS | {"scale": Operand(SCALAR, 2.0)},
                 _sigmoid_scale_residual, lambda z, scale: torch.sigmoid(z) * scale + z,
                 ours=epigemm.linear_sigmoid_scale_residual),
        # Gates, and what predicts probabilities.
        _problem("sigmoid_scale", "sigmoid(z + bias) * scale", _BIAS | {"scale": Operand(SCALAR, 2.0)},
                 lambda acc, bias, scale: torch.sigmoid(acc + bias) * scale,
                 lambda z, scale: torch.sigmoid(z) * scale),
        # Of diffusion models' time embeddings.
        _problem("bias_silu", "silu(z + bias)", _BIAS,
                 lambda acc, bias: F.silu(acc + bias), F.silu, quack="silu"),
        _problem("bias_gelu_tanh", "gelu(z + bias), tanh", _BIAS,
                 lambda acc, bias: F.gelu(acc + bias, approximate="tanh"),
                 functools.partial(F.gelu, approximate="tanh"), quack="gelu_tanh_approx", cancels=True),
        # A folded BatchNorm.
        _problem("batch_norm_relu", "relu(z * column + column)",
                 {"multiplier": Operand(COLUMN, 0.5, 1.5), "offset": Operand(COLUMN, -1.0, 1.0)},
                 lambda acc, multiplier, offset: torch.relu(acc * multiplier + offset)),
        _problem("dequantise", "z * row * column",
                 {"row_scale": Operand(ROW, 0.5, 1.5), "column_scale": Operand(COLUMN, 0.5, 1.5)},
                 lambda acc, row_scale, column_scale: acc * row_scale * column_scale),
        _problem("mish", "mish(z + bias)", _BIAS, lambda acc, bias: F.mish(acc + bias), F.mish),
        # Limits that are known at run time.
        _problem("clamp", "clamp(z + bias, low, high)",
                 _BIAS | {"low": Operand(SCALAR, -0.75), "high": Operand(SCALAR, 0.5)},
                 lambda acc, bias, low, high: torch.clamp(acc + bias, low, high), torch.clamp),
        _problem("tanh", "tanh(z)", {}, lambda acc: torch.tanh(acc), quack="tanh"),
    )
    # fmt: on
    return {problem.epilogue: problem for problem in found}


@functools.cache
def decorated(name: str) -> Any:
    """The function as a user has it: annotated, and decorated by `epigemm.epilogue`; one for all sizes and types."""
    problem, library = problems()[name], epigemm
    source: Any = problem.function
    copy = FunctionType(source.__code__, source.__globals__, name)
    kinds = {name: getattr(library, operand.kind) for name, operand in problem.operands.items()}
    copy.__annotations__ = {"acc": Tensor, **kinds, "return": Tensor}
    return library.epilogue(copy)
