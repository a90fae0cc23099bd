"""What is computed: a problem, its size, its arithmetic, and the tensors that go in.

A `Problem` is data: the formula in plain PyTorch, its operands, our function for it. The lists of them are beside this
file: `problems` (the five models), `custom` (epilogues from one Python function), `glu` (pairs of products), `host`,
`random` and `short` (shapes).
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = ("highest", "high")
EPS, MOMENTUM = 1e-5, 0.1
LINEAR, ELEMENTWISE, CUSTOM, GLU = "linear", "elementwise", "custom", "glu"
# The kinds of operands, by the names that they have in epigemm.
COLUMN, ROW, MATRIX, SCALAR = "PerColumn", "PerRow", "Matrix", "Scalar"
COUNTER = "num_batches_tracked"


@dataclass(frozen=True)
class Shape:
    """M x N x K of a linear problem; ``k`` is None for an elementwise one on an M x N tensor."""

    m: int
    n: int
    k: int | None = None

    def __str__(self) -> str:
        return "x".join(str(size) for size in (self.m, self.n, self.k) if size is not None)

    @classmethod
    def parse(cls, text: str) -> Shape:
        """``"1024x8192x8192"`` (M x N x K) or ``"4096x393216"`` (M x N).

        Raises:
            ValueError: not two or three positive numbers joined by "x".
        """
        parts = text.lower().split("x")
        if len(parts) not in (2, 3) or not all(part.isdigit() and int(part) > 0 for part in parts):
            raise ValueError(
                f"size: expected MxNxK (linear) or MxN (elementwise), positive numbers, got {text!r}"
            )
        return cls(*(int(part) for part in parts))


@dataclass(frozen=True)
class Setting:
    """The arithmetic asked for: a dtype and, for fp32, torch's matmul precision."""

    dtype_name: str
    precision: str

    @property
    def dtype(self) -> torch.dtype:
        """The tensors' dtype."""
        return DTYPES[self.dtype_name]

    @property
    def arithmetic(self) -> str:
        """What PyTorch multiplies fp32 tensors in: "ieee" or "tf32" (16-bit dtypes ignore it)."""
        return "tf32" if self.dtype_name == "fp32" and self.precision == "high" else "ieee"

    def __str__(self) -> str:
        return f"fp32 {self.precision}" if self.dtype_name == "fp32" else self.dtype_name


@dataclass(frozen=True)
class Operand:
    """An operand: its kind, and its values: U[low, high), or ``low`` itself for a scalar; with ``std`` N(0, std^2).

    ``of_linear``: drawn as ``nn.Linear`` draws its bias.
    """

    kind: str
    low: float = 0.0
    high: float = 0.0
    std: float = 0.0
    of_linear: bool = False


@dataclass(frozen=True)
class Parameters:
    """The values of a problem's operands: tensors [N], [M, 1] or [M, N], and numbers."""

    vectors: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)

    def columns(self, chosen: Tensor | slice, dtype: torch.dtype) -> Parameters:
        """The parameters of some output columns, converted to ``dtype``."""
        return replace(
            self, vectors={name: _columns(v, chosen).to(dtype) for name, v in self.vectors.items()}
        )


def _columns(operand: Tensor, chosen: Tensor | slice) -> Tensor:
    """Some output columns of [N] or [M, N]; of [M, 1] all there is."""
    return operand if operand.dim() == 2 and operand.shape[1] == 1 else operand[..., chosen]


@dataclass(frozen=True)
class Problem:
    """One thing to compute, at any size.

    Attributes:
        kind: "linear", "elementwise", "custom": a linear one whose epilogue the user wrote, or "glu": a gated pair of
            products.
        epilogue: its name.
        formula: one line of mathematics.
        operands: by name, in the order in which our function takes them.
        after: what follows ``F.linear`` in plain PyTorch (alone for an elementwise problem): a function of z and of the
            operands, without the bias if ``F.linear`` adds it.
        ours: our function, of x, the weight, the operands and ``out``; None where there is no built-in.
        linear_bias: whether the operand "bias" is given to ``F.linear``.
        function: of "custom": of acc and of the operands by their names; `epigemm.epilogue` gets it.
        training: BatchNorm with batch statistics; running statistics are updated.
        models: (name, size) of models: their numbers in the public problem set, or layers.
        quack: QuACK's name for it: an activation of ``gemm_act``, "add" for ``gemm_add``; "" where it has none.
        cancels: terms of the size of z cancel within it, as in GELU's 1 + erf(z): its error is relative to z, too.
    """

    kind: str
    epilogue: str
    formula: str
    operands: Mapping[str, Operand]
    after: Callable[..., Tensor]
    ours: Callable[..., Tensor] | None = None
    linear_bias: bool = False
    function: Callable[..., Tensor] | None = None
    training: bool = False
    models: tuple[tuple[str, Shape], ...] = ()
    quack: str = ""
    cancels: bool = False

    @property
    def name(self) -> str:
        """``linear/bias_relu``, ``linear/scale_batch_norm:train``, ``elementwise/sigmoid``."""
        return f"{self.kind}/{self.epilogue}" + (":train" if self.training else "")

    def inner_bias(self, p: Parameters) -> Tensor | None:
        """The bias that ``F.linear`` adds, or None."""
        return p.vectors["bias"] if self.linear_bias else None

    def values(self, p: Parameters) -> dict[str, Tensor | float]:
        """The operands as plain PyTorch sees them: columns [N], rows [M, 1], matrices [M, N], numbers."""
        known: dict[str, Tensor | float] = {**p.vectors, **p.scalars}
        return {name: known[name] for name in self.operands}

    def given(self, p: Parameters) -> dict[str, Tensor | float]:
        """The operands as a call of ours takes them: rows in the shape of x without its last axis."""
        rows = [name for name, operand in self.operands.items() if operand.kind == ROW]
        return self.values(p) | {name: p.vectors[name].squeeze(1) for name in rows}

    def pointwise(self, z: Tensor, p: Parameters) -> Tensor:
        """What follows ``F.linear`` but for training."""
        values = self.values(p)
        if self.linear_bias:
            values.pop("bias")
        return self.after(z, *values.values())

    def finish(self, z: Tensor, p: Parameters) -> Tensor:
        """Everything that follows ``F.linear``."""
        return train_batch_norm(z * p.vectors["scale"], p) if self.training else self.pointwise(z, p)

    def eager(self, x: Tensor, weight: Tensor | None, p: Parameters) -> Tensor:
        """The whole problem as PyTorch's users write it."""
        return self.finish(x if weight is None else F.linear(x, weight, self.inner_bias(p)), p)


