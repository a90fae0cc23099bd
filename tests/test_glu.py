"""`linear_glu` against PyTorch: values, derivatives, compilers and transforms, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

import epigemm
from epigemm import route
from epigemm.arguments.calls import LinearCall
from epigemm.explain.recorder import record
from tests.support.activations import ACT
from tests.support.gated import Pair, assert_right, draw
from tests.support.stage import Stage

M, N, K = 6, 16, 24
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
both_forms = pytest.mark.parametrize("is_whole", [True, False], ids=["one weight", "two weights"])


def given(pair: Pair, is_whole: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call."""
    if is_whole:
        return pair.whole, {}
    x, weight, bias, weight2, bias2 = pair
    return (x, weight, bias), {"weight2": weight2, "bias2": bias2}


def eager(pair: Pair, activation: str = "silu") -> Tensor:
    x, weight, bias, weight2, bias2 = pair
    return ACT[activation](F.linear(x, weight, bias)) * F.linear(x, weight2, bias2)


# --- values ----------------------------------------------------------------------------------------------------------


@both_forms
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "bare"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACT)
def test_against_fp64(activation: str, dtype: torch.dtype, bias: bool, is_whole: bool) -> None:
    pair = draw((2, 3), N, K, dtype, bias=bias)
    args, named = given(pair, is_whole)
    assert_right(epigemm.linear_glu(*args, activation=activation, **named), pair, activation)


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


@pytest.mark.parametrize("which", ["bias", "bias2"])
def test_one_bias_of_two(which: str) -> None:
    whole = draw((M,), N, K, torch.float32)
    pair = whole._replace(bias=None) if which == "bias" else whole._replace(bias2=None)
    args, named = given(pair, is_whole=False)
    assert_right(epigemm.linear_glu(*args, **named), pair, "silu")


def test_no_copy_of_a_weight_is_made() -> None:
    """Both products are of views."""
    x, weight, bias = draw((M,), N, K, torch.float32).whole
    _, recorder = record("linear_glu", x, weight, bias)
    (second,), (_, first) = recorder.earlier, recorder.taken_apart()
    assert isinstance(first, LinearCall)
    assert first.weight.data_ptr() == weight.data_ptr() and first.weight.shape == (N, K)
    assert second.weight.data_ptr() == weight[N:].data_ptr() and second.weight.shape == (N, K)


@both_forms
@pytest.mark.parametrize("lead", [(), (1,), (2, 1, 3)], ids=str)
def test_of_any_leading_shape(lead: tuple[int, ...], is_whole: bool) -> None:
    pair = draw(lead, N, K, torch.float32)
    args, named = given(pair, is_whole)
    assert_right(epigemm.linear_glu(*args, **named), pair, "silu")


@both_forms
@pytest.mark.parametrize("sizes", [(0, N, K), (M, 0, K), (M, N, 0)], ids=["M", "N", "K"])
def test_nothing_to_multiply(sizes: tuple[int, int, int], is_whole: bool) -> None:
    m, n, k = sizes
    pair = draw((m,), n, k, torch.float32)
    args, named = given(pair, is_whole)
    torch.testing.assert_close(epigemm.linear_glu(*args, **named), eager(pair))


@both_forms
def test_tensors_that_lie_anyhow(is_whole: bool) -> None:
    pair = draw((M,), N, K, torch.float32)
    args, named = given(pair, is_whole)
    args = tuple(torch.stack((each, each), -1)[..., 0] for each in args)
    named = {name: torch.stack((each, each), -1)[..., 0] for name, each in named.items()}
    assert not args[0].is_contiguous()
    assert_right(epigemm.linear_glu(*args, **named), pair, "silu")
    turned = pair.x.t().contiguous().t()
    assert_right(epigemm.linear_glu(turned, *args[1:], **named), pair, "silu")


@both_forms
def test_out(is_whole: bool) -> None:
    pair = draw((2, M), N, K, torch.float32)
    args, named = given(pair, is_whole)
    for out in (torch.empty(2, M, N), torch.empty(2, M, 2 * N)[..., :N]):
        assert epigemm.linear_glu(*args, out=out, **named) is out
        assert_right(out, pair, "silu")


# --- derivatives -----------------------------------------------------------------------------------------------------


