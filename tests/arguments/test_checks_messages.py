"""Messages of errors name the argument, its shape and dtype, and the line of the caller's code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm.epilogues.declaration import trace
from tests.support.untyped import torch as untyped

M, N, K = 4, 5, 8
X, W, BIAS, MATRIX = torch.randn(M, K), torch.randn(N, K), torch.randn(N), torch.randn(M, N)


@epigemm.epilogue
def scaled(
    acc: Tensor, bias: epigemm.PerColumn, r: epigemm.PerRow, m: epigemm.Matrix, s: epigemm.Scalar = 2.0
) -> Tensor:
    return torch.tanh(acc + bias) * r + m * s


ROW = torch.randn(M)
META = torch.empty(M, N, device="meta")
JAGGED = torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)
STORAGE = torch.randn(M + 1, N)


def of_z(
    z: Any = MATRIX, bias: Any = BIAS, r: Any = ROW, m: Any = MATRIX, **options: Any
) -> Callable[[], Any]:
    return lambda: scaled.elementwise(z, bias, r, m, **options)


def of_product(
    x: Any = X, w: Any = W, bias: Any = BIAS, r: Any = ROW, m: Any = MATRIX, **options: Any
) -> Callable[[], Any]:
    return lambda: scaled(x, w, bias, r, m, **options)


def of_folded(x: Any, w: Any) -> Callable[[], Any]:
    return lambda: epigemm.linear_batch_norm_relu(x, w, BIAS, BIAS, BIAS.abs())


EITHER = "accepted is torch.float16, torch.float32, as {} has torch.float16"
# Names of operands, and which of several faults is told; other words: tests/net/errors.txt, tests/ops/test_errors.py.
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    # the first argument of `elementwise` is called z
    "z: int32, and a matrix that does not fit": (of_z(MATRIX.int(), m=X), "z: got dtype torch.int32;"),
    "z: no dimensions": (of_z(torch.tensor(1.0)), "z: got a 0-dimensional tensor; accepted are shapes [..., N]"),
    "z: a bias on another device": (of_z(bias=META[0]), "bias: got device meta; accepted is cpu, where z is"),
    "z: a bias of another dtype": (of_z(bias=BIAS.double()), "as z has torch.float32"),
    "z: out shares memory": (of_z(STORAGE[:M], out=STORAGE[1:]), "out: some of its elements share memory with z; "
     "accepted is z itself or memory that z does not use"),
    # what x and weight have wrong comes before the operands, whose shapes follow from them
    "x: K": (of_product(torch.randn(M, 6, 3), m=torch.randn(M, 6, N)), f"x: got shape [{M}, 6, 3]; accepted is "
     f"[..., in_features] with in_features = {K}"),
    "x: K, and a matrix that does not fit": (of_product(torch.randn(M, 3), m=X), f"x: got shape [{M}, 3];"),
    "x: K, with out": (of_product(torch.randn(M, 3), out=X), f"x: got shape [{M}, 3];"),
    "weight: dimensions, and a matrix that does not fit": (of_product(w=W[0], m=X), f"weight: got shape [{K}];"),
    "m beside 3-d x": (of_product(X[None], r=ROW[None]), f"m: got shape [{M}, {N}]; accepted is [1, {M}, {N}]"),
    # what is folded is checked after x and weight
    "folded: x": (of_folded(X.int(), W), "x: got dtype torch.int32;"),
    "folded: weight": (of_folded(X, W[None]), f"weight: got shape [1, {N}, {K}];"),
    "folded: K": (of_folded(X, W[:, 1:]), f"x: got shape [{M}, {K}];"),
    **{f"BatchNorm, training {training}": (partial(epigemm.nn.LinearBatchNormReLU(K, N).train(training), 3),
       "x: got int; accepted is a torch.Tensor") for training in (True, False)},
    "init_values": (partial(epigemm.nn.LinearLayerScaleResidual, K, N, init_values="text"),  # type: ignore[arg-type]
     "init_values: got str; accepted is a number"),
    # both dtypes that an operand may have
    "either: bias": (of_product(X.half(), W.half(), BIAS.double()), "bias: got dtype torch.float64; "
     + EITHER.format("x")),
    "either: of z": (of_z(MATRIX.half(), m=MATRIX.double()), "m: got dtype torch.float64; " + EITHER.format("z")),
    "either: of our own": (lambda: epigemm.linear_residual(X.half(), W.half(), None, MATRIX.double()),
     "residual: got dtype torch.float64; " + EITHER.format("x")),
    "jagged": (lambda: epigemm.nn.LinearReLU(K, N)(JAGGED), "x: got a nested tensor;"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "words"), CASES.values(), ids=CASES)
def test_what_is_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((RuntimeError, TypeError)) as caught:
        call()
    assert type(caught.value) is (TypeError if words.endswith(("torch.Tensor", "a number")) else RuntimeError)
    assert words in str(caught.value)


def test_forward_mode_by_whatever_function() -> None:
    jacobian = untyped.autograd.functional.jacobian
    calls: list[Callable[[], Any]] = [
        lambda: jacobian(
            lambda t: scaled(X, W, t, ROW, MATRIX), BIAS, vectorize=True, strategy="forward-mode"
        ),
        lambda: jacobian(lambda t: epigemm.linear_relu(t, W), X, vectorize=True, strategy="forward-mode"),
    ]
    for call in calls:
        with pytest.raises(
            NotImplementedError, match="forward-mode automatic differentiation; accepted"
        ) as caught:
            call()
        assert "jvp" not in str(caught.value)


@pytest.mark.parametrize("transform", ["jacfwd", "jacrev"])
def test_derivatives_of_functions(transform: str) -> None:
    """They are named by what they are: which of them it was, is not known there."""
    for options, words in (
        ({"strict": True}, "strict: got True"),
        ({"out": torch.empty(M, N)}, "out: got a tensor"),
    ):
        with pytest.raises(RuntimeError, match=f"{words} under a derivative of torch.func"):
            getattr(untyped.func, transform)(partial(epigemm.linear_relu, weight=W, **options))(X)


# --- lines -----------------------------------------------------------------------------------------------------------


def named(acc: Tensor) -> Any:
    z = torch.tanh(acc)
    z = z * 2
    return {"z": z}  # here


def a_number(acc: Tensor) -> Any:
    if acc is None:
        return acc.relu()
    z = acc + 1.0
    return 3.0 if z is acc else 4.0  # here


def nothing(acc: Tensor) -> None:
    acc.relu()  # here


def a_column(acc: Tensor, r: epigemm.PerRow) -> Tensor:
    unused = acc * 2.0
    result = r * 2.0
    del unused
    return result  # here


def a_condition(acc: Tensor) -> Tensor:
    return (  # here
        acc > 0
    )


def the_first_of_two(acc: Tensor) -> Any:
    z = acc.relu()
    if SEVERAL:
        return {"z": z}  # here
    return z


SEVERAL = True


@pytest.mark.parametrize("function", [named, a_number, nothing, a_column, a_condition, the_first_of_two])
def test_a_refused_result_names_the_return(function: Callable[..., Any]) -> None:
    lines, first = inspect.getsourcelines(function)
    (here,) = (first + place for place, line in enumerate(lines) if "# here" in line)
    with pytest.raises((TypeError, NotImplementedError)) as caught:
        trace(function)
    named = re.search(rf"{re.escape(__file__)}:(\d+)\)", str(caught.value))
    assert named is not None and int(named[1]) == here, str(caught.value)


def test_a_default_that_no_float_holds() -> None:
    def huge(acc: Tensor, s: epigemm.Scalar = 10**400) -> Tensor:
        return acc * s

    with pytest.raises(ValueError, match=r"huge \(.*\): 's' has a default beyond fp64; accepted is"):
        trace(huge)
