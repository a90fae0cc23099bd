"""What does not fit: an error with the argument, what was got and what is accepted, before anything is written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.op import (
    COLUMN,
    MATRIX,
    NUMBER,
    ROW,
    TWO_COLUMNS,
    TWO_WEIGHTS,
    VARIANCE,
    WEIGHT,
    Arguments,
    Op,
    X,
)
from tests.ops.table import few, rows

M, N, K = 9, 16, 24


def is_function(op: Op) -> bool:
    """Layers have no arguments but their inputs."""
    return op.layer is None and op.name != "nn.Sigmoid"


VECTORS = (COLUMN, VARIANCE, TWO_COLUMNS)


def refused(op: Op, given: Arguments, error: type[Exception], name: str, *words: object) -> str:
    """The message; with `out=` nothing is written, and where autograd records it is the same."""
    with pytest.raises(error) as caught:
        op.call(**given)
    text = str(caught.value)
    assert type(caught.value) is error, text
    assert re.search(rf"\b{name}: .*accept(ed|s)", text, re.DOTALL) or re.search(f"'{name}'", text), text
    for word in words:
        assert str(word) in text, f"{word!r} is not in {text!r}"
    if op.takes_out:
        out = torch.full((M, N), float("nan"))
        with pytest.raises(error):
            op.call(**given, out=out)
        assert bool(out.isnan().all())
    first = given[op.input]
    if isinstance(first, Tensor) and first.dtype is torch.float32 and first.layout is torch.strided:
        with pytest.raises(error) as caught:
            op.call(**{**given, op.input: first.clone().requires_grad_()})
        assert str(caught.value) == text
    return text


def wrong_shapes(op: Op, name: str) -> Iterator[tuple[int, ...]]:
    """For an operand: other lengths and dimensions, those that PyTorch would broadcast too."""
    kind = op.operands[name]
    if kind in VECTORS:
        length = 2 * N if kind == TWO_COLUMNS else N
        yield from ((length - 1,), (length + 1,), (1,), (0,), (1, length), (length, 1), ())
    elif kind == ROW:
        yield from ((M, 1), (1,), (M + 1,), (), (1, M))
    elif kind == MATRIX:
        yield from ((M, N + 1), (M + 1, N), (M, 1), (N,), (1, M, N), (M * N,))
        if name not in op.shared:
            yield (1, N)
    elif kind in (WEIGHT, TWO_WEIGHTS):
        yield from ((K,), (1, 2, N, K), ())


@rows("errors of shapes", is_function)
def test_shapes(op: Op, rng: torch.Generator) -> None:
    arguments = op.draw(rng)
    for name in op.operands:
        for shape in wrong_shapes(op, name):
            if name == "weight2" and len(shape) != 2:
                continue
            refused(op, {**arguments, name: torch.ones(shape)}, RuntimeError, name, list(shape))
    for name in op.of_kind(X):
        for k in (K - 1, K + 1, 1, 0):
            refused(op, {**arguments, name: torch.ones(M, k)}, RuntimeError, name, [M, k], K)
        refused(op, {**arguments, name: torch.tensor(1.0)}, RuntimeError, name)
    for name in op.of_kind(NUMBER):
        refused(op, {**arguments, name: torch.ones(1)}, RuntimeError, name, "[1]")


@rows("errors of dtypes", is_function)
def test_dtypes_devices_and_layouts(op: Op, rng: torch.Generator) -> None:
    arguments = op.draw(rng)
    tensors = [name for name, value in arguments.items() if isinstance(value, Tensor) and value.dim()]
    for name in tensors:
        value = arguments[name]
        words = ("int32", "torch.float32") if name == op.input else ("int32",)
        refused(op, {**arguments, name: value.int()}, RuntimeError, name, *words)
        for dtype in (torch.complex64, torch.bool, torch.float8_e4m3fn):
            asked_for = (
                "x_scale" if (name, dtype) == (op.input, torch.float8_e4m3fn) and op.is_linear else name
            )
            refused(op, {**arguments, name: value.to(dtype)}, RuntimeError, asked_for, dtype)
        refused(op, {**arguments, name: value.to_sparse()}, RuntimeError, name, "sparse")
        nested = torch.nested.nested_tensor([value, value[:1]])
        refused(op, {**arguments, name: nested}, RuntimeError, name, "nested")
        if name != op.input:
            for dtype in (torch.float64, torch.bfloat16):
                other = {**arguments, name: value.to(dtype)}
                refused(op, other, RuntimeError, name, dtype, "torch.float32")
            meta = {**arguments, name: value.to("meta")}
            refused(op, meta, RuntimeError, name, "device meta", "cpu")


@rows("errors of wide operands", lambda op: is_function(op) and op.is_linear)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_may_not_be_fp32_beside_16_bits(op: Op, dtype: torch.dtype, rng: torch.Generator) -> None:
    """The weights, and a bias where the functor is C++: `test_fp32_operands_beside_16_bits` has the others' values."""
    arguments = op.draw(rng, dtype=dtype)
    is_program = bool(op.of_kind(MATRIX)) or op.name.startswith(("@", "linear_batch_norm_relu"))
    biases = [] if is_program else op.of_kind(COLUMN, TWO_COLUMNS)
    for name in {*op.of_kind(WEIGHT, TWO_WEIGHTS), *biases} - set(op.wide_beside_16_bits()):
        with pytest.raises(RuntimeError, match=rf"{name}: got dtype torch\.float32; accepted"):
            op.call(**{**arguments, name: arguments[name].float()})


