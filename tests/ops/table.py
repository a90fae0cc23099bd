"""The table: a row for every public function, every layer, and functions of users with every kind of operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from tests.ops.op import (
    COLUMN,
    COUNT,
    MATRIX,
    NUMBER,
    TWO_COLUMNS,
    TWO_WEIGHTS,
    VARIANCE,
    WEIGHT,
    Op,
    Result,
    X,
    Z,
)
from tests.ops.users import USERS
from tests.support.activations import ACT
from tests.support.thorough import is_thorough

LINEAR = {"x": X, "weight": WEIGHT, "bias": COLUMN}
NORM = {"running_mean": COLUMN, "running_var": VARIANCE, "bn_weight": COLUMN, "bn_bias": COLUMN}
AFFINE = ("bn_weight", "bn_bias")


def after(activation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The program of a linear layer and what follows it."""
    return lambda x, weight, bias=None, **rest: activation(F.linear(x, weight, bias), **rest)


def normal(
    z: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    bn_weight: Tensor | None = None,
    bn_bias: Tensor | None = None,
    scale: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """BatchNorm, folded to a multiplier and an offset, as PyTorch's own has it inside (`test_table.py`)."""
    multiplier = torch.rsqrt(running_var + eps)
    multiplier = multiplier if bn_weight is None else multiplier * bn_weight
    offset = -running_mean * multiplier
    offset = offset if bn_bias is None else bn_bias + offset
    return z * (multiplier if scale is None else scale * multiplier) + offset


def glu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    weight2: Tensor | None = None,
    bias2: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """Of one weight with the rows of both products, or of two weights."""
    if weight2 is None:
        first, second = F.linear(x, weight, bias).chunk(2, -1)
        return ACT[activation](first) * second
    return ACT[activation](F.linear(x, weight, bias)) * F.linear(x, weight2, bias2)


def trained(activation: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """BatchNorm by the batch's own statistics: the result, and the buffers afterwards."""

    def program(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        running_mean: Tensor,
        running_var: Tensor,
        bn_weight: Tensor,
        bn_bias: Tensor,
        count: Tensor,
        scale: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        z = F.linear(x, weight, bias)
        z = z if scale is None else z * scale
        var, mean = torch.var_mean(z, 0, correction=0)
        y = normal(z, mean, var, bn_weight, bn_bias)
        mean, unbiased = mean.detach(), var.detach() * (len(z) / (len(z) - 1))
        return activation(y), 0.9 * running_mean + 0.1 * mean, 0.9 * running_var + 0.1 * unbiased, count + 1

    return program


def function(name: str, reference: Callable[..., Any], operands: dict[str, str], **facts: Any) -> Op:
    """A row of a public function, by its name."""
    options = "-".join(map(str, dict(facts.get("fixed", ())).values()))
    return Op(name + ("-" + options) * bool(options), reference, operands, getattr(epigemm, name), **facts)


def gated(activation: str) -> Callable[..., Tensor]:
    """The program of `linear_gated`, which takes the activation's name again."""
    return after(lambda z, gate, **_: ACT[activation](z) * gate)


BARE = ("bias",)
FUNCTIONS = [
    function("linear", after(lambda z: z), LINEAR, optional=BARE),
    function("linear_relu", after(torch.relu), LINEAR, optional=BARE),
    *(
        function("linear_gelu", after(F.gelu), LINEAR, optional=BARE, fixed=(("approximate", form),))
        for form in ("none", "tanh")
    ),
    function("linear_silu", after(F.silu), LINEAR, optional=BARE),
    function("linear_tanh", after(torch.tanh), LINEAR, optional=BARE),
    function(
        "linear_sigmoid_scale_residual",
        after(lambda z, scale: z + scale * torch.sigmoid(z)),
        LINEAR | {"scale": NUMBER},
        optional=BARE,
    ),
    function(
        "linear_relu_div",
        after(lambda z, divisor: torch.relu(z) / divisor),
        LINEAR | {"divisor": NUMBER},
        optional=BARE,
    ),
    function(
        "linear_scale", after(lambda z, scale: z if scale is None else z * scale), LINEAR | {"scale": COLUMN},
        optional=("bias", "scale"),
    ),
    function(
        "linear_scale_batch_norm", after(normal), LINEAR | {"scale": COLUMN} | NORM,
        optional=("bias", "scale", *AFFINE),
    ),
    function(
        "linear_batch_norm_relu", after(lambda z, **rest: torch.relu(normal(z, **rest))), LINEAR | NORM,
        optional=(*BARE, *AFFINE),
    ),
    function(
        "linear_residual", after(lambda z, residual: z + residual), LINEAR | {"residual": MATRIX},
        optional=BARE, shared=("residual",),
    ),
    function(
        "linear_layer_scale_residual",
        after(lambda z, layer_scale, residual: residual + layer_scale * z),
        LINEAR | {"layer_scale": COLUMN, "residual": MATRIX},
        optional=BARE,
        shared=("residual",),
    ),
    *(
        function(
            "linear_gated", gated(name), LINEAR | {"gate": MATRIX},
            optional=BARE, shared=("gate",), fixed=(("activation", name),),
        )
        for name in ACT
    ),
    *(
        function(
            "linear_glu", glu, {"x": X, "weight": TWO_WEIGHTS, "bias": TWO_COLUMNS},
            optional=BARE, fixed=(("activation", name),),
        )
        for name in ACT
    ),
    Op(
        "linear_glu-two_weights",
        glu,
        {"x": X, "weight": WEIGHT, "bias": COLUMN, "weight2": WEIGHT, "bias2": COLUMN},
        lambda *args, **named: epigemm.linear_glu(*args, **named),
        optional=("bias", "bias2"),
    ),
    *(
        function(name, reference, {"x": Z} | operands, optional=optional, takes_precision=False)
        for name, reference, operands, optional in (
            ("sigmoid", torch.sigmoid, {}, ()),
            ("bias_relu", lambda x, bias: torch.relu(x if bias is None else x + bias), {"bias": COLUMN}, BARE),
            ("relu_div", lambda x, divisor: torch.relu(x) / divisor, {"divisor": NUMBER}, ()),
            ("sigmoid_scale_residual", lambda x, scale: x + scale * torch.sigmoid(x), {"scale": NUMBER}, ()),
            (
                "scale_batch_norm", lambda x, **rest: normal(x, **rest), {"scale": COLUMN} | NORM,
                ("scale", *AFFINE),
            ),
        )
    ),
]  # fmt: skip


def layer(
    make: Callable[..., nn.Module], reference: Callable[..., Any], operands: dict[str, str], **facts: Any
) -> Op:
    """A row of a layer, by its class."""
    options = {key: facts.pop(key) for key in ("approximate", "activation") if key in facts}

    def made(n: int, k: int, dtype: torch.dtype, has_bias: bool) -> nn.Module:
        return make(k, n, bias=has_bias, dtype=dtype, **options)

    name = "-".join(
        ["nn." + make.__name__, *options.values(), *(("training",) if "count" in operands else ())]
    )
    of_layers: dict[str, Any] = {"optional": BARE, "takes_any_lead": "running_mean" not in operands} | facts
    return Op(name, reference, operands, layer=made, takes_out=False, takes_precision=False, **of_layers)


class Chained(nn.Module):
    """`epigemm.nn.linear_scale_batch_norm1d`, a function of modules."""

    scale: Tensor

    def __init__(self, k: int, n: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(k, n, bias, dtype=dtype)
        self.bn = nn.BatchNorm1d(n, dtype=dtype)
        self.register_buffer("scale", torch.ones(n, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """The call."""
        return epigemm.nn.linear_scale_batch_norm1d(x, self.linear, self.scale, self.bn)


NAMES_OF_NORM = (
    ("weight", "linear.weight"),
    ("bias", "linear.bias"),
    ("bn_weight", "bn.weight"),
    ("bn_bias", "bn.bias"),
    ("running_mean", "bn.running_mean"),
    ("running_var", "bn.running_var"),
    ("count", "bn.num_batches_tracked"),
)
TRAINED = (Result(), Result(COLUMN), Result(COLUMN), Result())
IN_TRAINING: dict[str, Any] = {
    "names": NAMES_OF_NORM,
    "results": TRAINED,
    "is_row_by_row": False,
    "is_vmappable": False,
    "is_exported": False,
    "differentiable": ("x", "weight", "bias", "bn_weight", "bn_bias"),
}
SCALED_NORM = {"x": X, "weight": WEIGHT, "bias": COLUMN, "scale": COLUMN} | NORM
ours = epigemm.nn
LAYERS = [
    layer(ours.Linear, after(lambda z: z), LINEAR),
    layer(ours.LinearReLU, after(torch.relu), LINEAR),
    *(
        layer(ours.LinearGELU, after(lambda z, form=form: F.gelu(z, approximate=form)), LINEAR, approximate=form)
        for form in ("none", "tanh")
    ),
    layer(ours.LinearSiLU, after(F.silu), LINEAR),
    layer(ours.LinearTanh, after(torch.tanh), LINEAR),
    layer(ours.LinearSigmoidScaleResidual, after(lambda z: z + torch.sigmoid(z)), LINEAR),
    layer(ours.LinearReLUDiv, after(torch.relu), LINEAR),
    layer(ours.LinearResidual, after(lambda z, residual: z + residual), LINEAR | {"residual": MATRIX}),
    layer(ours.LinearGated, gated("tanh"), LINEAR | {"gate": MATRIX}, activation="tanh"),
    layer(
        ours.LinearLayerScaleResidual,
        after(lambda z, layer_scale, residual: residual + layer_scale * z),
        LINEAR | {"layer_scale": COLUMN, "residual": MATRIX},
    ),
    layer(ours.LinearGLU, glu, {"x": X, "weight": TWO_WEIGHTS, "bias": TWO_COLUMNS}, activation="silu"),
    layer(
        ours.LinearBatchNormReLU,
        after(lambda z, **rest: torch.relu(normal(z, **rest))),
        LINEAR | NORM,
        names=NAMES_OF_NORM,
    ),
    layer(ours.LinearBatchNormReLU, trained(torch.relu), LINEAR | NORM | {"count": COUNT}, **IN_TRAINING),
    layer(ours.LinearScaleBatchNorm1d, after(normal), SCALED_NORM, names=NAMES_OF_NORM),
    layer(
        ours.LinearScaleBatchNorm1d, trained(lambda y: y), SCALED_NORM | {"count": COUNT},
        **IN_TRAINING | {"differentiable": (*IN_TRAINING["differentiable"], "scale")},
    ),
    layer(Chained, after(normal), SCALED_NORM, names=NAMES_OF_NORM),
    layer(
        Chained, trained(lambda y: y), SCALED_NORM | {"count": COUNT},
        **IN_TRAINING | {"differentiable": (*IN_TRAINING["differentiable"], "scale")},
    ),
    Op("nn.Sigmoid", torch.sigmoid, {"x": Z}, epigemm.nn.Sigmoid(), takes_out=False, takes_precision=False),
]  # fmt: skip

OPS = [*FUNCTIONS, *LAYERS, *USERS]

PENDING: dict[str, tuple[str, ...]] = {}
"""Faults that are known and not mended yet: of a property (the name of a test), the rows that do not have it."""


_OF_ALL = ("values", "gradients", "invariance")
_TWINS = [
    f"linear_{of}-{name}" for of in ("gated", "glu") for name in ACT if name not in ("gelu_tanh", "silu")
]
"""Rows that differ from another one in an activation alone: their numbers are tested, not each property again."""


def some(op: Op) -> bool:
    """Where a case takes a second: every fourth row, and all of them with `--thorough` and where there is a GPU."""
    return is_thorough() or torch.cuda.is_available() or op.name in _SOME


def few(op: Op) -> bool:
    """Of those one for each way through a compiler."""
    return is_thorough() or torch.cuda.is_available() or op.name in _FEW


_FEW = (
    "linear_relu",
    "linear_gated-silu",
    "linear_relu_div",
    "scale_batch_norm",
    "@optional",
    "@of_every_operand",
)
_SOME = [
    *(op.name for op in OPS[::4]),
    "linear_gated-gelu",
    "@of_every_operand",
    "nn.LinearBatchNormReLU-training",
]


def rows(property_: str, has: Callable[[Op], bool] = lambda op: True) -> pytest.MarkDecorator:
    """A test's parameter `op`: every row for which the property says something."""
    pending = PENDING.get(property_, ())
    return pytest.mark.parametrize(
        "op",
        [
            pytest.param(
                op,
                id=op.name,
                marks=[pytest.mark.xfail(strict=True, reason="a known fault")] * (op.name in pending),
            )
            for op in OPS
            if has(op) and (property_ in _OF_ALL or op.name not in _TWINS)
        ],
    )
