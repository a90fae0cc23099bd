"""`epigemm::grouped_linear`, which compiled graphs have: its registrations, and pairs by two calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import epigemm
from epigemm.arguments.calls import LinearCall
from epigemm.epilogues.library import BIAS, FUNCTIONS
from epigemm.epilogues.registry import typed
from epigemm.operators import groups
from tests.support.pretended import describe

OPERATOR: Any = torch.ops.epigemm.grouped_linear
GATED = typed(FUNCTIONS["gated_silu"], (False, False))
ROWS, N, K = 9, 8, 16
OFFS = torch.tensor([4, 4, 9], dtype=torch.int32)


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = torch.randn(ROWS, K), torch.randn(3, 2 * N, K), torch.randn(3, 2 * N)
    return x.bfloat16(), weight.bfloat16(), bias.bfloat16()


def test_registrations() -> None:
    x, weight, bias = drawn()
    halves = weight.chunk(2, 1)
    for arguments in (
        (BIAS.name, x, weight, OFFS, [bias], None),
        (BIAS.name, x, weight, OFFS, [None], None),
        (GATED.name, x, halves[0], OFFS, [None, None], halves[1]),
    ):
        found = torch.library.opcheck(OPERATOR, arguments, test_utils=("test_schema", "test_faketensor"))
        assert set(found.values()) == {"SUCCESS"}


def test_operations_are_counted() -> None:
    """Twice those of a product, for two."""
    x, weight, _ = drawn()
    halves = weight.chunk(2, 1)
    for weight2, products in ((None, 1), (halves[1], 2)):
        with FlopCounterMode(display=False) as counter:
            OPERATOR(
                GATED.name if products == 2 else BIAS.name, x, halves[0], OFFS, [None] * products, weight2
            )
        assert counter.flop_counts["Global"][OPERATOR] == 2 * products * ROWS * N * K


def test_a_pair_by_two_calls() -> None:
    x, weight, bias = drawn()
    halves, biases = weight.chunk(2, 1), bias.chunk(2, 1)
    found = OPERATOR(GATED.name, x, halves[0], OFFS, [biases[0].contiguous(), None], halves[1])
    expected = epigemm.grouped_linear_glu(x, halves[0], biases[0], offs=OFFS, weight2=halves[1])
    assert torch.equal(found, expected)


class OfGraph(nn.Module):
    """A node of a graph."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor, offs: Tensor) -> Tensor:
        result: Tensor = OPERATOR(BIAS.name, x, weight, offs, [bias], None)
        return result


def test_a_kernel_reads_a_bias_with_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a call outside of graphs: here a half of a larger one."""
    describe(monkeypatch, linked=True)
    shapes = ((128, 2048), (8, 1536, 2048), (8, 2 * 1536))
    x, weight, bias = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
    (product,) = epigemm.explain(OfGraph(), x, weight, bias[:, :1536], torch.empty(8, dtype=torch.int32))
    assert product.explanation is not None and product.explanation.kernel.startswith("epigemm fused GEMM")


def test_a_graph_asks_the_arguments_that_a_call_asks() -> None:
    x, weight, _ = drawn()
    one = weight[0]
    with torch._subclasses.FakeTensorMode() as mode, pytest.raises(RuntimeError, match="weight: got shape"):
        OPERATOR(BIAS.name, mode.from_tensor(x), mode.from_tensor(one), mode.from_tensor(OFFS), [None], None)


def test_batch_invariant_calls_are_refused_in_graphs() -> None:
    """As they are outside of them: no kernel computes groups in a fixed order."""
    x, weight, _ = drawn()
    call = LinearCall(BIAS, x, weight, (None,), group_ends=OFFS)
    with torch._subclasses.FakeTensorMode() as mode:
        faked = call._replace(
            x=mode.from_tensor(x), weight=mode.from_tensor(weight), group_ends=mode.from_tensor(OFFS)
        )
        assert groups.in_graph(faked) is not None
        assert groups.in_graph(faked._replace(invariant=True)) is None
    assert groups.in_graph(call) is None
