"""Every linear function, of epigemm and of users, with its operands and what it is in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import epigemm
from epigemm import Matrix, PerColumn, PerRow, Scalar
from tests.support.activations import ACT

LEAD, N, K = (2, 3), 6, 8


def shape_of(kind: str, lead: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an operand beside an x of these leading axes."""
    known = {"row": lead, "matrix": (*lead, N), "shared": (*[1] * len(lead), N), "scalar": ()}
    return known.get(kind, (N,))


@epigemm.epilogue
def added(acc: Tensor, bias: PerColumn, residual: Matrix) -> Any:
    return acc + bias + residual


@epigemm.epilogue
def optional(acc: Tensor, bias: PerColumn | None = None, residual: Matrix | None = None) -> Any:
    acc = acc if bias is None else acc + bias
    return torch.tanh(acc) if residual is None else torch.tanh(acc) + residual


@epigemm.epilogue
def compared(acc: Tensor, residual: Matrix, factor: PerColumn) -> Any:
    return torch.where(residual > 0, acc, acc * 2.0) * factor


@epigemm.epilogue
def cast(acc: Tensor, residual: Matrix) -> Any:
    return (acc + residual).to(torch.bfloat16)


@epigemm.epilogue
def by_row(acc: Tensor, scale: PerRow, limit: Scalar) -> Any:
    return torch.clamp(acc * scale, -limit, limit)


@epigemm.epilogue
def detached(acc: Tensor, residual: Matrix) -> Any:
    return acc * residual.detach()


@epigemm.epilogue
def several(acc: Tensor, bias: PerColumn, residual: Matrix) -> Any:
    z = acc + bias
    return torch.sigmoid(z), [z + residual, z.sum(0)]


@epigemm.epilogue
def bias_twice(acc: Tensor, bias: PerColumn, residual: Matrix) -> Any:
    z = acc + bias
    return z - bias, z * residual, (z * residual).amax(1)


class Case(NamedTuple):
    call: Callable[..., Any]  # of x, weight, bias, operands
    plain: Callable[..., Any]  # PyTorch, of z = F.linear(x, weight, bias) and the operands
    operands: Sequence[str]  # what each is, as of `shape_of`
    has_bias: bool = True


def batch_norm(z: Tensor, scale: Tensor | None, mean: Tensor, var: Tensor) -> Tensor:
    z = z if scale is None else z * scale
    return F.batch_norm(z.flatten(0, -2), mean, var).view(z.shape)


def folded(x: Tensor, weight: Tensor, bias: Tensor, *vectors: Any) -> Tensor:
    return epigemm.linear_scale_batch_norm(x, weight, bias, *vectors)


def layer(kind: Any, *operands: str) -> Callable[..., Tensor]:
    """A call of a layer over the given parameters."""
    made = kind(K, N)

    def call(x: Tensor, weight: Tensor, bias: Tensor, *values: Tensor) -> Tensor:
        state = {"weight": weight, "bias": bias, **dict(zip(operands, values, strict=False))}
        result: Tensor = torch.func.functional_call(made, state, (x, *values[len(operands) :]))
        return result

    return call


