"""In-place sums onto tensors of the graph: fused where nothing else reads the write, right where something does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fusion.axes import fused
from tests.support.thorough import in_turn


class Base(nn.Module):
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("kept", torch.ones(6, 8))

    def forward(self, x: Tensor) -> Any:
        raise NotImplementedError


def made(forward: Any) -> Any:
    torch.manual_seed(0)
    return type("Model", (Base,), {"forward": forward})().eval()


def logit(self: Base, x: Tensor) -> Any:
    y = x * 2
    y += self.fc(x)
    return y


def method(self: Base, x: Tensor) -> Any:
    y = x.sin()
    return y.add_(self.fc(x).relu(), alpha=2)


def two_sums(self: Base, x: Tensor) -> Any:
    y = torch.zeros_like(x)
    y += self.fc(x)
    y += self.other(x)
    return torch.sigmoid(y)


def read_before(self: Base, x: Tensor) -> Any:
    y = x + 1
    z = y.sum()
    y *= self.fc(x)
    return y, z


def whole_view(self: Base, x: Tensor) -> Any:
    y = (x + 1).view(-1).view(6, 8)
    y -= self.fc(x)
    return y


def written_again(self: Base, x: Tensor) -> Any:
    y = x + 1
    y += self.fc(x)
    z = y.view(-1)
    y.mul_(2)
    return y, z


TAKEN = [logit, method, two_sums, read_before, whole_view, written_again]


def read_after(self: Base, x: Tensor) -> Any:
    y = x + 1
    z = y.view(-1)
    y += self.fc(x)
    return y, z


def old_name_after(self: Base, x: Tensor) -> Any:
    y = x + 1
    z = torch.add(y, self.fc(x), out=y) if not torch.is_grad_enabled() else y.add_(self.fc(x))
    return y * 2, z


def an_argument(self: Base, x: Tensor) -> Any:
    x += self.fc(x)
    return x


def a_buffer(self: Base, x: Tensor) -> Any:
    self.kept += self.fc(x).detach()
    return self.kept * 1


def idle_dropout(self: Base, x: Tensor) -> Any:
    y = x + 1
    z = F.dropout(y, 0.1, False)  # is y itself, which Dynamo does not note
    z += self.fc(x)
    return y, z * 1


def idle_dropout_after(self: Base, x: Tensor) -> Any:
    y = x + 1
    z = F.dropout(y, 0.1, False)
    y += self.fc(x)
    return y * 1, z


def a_part(self: Base, x: Tensor) -> Any:
    y = torch.cat([x, x + 1])
    first, second = y.chunk(2)
    first += self.fc(x)
    return y, second


def repeated(self: Base, x: Tensor) -> Any:
    y = x[:1].clone().expand(6, 8).contiguous()
    z = y[:, :4]
    y += self.fc(x)
    return y, z


def narrower(self: Base, x: Tensor) -> Any:
    y = x.bfloat16()
    y += self.fc(x)
    return y.float()


NOT_TAKEN = [
    read_after,
    old_name_after,
    an_argument,
    a_buffer,
    idle_dropout,
    idle_dropout_after,
    a_part,
    repeated,
    narrower,
]


def outcome(called: Any, model: nn.Module, learns: bool) -> tuple[list[Any], list[Any]]:
    """What two calls give and leave behind, with gradients; and what the results are."""
    found: list[Any] = []
    kinds: list[Any] = []
    for seed in range(2):
        leaf = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_(learns)
        x = leaf * 1
        with torch.set_grad_enabled(learns):
            results = called(x)
        results = results if isinstance(results, tuple) else (results,)
        found += [each.detach().clone() for each in (*results, x, *model.buffers())]
        kinds += [(each.stride(), each.dtype, each.requires_grad) for each in results]
        if learns:
            total = sum(each.double().square().sum() for each in results)
            assert isinstance(total, Tensor)
            given = [leaf, *model.parameters()]
            found += torch.autograd.grad(total, given, allow_unused=True)
    return found, kinds


# PyTorch itself has no derivative of these, and gives by aot_eager another result of those.
NOT_LEARNT = [an_argument, a_buffer, a_part]
NOT_COMPILED = [idle_dropout, idle_dropout_after]


COMPILED = [forward for forward in (*TAKEN, *NOT_TAKEN) if forward not in NOT_COMPILED]
WAYS = [*in_turn(COMPILED, ["fuse", "backend"]), *((forward, "fuse") for forward in NOT_COMPILED)]


@pytest.mark.parametrize(("forward", "road"), WAYS)
@pytest.mark.parametrize("learns", [False, True])
def test_in_place_sums(forward: Any, road: str, learns: bool) -> None:
    if learns and forward in NOT_LEARNT:
        pytest.skip("PyTorch's own")
    torch._dynamo.reset()
    plain = made(forward)
    model = copy.deepcopy(plain)
    called, report = fused(model, road)
    (expected, kinds), (actual, others) = outcome(plain, plain, learns), outcome(called, model, learns)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert others == kinds
    chains, taken = report.chains
    assert chains
    # What a derivative may read is not left to a later write.
    if not (learns and forward in (two_sums, written_again)):
        assert (taken == chains) == (forward in TAKEN), report
