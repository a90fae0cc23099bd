"""Every kind of bad input: the exact exception, a message with what was got and accepted, and nothing written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from tests.support.cases import poisoned
from tests.support.public import BY_NAME, PUBLIC, PUBLIC_ELEMENTWISE, PUBLIC_LINEAR, Arguments, Public

M, N, K = 9, 16, 24
INF, NAN = float("inf"), float("nan")


def refuses(
    function: Public,
    arguments: Arguments,
    error: type[Exception],
    argument: str,
    *words: object,
    out: torch.Tensor | None = None,
) -> None:
    """The call raises exactly `error`, naming the argument, what was got, what is accepted; `out` stays poisoned."""
    if out is None:
        x = arguments.get("x")
        dtype = x.dtype if isinstance(x, torch.Tensor) and x.dtype.is_floating_point else torch.float32
        out = poisoned((M, N), dtype, "cpu")
    with pytest.raises(error) as caught:
        function.call(**arguments, out=out)
    assert type(caught.value) is error
    text = str(caught.value)
    assert re.match(rf"{argument}: .*accept(ed|s)", text, re.S), text
    for word in words:
        assert str(word) in text, f"{word!r} is not in {text!r}"
    if (
        isinstance(out, torch.Tensor)
        and out.is_floating_point()
        and out.layout is torch.strided
        and not out.is_meta
    ):
        assert bool(out.isnan().all()), "out was written although the call was refused"
    # Refused without out= as well, and with the same words.
    if argument != "out":
        with pytest.raises(error, match=re.escape(text[: text.index(";")]) if ";" in text else argument):
            function.call(**arguments)


functions = pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.name)
linear_functions = pytest.mark.parametrize("function", PUBLIC_LINEAR, ids=lambda f: f.name)
elementwise_functions = pytest.mark.parametrize("function", PUBLIC_ELEMENTWISE, ids=lambda f: f.name)
VECTORS = [(function, name) for function in PUBLIC for name in function.vectors]
vectors = pytest.mark.parametrize(
    ("function", "name"), VECTORS, ids=[f"{function.name}-{name}" for function, name in VECTORS]
)
TENSORS = [
    (function, name)
    for function in PUBLIC
    for name in (("x", "weight") if function.is_linear else ("x",)) + function.vectors
]
# One tensor alone has nothing to differ from.
AMONG_OTHERS = [(function, name) for function, name in TENSORS if function.is_linear or function.vectors]
tensors_among_others = pytest.mark.parametrize(
    ("function", "name"), AMONG_OTHERS, ids=[f"{function.name}-{name}" for function, name in AMONG_OTHERS]
)
tensors = pytest.mark.parametrize(
    ("function", "name"), TENSORS, ids=[f"{function.name}-{name}" for function, name in TENSORS]
)


@pytest.fixture
def draw(rng: torch.Generator) -> Callable[[Public], Arguments]:
    return lambda function: function.draw(rng, shape=(M, N, K))


Draw = Callable[[Public], Arguments]


@tensors
@pytest.mark.parametrize("value", [3.0, "text", [1.0, 2.0]], ids=["float", "str", "list"])
def test_not_a_tensor(function: Public, name: str, value: object, draw: Draw) -> None:
    refuses(function, {**draw(function), name: value}, TypeError, name, type(value).__name__, "torch.Tensor")


@functions
@pytest.mark.parametrize("name", ["x", "weight"])
def test_none_stands_for_no_required_tensor(function: Public, name: str, draw: Draw) -> None:
    arguments = draw(function)
    if name in arguments:
        with pytest.raises(TypeError, match=f"{name}: got None"):
            function.call(**{**arguments, name: None})


@functions
def test_numpy_is_not_a_tensor(function: Public, draw: Draw) -> None:
    arguments = draw(function)
    arguments["x"] = arguments["x"].numpy()
    refuses(function, arguments, TypeError, "x", "ndarray", "torch.Tensor")


@linear_functions
@pytest.mark.parametrize("shape", [(K,), (2, N, K), ()], ids=str)
def test_wrong_rank_of_weight(function: Public, shape: tuple[int, ...], draw: Draw) -> None:
    arguments = {**draw(function), "weight": torch.zeros(shape)}
    refuses(function, arguments, RuntimeError, "weight", list(shape), "[out_features, in_features]")


@linear_functions
def test_zero_dimensional_x(function: Public, draw: Draw) -> None:
    refuses(function, {**draw(function), "x": torch.tensor(1.0)}, RuntimeError, "x", "[]")


@linear_functions
@pytest.mark.parametrize("k", [K - 1, K + 1, 1, 0])
def test_mismatched_k(function: Public, k: int, draw: Draw) -> None:
    arguments = {**draw(function), "x": torch.zeros(M, k)}
    refuses(function, arguments, RuntimeError, "x", [M, k], K)


@vectors
@pytest.mark.parametrize("shape", [(N - 1,), (N + 1,), (1,), (0,), (1, N), (N, 1), ()], ids=str)
def test_wrong_length_of_a_vector(function: Public, name: str, shape: tuple[int, ...], draw: Draw) -> None:
    """No broadcasting, not even of one element: a vector has length N."""
    arguments = {**draw(function), name: torch.ones(shape)}
    refuses(function, arguments, RuntimeError, name, list(shape), [N])


@tensors_among_others
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_mixed_dtypes(function: Public, name: str, dtype: torch.dtype, draw: Draw) -> None:
    arguments = draw(function)
    arguments[name] = arguments[name].to(dtype)
    out = poisoned((M, N), torch.float32, "cpu")
    with pytest.raises(RuntimeError) as caught:
        function.call(**arguments, out=out)
    text = str(caught.value)
    assert re.match(r"\w+: got dtype torch\.\w+; accepted", text), text
    assert str(dtype) in text and "torch.float32" in text
    if name not in {"x"}:
        assert text.startswith(f"{name}: "), text
    assert bool(out.isnan().all())


@tensors
@pytest.mark.parametrize(
    "dtype",
    [torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn],
    ids=str,
)
def test_unsupported_dtypes(function: Public, name: str, dtype: torch.dtype, draw: Draw) -> None:
    arguments = draw(function)
    arguments[name] = torch.ones_like(arguments[name]).to(dtype)
    out = poisoned((M, N), torch.float32, "cpu")
    refuses(function, arguments, RuntimeError, name, dtype, "float32", out=out)


@functions
def test_all_integer_tensors(function: Public, draw: Draw) -> None:
    arguments = {
        name: torch.ones_like(value).long() if isinstance(value, torch.Tensor) else value
        for name, value in draw(function).items()
    }
    refuses(function, arguments, RuntimeError, "x", "torch.int64", "torch.float16", "torch.float64")


@tensors
def test_sparse(function: Public, name: str, draw: Draw) -> None:
    arguments = draw(function)
    arguments[name] = arguments[name].to_sparse()
    refuses(function, arguments, RuntimeError, name, "sparse", "dense")


@tensors
def test_quantised(function: Public, name: str, draw: Draw) -> None:
    arguments = draw(function)
    try:
        arguments[name] = torch.quantize_per_tensor(arguments[name], 0.1, 0, torch.qint8)
    except (RuntimeError, AttributeError):
        pytest.skip("this torch has no quantised tensors")
    refuses(function, arguments, RuntimeError, name, "qint8")


@tensors
def test_nested(function: Public, name: str, draw: Draw) -> None:
    arguments = draw(function)
    arguments[name] = torch.nested.nested_tensor([torch.ones(3), torch.ones(5)])
    with pytest.raises(RuntimeError, match=f"{name}: got a nested tensor"):
        function.call(**arguments)


@tensors_among_others
def test_one_tensor_on_another_device(function: Public, name: str, draw: Draw) -> None:
    """One meta tensor among real ones is on a different device."""
    arguments = draw(function)
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(RuntimeError) as caught:
        function.call(**arguments)
    text = str(caught.value)
    assert re.match(r"\w+: got device \w+.*accepted is", text), text
    assert "meta" in text and "cpu" in text


@pytest.mark.gpu
@tensors_among_others
def test_cpu_and_cuda_tensors_together(function: Public, name: str, draw: Draw) -> None:
    arguments = draw(function)
    arguments[name] = arguments[name].cuda()
    with pytest.raises(RuntimeError, match=r"\w+: got device (cpu|cuda:0); accepted is (cuda:0|cpu)"):
        function.call(**arguments)


@functions
def test_out_of_wrong_shape(function: Public, draw: Draw) -> None:
    for shape in [(M, N + 1), (M + 1, N), (N, M), (M * N,), (1, M, N), (0,)]:
        out = poisoned(shape, torch.float32, "cpu")
        refuses(function, draw(function), RuntimeError, "out", list(shape), [M, N], out=out)


@functions
def test_out_of_wrong_dtype(function: Public, draw: Draw) -> None:
    for dtype in (torch.float64, torch.float16, torch.int32):
        out = torch.zeros(M, N, dtype=dtype) if dtype is torch.int32 else poisoned((M, N), dtype, "cpu")
        refuses(function, draw(function), RuntimeError, "out", dtype, "torch.float32", out=out)


@functions
def test_out_on_another_device_or_not_a_tensor(function: Public, draw: Draw) -> None:
    refuses(
        function, draw(function), RuntimeError, "out", "meta", "cpu", out=torch.empty(M, N, device="meta")
    )
    with pytest.raises(TypeError, match=r"out: got list; accepted"):
        function.call(**draw(function), out=[1.0])
    refuses(function, draw(function), RuntimeError, "out", "sparse", out=torch.zeros(M, N).to_sparse())
    negated = torch._neg_view(poisoned((M, N), torch.float32, "cpu"))
    refuses(function, draw(function), RuntimeError, "out", "negated", "its own values", out=negated)


@linear_functions
def test_out_overlaps_an_input_of_a_product(function: Public, rng: torch.Generator) -> None:
    """A product reads its inputs after it has begun to write: any shared element is refused."""
    size = 16
    for name in ("x", "weight", *function.vectors):
        arguments = function.draw(rng, shape=(size, size, size))
        before = arguments[name].clone()
        if arguments[name].dim() == 2:
            out = arguments[name]
        else:
            storage = torch.zeros(size * size)
            storage[:size] = arguments[name]
            arguments[name] = storage[:size]
            out = storage.view(size, size)
        with pytest.raises(RuntimeError, match=r"out: .*shared? memory.*; accepted is"):
            function.call(**arguments, out=out)
        assert torch.equal(arguments[name], before)


@elementwise_functions
def test_out_overlaps_x_partially(function: Public, rng: torch.Generator) -> None:
    """In place means exactly the same view: a shifted or transposed one would read what was already written."""
    arguments = function.draw(rng, shape=(N, N, K))
    storage = torch.cat([arguments["x"], torch.ones(1, N)])
    before = storage.clone()
    arguments["x"] = storage[:N]
    for out in (storage[1:], storage[:N].mT, storage.view(-1)[1 : 1 + N * N].view(N, N)):
        with pytest.raises(RuntimeError, match=r"out: .*share memory with x; accepted is x itself"):
            function.call(**arguments, out=out)
    assert torch.equal(storage, before)


@elementwise_functions
def test_out_overlaps_a_vector(function: Public, draw: Draw) -> None:
    for name in function.vectors:
        arguments = draw(function)
        storage = torch.zeros(M * N)
        storage[-N:] = arguments[name]
        arguments[name] = storage[-N:]
        with pytest.raises(RuntimeError, match=r"out: .*shared? memory.*; accepted is"):
            function.call(**arguments, out=storage.view(M, N))


@functions
def test_out_overlaps_itself(function: Public, draw: Draw) -> None:
    for out in (torch.zeros(1, N).expand(M, N), torch.zeros(64).as_strided((M, N), (1, 1))):
        with pytest.raises(RuntimeError, match=r"out: .*same element.*; accepted is"):
            function.call(**draw(function), out=out)
        assert bool((out == 0).all())


def interleaved(given: Tensor, out_columns: int) -> tuple[Tensor, Tensor]:
    """Columns of one buffer side by side, which share no element: a copy of the given ones, and others."""
    columns = given.shape[1]
    buffer = torch.full((len(given), columns + out_columns), NAN)
    buffer[:, :columns] = given
    return buffer[:, :columns], buffer[:, columns:]


def strided(given: Tensor, out_columns: int) -> tuple[Tensor, Tensor]:
    """Every second column of a matrix, and as many columns beside one another, some of which are the given ones."""
    buffer = torch.zeros(len(given), 2 * max(given.shape[1], out_columns))
    buffer[:, : 2 * given.shape[1] : 2] = given
    return buffer[:, : 2 * given.shape[1] : 2], buffer[:, :out_columns]


@functions
@pytest.mark.parametrize("laid_out", [interleaved, strided])
def test_views_whose_ranges_meet(function: Public, laid_out: Callable[..., Any], draw: Draw) -> None:
    """Whether they share an element or not, the result is right: it is computed elsewhere, and copied."""
    arguments = draw(function)
    expected = function.call(**arguments)
    arguments["x"], out = laid_out(arguments["x"], N)
    assert function.call(**arguments, out=out) is out
    assert torch.equal(out, expected)


BATCH_NORM = [function for function in PUBLIC if "running_var" in function.vectors]


@pytest.mark.parametrize("function", BATCH_NORM, ids=lambda f: f.name)
@pytest.mark.parametrize("eps", [NAN, INF, -INF, -1e-5], ids=str)
def test_eps_not_finite_or_negative(function: Public, eps: float, draw: Draw) -> None:
    refuses(function, {**draw(function), "eps": eps}, ValueError, "eps", eps, "finite")


@pytest.mark.parametrize("function", BATCH_NORM, ids=lambda f: f.name)
@pytest.mark.parametrize("eps", ["1e-5", None, [1e-5], 1j], ids=str)
def test_eps_not_a_number(function: Public, eps: Any, draw: Draw) -> None:
    refuses(
        function,
        {**draw(function), "eps": eps},
        TypeError,
        "eps",
        type(eps).__name__ if eps is not None else "None",
    )


@pytest.mark.parametrize("function", BATCH_NORM, ids=lambda f: f.name)
@pytest.mark.parametrize("name", ["running_mean", "running_var"])
def test_batch_norm_without_running_statistics(function: Public, name: str, draw: Draw) -> None:
    refuses(function, {**draw(function), name: None}, ValueError, name, "None", "[N]")
    arguments = {**draw(function), name: 1.0}
    with pytest.raises(TypeError, match=rf"^{name}: got float; accepted is a torch.Tensor$"):
        function.call(**arguments)


@linear_functions
@pytest.mark.parametrize("precision", ["hihg", "", "HIGH", "fp32", "default "])
def test_unknown_precision(function: Public, precision: str, draw: Draw) -> None:
    arguments = {**draw(function), "precision": precision}
    accepted = ["highest", "high", "medium", "ieee", "tf32"]
    refuses(function, arguments, ValueError, "precision", repr(precision), *accepted)


@linear_functions
@pytest.mark.parametrize("precision", [1, True, torch.float32], ids=str)
def test_precision_not_a_string(function: Public, precision: object, draw: Draw) -> None:
    refuses(
        function, {**draw(function), "precision": precision}, TypeError, "precision", type(precision).__name__
    )


SCALED = [function for function in PUBLIC if function.scalar]


@pytest.mark.parametrize("function", SCALED, ids=lambda f: f.name)
@pytest.mark.parametrize("value", ["2", None, [2.0], 1j, True], ids=repr)
def test_scalar_not_a_number(function: Public, value: Any, draw: Draw) -> None:
    refuses(function, {**draw(function), function.scalar: value}, TypeError, function.scalar, "number")


@pytest.mark.parametrize("function", SCALED, ids=lambda f: f.name)
def test_scalar_tensors_that_do_not_fit(function: Public, draw: Draw) -> None:
    refuses(
        function,
        {**draw(function), function.scalar: torch.ones(1)},
        RuntimeError,
        function.scalar,
        [1],
        "0-dim",
    )
    refuses(
        function, {**draw(function), function.scalar: torch.tensor(2)}, RuntimeError, function.scalar, "int64"
    )
    meta = torch.tensor(2.0, device="meta")
    refuses(function, {**draw(function), function.scalar: meta}, RuntimeError, function.scalar, "meta", "cpu")


@pytest.mark.parametrize("function", SCALED, ids=lambda f: f.name)
@pytest.mark.parametrize("value", [0.0, -0.0, INF, -INF, NAN], ids=str)
def test_division_by_zero_is_no_error(function: Public, value: float, draw: Draw) -> None:
    arguments = {**draw(function), function.scalar: value}
    torch.testing.assert_close(
        function.call(**arguments), function.eager(**arguments), equal_nan=True, rtol=1e-5, atol=1e-5
    )


@functions
def test_unknown_and_missing_arguments(function: Public, draw: Draw) -> None:
    arguments = draw(function)
    with pytest.raises(TypeError, match="no_such"):
        function.call(**arguments, no_such=1)
    with pytest.raises(TypeError):
        function.call()
    with pytest.raises(TypeError):
        function.call(*arguments.values(), 1e-5, torch.empty(M, N), "ieee", 5)


@functions
def test_out_while_a_gradient_is_needed(function: Public, draw: Draw) -> None:
    """As torch: out= can not be differentiated, and saying nothing would lose the gradient."""
    for name in [name for name, value in draw(function).items() if isinstance(value, torch.Tensor)]:
        arguments = draw(function)
        arguments[name].requires_grad_()
        out = poisoned((M, N), torch.float32, "cpu")
        with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
            function.call(**arguments, out=out)
        assert bool(out.isnan().all())
        with torch.no_grad():
            function.call(**arguments, out=out)
        assert not bool(out.isnan().any())


def test_bias_for_the_first_dimension_is_not_broadcast() -> None:
    """A frequent mistake: a bias of length M."""
    function = BY_NAME["linear_relu"]
    x, weight = torch.randn(M, K), torch.randn(N, K)
    refuses(function, {"x": x, "weight": weight, "bias": torch.randn(M)}, RuntimeError, "bias", [M], [N])
    with pytest.raises(RuntimeError, match="weight: got shape"):
        epigemm.linear_relu(x, torch.randn(K), None)
