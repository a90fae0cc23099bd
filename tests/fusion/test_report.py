"""What the report says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from epigemm.fusion import FusedSite, FusionReport, Skipped


class Sites(nn.Module):
    """One layer after the other, each used in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.vector = nn.Parameter(torch.rand(8))
        self.matrix = nn.Parameter(torch.rand(9, 8))


def notes(forward: object) -> str:
    """All that the report says about one forward."""
    model = type("Model", (Sites,), {"forward": forward})()
    return str(epigemm.fuse(model, dry_run=True))


def test_a_report_in_full() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Bilinear(8, 8, 8))
    model.add_module("norm", nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)))
    report = epigemm.fuse(nn.ModuleDict({"net": model[:4], "norm": model[5]}), dry_run=True)
    assert str(report) == (
        "fused 3 sites\n"
        "  net: 0: epigemm.linear_relu for 0 (nn.Linear) -> 1 (nn.ReLU)\n"
        "  net: 2: epigemm.linear for 2 (nn.Linear)\n"
        "      followed by 3 (nn.GELU): no built-in epilogue covers it after linear\n"
        "      a linear layer alone: replaced for fp32 on CUDA, where products on fp16 pieces are faster\n"
        "  norm: 0: epigemm.linear_scale_batch_norm for 0 (nn.Linear) -> 1 (nn.BatchNorm1d)\n"
        "      BatchNorm is in training mode: it runs as it is, after the product, until eval()"
    )


def second_user(self: Sites, x: Tensor) -> Tensor:
    z = self.fc(x)
    return torch.relu(z) * z  # type: ignore[no-any-return]


def returned_too(self: Sites, x: Tensor) -> tuple[Tensor, Tensor]:
    z = self.fc(x)
    return z, torch.relu(z)


def by_a_matrix(self: Sites, x: Tensor) -> Tensor:
    return self.fc(x) * self.matrix  # type: ignore[no-any-return]


def relu_by_a_vector(self: Sites, x: Tensor) -> Tensor:
    return F.relu(self.fc(x)) * self.vector


def divides_by_it(self: Sites, x: Tensor) -> Tensor:
    return 1 / F.relu(self.fc(x))


def two_biases(self: Sites, x: Tensor) -> Tensor:
    return self.fc(x) + self.vector  # type: ignore[no-any-return]


def trains(self: Sites, x: Tensor) -> Tensor:
    bn = self.bn
    return F.batch_norm(self.fc(x), bn.running_mean, bn.running_var, bn.weight, bn.bias, True)


def other_residual(self: Sites, x: Tensor) -> Tensor:
    z = self.fc(x)
    return torch.sigmoid(z) * self.vector + z  # type: ignore[no-any-return]


def scaled_bias(self: Sites, x: Tensor) -> Tensor:
    return torch.add(x @ self.fc.weight.T, self.vector, alpha=2)


@pytest.mark.parametrize(
    ("forward", "text"),
    [
        (second_user, "fc has more than one user: relu (torch.relu), mul (operator.mul)"),
        (returned_too, "fc has more than one user: relu (torch.relu), the result"),
        (by_a_matrix, "its operand is not known to be one value per column"),
        (relu_by_a_vector, "no built-in epilogue multiplies after relu by a tensor"),
        (divides_by_it, "which divides by it"),
        (two_biases, "there is a bias already"),
        (trains, "in training mode, which needs the batch's statistics"),
        (other_residual, "its operand is neither a number nor a 0-d tensor"),
        (scaled_bias, "with alpha=2"),
    ],
    ids=lambda v: v.__name__ if callable(v) else "",
)
def test_reasons(forward: object, text: str) -> None:
    assert text in notes(forward)


def test_modules_that_are_not_looked_into() -> None:
    report = epigemm.fuse(nn.TransformerEncoderLayer(8, 2), dry_run=True)
    assert (
        Skipped("TransformerEncoderLayer", "torch's own TransformerEncoderLayer is not looked into")
        in report.skipped
    )
    report = epigemm.fuse(nn.Linear(8, 8), dry_run=True)
    assert str(report) == "fused 0 sites\nleft alone 1\n  Linear: a linear layer alone; call epigemm.linear"
    assert str(epigemm.fuse(nn.ReLU(), dry_run=True)) == "fused 0 sites"


def test_reports_add_up_without_repetition() -> None:
    first = FusionReport([FusedSite("a", "linear", ("fc",))], [Skipped("b", "why")])
    second = FusionReport([FusedSite("a", "linear", ("fc",)), FusedSite("c", "linear", ("fc",))], [])
    first.add(second)
    assert [site.name for site in first.sites] == ["a", "c"] and len(first.skipped) == 1
