"""Marks on the tensors of a call, and that none is left after it."""

from __future__ import annotations

import torch

from epigemm.fusion.marks import Marks


def test_marks_go_again() -> None:
    x, y, z = torch.rand(3, 2), torch.rand(3), torch.rand(())
    marks = Marks()
    marks.mark([x, (y, [z]), {"x": x}, 3])
    assert hasattr(x, "_dynamo_weak_dynamic_indices") and hasattr(y, "_dynamo_weak_dynamic_indices")
    assert not hasattr(z, "_dynamo_weak_dynamic_indices")
    marks.unmark()
    assert not vars(x) and not vars(y) and not marks.is_bounded


def test_what_the_caller_has_marked_stays() -> None:
    x, y = torch.rand(3, 2), torch.rand(3, 2)
    torch._dynamo.mark_dynamic(x, 1)
    torch._dynamo.maybe_mark_dynamic(y, 1)
    before = dict(vars(y))
    marks = Marks()
    marks.mark([x, y])
    assert marks.is_bounded
    marks.unmark()
    assert hasattr(x, "_dynamo_dynamic_indices") and vars(y) == before
