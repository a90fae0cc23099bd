"""`linear_glu`: the order of its halves, exported programs, packs, tuning. Values and errors: tests/ops, tests/net."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import epigemm
from tests.support.gated import assert_right, draw
from tests.support.stage import Stage

M, N, K = 6, 16, 24
x = torch.randn(M, K)


def test_the_first_half_is_activated() -> None:
    """As Phi-3's layers have it; the default is SiLU. `F.glu` and diffusers' GEGLU have the halves the other way."""
    x, weight, bias = draw((M,), N, K, torch.float64).whole
    assert bias is not None
    first, second = F.linear(x, weight, bias).chunk(2, -1)
    torch.testing.assert_close(epigemm.linear_glu(x, weight, bias), F.silu(first) * second)
    turned = epigemm.linear_glu(
        x, weight[N:], bias[N:], weight2=weight[:N], bias2=bias[:N], activation="sigmoid"
    )
    torch.testing.assert_close(turned, F.glu(F.linear(x, weight, bias), -1))


@pytest.mark.slow
def test_exported() -> None:
    """Two calls of a public operator."""
    linears = [torch.nn.Linear(K, N) for _ in range(2)]
    for layer in (epigemm.nn.LinearGLU(K, N), epigemm.nn.LinearGLU.from_linears(*linears)):
        with torch.no_grad():
            program = torch.export.export(layer.eval(), (x,))
            calls = [node for node in program.graph.nodes if "epigemm.linear" in str(node.target)]
            assert len(calls) == 2
            torch.testing.assert_close(program.module()(x), layer(x))


def test_packed_weights() -> None:
    pair = draw((M,), N, K, torch.float32)
    x, weight, bias, weight2, bias2 = pair
    found = epigemm.linear_glu(
        x, epigemm.pack(weight), bias, weight2=epigemm.pack(weight2), bias2=bias2, activation="relu"
    )
    assert_right(found, pair, "relu")


def test_tuned(stage: Stage) -> None:
    """The product that the other one reads, and that one."""
    pair = draw((40,), 256, 128, torch.bfloat16, bias=False)
    found = epigemm.tune("linear_glu", pair.x, pair.weight, weight2=pair.weight2)
    assert [entry.epilogue for entry in found.entries[:1]] == ["bias"] and len(found.entries) == 2
    assert "; gated_silu" in found.problem and sum(each.chosen for each in found.candidates) == 2