def train_batch_norm(y: Tensor, p: Parameters) -> Tensor:
    """What ``nn.BatchNorm1d`` does in training mode, its counter included."""
    v = p.vectors
    v[COUNTER].add_(1)
    return F.batch_norm(
        y, v["running_mean"], v["running_var"], v["weight"], v["bn_bias"], True, MOMENTUM, EPS
    )


@dataclass(frozen=True)
class Case:
    """A problem at one size in one arithmetic."""

    problem: Problem
    shape: Shape
    setting: Setting
    models: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Unique within a run."""
        return f"{self.problem.name} {self.shape} {self.setting}"

    @property
    def columns(self) -> int:
        """Of the result: N, or half of it for a pair of products."""
        return self.shape.n // 2 if self.problem.kind == GLU else self.shape.n

    @property
    def is_fp32_product(self) -> bool:
        """Whether the weight may be packed."""
        return self.shape.k is not None and self.setting.dtype_name == "fp32"

    @property
    def flops(self) -> int:
        """Floating-point operations of the product alone (0 for elementwise problems)."""
        return 2 * self.shape.m * self.shape.n * self.shape.k if self.shape.k else 0

    @property
    def bytes(self) -> int:
        """The fewest bytes the problem moves: every matrix once in, the result once out."""
        m, n, k = self.shape.m, self.shape.n, self.shape.k
        elements = m * k + n * k + m * n if k else 2 * m * n
        elements += m * n * sum(operand.kind == MATRIX for operand in self.problem.operands.values())
        return elements * self.setting.dtype.itemsize


@dataclass
class Data:
    """The tensors of one case."""

    x: Tensor
    weight: Tensor | None
    parameters: Parameters

    def refill(self, signed: bool, seed: int) -> None:
        """Overwrite x in place: N(0, 1), or U[0, 1) as the problem set does.

        Uniform inputs alone would hide errors: relu is nearly the identity on them, sigmoid stays in [0.5, 0.74).
        """
        generator = torch.Generator(self.x.device).manual_seed(seed)
        if signed:
            self.x.normal_(generator=generator)
        else:
            self.x.uniform_(generator=generator)


def make_data(case: Case, device: torch.device, seed: int) -> Data:
    """Random tensors of the problem set's distributions, drawn on the device: x in U[0, 1)."""
    shape, dtype = case.shape, case.setting.dtype
    generator = torch.Generator(device).manual_seed(seed)
    parameters = _draw(case.problem, shape, dtype, generator)
    weight = None
    if shape.k is not None:
        bound = 1.0 / math.sqrt(shape.k)
        weight = torch.empty(shape.n, shape.k, dtype=dtype, device=device)
        weight.uniform_(-bound, bound, generator=generator)
    data = Data(torch.empty(shape.m, shape.k or shape.n, dtype=dtype, device=device), weight, parameters)
    data.refill(signed=False, seed=seed + 1)
    return data


def _draw(problem: Problem, shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Parameters:
    device = generator.device
    sizes = {COLUMN: (shape.n,), ROW: (shape.m, 1), MATRIX: (shape.m, shape.n)}
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, float] = {}
    for name, operand in problem.operands.items():
        if operand.kind == SCALAR:
            scalars[name] = operand.low
            continue
        low, high = operand.low, operand.high
        if operand.of_linear:
            high = 1.0 / math.sqrt(shape.k or 1)
            low = -high
        values = torch.empty(sizes[operand.kind], device=device)
        if operand.std:
            values.normal_(std=operand.std, generator=generator)
        else:
            values.uniform_(low, high, generator=generator)
        tensors[name] = values.to(dtype)
    if problem.training:
        tensors[COUNTER] = torch.zeros((), dtype=torch.long, device=device)
    return Parameters(tensors, scalars)


def matching(names: Sequence[str], patterns: Sequence[str], where: str) -> list[str]:
    """The names that patterns mean: a name in full means that alone, else a part of it or a shell pattern.

    Args:
        names: all there are.
        patterns: none: all names.
        where: for the message: the option that they belong to.

    Raises:
        ValueError: a pattern matches nothing.
    """
    found: set[str] = set()
    for pattern in patterns:
        matched = (
            {pattern} & set(names)
            or set(fnmatch.filter(names, pattern))
            or {name for name in names if pattern in name}
        )
        if not matched:
            raise ValueError(f"--cases: {pattern!r} matches nothing; {where}: {', '.join(names)}")
        found |= matched
    return [name for name in names if not patterns or name in found]


def compile_in_this_process() -> None:
    """Inductor's processes, which start in the background, would take cores from the host that is timed."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1
