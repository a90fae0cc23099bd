"""Forwards that transform functions, as `torch.vmap` does: what is outside of a transform is fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch.autograd import forward_ad

from epigemm.fusion import FusionReport
from tests.fusion.eager import fuse_eagerly
from tests.fusion.test_chains_gates import outcome
from tests.support.thorough import in_turn

ROWS, WIDTH = 5, 8
INSIDE = "it is inside of a transform"
_ad: Any = forward_ad
_jvp: Any = torch.func.jvp


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


def vmap(self: Any, x: Tensor) -> Any:
    return torch.vmap(lambda row: row * 2 + row.sum())(F.relu(self.fc(x)))


def vmap_of_a_layer(self: Any, x: Tensor) -> Any:
    return F.relu(self.two(torch.vmap(self.fc)(x)))


def vmap_over_what_is_outside(self: Any, x: Tensor) -> Any:
    return torch.vmap(lambda row: row * F.relu(self.fc(x)).sum())(x) + F.relu(self.two(x))


def vmap_writes_the_result(self: Any, x: Tensor) -> Any:
    h = self.fc(x)
    torch.vmap(lambda row: row.mul_(2))(h)
    return F.relu(h)


def vmap_writes_an_operand(self: Any, x: Tensor) -> Any:
    residual, h = x * 2, self.fc(x)
    torch.vmap(lambda row: row.mul_(2))(residual)
    return F.relu(h) + residual


def grad(self: Any, x: Tensor) -> Any:
    return F.relu(self.fc(x)) + torch.func.grad(lambda z: self.fc(z).tanh().sum())(x)


def grad_of_what_is_outside(self: Any, x: Tensor) -> Any:
    h = F.relu(self.fc(x))
    found = torch.func.grad(lambda z: (h * z.tanh()).sum())(h)
    return F.relu(self.two(found)) * h


def vmap_of_grad(self: Any, x: Tensor) -> Any:
    return torch.vmap(torch.func.grad(lambda z: F.relu(self.two(z)).sum()))(F.relu(self.fc(x)))


def jacobian(self: Any, x: Tensor) -> Any:
    return torch.func.jacrev(lambda z: F.relu(self.two(z)).sum(0))(F.relu(self.fc(x))).sum(1)


def jvp(self: Any, x: Tensor) -> Any:
    h = F.relu(self.fc(x))
    value, tangent = _jvp(lambda z: F.gelu(self.two(z)), (h,), (x,))
    return F.relu(self.two(value)) * tangent


def dual_level(self: Any, x: Tensor) -> Any:
    with _ad.dual_level():
        dual = _ad.make_dual(x, x * 2)
        return F.relu(_ad.unpack_dual(F.relu(self.fc(dual))).tangent)


def scan(self: Any, x: Tensor) -> Any:
    h = F.relu(self.fc(x))
    return associative_scan(lambda a, b: a * b, h, 0, combine_mode="generic") + F.relu(self.two(x))


FORWARDS: list[tuple[Callable[..., Any], int, int]] = [
    *[(each, 1, 0) for each in (vmap, vmap_writes_the_result, vmap_writes_an_operand)],
    *[(each, 1, 1) for each in (vmap_of_a_layer, vmap_over_what_is_outside, grad, vmap_of_grad, jacobian)],
    (grad_of_what_is_outside, 2, 0),
    (jvp, 2, 1),
    (scan, 2, 0),
    (dual_level, 0, 1),
]


@pytest.mark.parametrize(
    ("case", "road"),
    in_turn(FORWARDS, ["fuse", "aot_eager"]),
    ids=lambda v: v if isinstance(v, str) else v[0].__name__,
)
def test_values_and_gradients(case: tuple[Callable[..., Any], int, int], road: str) -> None:
    forward, products, inside = case
    torch.manual_seed(1)
    model, report = type("Model", (Layers,), {"forward": forward})(), FusionReport()
    if road == "fuse":
        fused = fuse_eagerly(model)
        report = fused.fusion_report
    else:
        fused = torch.compile(model, backend="epigemm", options={"backend": road, "report": report.add})
    x = torch.randn(ROWS, WIDTH)
    # PyTorch's own compiler cannot make a graph of a dual level for the backward pass.
    for learns in (False,) if (forward, road) == (dual_level, "aot_eager") else (False, True):
        expected = outcome(model, model, (x,), learns)
        torch.testing.assert_close(outcome(fused, model, (x,), learns), expected, rtol=1e-5, atol=1e-5)
        assert len(report.sites) == products, report
        assert [INSIDE in skipped.reason for skipped in report.skipped] == [True] * inside, report
