"""The Python half of the epilogue registry: operands and PyTorch reference of every epilogue.

The list itself is `csrc/epilogue/registry.def`; a test asserts that both halves name the same epilogues and
operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epigemm._native import registry
from epigemm.epilogues.kinds import PER_COLUMN, SCALAR

ACCUMULATOR = "accumulator"


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of the epilogue's arithmetic for tensors of `dtype`: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Operand:
    """One operand of an epilogue: what it is broadcast along, its name and its element type.

    `folded` operands have the type of the epilogue's arithmetic (`compute_dtype`), the others that of x. A matrix that
    is `shared` may have 1 in place of its last leading axes (`OperandKind.shares_rows`).
    """

    kind: str
    name: str
    folded: bool = False
    shared: bool = False

    def dtype(self, x_dtype: torch.dtype) -> torch.dtype:
        """The element type of this operand in a call with an x of `x_dtype`."""
        return compute_dtype(x_dtype) if self.folded else x_dtype


class Epilogue:
    """One epilogue: its name and formula, its operands, and a differentiable reference in plain PyTorch.

    `compute(z, *operands, *scalars)` computes in the type of the epilogue's arithmetic. z is the accumulator, plus the
    bias if the epilogue has one.
    """

    def __init__(
        self,
        name: str,
        formula: str,
        compute: Callable[..., Tensor],
        *operands: Operand,
        linear: bool = True,
    ) -> None:
        self.name = name
        self.number = -1  # its position in registry.def
        self.prelinked = name  # the name under which the package may have its kernels
        self.functor = ""  # the struct in csrc/epilogue/NAME.h
        self.formula = formula
        self.compute = compute
        self.operands = (Operand(ACCUMULATOR, ACCUMULATOR), *operands)
        self.linear = linear
        self.takes_bias = any(operand.name == "bias" for operand in operands)
        self.vectors = tuple(o for o in operands if o.kind == PER_COLUMN and o.name != "bias")
        scalars = [o for o in operands if o.kind == SCALAR]
        self.scalar = scalars[0] if scalars else None
        self.operand_count = len(self.vectors) + len(scalars)  # without the accumulator and the bias

    first = "x"  # the name of the elementwise function's first argument
    takes_0d = True  # the elementwise function's first argument may be 0-d if no operand has axes
    chooses_dtypes = False  # callers choose for each operand between x's dtype and the arithmetic's
    order_of_operands = " (vectors first; a scalar as a 0-d tensor or as a number)"
    has_cpu_loop = True  # csrc/cpu runs it
    derives_operands = False  # its derivative's kernel also computes the operands' gradients
    unread: frozenset[int] = frozenset()  # the positions in `operands` of what no derivative depends on
    bias_place: int | None = None  # for a linked epilogue: the position of its bias in `operands`

    @property
    def after_bias(self) -> Epilogue | None:
        """The epilogue without its bias, if there is one in the registry."""
        return None

    def __repr__(self) -> str:
        return f"Epilogue({self.name}: {self.formula})"

    def source(self, symbol: str) -> str:
        """The text for NVRTC that goes into an open kernel: see csrc/open/functor.h."""
        from epigemm.epilogues.tracing.source import built_in_source

        # For results of 16 bits shorter instructions are used.
        number = "float"
        if "float16" in symbol and "_derivative_" not in symbol:
            number = "epigemm::RoundedToBFloat16" if "bfloat16" in symbol else "epigemm::Rounded"
        return built_in_source(self.name, self.functor, number)

    def describe_error(self, source: str, log: str) -> str:
        """NVRTC's error for a source, in one line."""
        del source
        return log.strip().split("\n")[0]

    def in_order(
        self, bias: Tensor | None, operands: Sequence[Tensor], scalars: Sequence[float]
    ) -> tuple[Tensor | float | None, ...] | None:
        """A call's operands, one value for each after the accumulator; None if their number does not fit.

        A built-in epilogue has its vectors first, and at most one scalar.
        """
        if len(operands) + len(scalars) != self.operand_count or (bias is not None and not self.takes_bias):
            return None
        return (bias, *operands, *scalars) if self.takes_bias else (*operands, *scalars)

    def reference(
        self, acc: Tensor, bias: Tensor | None, operands: Sequence[Tensor], scalars: Sequence[float]
    ) -> Tensor:
        """The epilogue in plain differentiable PyTorch, rounded once to the dtype of `acc`."""
        z = acc.to(compute_dtype(acc.dtype))
        if bias is not None:
            z = z + bias.to(z.dtype)
        return self.compute(z, *operands, *scalars).to(acc.dtype)


_BIAS = Operand(PER_COLUMN, "bias")


EPILOGUES: dict[str, Epilogue] = {}
_NATIVE = {half["name"]: (number, half["functor"]) for number, half in enumerate(registry())}


def _built_in(
    name: str, formula: str, compute: Callable[..., Tensor], *operands: Operand, linear: bool = True
) -> Epilogue:
    """A row of `EPILOGUES`."""
    made = EPILOGUES[name] = Epilogue(name, formula, compute, *operands, linear=linear)
    made.number, made.functor = _NATIVE.get(name, (made.number, made.functor))
    return made