@rows("errors of types", is_function)
def test_types(op: Op, rng: torch.Generator) -> None:
    """No tensor where one is needed; None where one is required; a number that is none."""
    arguments = op.draw(rng)
    value: Any
    for name, kind in op.operands.items():
        for value in ("text", [1.0], np.ones(3)):
            refused(op, {**arguments, name: value}, TypeError, name, type(value).__name__)
        if kind == NUMBER:
            for value in (True, 1j, None):
                if value is not None or not has_default(op, name):
                    refused(op, {**arguments, name: value}, TypeError, name)
            with pytest.raises(ValueError, match=f"{name}: got a number beyond fp64"):
                op.call(**{**arguments, name: 10**400})
        else:
            refused(op, {**arguments, name: 3.0}, TypeError, name, "float")
            if name not in op.optional and name != "weight2":
                error = ValueError if "running" in name else TypeError
                refused(op, {**arguments, name: None}, error, name, "None")


def has_default(op: Op, name: str) -> bool:
    """Whether None is what stands for the default."""
    return op.name.startswith("@") and name in ("high", "limit")


@rows("errors of options", is_function)
def test_options(op: Op, rng: torch.Generator) -> None:
    arguments = op.draw(rng)
    wrong: dict[str, list[tuple[Any, type[Exception]]]] = {"out": [(3.0, TypeError)]}
    if op.takes_precision:
        wrong["precision"] = [("best", ValueError), (1, TypeError)]
        wrong["strict"] = [(1, TypeError), (None, TypeError)]
    if "running_var" in op.operands:
        wrong["eps"] = [(-1.0, ValueError), (float("nan"), ValueError), ("text", TypeError)]
    if dict(op.fixed).get("activation"):
        wrong["activation"] = [("swish", ValueError), (None, TypeError)]
    if dict(op.fixed).get("approximate"):
        wrong["approximate"] = [("erf", ValueError)]
    for name, cases in wrong.items():
        for value, error in cases:
            with pytest.raises(
                (error, RuntimeError) if name == "out" else error, match=f"{name}: got"
            ) as caught:
                op.call(**{**arguments, name: value})
            assert "accept" in str(caught.value)
    with pytest.raises(TypeError, match="unknown"):
        op.call(**arguments, unknown=1.0)
    with pytest.raises(TypeError):
        op.call()


@rows("errors of operands", lambda op: op.name.startswith("@"))
def test_operands_of_users_functions(op: Op, rng: torch.Generator) -> None:
    """Missing, unknown, given twice, too many: by name, with those that are accepted."""
    arguments = op.draw(rng)
    first = [name for name in op.operands if name in (op.input, "weight")]
    operands = [name for name in op.operands if name not in first]
    given = [arguments[name] for name in (*first, *operands)]
    with pytest.raises(TypeError, match=r"got an operand 'unknown'; accepted (are|is)"):
        op.call(*given, unknown=1.0)
    names = {"clamped": ["low", "high"]}.get(op.name[1:].split(".")[0], operands)
    with pytest.raises(TypeError, match=rf"got {len(names) + 1} operands?"):
        op.call(*given, *[1.0] * (len(names) + 1 - len(operands)))
    for name in operands:
        if name in op.optional or op.operands[name] == NUMBER:
            continue
        with pytest.raises(TypeError, match=f"{name}: got None, or was not given; accepted is a tensor"):
            op.call(**{each: value for each, value in arguments.items() if each != name})
    if operands:
        with pytest.raises(TypeError, match=f"'{operands[0]}' twice"):
            op.call(*given, **{operands[0]: given[len(first)]})


@rows("errors of shared rows", lambda op: bool(op.shared))
def test_shapes_of_matrices_beside_leading_axes(op: Op, rng: torch.Generator) -> None:
    """All that are accepted are named; those that PyTorch would broadcast to the result are not accepted."""
    arguments = op.draw(rng, (3, 4))
    name = op.shared[-1]
    for shape in ((1, 4, N), (3, N), (1, N), (2, 1, N), (3, 1, 1), (3, 4, 1), (3, 1, 4, N), (3, 2, N)):
        words = f"{name}: got shape {list(shape)}; accepted is [3, 4, {N}] or [3, 1, {N}] or [1, 1, {N}]"
        with pytest.raises(RuntimeError, match=re.escape(words)):
            op.call(**{**arguments, name: torch.zeros(shape)})


@rows("compiled errors", lambda op: is_function(op) and few(op))
def test_the_same_words_from_a_compiler(op: Op, rng: torch.Generator, fresh_compiler: Any) -> None:
    """Of a shape, a dtype and a type."""
    arguments = op.draw(rng)
    name = list(op.operands)[-1]
    for given in (
        {**arguments, op.input: arguments[op.input].int()},
        {**arguments, name: torch.ones(2, 3, 5).int()},
        {**arguments, name: "text"},
    ):
        with pytest.raises(Exception) as eager:  # noqa: PT011  # whatever it is
            op.call(**given)
        with pytest.raises(Exception) as found:  # noqa: PT011
            torch.compile(op.call, backend="eager")(**given)
        assert str(eager.value).split(";")[0] in str(found.value)
