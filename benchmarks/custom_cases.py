"""What ``python -m benchmarks --custom`` measures: epilogues that models have, each as one Python function.

The same function is given to `epigemm.epilogue`, and to eager PyTorch and its compilers behind ``F.linear``. Where it
adds a bias first, the rivals get that bias inside ``F.linear``, as users write it, and the rest of the function.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from benchmarks import peers_quack
from benchmarks.cases import Case, Problem, Setting, Shape
from benchmarks.formulas import Draw, Formula, Parameters

# The kinds of operands, by the names that they have in epigemm.
COLUMN, ROW, MATRIX, SCALAR = "PerColumn", "PerRow", "Matrix", "Scalar"
SIZES = (Shape(1024, 8192, 8192), Shape(16384, 4096, 4096), Shape(4096, 1024, 4096))
CPU_SIZES = (Shape(16, 64, 48),)
# Layers of transformers and recommenders whose K is short, so that the epilogue takes a good part of the time:
# ``--layers``. M is tokens, or rows of a batch.
LAYERS = {
    "BERT-base, 512 x 32 tokens, intermediate": Shape(16384, 3072, 768),
    "BERT-base, 128 x 32 tokens, attention output": Shape(4096, 768, 768),
    "BERT-large, 512 tokens, intermediate": Shape(512, 4096, 1024),
    "BERT-large, 384 x 8 tokens, attention output": Shape(3072, 1024, 1024),
    "ViT-B/16, 8 images, MLP": Shape(1576, 3072, 768),
    "ViT-B/16, 64 images, attention output": Shape(12608, 768, 768),
    "ViT-S/16, 64 images, MLP": Shape(12608, 1536, 384),
    "Swin-T, 64 images, third stage, MLP": Shape(12544, 1536, 384),
    "Swin-T, 64 images, fourth stage, MLP": Shape(3136, 3072, 768),
    "Mixer-B/16, 32 images, channels": Shape(6272, 3072, 768),
    "GPT-2, 1024 x 8 tokens, MLP": Shape(8192, 3072, 768),
    "GPT-2 medium, 1024 x 8 tokens, MLP": Shape(8192, 4096, 1024),
    "T5-small, 512 x 8 tokens, feed-forward": Shape(4096, 2048, 512),
    "Whisper base, 8 x 30 s, MLP": Shape(12000, 2048, 512),
    "FT-Transformer, 1024 rows x 32 features": Shape(32768, 512, 256),
    "DLRM, bottom MLP, 32768 rows": Shape(32768, 256, 512),
    "DLRM, top MLP, 32768 rows": Shape(32768, 1024, 1024),
    "DLRM, top MLP, 2048 rows": Shape(2048, 1024, 1024),
    "Wide & Deep, 50000 rows": Shape(50000, 512, 1024),
    "DeepFM, 10000 rows": Shape(10000, 400, 400),
}
SETTINGS = (Setting("bf16", "highest"), Setting("fp32", "highest"))
_BIAS = "linear_bias"
"""Where `Parameters` has the bias that ``F.linear`` adds."""


@dataclass(frozen=True)
class Given:
    """An operand: its kind, and its sample values: U[low, high), or ``low`` itself for a scalar."""

    kind: str
    low: float
    high: float = 0.0


@dataclass(frozen=True)
class CustomCase:
    """One epilogue.

    Attributes:
        function: of acc and of the operands by their names.
        formula: one line of mathematics.
        operands: by name, in the function's order.
        after_bias: the function without its bias, where it adds one first; takes z and the other operands.
        quack: QuACK's name for it: an activation of ``gemm_act``, `peers_quack.ADD` for ``gemm_add``; "" where it has
            none.
        builtin: our built-in function for the same, given x, weight, bias, the other operands and ``out``.
        cancels: see `benchmarks.formulas.Formula`.
    """

    function: Callable[..., Tensor]
    formula: str
    operands: Mapping[str, Given]
    after_bias: Callable[..., Tensor] | None = None
    quack: str = ""
    builtin: Callable[..., Tensor] | None = None
    cancels: bool = False

    @property
    def name(self) -> str:
        """The function's."""
        return self.function.__name__

    def values(self, parameters: Parameters) -> dict[str, Tensor | float]:
        """The operands as the Python function sees them: columns [N], rows [M, 1], matrices [M, N], numbers."""
        known: dict[str, Tensor | float] = {**parameters.vectors, **parameters.scalars}
        return {name: known[self._stored(name)] for name in self.operands}

    def given(self, parameters: Parameters) -> dict[str, Tensor | float]:
        """The operands as a call of ours takes them: rows in the shape of x without its last axis."""
        rows = [name for name, operand in self.operands.items() if operand.kind == ROW]
        values = self.values(parameters)
        return values | {name: parameters.vectors[name].squeeze(1) for name in rows}

    def draw(self, draw: Draw) -> Parameters:
        """Sample values of one size."""
        shapes = {COLUMN: (draw.n,), ROW: (draw.rows, 1), MATRIX: (draw.rows, draw.n)}
        tensors, scalars = {}, {}
        for name, operand in self.operands.items():
            if operand.kind == SCALAR:
                scalars[name] = operand.low
            else:
                tensors[self._stored(name)] = draw.uniform(operand.low, operand.high, shapes[operand.kind])
        return Parameters(tensors, scalars)

    def pointwise(self, z: Tensor, parameters: Parameters) -> Tensor:
        """What follows ``F.linear``, which has added the bias if there is one."""
        values = self.values(parameters)
        if self.after_bias is None:
            return self.function(z, **values)
        values.pop("bias")
        return self.after_bias(z, *values.values())

    def _stored(self, name: str) -> str:
        return _BIAS if name == "bias" and self.after_bias is not None else name