CASES = {
    "linear": Case(epigemm.linear, lambda z: z, ()),
    **{
        f"linear_{name}": Case(getattr(epigemm, f"linear_{name}"), ACT[name], ())
        for name in ("relu", "silu", "tanh", "gelu")
    },
    "sigmoid_scale_residual": Case(
        epigemm.linear_sigmoid_scale_residual, lambda z, s: torch.sigmoid(z) * s + z, ["scalar"]
    ),
    "relu_div": Case(epigemm.linear_relu_div, lambda z, d: torch.relu(z) / d, ["scalar"]),
    "scale": Case(epigemm.linear_scale, lambda z, s: z * s, ["column"]),
    "scale_batch_norm": Case(folded, batch_norm, ["column", "mean", "var"]),
    "batch_norm": Case(
        lambda x, w, b, *v: epigemm.linear_scale_batch_norm(x, w, b, None, *v),
        lambda z, *v: batch_norm(z, None, *v),
        ["mean", "var"],
    ),
    "batch_norm_relu": Case(
        epigemm.linear_batch_norm_relu,
        lambda z, *v: torch.relu(batch_norm(z, None, *v)),
        ["mean", "var"],
    ),
    "glu": Case(lambda x, w, b: epigemm.linear_glu(x, w, b, weight2=w, bias2=b), lambda z: F.silu(z) * z, ()),
    "residual": Case(epigemm.linear_residual, torch.add, ["matrix"]),
    "residual_of_rows": Case(epigemm.linear_residual, torch.add, ["shared"], False),
    "layer_scale": Case(epigemm.linear_layer_scale_residual, lambda z, v, m: m + v * z, ["column", "matrix"]),
    **{
        f"gated_{name}": Case(
            lambda *a, name=name: epigemm.linear_gated(*a, activation=name),
            lambda z, m, name=name: ACT[name](z) * m,
            ["matrix"],
        )
        for name in ACT
    },
    "LinearResidual": Case(layer(epigemm.nn.LinearResidual), torch.add, ["matrix"]),
    "LinearGated": Case(layer(epigemm.nn.LinearGated), lambda z, m: F.silu(z) * m, ["matrix"]),
    "LinearLayerScaleResidual": Case(
        layer(epigemm.nn.LinearLayerScaleResidual, "layer_scale"),
        lambda z, v, m: m + v * z,
        ["column", "matrix"],
    ),
    "own_layer": Case(layer(lambda *sizes: epigemm.nn.Linear(*sizes, epilogue=added)), torch.add, ["matrix"]),
    "added": Case(added, torch.add, ["matrix"]),
    "optional": Case(optional, lambda z, m: torch.tanh(z) + m, ["matrix"]),
    "optional_without": Case(
        lambda x, w, b, m: optional(x, w, None, m), torch.add, ["matrix"], False
    )._replace(plain=lambda z, m: torch.tanh(z) + m),
    "optional_bias": Case(optional, torch.tanh, ()),
    "compared": Case(
        lambda x, w, b, *o: compared(x, w, *o),
        lambda z, m, v: torch.where(m > 0, z, z * 2.0) * v,
        ["matrix", "column"],
        False,
    ),
    "cast": Case(
        lambda x, w, b, m: cast(x, w, m), lambda z, m: (z + m).to(torch.bfloat16), ["matrix"], False
    ),
    "by_row": Case(
        lambda x, w, b, r: by_row(x, w, r, 0.5),
        lambda z, r: torch.clamp(z * r[..., None], -0.5, 0.5),
        ["row"],
        False,
    ),
    "detached": Case(lambda x, w, b, m: detached(x, w, m), lambda z, m: z * m.detach(), ["matrix"], False),
    "several": Case(
        several,
        lambda z, m: (torch.sigmoid(z), [z + m, z.float().flatten(0, -2).sum(0)]),
        ["matrix"],
    ),
    "bias_twice": Case(
        lambda x, w, b, *o: bias_twice(x, w, *o),
        lambda z, b, m: ((z + b) - b, (z + b) * m, ((z.float() + b) * m).amax(-1)),
        ["column", "matrix"],
        False,
    ),
}


class Given(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    operands: list[Tensor]

    @property
    def leaves(self) -> list[Tensor]:
        return [each for each in (self.x, self.weight, self.bias, *self.operands) if each is not None]


def draw(
    case: Case,
    narrow: Sequence[bool],
    dtype: torch.dtype,
    *,
    recorded: bool = False,
    lead: tuple[int, ...] = LEAD,
) -> Given:
    """Tensors in fp32; of the operands those that `narrow` says in autocast's type."""
    rng = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    operands = [some(*shape_of(kind, lead)) for kind in case.operands]
    operands = [
        each.abs() + 0.5 if kind in ("var", "scalar") else each
        for kind, each in zip(case.operands, operands, strict=True)
    ]
    operands = [
        each.to(dtype) if is_narrow else each for each, is_narrow in zip(operands, narrow, strict=True)
    ]
    given = Given(some(*lead, K), some(N, K), some(N) if case.has_bias else None, operands)
    statistics = [each for each, kind in zip(operands, case.operands, strict=True) if kind in ("mean", "var")]
    for each in given.leaves:
        each.requires_grad_(recorded and not any(each is other for other in statistics))
    return given
