"""`linear_glu` against PyTorch: values, derivatives, compilers and transforms, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from epigemm import route
from epigemm.arguments.calls import LinearCall
from epigemm.explain.log import logged
from tests.support.gated import Pair, assert_right, draw
from tests.support.stage import Stage

M, N, K = 6, 16, 24


def given(pair: Pair, is_whole: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call."""
    if is_whole:
        return pair.whole, {}
    x, weight, bias, weight2, bias2 = pair
    return (x, weight, bias), {"weight2": weight2, "bias2": bias2}


# --- values ----------------------------------------------------------------------------------------------------------


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


def test_no_copy_of_a_weight_is_made() -> None:
    """Both products are of views."""
    x, weight, bias = draw((M,), N, K, torch.float32).whole
    _, opened = logged("linear_glu", x, weight, bias)
    second, first = (each.call for each in opened.calls)
    assert isinstance(first, LinearCall) and isinstance(second, LinearCall)
    assert first.weight.data_ptr() == weight.data_ptr() and first.weight.shape == (N, K)
    assert second.weight.data_ptr() == weight[N:].data_ptr() and second.weight.shape == (N, K)


# --- compilers and modes ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_exported() -> None:
    """Two calls of a public operator. Of one weight's halves, which a program makes anew, no packs are kept."""
    linears = [torch.nn.Linear(K, N) for _ in range(2)]
    for layer, keeps in (
        (epigemm.nn.LinearGLU(K, N), False),
        (epigemm.nn.LinearGLU.from_linears(*linears), True),
    ):
        with torch.no_grad():
            program = torch.export.export(layer.eval(), (x,))
            calls = [node for node in program.graph.nodes if "epigemm.linear" in str(node.target)]
            assert ["keep" in call.args for call in calls] == [keeps, keeps]
            torch.testing.assert_close(program.module()(x), layer(x))


def test_packed_weights() -> None:
    pair = draw((M,), N, K, torch.float32)
    x, weight, bias, weight2, bias2 = pair
    found = epigemm.linear_glu(
        x, epigemm.pack(weight), bias, weight2=epigemm.pack(weight2), bias2=bias2, activation="relu"
    )
    assert_right(found, pair, "relu")
    with epigemm.keep_packs():
        whole = epigemm.linear_glu(x, torch.nn.Parameter(pair.whole[1]), pair.whole[2], activation="relu")
    assert_right(whole, pair, "relu")


def test_explained() -> None:
    """Both products, in the order in which they run."""
    args, named = given(draw((M,), N, K, torch.float32), is_whole=False)
    found = epigemm.explain(epigemm.linear_glu, *args, **named)
    assert "epilogue gated_silu" in found.op and len(found.kernels) == 3
    assert any(reason.startswith("it reads another product: torch GEMM") for reason in found.reasons)


def test_tuned(stage: Stage) -> None:
    """The product that the other one reads, and that one."""
    pair = draw((40,), 256, 128, torch.bfloat16, bias=False)
    found = epigemm.tune("linear_glu", pair.x, pair.weight, weight2=pair.weight2)
    assert [entry.epilogue for entry in found.entries[:1]] == ["bias"] and len(found.entries) == 2
    assert "; gated_silu" in found.problem and sum(each.chosen for each in found.candidates) == 2


# --- what is refused -------------------------------------------------------------------------------------------------

x, weight, bias = torch.randn(M, K), torch.randn(2 * N, K), torch.randn(2 * N)
half = weight[:N]
REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "odd": (
        (x, weight[1:]),
        {},
        RuntimeError,
        r"weight: got shape \[31, 24\]; accepted is an even number of rows",
    ),
    "bias of a half": (
        (x, weight, bias[:N]),
        {},
        RuntimeError,
        r"bias: got shape \[16\]; accepted is \[32\]",
    ),
    "bias of both": (
        (x, half, bias),
        {"weight2": half},
        RuntimeError,
        r"bias: got shape \[32\]; accepted is \[16\]",
    ),
    "bias2": (
        (x, half),
        {"weight2": half, "bias2": bias},
        RuntimeError,
        r"bias2: got shape \[32\]; accepted is \[16\]",
    ),
    "bias2 alone": (
        (x, weight),
        {"bias2": bias[:N]},
        RuntimeError,
        "bias2: got a tensor without a weight2; accepted is None",
    ),
    "other rows": (
        (x, half),
        {"weight2": weight},
        RuntimeError,
        r"weight2: got shape \[32, 24\]; accepted is \[16, 24\], that of weight",
    ),
    "other columns": (
        (x, half),
        {"weight2": half[:, 1:]},
        RuntimeError,
        r"weight2: got shape \[16, 23\]; accepted is \[16, 24\]",
    ),
    "other type": (
        (x, half),
        {"weight2": half.double()},
        RuntimeError,
        "weight2: got dtype torch.float64; accepted is torch.float32, as x has torch.float32",
    ),
    "elsewhere": (
        (x, half),
        {"weight2": half.to("meta")},
        RuntimeError,
        "weight2: got device meta; accepted is cpu, where x is",
    ),
    "no tensor": (
        (x, half),
        {"weight2": [1.0]},
        TypeError,
        "weight2: got list; accepted is a torch.Tensor or None",
    ),
    "no weight": ((x, None), {}, TypeError, "weight: got NoneType|weight: got None"),
    "columns of x": (
        (x[:, 1:], weight),
        {},
        RuntimeError,
        r"x: got shape \[6, 23\]; accepted is \[..., in_features\]",
    ),
    "activation": (
        (x, weight),
        {"activation": "swish"},
        ValueError,
        "activation: got 'swish'; accepted are gelu,",
    ),
    "no activation": (
        (x, weight),
        {"activation": None},
        TypeError,
        "activation: got NoneType; accepted are gelu,",
    ),
    "precision": ((x, weight), {"precision": "best"}, ValueError, "precision: got 'best'; accepted are"),
    "strict": ((x, weight), {"strict": 1}, TypeError, "strict: got int; accepted is True or False"),
    "not fused": (
        (x, weight),
        {"strict": True},
        RuntimeError,
        "strict: got True for a call that no fused kernel",
    ),
    "packed rows of both": (
        (x, epigemm.pack(weight)),
        {},
        TypeError,
        "weight: got a PackedWeight with the rows of both products; accepted is a tensor, or a PackedWeight of each",
    ),
    "out's shape": ((x, weight), {"out": torch.empty(M, 2 * N)}, RuntimeError, r"out: got shape \[6, 32\]"),
    "out is an input": (
        (x, half),
        {"weight2": half.clone(), "out": half.reshape(-1)[: M * N].view(M, N)},
        RuntimeError,
        "out: some of its elements share memory with weight;",
    ),
    "out is weight2": (
        (x, half.clone()),
        {"weight2": half, "out": half.reshape(-1)[: M * N].view(M, N)},
        RuntimeError,
        "out: some of its elements share memory with weight2;",
    ),
    "out and gradients": (
        (x, weight.clone().requires_grad_()),
        {"out": torch.empty(M, N)},
        RuntimeError,
        r"linear_glu\(\): functions with out=... arguments don't support automatic differentiation",
    ),
}


@pytest.mark.parametrize(("args", "named", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_before_anything_is_launched(
    args: tuple[Any, ...],
    named: dict[str, Any],
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def launched(*call: Any) -> Tensor:
        raise AssertionError("the second product was launched")

    monkeypatch.setattr(route, "linear", launched)
    with pytest.raises(error, match=message):
        epigemm.linear_glu(*args, **named)