def _of_bias(function: Callable[..., Tensor], formula: str, **more: Any) -> CustomCase:
    return CustomCase(function, formula, {"bias": Given(COLUMN, -2.0, 2.0)}, **more)


def bias_relu(acc: Tensor, bias: Tensor) -> Tensor:
    """The built-in's copy."""
    return torch.relu(acc + bias)


def bias_gelu(acc: Tensor, bias: Tensor) -> Tensor:
    """Of transformers' feed-forward layers."""
    return F.gelu(acc + bias)


def residual(acc: Tensor, bias: Tensor, shortcut: Tensor) -> Tensor:
    """The most common of all."""
    return acc + bias + shortcut


def gate(acc: Tensor, bias: Tensor, up: Tensor) -> Tensor:
    """SwiGLU: the gate's product beside the other's result."""
    return F.silu(acc + bias) * up


def layer_scale_residual(acc: Tensor, bias: Tensor, gamma: Tensor, shortcut: Tensor) -> Tensor:
    """Of vision transformers."""
    return (acc + bias) * gamma + shortcut


def bias_silu(acc: Tensor, bias: Tensor) -> Tensor:
    """Of diffusion models' time embeddings."""
    return F.silu(acc + bias)


def sigmoid_scale_residual(acc: Tensor, bias: Tensor, scale: float) -> Tensor:
    """The built-in's copy."""
    z = acc + bias
    return torch.sigmoid(z) * scale + z


def _sigmoid_scale_residual(z: Tensor, scale: float) -> Tensor:
    return torch.sigmoid(z) * scale + z


def bias_gelu_tanh(acc: Tensor, bias: Tensor) -> Tensor:
    """GPT-2's."""
    return F.gelu(acc + bias, approximate="tanh")


def batch_norm_relu(acc: Tensor, multiplier: Tensor, offset: Tensor) -> Tensor:
    """A folded BatchNorm."""
    return torch.relu(acc * multiplier + offset)


def dequantise(acc: Tensor, row_scale: Tensor, column_scale: Tensor) -> Tensor:
    """Of scaled operands."""
    return acc * row_scale * column_scale


def mish(acc: Tensor, bias: Tensor) -> Tensor:
    """Softplus in it."""
    return F.mish(acc + bias)


def clamp(acc: Tensor, bias: Tensor, low: float, high: float) -> Tensor:
    """Limits that are known at run time."""
    return torch.clamp(acc + bias, low, high)


def tanh(acc: Tensor) -> Tensor:
    """No operand at all."""
    return torch.tanh(acc)


