"""Marks a call's tensors while Dynamo traces it, so that one graph serves every batch size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# The attributes that torch._dynamo.mark_dynamic and mark_unbacked set on a tensor.
_MARKS = ("_dynamo_dynamic_indices", "_dynamo_unbacked_indices")


class Marks:
    """The tensors that are marked.

    Attributes:
        is_bounded: whether the caller has marked sizes.
    """

    def __init__(self) -> None:
        self.is_bounded = False
        self._marked: list[Tensor] = []

    def mark(self, values: Iterable[Any]) -> None:
        """Make the leading axis of a call's tensors symbolic from the first graph on."""
        for value in values:
            if type(value) in (list, tuple):
                self.mark(value)
            elif type(value) is dict:
                self.mark(value.values())
            elif any(hasattr(value, mark) for mark in _MARKS):
                self.is_bounded = True
            elif type(value) is Tensor and value.dim() and not hasattr(value, "_dynamo_weak_dynamic_indices"):
                torch._dynamo.maybe_mark_dynamic(value, 0)
                self._marked.append(value)

    def unmark(self) -> None:
        """Remove the marks after the call."""
        while self._marked:
            tensor = self._marked.pop()
            tensor.__dict__.pop("_dynamo_weak_dynamic_indices", None)
            tensor.__dict__.pop("_has_dynamo_dim_marking", None)
