"""What the report says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epigemm.fusion import FusedSite, FusionReport, Skipped
from tests.fusion.eager import fuse_eagerly


class Sites(nn.Module):
    """One layer after the other, each used in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.vector = nn.Parameter(torch.rand(8))
        self.matrix = nn.Parameter(torch.rand(9, 8))
        self.mask = torch.rand(9, 8) > 0.5


def report_of(forward: Any) -> FusionReport:
    model = type("Model", (Sites,), {"forward": forward})()
    return fuse_eagerly(model, dry_run=True, example_inputs=(torch.rand(9, 8),))  # type: ignore[no-any-return]


def test_equal_blocks_are_one_line() -> None:
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3)]
    report = fuse_eagerly(nn.Sequential(*blocks), dry_run=True, example_inputs=[torch.rand(4, 8)])
    text = str(report).splitlines()
    assert text[0] == "6 of 6 products fused"
    assert text[1:] == ["  *.0 (3): linear_gelu: gelu(acc + c1)", "  *.2 (3): linear: acc + c1"], str(report)


def second_user(self: Sites, x: Tensor) -> Any:
    z = self.fc(x)
    return torch.relu(z) * z + z.sum()


def reduced(self: Sites, x: Tensor) -> Any:
    return F.softmax(self.fc(x), -1)


def masked(self: Sites, x: Tensor) -> Any:
    return self.fc(x).masked_fill(self.mask, 0.0)


def five_vectors(self: Sites, x: Tensor) -> Any:
    z = self.fc(x)
    for number in range(4):
        z = z * (self.vector + number)
    return z


def wider(self: Sites, x: Tensor) -> Any:
    return self.fc(x) * self.vector.double()


@pytest.mark.parametrize(
    ("forward", "formula", "text"),
    [
        (second_user, "acc + c1", "sum_1 makes one number of several, as norms do, which is not pointwise"),
        (reduced, "acc + c1", "softmax is a reduction"),
        (masked, "acc + c1", "bool [9, 8], is no operand"),
        (five_vectors, "(((acc + c1) * c2) * c3) * c4", "an epilogue has at most 4"),
        (wider, "acc + c1", "float64 [8], is no operand"),
    ],
    ids=lambda v: v.__name__ if callable(v) else "",
)
def test_why_a_chain_ends(forward: Any, formula: str, text: str) -> None:
    report = report_of(forward)
    (site,) = report.sites
    assert site.formula == formula and any(text in note for note in site.notes), report


def test_what_is_left_alone() -> None:
    model = nn.Linear(8, 8).double()
    report = fuse_eagerly(model, dry_run=True, example_inputs=(torch.rand(4, 8).double(),))
    assert report.skipped == [Skipped("linear", "it is in float64")]
    compiled = nn.Linear(8, 8)
    compiled.compile(backend="eager")
    assert "left alone: it has been compiled already" in str(
        fuse_eagerly(compiled, inplace=True).fusion_report
    )


def test_reports_add_up_without_repetition() -> None:
    first = FusionReport([FusedSite("a", "linear", ("fc",))], [Skipped("b", "why")])
    second = FusionReport([FusedSite("a", "linear", ("fc",)), FusedSite("c", "linear", ("fc",))], [])
    first.add(second)
    assert [site.name for site in first.sites] == ["a", "c"] and len(first.skipped) == 1