_BIASED, _SHORTCUT = Given(COLUMN, -2.0, 2.0), Given(MATRIX, -1.0, 1.0)
_CASES = (
    # The most telling first: a budget of time cuts the last.
    _of_bias(bias_relu, "relu(z + bias)", after_bias=torch.relu, quack="relu", builtin=epigemm.linear_relu),
    _of_bias(bias_gelu, "gelu(z + bias)", after_bias=F.gelu, quack="gelu_erf", cancels=True),
    CustomCase(
        residual,
        "z + bias + matrix",
        {"bias": _BIASED, "shortcut": _SHORTCUT},
        after_bias=lambda z, shortcut: z + shortcut,
        quack=peers_quack.ADD,
    ),
    CustomCase(
        gate,
        "silu(z + bias) * matrix",
        {"bias": _BIASED, "up": _SHORTCUT},
        after_bias=lambda z, up: F.silu(z) * up,
    ),
    CustomCase(
        layer_scale_residual,
        "(z + bias) * column + matrix",
        {"bias": _BIASED, "gamma": Given(COLUMN, 0.1, 1.0), "shortcut": _SHORTCUT},
        after_bias=lambda z, gamma, shortcut: z * gamma + shortcut,
    ),
    CustomCase(
        sigmoid_scale_residual,
        "sigmoid(z + bias) * scale + z + bias",
        {"bias": _BIASED, "scale": Given(SCALAR, 2.0)},
        after_bias=_sigmoid_scale_residual,
        builtin=epigemm.linear_sigmoid_scale_residual,
    ),
    _of_bias(bias_silu, "silu(z + bias)", after_bias=F.silu, quack="silu"),
    _of_bias(
        bias_gelu_tanh,
        "gelu(z + bias), tanh",
        after_bias=functools.partial(F.gelu, approximate="tanh"),
        quack="gelu_tanh_approx",
        cancels=True,
    ),
    CustomCase(
        batch_norm_relu,
        "relu(z * column + column)",
        {"multiplier": Given(COLUMN, 0.5, 1.5), "offset": Given(COLUMN, -1.0, 1.0)},
    ),
    CustomCase(
        dequantise,
        "z * row * column",
        {"row_scale": Given(ROW, 0.5, 1.5), "column_scale": Given(COLUMN, 0.5, 1.5)},
    ),
    _of_bias(mish, "mish(z + bias)", after_bias=F.mish),
    CustomCase(
        clamp,
        "clamp(z + bias, low, high)",
        {"bias": _BIASED, "low": Given(SCALAR, -0.75), "high": Given(SCALAR, 0.5)},
        after_bias=torch.clamp,
    ),
    CustomCase(tanh, "tanh(z)", {}, quack="tanh"),
)
CASES = {case.name: case for case in _CASES}


def why_no_epilogue() -> str:
    """Why nothing can be measured; empty where `epigemm.epilogue` is there."""
    return "" if hasattr(epigemm, "epilogue") else "this build of epigemm has no epigemm.epilogue"


def decorate(case: CustomCase) -> Any:
    """The function as a user has it: annotated, and decorated by `epigemm.epilogue`."""
    library: Any = epigemm
    source: Any = case.function
    copy = FunctionType(source.__code__, source.__globals__, source.__name__, source.__defaults__)
    copy.__module__, copy.__qualname__, copy.__doc__ = source.__module__, source.__qualname__, source.__doc__
    kinds = {name: getattr(library, operand.kind) for name, operand in case.operands.items()}
    copy.__annotations__ = {"acc": Tensor, **kinds, "return": Tensor}
    return library.epilogue(copy)


def _no_such_form(*arguments: object) -> NoReturn:
    raise NotImplementedError("a custom epilogue is called by its own function")


def problem(case: CustomCase) -> Problem:
    """The epilogue as the harness knows problems."""
    formula = Formula(
        epilogue=case.name,
        formula=case.formula,
        linear_has_bias=False,
        draw=case.draw,
        pointwise=case.pointwise,
        linear=_no_such_form,
        module=_no_such_form,
        elementwise=_no_such_form,
        native=_no_such_form,
        cancels=case.cancels,
    )
    return Problem("custom", formula)


def select(
    patterns: Sequence[str], sizes: Sequence[Shape], dtypes: Sequence[str], device: torch.device
) -> list[Case]:
    """What to measure, the most telling first: size by size, at each all epilogues.

    Args:
        patterns: names, parts of names or shell patterns; none: all.
        sizes: M x N x K; none: `SIZES`, on a CPU tiny ones.
        dtypes: "bf16", "fp32"; none: both.
        device: where they are to run.

    Raises:
        ValueError: a pattern that matches nothing, a size without K, another dtype.
    """
    found = {p: [p] if p in CASES else fnmatch.filter(CASES, f"*{p}*") for p in patterns}
    if missing := [pattern for pattern, names in found.items() if not names]:
        raise ValueError(f"--cases: {missing[0]!r} matches nothing; with --custom: {', '.join(CASES)}")
    if any(shape.k is None for shape in sizes):
        raise ValueError("--sizes: --custom takes MxNxK")
    if other := sorted(set(dtypes) - {setting.dtype_name for setting in SETTINGS}):
        raise ValueError(f"--dtypes: --custom takes bf16 and fp32, got {other[0]}")
    names = [name for name in CASES if not patterns or any(name in chosen for chosen in found.values())]
    settings = [setting for setting in SETTINGS if not dtypes or setting.dtype_name in dtypes]
    return [
        Case(problem(CASES[name]), shape, setting)
        for shape in sizes or (CPU_SIZES if device.type == "cpu" else SIZES)
        for name in names
        for setting in settings
    ]


def case_name(case: Case) -> str:
    """``NAME/MxNxK``: what a record calls it, whatever the dtype."""
    return f"{case.problem.formula.epilogue}/{case.shape}"
