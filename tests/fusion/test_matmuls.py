"""Products of random broadcast batches: whether fused or not, PyTorch's values. Spellings: `table_products.py`."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fusion.eager import fuse_eagerly
from tests.net.explanations import Calls
from tests.support.thorough import in_turn


def _drawn(draw: random.Random, batch: list[int], rows: int, columns: int) -> Tensor:
    """A side of a product: with some of the batch's axes, some of them 1, some of them repeated in memory."""
    lead = batch[draw.randint(0, len(batch)) :] if draw.random() < 0.5 else batch
    sizes = [draw.choice([size, size, 1]) for size in lead]
    stored = [draw.choice([size, 1]) for size in sizes]
    made = torch.randn(*stored, rows, columns)
    if draw.random() < 0.2:
        made = made.mT.contiguous().mT
    return made.expand(*sizes, rows, columns)


def drawn(seed: int) -> tuple[Tensor, Tensor]:
    """Two tensors that PyTorch multiplies."""
    draw = random.Random(seed)
    batch = [draw.choice([0, 1, 2, 2, 3, 3]) for _ in range(draw.randint(0, 3))]
    m, k, n = (draw.choice([0, 1, 2, 5, 5, 5]) for _ in range(3))
    x, w = _drawn(draw, batch, m, k), _drawn(draw, batch, k, n)
    which = draw.random()
    if which < 0.05:
        x = torch.randn(k)
    elif which < 0.1:
        w = torch.randn(k)
    return x, w


class Products(nn.Module):
    """Many products of two tensors each, with something behind each."""

    def forward(self, pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        found = []
        for x, w in pairs:
            for z in [torch.matmul(x, w), *([torch.bmm(x, w)] if _fits_bmm(x, w) else [])]:
                found.append(torch.relu(z) * 2 if z.numel() % 2 else torch.sigmoid(z + 1))
        return found


def _fits_bmm(x: Tensor, w: Tensor) -> bool:
    return x.dim() == w.dim() == 3 and x.shape[0] == w.shape[0]


@pytest.mark.parametrize(("first", "road"), in_turn(range(0, 160, 40), ["fuse", "backend"]))
def test_batches(road: str, first: int) -> None:
    pairs = [drawn(seed) for seed in range(first, first + 40)]
    for x, _ in pairs:
        x.requires_grad_(first % 80 < 40)
    expected = Products()(pairs)
    reports: list[Any] = []
    if road == "fuse":
        fused: Any = fuse_eagerly(Products(), strict=True)
        actual = fused(pairs)
        reports.append(fused.fusion_report)
    else:
        options: dict[str, Any] = {"backend": "aot_eager", "report": reports.append, "strict": True}
        actual = torch.compile(Products(), backend="epigemm", options=options)(pairs)
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape and one.requires_grad == other.requires_grad
        torch.testing.assert_close(one, other)
    assert sum(len(report.sites) for report in reports) >= 4


def test_a_summand_that_is_written_before_its_derivative_would_read_it() -> None:
    def written_later(c: Tensor, x: Tensor, w: Tensor) -> Tensor:
        added = c * 1
        z = torch.addmm(added, x, w)
        added += 1
        return z + added

    inputs = [torch.randn(shape, requires_grad=True) for shape in ((5, 6), (5, 8), (8, 6))]
    report = fuse_eagerly(Calls(written_later), dry_run=True, example_inputs=inputs)
    (skipped,) = report.skipped
    assert "what it adds is written before its derivative would read it again" in skipped.reason
    assert not report.sites