@both_forms
@pytest.mark.parametrize("activation", ["silu", "gelu", "tanh", "identity"])
def test_first_and_second_derivatives(activation: str, is_whole: bool) -> None:
    args, named = given(draw((3,), 2, 4, torch.float64), is_whole)
    names = tuple(named)
    tensors = [each.clone().requires_grad_() for each in (*args, *named.values())]

    def call(*tensors: Tensor) -> Tensor:
        return epigemm.linear_glu(
            *tensors[: len(args)],
            activation=activation,
            **dict(zip(names, tensors[len(args) :], strict=True)),  # type: ignore[arg-type]
        )

    assert torch.autograd.gradcheck(call, tensors)
    assert torch.autograd.gradgradcheck(call, tensors)


@pytest.mark.parametrize("activation", ACT)
def test_gradients_are_pytorchs(activation: str) -> None:
    """Of one weight a single tensor, with both halves."""
    pair = draw((M,), N, K, torch.float64)
    ours = [each.clone().requires_grad_() for each in pair.whole if each is not None]
    theirs = [each.detach().clone().requires_grad_() for each in ours]
    grad_out = torch.randn(M, N, dtype=torch.float64)
    torch.autograd.backward(epigemm.linear_glu(ours[0], ours[1], ours[2], activation=activation), grad_out)
    first, second = F.linear(*theirs).chunk(2, -1)
    torch.autograd.backward(ACT[activation](first) * second, grad_out)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_under_transforms() -> None:
    """A batch of weights by vmap, and gradients of each sample."""
    pair = draw((M,), N, K, torch.float64)
    x, weight, bias = pair.whole
    weights = torch.stack([weight, 2 * weight, weight - 1])
    found = vmap(lambda each: epigemm.linear_glu(x, each, bias))(weights)
    torch.testing.assert_close(found, torch.stack([epigemm.linear_glu(x, each, bias) for each in weights]))
    layer = epigemm.nn.LinearGLU(K, N, dtype=torch.float64)
    state = {name: each.detach() for name, each in layer.named_parameters()}

    def loss(state: dict[str, Tensor], row: Tensor) -> Tensor:
        result: Tensor = functional_call(layer, state, (row,))
        return result.square().sum()

    by_row = vmap(grad(loss), (None, 0))(state, x)
    layer(x).square().sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(by_row[name].sum(0), parameter.grad)


# --- compilers and modes ---------------------------------------------------------------------------------------------


@both_forms
@pytest.mark.slow
def test_compiled(is_whole: bool) -> None:
    pair = draw((M,), N, K, torch.float32)
    args, named = given(pair, is_whole)
    compiled = torch.compile(epigemm.linear_glu, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args, **named), epigemm.linear_glu(*args, **named))
    out = torch.empty(M, N)
    torch.testing.assert_close(compiled(*args, **named, out=out), epigemm.linear_glu(*args, **named))
    torch.testing.assert_close(out, epigemm.linear_glu(*args, **named))
    leaves = [each.clone().requires_grad_() for each in args]
    others = [each.detach().clone().requires_grad_() for each in leaves]
    torch.autograd.backward(compiled(*leaves, **named).sum())
    torch.autograd.backward(epigemm.linear_glu(*others, **named).sum())
    for mine, other in zip(leaves, others, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


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


@both_forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, is_whole: bool) -> None:
    """As of tensors that were cast before."""
    pair = draw((M,), N, K, torch.float32)
    args, named = given(pair, is_whole)
    with torch.autocast("cpu", dtype):
        found = epigemm.linear_glu(*args, **named)
    cast = Pair(*(None if each is None else each.to(dtype) for each in pair))  # type: ignore[arg-type]
    assert_right(found, cast, "silu")


@both_forms
def test_batch_invariant(is_whole: bool) -> None:
    args, named = given(draw((M,), N, K, torch.float32), is_whole)
    with epigemm.batch_invariant():
        all_rows = epigemm.linear_glu(*args, **named)
        one = epigemm.linear_glu(args[0][2:3], *args[1:], **named)
    assert torch.equal(all_rows[2:3], one)


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
    assert "epilogue bias_gated_silu" in found.op and len(found.kernels) == 3
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


@pytest.mark.parametrize("name", ["odd", "bias2 alone", "other rows", "activation"])
def test_the_same_words_from_a_compiler(name: str, fresh_compiler: Any) -> None:
    args, named, _, message = REFUSED[name]
    call: Callable[..., Any] = torch.compile(epigemm.linear_glu, backend="eager")
    with pytest.raises(Exception, match=message):
        call(*args, **named)
