"""`FlopCounterMode` counts for each row what it counts for PyTorch's program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.ops.op import COUNT, Arguments, Op, results_of
from tests.ops.table import few, rows
from tests.ops.test_autograd import Call, with_leaves

M, N, K = 9, 16, 24


def counted(call: Call, given: Arguments) -> tuple[int, int]:
    """Of the forward pass, and of the backward pass of everything that has one."""
    with FlopCounterMode(display=False) as forward:
        results = [each for each in results_of(call(**given)) if each.requires_grad]
    with FlopCounterMode(display=False) as after:
        total: Any = sum(each.float().square().sum() for each in results)
        if results:
            total.backward()
    return forward.get_total_flops(), after.get_total_flops()


@rows("operations", lambda op: not op.of_kind(COUNT))
@pytest.mark.parametrize("recorded", [False, True])
def test_operations_are_counted_as_pytorchs(op: Op, recorded: bool, rng: torch.Generator) -> None:
    """Two for each term of a product."""
    wanted = None if recorded else ()
    arguments = op.draw(rng, (M,), N, K)
    found, expected = (counted(call, with_leaves(op, arguments, wanted)) for call in (op.call, op.reference))
    assert found == expected
    if op.is_linear and op.differentiable != ("row", "other"):
        assert found[0] > 0


@rows("operations into out", lambda op: op.is_linear and op.takes_out and few(op))
def test_operations_of_other_shapes(op: Op, rng: torch.Generator) -> None:
    """Into `out`, of no rows, and of a vector."""
    for lead in ((2, 3), (0,), ()):
        arguments = op.draw(rng, lead, N, K)
        expected = counted(op.reference, arguments)
        assert counted(op.call, arguments) == expected
        assert counted(op.call, {**arguments, "out": torch.empty(*lead, N)}) == expected


@rows("operations of graphs", lambda op: op.function is not None and few(op))
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.usefixtures("fresh_compiler")
def test_operations_of_graphs(op: Op, backend: str, rng: torch.Generator) -> None:
    """The second call's: the first one is the compiler's, too."""
    arguments = op.draw(rng, (M,), N, K)
    compiled = torch.compile(op.call, backend=backend)
    for _ in range(2):
        found = counted(compiled, with_leaves(op, arguments))
    assert found == counted(op.reference, with_leaves(op, arguments))
