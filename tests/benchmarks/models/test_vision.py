"""Windows of images; that fusion computes the same is in `test_unseen.py`."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.models import vision


def test_a_shifted_window_sees_its_neighbours_alone() -> None:
    """A change reaches, by one shifted layer, its window: not what the shift brought there from the other side."""
    torch.manual_seed(0)
    layer: Any = vision.SwinLayer(32, 1, side=8, size=4, is_shifted=True)
    x = torch.randn(1, 8, 8, 32)
    for (row, column), (bottom, right) in {(0, 0): (2, 2), (3, 3): (6, 6)}.items():
        changed = x.clone()
        changed[0, row, column, :16] += 10.0
        moved = (layer(changed) - layer(x)).abs().amax(dim=-1)[0] > 0
        wanted = torch.zeros(8, 8, dtype=torch.bool)
        wanted[max(0, bottom - 4) : bottom, max(0, right - 4) : right] = True
        assert torch.equal(moved, wanted)
