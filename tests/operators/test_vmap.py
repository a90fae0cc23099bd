"""Rules for batches of calls: what a call for each element of the batch would give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epigemm._native import ops
from epigemm.operators.vmap import vmap_rule

x, weight, bias = torch.randn(4, 6, 8), torch.randn(4, 5, 8), torch.randn(4, 5)


def linear(x: Any, weight: Any, bias: Any) -> Any:
    return ops.linear("bias_relu", x, weight, bias, [], [], "default")


@pytest.mark.parametrize(
    ("in_dims", "calls"),
    [((0, None, None), 1), ((1, None, None), 1), ((None, 0, None), 4), ((0, None, 0), 4)],
)
def test_a_batch_of_x_alone_is_one_call(in_dims: tuple[int | None, ...], calls: int) -> None:
    seen = []

    def op(*arguments: Any) -> Any:
        seen.append(arguments)
        return ops.linear(*arguments)

    given = [
        each[0] if place is None else each.movedim(0, place)
        for each, place in zip((x, weight, bias), in_dims, strict=True)
    ]
    dims: tuple[Any, ...] = (None, *in_dims, [], [], None)
    rule = vmap_rule(op)
    found, place = rule(SimpleNamespace(batch_size=4), dims, "bias_relu", *given, [], [], "default")
    assert len(seen) == calls and place == 0
    torch.testing.assert_close(found, torch.vmap(linear, in_dims)(*given))
