"""What is computed: problem x shape x arithmetic, and the tensors that go in.

The default cases are the models of the public problem set (KernelBench level 1 and 2) at their real sizes,
BatchNorm in both modes; then one elementwise case for every epilogue in the registry, and one linear case for
every registered linear epilogue that no model covers. Nothing here lists epilogues: a new registry entry
shows up by itself.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.formulas import EPS, MOMENTUM, Draw, Formula, Parameters, all_formulas, epilogue_forms

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = ("highest", "high")


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

    @property
    def pieces(self) -> str:
        """The arithmetic on fp16 pieces that stands in for it: "split", "scaled", or "" for 16-bit dtypes."""
        if self.dtype_name != "fp32":
            return ""
        return "scaled" if self.precision == "high" else "split"

    def __str__(self) -> str:
        return f"fp32 {self.precision}" if self.dtype_name == "fp32" else self.dtype_name


@dataclass(frozen=True)
class Problem:
    """One thing to compute, at any size: an epilogue behind a linear layer, or alone.

    Attributes:
        kind: "linear" or "elementwise".
        formula: the epilogue.
        training: BatchNorm with batch statistics (and running statistics updated) in place of the folded one.
        models: (problem number, real size, earlier size) in the public problem set.
    """

    kind: str
    formula: Formula
    training: bool = False
    models: tuple[tuple[str, Shape, Shape], ...] = ()

    @property
    def name(self) -> str:
        """``linear/bias_relu``, ``linear/scale_batch_norm:train``, ``elementwise/sigmoid``."""
        return f"{self.kind}/{self.formula.epilogue}" + (":train" if self.training else "")

    def finish(self, z: Tensor, parameters: Parameters) -> Tensor:
        """Everything after the linear layer, in plain PyTorch."""
        if not self.training:
            return self.formula.pointwise(z, parameters)
        return train_batch_norm(z * parameters.vectors["scale"], parameters)


def train_batch_norm(y: Tensor, parameters: Parameters) -> Tensor:
    """What ``nn.BatchNorm1d`` does in training mode, its counter included."""
    v = parameters.vectors
    v["num_batches_tracked"].add_(1)
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
        """Unique within a run, and what ``--cases`` matches against."""
        return f"{self.problem.name} {self.shape} {self.setting}"

    @property
    def on_pieces(self) -> bool:
        """Whether it is an fp32 product, which may run on fp16 pieces."""
        return self.shape.k is not None and bool(self.setting.pieces)

    @property
    def flops(self) -> int:
        """Floating-point operations of the product alone (0 for elementwise problems)."""
        return 2 * self.shape.m * self.shape.n * self.shape.k if self.shape.k else 0

    @property
    def bytes(self) -> int:
        """The fewest bytes the problem moves: every matrix once in, the result once out."""
        m, n, k = self.shape.m, self.shape.n, self.shape.k
        elements = m * k + n * k + m * n if k else 2 * m * n
        return elements * self.setting.dtype.itemsize


@dataclass
class Data:
    """The tensors of one case."""

    x: Tensor
    weight: Tensor | None
    parameters: Parameters

    def refill(self, signed: bool, seed: int) -> None:
        """Overwrite x in place: N(0, 1), or U[0, 1) as the problem set does.

        Uniform inputs alone would hide errors: relu is nearly the identity on them, sigmoid stays in [0.5,
        0.74).
        """
        generator = torch.Generator(self.x.device).manual_seed(seed)
        if signed:
            self.x.normal_(generator=generator)
        else:
            self.x.uniform_(generator=generator)


def make_data(case: Case, device: torch.device, seed: int) -> Data:
    """Random tensors of the problem set's distributions: x in U[0,1), weights as ``nn.Linear`` draws them.

    They are drawn on the device: the same distributions as the original's CPU draws, without minutes of
    transfer.
    """
    shape, dtype = case.shape, case.setting.dtype
    generator = torch.Generator(device).manual_seed(seed)
    draw = Draw(shape.n, dtype, device, generator, linear=shape.k is not None, rows=shape.m)
    parameters = case.problem.formula.draw(draw)
    weight = None
    if shape.k is not None:
        bound = 1.0 / math.sqrt(shape.k)
        weight = torch.empty(shape.n, shape.k, dtype=dtype, device=device)
        weight.uniform_(-bound, bound, generator=generator)
        if case.problem.formula.linear_has_bias:
            parameters.vectors["linear_bias"] = draw.uniform(-bound, bound)
    if case.problem.training:
        parameters.vectors["num_batches_tracked"] = torch.zeros((), dtype=torch.long, device=device)
    x = torch.empty(shape.m, shape.k or shape.n, dtype=dtype, device=device)
    data = Data(x, weight, parameters)
    data.refill(signed=False, seed=seed + 1)
    return data


_REAL = Shape(1024, 8192, 8192)
_LARGE_BATCH = Shape(16384, 4096, 4096)
_EARLIER = Shape(128, 512, 1024)
_SIGMOID = Shape(4096, 393216)
_SIGMOID_EARLIER = Shape(16, 16384)

FP32_SIZES = (
    _REAL,
    _LARGE_BATCH,
    Shape(4096, 4096, 4096),
    Shape(8192, 8192, 8192),
    Shape(256, 8192, 8192),
    Shape(128, 8192, 8192),
    Shape(16, 8192, 8192),
)
"""From squares to small batches: where an fp32 product on tensor cores is measured with one epilogue."""

# (epilogue, kind, training) -> the problems that ask for it. Problems 33 and 39 never call eval(): they
# train.
_MODELS: dict[tuple[str, str, bool], tuple[tuple[str, Shape, Shape], ...]] = {
    ("bias_relu", "linear", False): (("2/76", _REAL, _EARLIER),),
    ("sigmoid_scale_residual", "linear", False): (("2/70", _REAL, _EARLIER),),
    ("scale_batch_norm", "linear", False): (("2/33", _REAL, _EARLIER), ("2/39", _LARGE_BATCH, _EARLIER)),
    ("scale_batch_norm", "linear", True): (("2/33", _REAL, _EARLIER), ("2/39", _LARGE_BATCH, _EARLIER)),
    ("relu_div", "linear", False): (("2/63", _REAL, _EARLIER),),
    ("sigmoid", "elementwise", False): (("1/21", _SIGMOID, _SIGMOID_EARLIER),),
}


def all_problems() -> list[Problem]:
    """Every problem: the problem set's linear ones, the registry's other linear ones, elementwise ones."""
    formulas = all_formulas()
    keys = [key for key in _MODELS if key[1] == "linear"]
    for kind in ("linear", "elementwise"):
        registered = [(name, kind, False) for name, forms in epilogue_forms().items() if kind in forms]
        keys += [key for key in registered if key not in keys]
    return [
        Problem(kind, formulas[epilogue], training, _MODELS.get((epilogue, kind, training), ()))
        for epilogue, kind, training in keys
    ]


def default_shapes(problem: Problem, real: bool) -> list[tuple[Shape, tuple[str, ...]]]:
    """The sizes of a problem, each with the models that have it; without a model, the most common size."""
    shapes: dict[Shape, tuple[str, ...]] = {}
    for number, today, earlier in problem.models:
        shape = today if real else earlier
        shapes[shape] = (*shapes.get(shape, ()), number)
    if not shapes:
        linear = problem.kind == "linear"
        shapes[(_REAL if linear else _SIGMOID) if real else (_EARLIER if linear else _SIGMOID_EARLIER)] = ()
    return list(shapes.items())


def _sizes(
    problem: Problem, sizes: Sequence[Shape], sweep_m: Sequence[int], real: bool
) -> list[tuple[Shape, tuple[str, ...]]]:
    linear = problem.kind == "linear"
    chosen = default_shapes(problem, real)
    if sizes:
        models = dict(chosen)
        chosen = [(shape, models.get(shape, ())) for shape in sizes if (shape.k is not None) == linear]
    if not sweep_m or not linear:
        return chosen
    swept = dict.fromkeys(Shape(m, shape.n, shape.k) for shape, _ in chosen for m in sweep_m)
    return [(shape, ()) for shape in swept]


def _matches(problem: Problem, pattern: str, names: Iterable[str]) -> bool:
    """Whether a pattern means a problem: its exact name, else a problem number, a shell pattern, a part of a name."""
    if pattern in names:
        return problem.name == pattern
    numbers = [number for number, _, _ in problem.models]
    return pattern in numbers or pattern in problem.name or fnmatch.fnmatch(problem.name, pattern)


def select_cases(
    *,
    patterns: Sequence[str],
    sizes: Sequence[Shape],
    sweep_m: Sequence[int],
    settings: Sequence[Setting],
    real: bool,
) -> list[Case]:
    """The cases of a run, the arithmetics of one problem and size next to each other.

    Elementwise problems have no product: "highest" and "high" are one case for them. A sweep over M leaves
    them out unless they are named.

    Raises:
        ValueError: a pattern matches no problem.
    """
    problems = all_problems()
    names = [problem.name for problem in problems]
    for pattern in patterns:
        if not any(_matches(problem, pattern, names) for problem in problems):
            raise ValueError(f"--cases: {pattern!r} matches nothing; the problems are: {', '.join(names)}")
    chosen = [p for p in problems if not patterns or any(_matches(p, text, names) for text in patterns)]
    if sweep_m and not patterns:
        chosen = [p for p in chosen if p.kind == "linear"]
    cases: dict[str, Case] = {}
    for problem in chosen:
        for shape, models in _sizes(problem, sizes, sweep_m, real):
            for setting in settings:
                asked = setting if problem.kind == "linear" else Setting(setting.dtype_name, "highest")
                case = Case(problem, shape, asked, models)
                cases.setdefault(case.name, case)
    return list(cases.values())


def fp32_cases(settings: Sequence[Setting]) -> list[Case]:
    """Every linear problem at its models' real sizes, and bias + ReLU at all of `FP32_SIZES`."""

    def select(pattern: str, sizes: Sequence[Shape]) -> list[Case]:
        return select_cases(patterns=[pattern], sizes=sizes, sweep_m=[], settings=settings, real=True)

    chosen = [*select("linear/*", ()), *select("linear/bias_relu", FP32_SIZES)]
    return list({case.name: case for case in chosen}.values())


def fitting(case: Case, device: torch.device) -> Case:
    """The case itself, or for an elementwise one on a small GPU the same with M halved until everything fits.

    Input, output and eager's temporaries are alive at once, six tensors at most.
    """
    if device.type != "cuda" or case.problem.kind != "elementwise":
        return case
    free, _ = torch.cuda.mem_get_info(device)
    m = case.shape.m
    while m > 1 and 3 * case.bytes * m // case.shape.m > 0.8 * free:
        m //= 2
    return Case(case.problem, Shape(m, case.shape.n), case.setting, case.models if m == case.shape.m else ())
