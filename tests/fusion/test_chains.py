"""What counts as a chain, and as taken: arithmetic that the fused call computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from tests.fusion.eager import fuse_eagerly
from tests.support.thorough import in_turn


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.other, self.dropout = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.1)
        self.norm, self.batch_norm = nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.slope, self.slopes = nn.Parameter(torch.rand(1)), nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Any:
        raise NotImplementedError


def report_of(forward: Any, dtype: torch.dtype = torch.float32) -> epigemm.FusionReport:
    model = type("Model", (Base,), {"forward": forward})().eval().to(dtype)
    return fuse_eagerly(model, dry_run=True, example_inputs=(torch.rand(3, 8, 8, dtype=dtype),))  # type: ignore[no-any-return]


def relu(self: Base, x: Tensor) -> Any:
    return self.fc(x).relu()


def behind_dropout(self: Base, x: Tensor) -> Any:
    return self.dropout(self.fc(x)) + x


def behind_a_view(self: Base, x: Tensor) -> Any:
    return self.fc(x).view(24, 8) * 2


def hardswish(self: Base, x: Tensor) -> Any:
    return F.hardswish(self.fc(x))  # which PyTorch does not mark as pointwise


def batch_norm(self: Base, x: Tensor) -> Any:
    return self.batch_norm(self.fc(x[0]))


def counted(self: Base, x: Tensor) -> Any:
    z = self.fc(x)
    torch._C._log_api_usage_once("tests")  # as torchvision's functions begin
    return z + x


def cast_and_back(self: Base, x: Tensor) -> Any:
    return self.fc(x).float().relu().to(x.dtype)


def behind_idle_dropouts(self: Base, x: Tensor) -> Any:
    z = torch.feature_dropout(F.alpha_dropout(F.dropout(self.fc(x), 0.0), 0.0, True), 0.0, True)
    return torch.dropout(F.feature_alpha_dropout(z, 0.0, True), 0.0, True) + x


def prelu(self: Base, x: Tensor) -> Any:
    return F.prelu(self.fc(x), self.slope)


def prelu_of_columns(self: Base, x: Tensor) -> Any:
    return self.fc(x[0]).prelu(weight=self.slopes)


def compared(self: Base, x: Tensor) -> Any:
    z = self.fc(x)
    return torch.where((z > 0) & ~(z >= self.slopes), z * self.slope, z)


def masked_by_itself(self: Base, x: Tensor) -> Any:
    z = self.fc(x)
    return z.masked_fill(z.lt(x), 0.0) + (z > 0).to(z.dtype) * x


def scaled(self: Base, x: Tensor) -> Any:
    return torch.addmm(x[0], x[1], self.fc.weight.t(), beta=0.5, alpha=2).relu()


FORWARDS = [relu, behind_dropout, behind_a_view, hardswish, batch_norm, cast_and_back, counted]
FORWARDS += [behind_idle_dropouts, prelu, prelu_of_columns, compared, masked_by_itself, scaled]


@pytest.mark.parametrize(("forward", "dtype"), in_turn(FORWARDS, [torch.float32, torch.bfloat16]))
def test_taken(forward: Any, dtype: torch.dtype) -> None:
    report = report_of(forward, dtype)
    assert (report.chains, report.not_taken) == ((1, 1), []), report


def alone(self: Base, x: Tensor) -> Any:
    return self.fc(x)


def dropout_alone(self: Base, x: Tensor) -> Any:
    return self.dropout(self.fc(x))


def view_alone(self: Base, x: Tensor) -> Any:
    return self.fc(x).view(24, 8).transpose(0, 1)


def cast_alone(self: Base, x: Tensor) -> Any:
    return self.dropout(self.fc(x).float()).to(torch.float32)


def copied(self: Base, x: Tensor) -> Any:
    return self.fc(x).transpose(1, 2).contiguous().clone()


def norm_alone(self: Base, x: Tensor) -> Any:
    return self.norm(self.dropout(self.fc(x)))


def rotated(self: Base, x: Tensor) -> Any:
    z = self.fc(x).transpose(1, 2)
    return z * x + torch.cat([z[..., 4:], z[..., :4]], -1)


@pytest.mark.parametrize(
    "forward", [alone, dropout_alone, view_alone, cast_alone, copied, norm_alone, rotated]
)
def test_nothing_pointwise_follows(forward: Any) -> None:
    report = report_of(forward)
    assert (report.chains, report.not_taken) == ((0, 0), []), report


def read_by_a_norm(self: Base, x: Tensor) -> Any:
    z = self.dropout(self.fc(x))
    return z + self.norm(z)


def both(self: Base, x: Tensor) -> Any:
    return self.fc(x) + self.dropout(self.other(x))


def given_away(self: Base, x: Tensor) -> Any:
    z = self.fc(x)
    return z, z.relu()


def shared(self: Base, x: Tensor) -> Any:
    z = self.fc(x)
    return z * 2, self.other(z)


def masked(self: Base, x: Tensor) -> Any:
    return self.dropout(self.fc(x)).masked_fill(x > 0, 0.0)


def behind_a_transpose(self: Base, x: Tensor) -> Any:
    return x * self.dropout(self.fc(x)).transpose(1, 2).unsqueeze(0)


def prelu_of_another_axis(self: Base, x: Tensor) -> Any:
    return F.prelu(self.fc(x), self.slopes)  # the second of [3, 8, 8]


def test_prelu_along_the_second_of_three_axes_ends_a_chain() -> None:
    (site,) = report_of(prelu_of_another_axis).sites
    assert site.function == "linear" and "along the second axis" in site.notes[0]


def normalised(self: Base, x: Tensor) -> Any:
    z = self.fc(x).view(3, 8, 2, 4)
    return z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6)


def turned_by_halves(self: Base, x: Tensor) -> Any:
    z = self.fc(x)
    return z * x + torch.cat([-z[..., 4:], z[..., :4]], -1) * x


def repeated(self: Base, x: Tensor) -> Any:
    return self.dropout(self.fc(x)).contiguous() + x[:1]


@pytest.mark.parametrize(
    ("forward", "chains", "text"),
    [
        (read_by_a_norm, (1, 0), "is not pointwise"),
        (both, (2, 1), "is a part of another product's chain"),
        (given_away, (1, 0), "output reads a value in between"),
        (masked, (1, 0), "is no operand"),
        (shared, (1, 0), "linear_1 reads a value in between"),
        (behind_a_transpose, (1, 0), "gives a result of another shape or order"),
        (repeated, (1, 0), "is no operand; to repeat it takes as long as to add it"),
        (normalised, (1, 0), "makes one number of several, as norms do"),
        (turned_by_halves, (1, 0), "takes a part of it, as rotary embeddings do"),
    ],
)
def test_each_that_is_not_taken_has_its_reason(forward: Any, chains: tuple[int, int], text: str) -> None:
    report = report_of(forward)
    assert report.chains == chains, report
    (found,) = report.not_taken
    assert text in found.reason, found
