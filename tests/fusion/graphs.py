"""Graphs that invite a wrong fusion, and neighbours of theirs that should be fused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx

M, K, N = 5, 6, 4
RELU, RELU_DIV = "linear_relu", "linear_relu_div"
RESIDUAL = "linear_sigmoid_scale_residual"
SCALE, NORM = "linear_scale", "linear_scale_batch_norm"
EVERYWHERE = ("fx", "dynamo")

torch.library.define("epigemm_tests::write", "(Tensor(a!) x) -> ()")
torch.library.define("epigemm_tests::twice", "(Tensor x) -> Tensor")


@torch.library.impl("epigemm_tests::write", "CompositeExplicitAutograd")
def _write(x: Tensor) -> None:
    x.mul_(3)


@torch.library.impl("epigemm_tests::twice", "CompositeExplicitAutograd")
def _twice(x: Tensor) -> Tensor:
    return x * 2


torch.library.register_fake("epigemm_tests::write", lambda x: None)
torch.library.register_fake("epigemm_tests::twice", torch.empty_like)
_ops: Any = torch.ops
_torch: Any = torch


def _written_by_a_function(x: Tensor) -> None:
    x.mul_(3)


fx.wrap("_written_by_a_function")


@dataclass(frozen=True)
class Graph:
    """A function of (x, weight, bias, vector), and what fusion is to find in it, linear layers alone left out.

    Attributes:
        shapes: those that differ from [M, K], [N, K], [N], [N], by position.
        dtypes: of the arguments, by position; others have the first one's.
        roads: where it is found so.
        learns: the positions of arguments that need gradients.
    """

    name: str
    function: Callable[..., Any]
    finds: tuple[str, ...]
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)
    roads: tuple[str, ...] = EVERYWHERE
    learns: tuple[int, ...] = (0, 1, 2, 3)

    def __str__(self) -> str:
        return self.name

    def arguments(self) -> list[Tensor]:
        """Random, and those of `learns` leaves that need gradients."""
        shapes = [(M, K), (N, K), (N,), (N,)]
        made = []
        for position, shape in enumerate(shapes):
            dtype = self.dtypes.get(position, self.dtypes.get(0, torch.float32))
            draw = torch.randn(self.shapes.get(position, shape), dtype=torch.float64)
            draw = draw if position < 3 else draw.abs() + 0.1  # a variance
            tensor = draw.round().to(dtype) if not dtype.is_floating_point else draw.to(dtype)
            differentiable = dtype.is_floating_point or dtype.is_complex
            made.append(tensor.requires_grad_(position in self.learns and differentiable))
        return made


def _z(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.linear(x, w, b)


def _in_between(write: Callable[[Tensor], Any]) -> Callable[..., Any]:
    """A write to the vector between the product and the sum that reads it."""

    def function(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
        z = x @ w.t()
        write(b)
        return torch.relu(z + b)

    return function


def _beside(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Something between the product and the sum that writes nothing."""

    def function(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
        z = x @ w.t()
        other = compute(v)
        return torch.relu(z + b) * cast(Tensor, other.sum())

    return function


def _after_relu(compute: Callable[[Tensor], Any]) -> Callable[..., Any]:
    return lambda x, w, b, v: compute(torch.relu(_z(x, w, b)))


def _with_z(compute: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w, b, v: compute(_z(x, w, b), v)


def _trained_statistics(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    z = _z(x, w)
    F.batch_norm(x[:, :N], b, v.abs(), training=True)
    return F.batch_norm(z * v, b, v.abs())


def _two_equal_products(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(_z(x, w, b)) * 2 + _z(x, w, b)


def _view_read_later(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    z = _z(x, w, b)
    row = z.view(-1)
    torch.relu_(z)
    return row * 2


def _transpose_then_write(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    transposed = w.t()
    w.mul_(2)
    return torch.relu(x @ transposed)


def _no_grad_product(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        z = _z(x, w, b)
    return torch.relu(z) + v


def _no_grad_transpose(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        transposed = w.t()
    return torch.relu(x @ transposed + b)


def _no_grad_between(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    z = _z(x, w, b)
    with torch.no_grad():
        other = v * 2
    return torch.relu(z) + other


def _no_grad_middle(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    z = _z(x, w, b)
    with torch.no_grad():
        r = torch.relu(z)
    return r / 2 + v


def _autocast_transpose(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    transposed = w.t()
    with torch.autocast("cpu", torch.bfloat16):
        z = x @ transposed
    return torch.relu(z)


def _autocast_all(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.relu(x @ w.t()) / 2


def _norm(**options: Any) -> Callable[..., Any]:
    def function(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
        return F.batch_norm(_z(x, w), b, v, **options)

    return function


def _checkpointed(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    z = _z(x, w, b)
    other: Tensor = checkpoint(torch.sin, v, use_reentrant=False)
    return torch.relu(z) + other


def _chained(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    h = torch.relu(_z(x, w, b))
    return torch.relu(h @ w * 0.5).matmul(w.t()).add(v).relu().div(2)


def _iadd(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    return torch.relu(_z(x, w, b)).add_(1)


GRAPHS = [
    # --- found ---
    Graph("relu", _with_z(lambda z, v: z.relu()), (RELU,)),
    Graph("given_twice", _with_z(lambda z, v: (r := z.relu(), r)), (RELU,)),
    Graph("residual", _with_z(lambda z, v: torch.sigmoid(z) * 3 + z), (RESIDUAL,)),
    Graph("minus", _with_z(lambda z, v: z - torch.sigmoid(z) * 3), (RESIDUAL,)),
    Graph("alpha", _with_z(lambda z, v: torch.add(z, z.sigmoid(), alpha=3)), (RESIDUAL,)),
    Graph("relu_div", _after_relu(lambda r: r / 3), (RELU_DIV,)),
    Graph("times_power_of_2", _after_relu(lambda r: r * -0.25), (RELU_DIV,)),
    Graph("scale", _with_z(lambda z, v: v * z), (SCALE,)),
    Graph("norm", _norm(weight=None), (NORM,), learns=(0, 1)),
    Graph("chained", _chained, (RELU, RELU_DIV)),
    Graph("weight_is_computed", lambda x, w, b, v: F.linear(x, w * w, b).relu(), (RELU,)),
    Graph("one_dimension", lambda x, w, b, v: torch.relu(x @ w.t() + b), (RELU,), {0: (K,)}),
    Graph("three_dimensions", lambda x, w, b, v: torch.relu(x @ w.t() + b), (RELU,), {0: (2, M, K)}),
    Graph(
        "permuted_rows", lambda x, w, b, v: (x.transpose(0, 1) @ w.t() + b).relu(), (RELU,), {0: (2, M, K)}
    ),
    Graph("no_rows", _with_z(lambda z, v: z.relu()), (RELU,), {0: (0, K)}),
    Graph("no_columns", _with_z(lambda z, v: z.relu()), (RELU,), {1: (0, K), 2: (0,)}),
    Graph("no_depth", _with_z(lambda z, v: z.relu()), (RELU,), {0: (M, 0), 1: (N, 0)}),
    Graph("frozen_weight", _with_z(lambda z, v: z.relu() / 2), (RELU_DIV,), learns=(0,)),
    Graph("frozen_x", _with_z(lambda z, v: z + z.sigmoid()), (RESIDUAL,), learns=(1,)),
    Graph("bias_alone_learns", _with_z(lambda z, v: z + z.sigmoid()), (RESIDUAL,), learns=(2,)),
    Graph("pure_beside", _beside(torch.tanh), (RELU,)),
    Graph("pure_softmax", _beside(lambda v: F.softmax(v, 0).float().view(2, -1)), (RELU,)),
    Graph("pure_custom", _beside(lambda v: _ops.epigemm_tests.twice(v.detach())), (RELU,)),
    Graph("pure_overload", _beside(lambda v: _ops.aten.mul.Tensor(v, v)), (RELU,)),
    Graph("checkpointed", _checkpointed, (RELU,), roads=("dynamo",)),
    Graph("autocast_all", _autocast_all, (RELU_DIV,), roads=("dynamo",)),
    # --- found, and left to the operators at the call ---
    Graph("complex", lambda x, w, b, v: F.linear(x, w) * v, (SCALE,), dtypes={0: torch.complex64}),
    Graph("mixed", _with_z(lambda z, v: z.relu()), (RELU,), dtypes={1: torch.float64}),
    Graph("wider_bias", lambda x, w, b, v: (x @ w.t() + b).relu(), (RELU,), dtypes={2: torch.float64}),
    Graph("narrower_bias", lambda x, w, b, v: (x @ w.t() + b).relu(), (RELU,), dtypes={2: torch.float16}),
    Graph("integers", _with_z(lambda z, v: z.relu()), (RELU,), dtypes={0: torch.int64}),
    Graph("outer", _with_z(lambda z, v: z * v), (SCALE,), {1: (1, K), 2: (1,), 3: (M,)}),
    Graph("one_for_all", _with_z(lambda z, v: z * v), (SCALE,), {3: (1,)}),
    Graph("mm_of_3d", lambda x, w, b, v: torch.mm(x, w.t()).relu(), (RELU,), {0: (2, M, K)}, roads=("fx",)),
    Graph("mm_of_1d", lambda x, w, b, v: x.mm(w.t()).relu(), (RELU,), {0: (K,)}, roads=("fx",)),
    Graph(
        "addmm_of_1d", lambda x, w, b, v: torch.addmm(b, x, w.t()).relu(), (RELU,), {0: (K,)}, roads=("fx",)
    ),
    Graph("wrong_depth", _with_z(lambda z, v: z.relu()), (RELU,), {0: (M, K + 1)}, roads=("fx",)),
    Graph("norm_negative_variance", lambda x, w, b, v: F.batch_norm(_z(x, w), v, b), (NORM,), learns=(0, 1)),
    Graph("norm_negative_eps", _norm(eps=-0.5), (NORM,), learns=(0, 1)),
    Graph("norm_mixed", _norm(), (NORM,), dtypes={0: torch.bfloat16, 3: torch.float32}, learns=(0, 1)),
    # --- not found ---
    Graph("twice", _with_z(lambda z, v: z + z), ()),
    Graph("twice_1d", lambda x, w, b, v: torch.add(x @ w.t(), x @ w.t()), (), {0: (K,)}),
    Graph("sum_with_itself_1d", lambda x, w, b, v: (lambda z: z + z)(x @ w.t()), (), {0: (K,)}),
    Graph("square_1d", lambda x, w, b, v: (lambda z: z * z)(x @ w.t()), (), {0: (K,)}),
    Graph("silu", _with_z(lambda z, v: z * torch.sigmoid(z)), ()),
    Graph("equal_products", _two_equal_products, ()),
    Graph("sigmoid_minus", _with_z(lambda z, v: torch.sigmoid(z) * 3 - z), ()),
    Graph("alpha_of_z", _with_z(lambda z, v: torch.add(z.sigmoid(), z, alpha=3)), ()),
    Graph("huge_alpha", _with_z(lambda z, v: torch.add(z, z.sigmoid(), alpha=10**400)), (), roads=("fx",)),
    Graph("huge_factors", _with_z(lambda z, v: torch.add(z, z.sigmoid() * 1e17, alpha=1e17)), ()),
    Graph("bias_alpha", lambda x, w, b, v: torch.add(x @ w.t(), b, alpha=2), ()),
    Graph("z_given_too", _with_z(lambda z, v: (z, z.relu())), ()),
    Graph("row_given_too", _with_z(lambda z, v: (z[0], z.relu())), ()),
    Graph("view_read_later", _view_read_later, ()),
    Graph("relu_is_used_twice", _after_relu(lambda r: r / 2 + r), (RELU,)),
    Graph("sigmoid_is_used_twice", _with_z(lambda z, v: (lambda s: z + s * 2 + s)(z.sigmoid())), ()),
    Graph("in_place_on_a_result", _iadd, (RELU,), roads=("fx",)),
    Graph("inexact_reciprocal", _after_relu(lambda r: r * 0.3), (RELU,)),
    *(
        Graph(f"over_{number!r:.8}", _after_relu(lambda r, n=number: r / n), (RELU,))  # type: ignore[misc]
        for number in (0, 0.0, -0.0, float("inf"), float("nan"), 1e300, 1e-300, 2**62, True)
    ),
    *(
        Graph(f"times_{number!r:.8}", _after_relu(lambda r, n=number: r * n), (RELU,))  # type: ignore[misc]
        for number in (0.0, float("inf"), float("nan"), 1e300, True)
    ),
    Graph("over_huge_integer", _after_relu(lambda r: r / 10**400), (RELU,), roads=("fx",)),
    Graph("divides_by_it", _after_relu(lambda r: 2 / (r + 1)), (RELU,)),
    Graph("rounds", _after_relu(lambda r: torch.div(r, 2, rounding_mode="floor")), (RELU,)),
    Graph("row_factor", _with_z(lambda z, v: z * v), (), {3: (M, 1)}),
    Graph("one_row", _with_z(lambda z, v: z * v), (), {3: (1, N)}),
    Graph("factor_computed_later", lambda x, w, b, v: _z(x, w, b) * (v + 1), ()),
    Graph("factor_from_z", _with_z(lambda z, v: z * z.sum(0)), ()),
    Graph("weight_is_computed_at", lambda x, w, b, v: (x @ (w * w).t()).relu(), ()),
    Graph("batch", lambda x, w, b, v: (x @ w).relu(), (), {0: (2, M, K), 1: (2, K, N)}),
    Graph("norm_in_training", _norm(training=True), (), learns=(0, 1)),
    Graph("trained_statistics", _trained_statistics, (), learns=(0, 1)),
    Graph("written_mul_", _in_between(lambda b: b.mul_(3)), (), learns=(0, 1)),
    Graph(
        "written_setitem", _in_between(lambda b: b.__setitem__(0, 3.0)), (), learns=(0, 1), roads=("dynamo",)
    ),
    Graph("written_out", _in_between(lambda b: torch.add(b, 1, out=b)), (), learns=(0, 1)),
    Graph("written_foreach", _in_between(lambda b: torch._foreach_mul_([b], 3.0)), (), learns=(0, 1)),
    Graph("written_packet", _in_between(lambda b: _ops.aten.mul_(b, 3)), (), learns=(0, 1)),
    Graph("written_overload", _in_between(lambda b: _ops.aten.mul_.Scalar(b, 3)), (), learns=(0, 1)),
    Graph("written_custom", _in_between(lambda b: _ops.epigemm_tests.write(b)), (), learns=(0, 1)),
    Graph("written_relu", _in_between(lambda b: F.relu(b, True)), (), learns=(0, 1)),
    Graph("written_dropout", _in_between(lambda b: F.dropout(b, 1.0, True, True)), (), learns=(0, 1)),
    Graph("written_silu", _in_between(lambda b: F.silu(b, inplace=True)), (), learns=(0, 1)),
    Graph("written_view", _in_between(lambda b: b.view(2, -1).mul_(3)), (), learns=(0, 1)),
    Graph("written_function", _in_between(_written_by_a_function), (), learns=(0, 1), roads=("fx",)),
    Graph("written_copy", _in_between(lambda b: b.copy_(b * 2)), (), learns=(0, 1)),
    Graph("written_transpose", _transpose_then_write, (), learns=(0,)),
    Graph("adds_to_the_bias", lambda x, w, b, v: b.add_(x @ w.t()), (), {0: (K,)}, learns=(0, 1)),
    Graph("no_grad_product", _no_grad_product, (), roads=("dynamo",)),
    Graph("no_grad_transpose", _no_grad_transpose, (), roads=("dynamo",)),
    Graph("no_grad_between", _no_grad_between, (), roads=("dynamo",)),
    Graph("no_grad_middle", _no_grad_middle, (), roads=("dynamo",)),
    Graph("autocast_transpose", _autocast_transpose, (), roads=("dynamo",)),
]
