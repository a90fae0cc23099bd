"""Every epilogue as plain PyTorch operations, beside the call that fuses it.

A :class:`Formula` joins what the benchmark must know about one epilogue: its random parameters, the
operations a user would write today, our public function, and the raw operands of the native op. The models of
the public problem set get their own spelling here, because eager PyTorch is to be timed exactly as users
write it. An epilogue
that is in the registry and has no such spelling still takes part: :func:`registered_formula` derives
    everything from
the registry's Python half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from epigemm import epilogues, packs

EPS = 1e-5
MOMENTUM = 0.1


@dataclass(frozen=True)
class Parameters:
    """What an epilogue needs besides the product: named per-column vectors [N], and numbers.

    Among the vectors may be rows [M, 1] and matrices [M, N].
    ``vectors["linear_bias"]``, where present, is the bias that the linear layer itself adds.
    """

    vectors: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)

    @property
    def linear_bias(self) -> Tensor | None:
        """The bias inside the linear layer, or None."""
        return self.vectors.get("linear_bias")

    def columns(self, chosen: Tensor | slice, dtype: torch.dtype) -> Parameters:
        """The parameters of some output columns, converted to ``dtype``."""
        return replace(
            self, vectors={name: _columns(v, chosen).to(dtype) for name, v in self.vectors.items()}
        )


def _columns(operand: Tensor, chosen: Tensor | slice) -> Tensor:
    """Some output columns of [N] or [M, N]; of [M, 1] all there is."""
    return operand if operand.dim() == 2 and operand.shape[1] == 1 else operand[..., chosen]


@dataclass(frozen=True)
class NativeOperands:
    """The arguments of the generic native op that follow the weight: bias, operand tensors, scalars."""

    bias: Tensor | None = None
    operands: list[Tensor] = field(default_factory=list)
    scalars: list[float] = field(default_factory=list)


class Draw:
    """Random per-column vectors of one length, dtype and device, from one seeded generator.

    ``linear`` says whether they are for a linear layer's epilogue or for the standalone elementwise op, ``rows`` how
    many rows the result has.
    """

    def __init__(
        self,
        n: int,
        dtype: torch.dtype,
        device: torch.device,
        generator: torch.Generator,
        linear: bool,
        rows: int = 1,
    ) -> None:
        self.n, self.dtype, self.device, self.generator, self.linear = n, dtype, device, generator, linear
        self.rows = rows

    def normal(self, std: float = 1.0) -> Tensor:
        """N(0, std^2)."""
        values = torch.randn(self.n, device=self.device, generator=self.generator)
        return (values * std).to(self.dtype)

    def uniform(self, low: float, high: float, shape: Sequence[int] = ()) -> Tensor:
        """U[low, high), [N] unless another shape is asked for."""
        values = torch.rand(*(shape or (self.n,)), device=self.device, generator=self.generator)
        return (values * (high - low) + low).to(self.dtype)


@dataclass(frozen=True)
class Formula:
    """One epilogue, three times: plain PyTorch, our public function, the native op's operands.

    Attributes:
        epilogue: the registry's name.
        formula: one line of mathematics, for tables.
        linear_has_bias: whether the linear layer adds a bias of its own before ``pointwise``.
        draw: random parameters.
        pointwise: z -> D in plain PyTorch (any floating dtype); z is the product plus ``linear_bias``.
        linear: our fused call into ``out``.
        module: our module over existing tensors, which keeps its weight's pieces.
        elementwise: our standalone call into ``out``.
        native: operands of the generic native op (with the linear layer's bias).
        cancels: terms of the size of z cancel within it, as in GELU's 1 + erf(z): its error is relative to z, too.
    """

    epilogue: str
    formula: str
    linear_has_bias: bool
    draw: Callable[[Draw], Parameters]
    pointwise: Callable[[Tensor, Parameters], Tensor]
    linear: Callable[[Tensor, Tensor, Parameters, Tensor], object]
    module: Callable[[Tensor, Parameters], nn.Module]
    elementwise: Callable[[Tensor, Parameters, Tensor], object]
    native: Callable[[Tensor, Parameters], NativeOperands]
    cancels: bool = False


def _call_linear_op(epilogue: str, x: Tensor, weight: Tensor, native: NativeOperands, out: Tensor) -> None:
    torch.ops.epigemm.linear_out(
        epilogue, x, weight, native.bias, native.operands, native.scalars, "default", out
    )


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _layer(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """An ``nn.Linear`` over existing tensors."""
    n, k = weight.shape
    layer = nn.Linear(k, n, bias=bias is not None, device="meta")
    layer.weight = _frozen(weight)
    if bias is not None:
        layer.bias = _frozen(bias)
    return layer


class _LinearOp(nn.Module):
    """A registered epilogue that has no module of its own, behind the generic op."""

    def __init__(self, epilogue: str, weight: Tensor, native: NativeOperands) -> None:
        super().__init__()
        self.weight, self._epilogue, self._native = _frozen(weight), epilogue, native

    def forward(self, x: Tensor) -> Tensor:
        native = self._native
        result: Tensor = torch.ops.epigemm.linear(
            self._epilogue,
            x,
            self.weight,
            native.bias,
            native.operands,
            native.scalars,
            "default",
            packs.KEEP,
        )
        return result


def _call_elementwise_op(epilogue: str, x: Tensor, native: NativeOperands, out: Tensor) -> None:
    torch.ops.epigemm.elementwise_out(epilogue, x, native.bias, native.operands, native.scalars, out)


def _bias_relu() -> Formula:
    return Formula(
        epilogue="bias_relu",
        formula="relu(z + bias)",
        linear_has_bias=False,
        draw=lambda draw: Parameters({"bias": draw.normal()}),
        pointwise=lambda z, p: torch.relu(z + p.vectors["bias"]),
        linear=lambda x, w, p, out: epigemm.linear_relu(x, w, p.vectors["bias"], out=out),
        module=lambda w, p: epigemm.nn.LinearReLU.from_linear(_layer(w, p.vectors["bias"])),
        elementwise=lambda x, p, out: epigemm.bias_relu(x, p.vectors["bias"], out=out),
        native=lambda x, p: NativeOperands(bias=p.vectors["bias"]),
    )


def _sigmoid_scale_residual() -> Formula:
    def pointwise(z: Tensor, p: Parameters) -> Tensor:
        return torch.sigmoid(z) * p.scalars["scale"] + z

    return Formula(
        epilogue="sigmoid_scale_residual",
        formula="z + scale * sigmoid(z)",
        linear_has_bias=True,
        draw=lambda draw: Parameters(scalars={"scale": 2.0}),
        pointwise=pointwise,
        linear=lambda x, w, p, out: epigemm.linear_sigmoid_scale_residual(
            x, w, p.linear_bias, p.scalars["scale"], out=out
        ),
        module=lambda w, p: epigemm.nn.LinearSigmoidScaleResidual.from_linear(
            _layer(w, p.linear_bias), p.scalars["scale"]
        ),
        elementwise=lambda x, p, out: epigemm.sigmoid_scale_residual(x, p.scalars["scale"], out=out),
        native=lambda x, p: NativeOperands(bias=p.linear_bias, scalars=[p.scalars["scale"]]),
    )


_BATCH_NORM_VECTORS = ("running_mean", "running_var", "weight", "bn_bias")


def _scale_batch_norm() -> Formula:
    """Statistics, weight and bias are random: BatchNorm's initial zeros and ones would hide errors."""

    def draw(draw: Draw) -> Parameters:
        return Parameters(
            {
                "scale": draw.normal(),
                "running_mean": draw.normal(0.1),
                "running_var": draw.uniform(0.5, 1.5),
                "weight": draw.normal(),
                "bn_bias": draw.normal(),
            }
        )

    def pointwise(z: Tensor, p: Parameters) -> Tensor:
        mean, var, weight, bias = (p.vectors[name] for name in _BATCH_NORM_VECTORS)
        return F.batch_norm(z * p.vectors["scale"], mean, var, weight, bias, False, MOMENTUM, EPS)

    def arguments(p: Parameters) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        mean, var, weight, bias = (p.vectors[name] for name in _BATCH_NORM_VECTORS)
        return p.vectors["scale"], mean, var, weight, bias

    def native(x: Tensor, p: Parameters) -> NativeOperands:
        folded = torch.ops.epigemm.fold_batch_norm(x, p.linear_bias, *arguments(p), EPS)
        return NativeOperands(operands=[folded[0], folded[1]])

    def module(weight: Tensor, p: Parameters) -> nn.Module:
        bn = nn.BatchNorm1d(weight.shape[0], EPS, MOMENTUM, device="meta")
        bn.running_mean, bn.running_var = p.vectors["running_mean"], p.vectors["running_var"]
        bn.weight, bn.bias = _frozen(p.vectors["weight"]), _frozen(p.vectors["bn_bias"])
        # Only training counts batches, and only its cases have a counter.
        bn.num_batches_tracked = p.vectors.get("num_batches_tracked", bn.num_batches_tracked)
        return epigemm.nn.LinearScaleBatchNorm1d.from_layers(
            _layer(weight, p.linear_bias), p.vectors["scale"], bn
        )

    return Formula(
        epilogue="scale_batch_norm",
        formula="batch_norm(scale * z)",
        linear_has_bias=True,
        draw=draw,
        pointwise=pointwise,
        linear=lambda x, w, p, out: epigemm.linear_scale_batch_norm(
            x, w, p.linear_bias, *arguments(p), EPS, out=out
        ),
        module=module,
        elementwise=lambda x, p, out: epigemm.scale_batch_norm(x, *arguments(p), EPS, out=out),
        native=native,
    )


def _relu_div() -> Formula:
    return Formula(
        epilogue="relu_div",
        formula="relu(z) / divisor",
        linear_has_bias=True,
        draw=lambda draw: Parameters(scalars={"divisor": 2.0}),
        pointwise=lambda z, p: torch.relu(z) / p.scalars["divisor"],
        linear=lambda x, w, p, out: epigemm.linear_relu_div(
            x, w, p.linear_bias, p.scalars["divisor"], out=out
        ),
        module=lambda w, p: epigemm.nn.LinearReLUDiv.from_linear(
            _layer(w, p.linear_bias), p.scalars["divisor"]
        ),
        elementwise=lambda x, p, out: epigemm.relu_div(x, p.scalars["divisor"], out=out),
        native=lambda x, p: NativeOperands(bias=p.linear_bias, scalars=[p.scalars["divisor"]]),
    )


def _sigmoid() -> Formula:
    def no_linear(*arguments: object) -> NoReturn:
        raise NotImplementedError("the registry declares sigmoid as elementwise only")

    return Formula(
        epilogue="sigmoid",
        formula="sigmoid(x)",
        linear_has_bias=False,
        draw=lambda draw: Parameters(),
        pointwise=lambda z, p: torch.sigmoid(z),
        linear=no_linear,
        module=no_linear,
        elementwise=lambda x, p, out: epigemm.sigmoid(x, out=out),
        native=lambda x, p: NativeOperands(),
    )


def registered_formula(epilogue: epilogues.Epilogue) -> Formula:
    """A formula for an entry that no model spells out, made from the registry's Python half."""

    def draw(draw: Draw) -> Parameters:
        generator = torch.Generator().manual_seed(draw.generator.initial_seed())
        sample = epilogue.sample_inputs(
            draw.n, draw.dtype, draw.device, generator=generator, with_bias=not draw.linear
        )
        vectors = {} if sample.bias is None else {"bias": sample.bias}
        vectors |= {operand.name: v for operand, v in zip(epilogue.vectors, sample.operands, strict=True)}
        scalars = {} if epilogue.scalar is None else {epilogue.scalar.name: sample.scalars[0]}
        return Parameters(vectors, scalars)

    def operands(p: Parameters) -> list[Tensor]:
        return [p.vectors[operand.name] for operand in epilogue.vectors]

    def pointwise(z: Tensor, p: Parameters) -> Tensor:
        biased = z + p.vectors["bias"] if "bias" in p.vectors else z
        return epilogue.compute(biased, *operands(p), *p.scalars.values()).to(z.dtype)

    def native(x: Tensor, p: Parameters) -> NativeOperands:
        bias = p.vectors.get("bias", p.linear_bias)
        return NativeOperands(bias, operands(p), list(p.scalars.values()))

    return Formula(
        epilogue=epilogue.name,
        formula=epilogue.formula,
        linear_has_bias=epilogue.takes_bias,
        draw=draw,
        pointwise=pointwise,
        linear=lambda x, w, p, out: _call_linear_op(epilogue.name, x, w, native(x, p), out),
        module=lambda w, p: _LinearOp(epilogue.name, w, native(w, p)),
        elementwise=lambda x, p, out: _call_elementwise_op(epilogue.name, x, native(x, p), out),
        native=native,
    )


def all_formulas() -> dict[str, Formula]:
    """A formula for every epilogue in the registry, the problem set's own spelling where there is one."""
    spelled = [f() for f in (_bias_relu, _sigmoid_scale_residual, _scale_batch_norm, _relu_div, _sigmoid)]
    by_name = {formula.epilogue: formula for formula in spelled}
    return {
        name: by_name.get(name) or registered_formula(epilogue)
        for name, epilogue in epilogues.EPILOGUES.items()
    }


def epilogue_forms() -> dict[str, tuple[str, ...]]:
    """Each registered epilogue and the forms it has: "linear", "elementwise"."""
    return {
        name: ("linear", "elementwise") if epilogue.linear else ("elementwise",)
        for name, epilogue in epilogues.EPILOGUES.items()
    }