BIAS = _built_in("bias", "D = acc + bias[n]", lambda z: z, _BIAS)
BIAS_RELU = _built_in("bias_relu", "D = relu(acc + bias[n])", torch.relu, _BIAS)
SIGMOID_SCALE_RESIDUAL = _built_in(
    "sigmoid_scale_residual",
    "z = acc + bias[n]; D = z + scale * sigmoid(z)",
    lambda z, scale: z + scale * torch.sigmoid(z),
    _BIAS,
    Operand(SCALAR, "scale", folded=True),
)
SCALE_BATCH_NORM = _built_in(
    "scale_batch_norm",
    "D = multiplier[n] * acc + offset[n]",
    lambda acc, multiplier, offset: multiplier * acc + offset,
    Operand(PER_COLUMN, "multiplier", folded=True),
    Operand(PER_COLUMN, "offset", folded=True),
)
RELU_DIV = _built_in(
    "relu_div",
    "D = relu(acc + bias[n]) / divisor",
    lambda z, divisor: torch.relu(z) / divisor,
    _BIAS,
    Operand(SCALAR, "divisor", folded=True),
)
SIGMOID = _built_in("sigmoid", "D = sigmoid(acc)", torch.sigmoid, linear=False)
BIAS_GELU = _built_in(
    "bias_gelu",
    "z = acc + bias[n]; D = z (1 + erf(z / sqrt(2))) / 2",
    torch.nn.functional.gelu,
    _BIAS,
)
BIAS_GELU_TANH = _built_in(
    "bias_gelu_tanh",
    "z = acc + bias[n]; D = z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) / 2",
    functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    _BIAS,
)
BIAS_SILU = _built_in("bias_silu", "z = acc + bias[n]; D = z sigmoid(z)", torch.nn.functional.silu, _BIAS)
BIAS_TANH = _built_in("bias_tanh", "D = tanh(acc + bias[n])", torch.tanh, _BIAS)
_GELUS = {"none": BIAS_GELU, "tanh": BIAS_GELU_TANH}


def gelu_epilogue(approximate: str) -> Epilogue:
    """The epilogue with this GELU.

    Raises:
        TypeError: `approximate` is no string.
        ValueError: there is no such form.
    """
    if not isinstance(approximate, str):
        raise TypeError(
            f"approximate: got {type(approximate).__name__}; accepted is {' or '.join(map(repr, _GELUS))}"
        )
    if approximate not in _GELUS:
        raise ValueError(f"approximate: got {approximate!r}; accepted is {' or '.join(map(repr, _GELUS))}")
    return _GELUS[approximate]


LINKED: dict[str, Epilogue] = {}
"""The epilogues that were made at run time: see `epigemm.epilogues.traced`."""

MAKERS: list[Callable[[str], Epilogue | None]] = []
"""Functions that make an epilogue of the package by its name, which an exported program may use first."""


def named(name: str) -> Epilogue | None:
    """The epilogue of this name, built in or made at run time."""
    found = EPILOGUES.get(name) or LINKED.get(name)
    return found or next((made for make in MAKERS if (made := make(name)) is not None), None)


FOLDED = ("bias", "scale", "running_mean", "running_var", "bn_weight", "bn_bias")
"""The vectors that fold into scale_batch_norm's multiplier and offset, in the operator's order."""


def fold_batch_norm_reference(like: Tensor, vectors: Sequence[Tensor | None], eps: float) -> Tensor:
    """`folded_by_reference` as one tensor `[2, N]`."""
    return torch.stack(folded_by_reference(like, vectors, eps))


def folded_by_reference(like: Tensor, vectors: Sequence[Tensor | None], eps: float) -> tuple[Tensor, Tensor]:
    """The fold of scale and inference BatchNorm into `multiplier` and `offset`, in differentiable PyTorch.

        multiplier = scale * g,  offset = (bias * scale - mean) * g + bn_bias,  g = bn_weight / sqrt(var + eps)

    An absent vector counts as neutral: 0 for bias, mean and bn_bias, 1 for scale and bn_weight. Without `running_var`
    there is no normalisation (g = bn_weight). Both are `[N]`, in the epilogue's arithmetic type.
    """
    bias, scale, running_mean, running_var, bn_weight, bn_bias = vectors
    # The offset is a difference of products, which may cancel. fp64 keeps all bits that fp32 can hold. MPS has no fp64.
    wide = torch.float32 if like.device.type == "mps" else torch.float64

    def read(vector: Tensor | None, absent: float) -> Tensor:
        return like.new_full((), absent, dtype=wide) if vector is None else vector.to(wide)

    gain = read(bn_weight, 1.0)
    if running_var is not None:
        gain = gain / torch.sqrt(running_var.to(wide) + eps)
    scaled = read(scale, 1.0)
    multiplier = scaled * gain
    # Absent vectors are left out: an infinity would make NaN of a product with their zeros.
    offset = read(bn_bias, 0.0)
    if bias is not None or running_mean is not None:
        shifted = read(bias, 0.0) * scaled if bias is not None else read(bias, 0.0)
        offset = (shifted - read(running_mean, 0.0)) * gain + offset
    offset = offset if offset.dim() else offset.expand_as(multiplier)
    # Both have the full shape; apart, each has the gradients of its own.
    dtype = compute_dtype(like.dtype)
    return multiplier.expand_as(offset).to(dtype), offset.to(dtype)
