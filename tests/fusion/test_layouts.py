"""A copy that puts sums in rows is kept where it is faster and its strides cannot be noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from epigemm.fusion import profit
from epigemm.fusion.profit import Judged
from tests.fusion.axes import B, Base, C, S, compare


def block(self: Base, x: Tensor) -> Tensor:
    z: Tensor = x + self.fc(F.layer_norm(x, (C,)))
    return z


def stream(self: Base, x: Tensor, y: Tensor) -> Any:
    return block(self, block(self, block(self, y.mT))).sum(1)


def positions(self: Base, x: Tensor, y: Tensor) -> Any:
    return F.layer_norm(block(self, block(self, y.mT + self.grid)), (C,)), x


def scaled(self: Base, x: Tensor, y: Tensor) -> Any:
    z = y.mT + self.gain * F.dropout(self.fc(y).relu(), 0.5, False)
    return block(self, z).contiguous() * 1


def parts(self: Base, x: Tensor, y: Tensor) -> Any:
    z = block(self, block(self, y.mT))
    first, second = z.chunk(2, 1)
    return torch.cat([second, first], 1), z.reshape(-1).sum(0)


def given_back_of_many(self: Base, x: Tensor, y: Tensor) -> Any:
    z = block(self, block(self, block(self, block(self, block(self, y.mT)))))
    return z, z.contiguous(), z.sum(1)


PUT = [stream, positions, scaled, parts, given_back_of_many]


def shared(self: Base, x: Tensor, y: Tensor) -> Any:
    z = block(self, block(self, block(self, block(self, y.mT))))
    return z, z.mT


def given_back(self: Base, x: Tensor, y: Tensor) -> Any:
    return block(self, block(self, y.mT))


def view_given_back(self: Base, x: Tensor, y: Tensor) -> Any:
    z = block(self, block(self, y.mT))
    return z.sum(1), z[:, 0]


def one_sum(self: Base, x: Tensor, y: Tensor) -> Any:
    return block(self, y.mT).sum(1)


def written(self: Base, x: Tensor, y: Tensor) -> Any:
    z = block(self, block(self, y.mT))
    kept = z.contiguous()  # a copy, but not of what lies in rows
    kept.add_(1)
    return z.sum(1), kept * 1


def written_view(self: Base, x: Tensor, y: Tensor) -> Any:
    z = block(self, block(self, y.mT))
    turned = z.mT.reshape(B, -1)  # a view, but not of what lies in rows
    turned.add_(1)
    return z.sum(1), turned.sum(1)


def random(self: Base, x: Tensor, y: Tensor) -> Any:
    torch.manual_seed(3)
    z = F.dropout(block(self, block(self, y.mT)), 0.5, True)
    return z.sum(1)


def memory(self: Base, x: Tensor, y: Tensor) -> Any:
    z = block(self, block(self, y.mT))
    return z.as_strided((B, 4), (S * C, 1)) * 1


def alternating(self: Base, x: Tensor, y: Tensor) -> Any:
    z = y.mT
    for _ in range(2):
        z = z + self.fc(z.mT).mT
        z = block(self, z)
    return z.sum(1)


LEFT = [given_back, shared, view_given_back, one_sum, written, written_view, random, memory, alternating]


@pytest.mark.parametrize("forward", [*PUT, *LEFT])
@pytest.mark.parametrize(("road", "learns"), [("fuse", False), ("fuse", True), ("backend", False)])
def test_a_copy_that_nobody_sees(forward: Any, road: str, learns: bool) -> None:
    if forward is random and road == "backend":
        pytest.skip("a seed cannot be compiled")
    report = compare(forward, road, learns)
    is_put = any("is copied once" in note for note in report.notes)
    assert is_put == (forward in PUT), report
    if is_put:
        assert report.chains[0] == report.chains[1] >= 2, report


def test_nothing_is_copied_if_the_sums_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profit, "judged", lambda *given, **named: Judged(profit.SLOWER))
    report = compare(stream, "fuse", False)
    assert not report.sites and not report.notes, report
