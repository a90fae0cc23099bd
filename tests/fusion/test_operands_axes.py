"""Chains behind a view of the product by other axes: equal values, strides and gradients, whatever stands beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fusion.axes import B, Base, C, S, compare
from tests.fusion.eager import fuse_eagerly
from tests.support.thorough import in_turn


def alone(self: Base, x: Tensor, y: Tensor) -> Any:
    return self.fc(x).transpose(1, 2).relu() * 2


def same_order(self: Base, x: Tensor, y: Tensor) -> Any:
    return y.transpose(1, 2) + self.fc(x).transpose(1, 2)


def second(self: Base, x: Tensor, y: Tensor) -> Any:
    return torch.sub(self.fc(x).transpose(1, 2), y.mT, alpha=2).tanh()


def by_row(self: Base, x: Tensor, y: Tensor) -> Any:
    return y.mT + self.gain * self.fc(x).transpose(1, 2)


def by_column(self: Base, x: Tensor, y: Tensor) -> Any:
    return self.fc(x).permute(0, 2, 1) * self.column


def by_both(self: Base, x: Tensor, y: Tensor) -> Any:
    return self.fc(x).relu().mT * self.gain - self.column


def batch_of_rows(self: Base, x: Tensor, y: Tensor) -> Any:
    return self.fc(x).mT * y[:, :1]


def there_and_back(self: Base, x: Tensor, y: Tensor) -> Any:
    return (self.fc(x).mT * self.gain).mT + y * self.gain


def in_place(self: Base, x: Tensor, y: Tensor) -> Any:
    z = self.fc(x).mT
    z += y.mT
    z.relu_()
    return z


def all_axes(self: Base, x: Tensor, y: Tensor) -> Any:
    return self.fc(x).view(B, 2, 3, S).permute(3, 0, 2, 1).sigmoid() * 3


def last_two_of_four(self: Base, x: Tensor, y: Tensor) -> Any:
    return self.fc(x).unsqueeze(0).permute(0, 1, 3, 2) + y.mT[None]


def views_of_views(self: Base, x: Tensor, y: Tensor) -> Any:
    z = self.fc(x).mT
    return z[:, :, None].relu(), x


def rows_of_batches(self: Base, x: Tensor, y: Tensor) -> Any:
    z = self.norm(self.fc(x).flatten(0, 1))
    return z.view(B, S, C).mT * self.gain


def given_twice(self: Base, x: Tensor, y: Tensor) -> Any:
    z = torch.sigmoid(self.fc(x).mT)
    return z, z


TAKEN = [
    alone,
    same_order,
    second,
    by_row,
    by_column,
    by_both,
    batch_of_rows,
    there_and_back,
    in_place,
    all_axes,
    last_two_of_four,
    views_of_views,
    rows_of_batches,
    given_twice,
]


def other_order(self: Base, x: Tensor, y: Tensor) -> Any:
    return self.fc(x).mT + y


def others_result(self: Base, x: Tensor, y: Tensor) -> Any:
    return y + self.fc(x).mT


def read_twice(self: Base, x: Tensor, y: Tensor) -> Any:
    z = self.fc(x).mT
    return z * self.gain, z.sum(1)


def alias(self: Base, x: Tensor, y: Tensor) -> Any:
    z = self.fc(x)
    t = z.mT
    t.mul_(2)
    return z, t


def alias_kept(self: Base, x: Tensor, y: Tensor) -> Any:
    z = self.fc(x)
    row = z.view(-1)
    t = z.mT.relu_()
    return row, t


def channels(self: Base, x: Tensor, y: Tensor) -> Any:
    return F.prelu(self.fc(x).mT, self.gain)


def turned_norm(self: Base, x: Tensor, y: Tensor) -> Any:
    return self.norm(self.fc(x[0]).t())


def grid(self: Base, x: Tensor, y: Tensor) -> Any:
    return self.fc(x).mT * self.grid


def repeated(self: Base, x: Tensor, y: Tensor) -> Any:
    return self.fc(x).mT + y[0].mT.expand(B, S, C)


def a_part(self: Base, x: Tensor, y: Tensor) -> Any:
    return self.fc(x).mT[:, 1:] * 2, self.fc(x).mT[:, ::2] + 1


NOT_TAKEN = [
    other_order,
    others_result,
    read_twice,
    alias,
    alias_kept,
    channels,
    turned_norm,
    grid,
    repeated,
    a_part,
]


# Without gradients and with them, one of each in turn.
SETTINGS = [
    [("fuse", False, torch.float32), ("backend", True, torch.float32)],
    [("fuse", False, torch.bfloat16), ("fuse", True, torch.float32)],
]


@pytest.mark.parametrize(
    ("forward", "setting"),
    [(forward, setting) for forward, settings in in_turn(TAKEN, SETTINGS) for setting in settings],
)
def test_taken(forward: Any, setting: tuple[str, bool, torch.dtype]) -> None:
    road, learns, dtype = setting
    report = compare(forward, road, learns, dtype)
    assert report.chains == (1, 1), report


@pytest.mark.parametrize("forward", NOT_TAKEN)
@pytest.mark.parametrize("learns", [False, True])
def test_not_taken(forward: Any, learns: bool) -> None:
    report = compare(forward, "fuse", learns)
    assert report.sites and not report.chains[1], report
    assert [bool(each.reason) for each in report.not_taken] == [True] * report.chains[0]


def test_other_sizes_of_a_batch() -> None:
    """One graph for several batches, of which nothing is known but that they are sizes."""
    torch.manual_seed(0)
    model = type("Model", (Base,), {"forward": by_row})().eval()
    fused = fuse_eagerly(model)
    for batch in (4, 7, 1, 12):
        x, y = torch.randn(batch, S, C), torch.randn(batch, S, C)
        expected, actual = model(x, y), fused(x, y)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert actual.stride() == expected.stride()
