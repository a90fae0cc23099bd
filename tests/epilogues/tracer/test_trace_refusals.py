"""What no epilogue may do or declare: an error at decoration that names the line."""

from __future__ import annotations

import inspect
import math
import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, no_grad

from epigemm.epilogues.declaration import trace
from epigemm.epilogues.kinds import Matrix, PerColumn, Scalar

# What no epilogue does: each with a part of its message. The line of the body's last statement is named.


def reduction(acc: Tensor) -> Tensor:
    return acc - acc.sum(-1, keepdim=True)


def softmax(acc: Tensor) -> Tensor:
    return acc.softmax(-1)


def index(acc: Tensor) -> Tensor:
    return acc + acc[0]


def strided(acc: Tensor) -> Tensor:
    return acc + acc[:, :1]


def branch_on_values(acc: Tensor) -> Tensor:
    return acc if acc.sum() > 0 else -acc


def branch_on_element(acc: Tensor) -> Tensor:
    return acc if acc[0, 0] > 0 else -acc


def item(acc: Tensor) -> Tensor:
    return acc * acc.max().item()


def branch_on_scalar(acc: Tensor, s: Scalar) -> Tensor:
    return acc if s > 0 else -acc


def float_of_scalar(acc: Tensor, s: Scalar) -> Tensor:
    return acc * float(s)


def math_of_scalar(acc: Tensor, s: Scalar) -> Tensor:
    return acc * math.exp(s)


def branch_on_shape(acc: Tensor) -> Tensor:
    return acc if acc.shape[0] > 3 else -acc


def shape_as_number(acc: Tensor) -> Tensor:
    return acc * acc.shape[1]


def literal_shape(acc: Tensor) -> Tensor:
    return acc * torch.ones(7)


def branch_on_dtype(acc: Tensor) -> Tensor:
    return acc if acc.dtype == torch.float32 else -acc


def epsilon_of_dtype(acc: Tensor) -> Tensor:
    return acc + torch.finfo(acc.dtype).eps


def device(acc: Tensor) -> Tensor:
    return acc if acc.device.type == "cuda" else -acc


def in_place(acc: Tensor) -> Tensor:
    return acc.add_(1.0)


def in_place_of_a_copy(acc: Tensor) -> Tensor:
    return (acc * 2.0).relu_()


def in_place_argument(acc: Tensor) -> Tensor:
    return F.relu(acc, inplace=True)


def out_argument(acc: Tensor) -> Tensor:
    return torch.add(acc, 1.0, out=acc)


def random_numbers(acc: Tensor) -> Tensor:
    return acc * torch.rand_like(acc)


def dropout(acc: Tensor) -> Tensor:
    return F.dropout(acc, 0.5)


def product(acc: Tensor) -> Tensor:
    return acc @ acc.t()


def transposed(acc: Tensor) -> Tensor:
    return acc.t().t()


def concatenated(acc: Tensor) -> Tensor:
    return torch.cat([acc, acc], 1)


def no_tensor(acc: Tensor) -> Any:
    return {"acc": acc}


def nothing(acc: Tensor) -> Any:
    acc = acc + 1.0


def number(acc: Tensor) -> Any:
    return 1.0


def vector(acc: Tensor, bias: PerColumn) -> Any:
    return bias


def boolean(acc: Tensor) -> Tensor:
    return acc > 0


def integers(acc: Tensor) -> Tensor:
    return acc.int() * 2.0


def double(acc: Tensor) -> Tensor:
    return acc.double().float()


def unsupported(acc: Tensor) -> Tensor:
    return torch.nextafter(acc, acc)


def fails(acc: Tensor) -> Tensor:
    given: Any = acc
    return torch.relu(given.no_such_method())


def without_gradient(acc: Tensor) -> Tensor:
    with torch.no_grad():
        return acc * 2.0


def floor_of_scalar(acc: Tensor, s: Scalar) -> Tensor:
    return acc * (s // 2)


def round_of_scalar(acc: Tensor, s: Scalar) -> Tensor:
    return acc * round(s)


def floor_by_math(acc: Tensor, s: Scalar) -> Tensor:
    return acc * math.floor(s)


def function_of_scalar(acc: Tensor, s: Any) -> Tensor:
    return acc * torch.exp(s)


def power_of_scalar(acc: Tensor, s: Scalar) -> Any:
    return acc * (-2.0) ** s


def method_of_scalar(acc: Tensor, s: Scalar) -> Tensor:
    return acc * s.is_integer()


def comparison_of_scalar(acc: Tensor, s: Scalar) -> Tensor:
    return acc * (s > 0)


def hardtanh_of_scalar(acc: Tensor, s: Scalar) -> Tensor:
    return F.hardtanh(acc, -1.0, s)


def nan_to_scalar(acc: Tensor, s: Scalar) -> Tensor:
    return torch.nan_to_num(acc, s)


def softshrink_of_scalar(acc: Tensor, s: Scalar) -> Tensor:
    return F.softshrink(acc, s)


function_of_scalar.__annotations__["s"] = Scalar


def prelu(acc: Tensor, slope: PerColumn) -> Tensor:
    return F.prelu(acc, slope)


def batch_norm(acc: Tensor, mean: PerColumn, variance: PerColumn) -> Tensor:
    return F.batch_norm(acc, mean, variance)


def isclose(acc: Tensor, other: Matrix) -> Tensor:
    return torch.where(torch.isclose(acc, other), 1.0, 0.0)


def length(acc: Tensor) -> Tensor:
    return acc * len(acc)


def count_of_elements(acc: Tensor) -> Tensor:
    return acc * acc.numel()


def view_as_another(acc: Tensor, other: Matrix) -> Tensor:
    return acc + other.view(acc.shape)


def roll(acc: Tensor) -> Tensor:
    return acc.roll(1, 0)


def flip(acc: Tensor) -> Tensor:
    return acc.flip(0)


def sort(acc: Tensor) -> Tensor:
    return acc.sort(-1)[0]


def iteration(acc: Tensor) -> Any:
    return acc + next(iter(acc))


def not_broadcast(acc: Tensor, bias: PerColumn) -> Tensor:
    return acc + bias.unsqueeze(-1)


@torch.no_grad()
def decorated_without_gradient(acc: Tensor) -> Tensor:
    return acc * 2.0


def named_without_gradient(acc: Tensor) -> Tensor:
    with no_grad():
        return acc * 2.0


def hooked(acc: Tensor) -> Tensor:
    result = acc * 2.0
    result.register_hook(lambda gradient: gradient * 0.0)  # type: ignore[no-untyped-call]
    return result


def detached_in_place(acc: Tensor) -> Tensor:
    return acc.detach_() * 2.0


class Reversed(torch.autograd.Function):
    """Its forward runs nothing that a trace could see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


def derivative_of_nothing(acc: Tensor) -> Any:
    return Reversed.apply(acc * 2.0)  # type: ignore[no-untyped-call]


def own_derivative(acc: Tensor) -> Any:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2.0

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] * 100.0

    return Doubled.apply(acc)  # type: ignore[no-untyped-call]


def requires_grad(acc: Tensor) -> Tensor:
    return acc if acc.requires_grad else -acc


def gradient_mode(acc: Tensor) -> Tensor:
    return acc if torch.is_grad_enabled() else -acc


def device_by_name(acc: Tensor) -> Tensor:
    return acc if getattr(acc, "device").type == "cuda" else -acc  # noqa: B009


def swallows(acc: Tensor) -> Tensor:
    try:
        return acc * acc.item()
    except Exception:
        return acc


def swallows_all(acc: Tensor) -> Tensor:
    try:
        return acc if acc.sum() > 0 else -acc
    except:  # noqa: E722
        return acc * 2.0


def python_random(acc: Tensor) -> Tensor:
    return acc * random.random()


def the_time(acc: Tensor) -> Tensor:
    # The fraction: numbers are compared in fp32, whose step is 0.06 s on a machine that has run for ten days.
    return acc * (time.perf_counter() % 1)


def integer_of_scalar(acc: Tensor, s: Scalar) -> Tensor:
    return acc * torch.full_like(acc, s, dtype=torch.int64)


LEAKY = torch.nn.LeakyReLU(0.1)


def global_module(acc: Tensor) -> Any:
    return LEAKY(acc)


WEIGHT = torch.ones(7)
LIST = [1.0]
ON_SCALAR = "on a Scalar; a Scalar is a symbolic number, with \\+ - "


def global_tensor(acc: Tensor) -> Tensor:
    return acc * WEIGHT


def global_list(acc: Tensor) -> Tensor:
    return acc * LIST[0]


def attribute_tensor(acc: Tensor) -> Tensor:
    return acc * hidden.weight


class hidden:
    weight = torch.ones(())


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (reduction, NotImplementedError, "sum is a reduction"),
        (softmax, NotImplementedError, "_softmax is a reduction"),
        (index, NotImplementedError, "its result has the shape \\[N\\]|select is an index"),
        (strided, NotImplementedError, "slice"),
        (branch_on_values, NotImplementedError, "use torch.where"),
        (branch_on_element, NotImplementedError, "use torch.where"),
        (item, NotImplementedError, "use torch.where"),
        (branch_on_scalar, NotImplementedError, "the value of a scalar operand decides"),
        (float_of_scalar, NotImplementedError, "no float\\(\\) or math function"),
        (math_of_scalar, NotImplementedError, "no float\\(\\) or math function"),
        (branch_on_shape, NotImplementedError, "the shape of a tensor decides"),
        (shape_as_number, NotImplementedError, "the size of a tensor is used as a number"),
        (literal_shape, NotImplementedError, "the shape of a tensor decides"),
        (branch_on_dtype, NotImplementedError, "dtype decides"),
        (epsilon_of_dtype, NotImplementedError, "dtype decides"),
        (device, NotImplementedError, "the device is read"),
        (in_place, NotImplementedError, "add_ writes in place; use add"),
        (in_place_of_a_copy, NotImplementedError, "relu_ writes in place; use relu"),
        (in_place_argument, NotImplementedError, "relu_ writes in place; use relu"),
        (out_argument, NotImplementedError, "writes in place"),
        (random_numbers, NotImplementedError, "draws random numbers"),
        (dropout, NotImplementedError, "draws random numbers"),
        (product, NotImplementedError, "shape \\[N, M\\]|permute|mm"),
        (transposed, NotImplementedError, "shape \\[N, M\\]|permute|t is not supported"),
        (concatenated, NotImplementedError, "shape"),
        (no_tensor, TypeError, "it returns dict; an epilogue returns a tensor, or a tuple"),
        (nothing, TypeError, "it returns NoneType"),
        (number, TypeError, "it returns float"),
        (vector, NotImplementedError, "its result has the shape \\[N\\], not \\[M, N\\]"),
        (boolean, NotImplementedError, "its result is of torch.bool"),
        (integers, NotImplementedError, "its result is of torch.int32; integers"),
        (double, NotImplementedError, "its result is of torch.float64"),
        (unsupported, NotImplementedError, "nextafter is not supported; supported are"),
        (fails, TypeError, "no attribute 'no_such_method'"),
        (without_gradient, NotImplementedError, "no_grad or the like, or .* is not supported"),
        (floor_of_scalar, NotImplementedError, ON_SCALAR),
        (round_of_scalar, NotImplementedError, ON_SCALAR),
        (floor_by_math, NotImplementedError, ON_SCALAR),
        (function_of_scalar, NotImplementedError, ON_SCALAR),
        (power_of_scalar, NotImplementedError, ON_SCALAR),
        (method_of_scalar, NotImplementedError, ON_SCALAR),
        (comparison_of_scalar, NotImplementedError, ON_SCALAR),
        (
            hardtanh_of_scalar,
            NotImplementedError,
            "a scalar operand decides .* a Scalar is a symbolic number",
        ),
        (
            softshrink_of_scalar,
            NotImplementedError,
            "a scalar operand decides .* a Scalar is a symbolic number",
        ),
        (nan_to_scalar, NotImplementedError, "a scalar operand decides .* a Scalar is a symbolic number"),
        (prelu, NotImplementedError, "prelu is not supported; use torch.where"),
        (batch_norm, NotImplementedError, "batch_norm is not supported; in eval it is acc"),
        (isclose, NotImplementedError, "isclose is not supported; use"),
        (length, NotImplementedError, "len reads the shape"),
        (count_of_elements, NotImplementedError, "the size of a tensor is used as a number"),
        (view_as_another, NotImplementedError, "the shape of a tensor .* is given to view or reshape"),
        (roll, NotImplementedError, "roll moves elements"),
        (flip, NotImplementedError, "flip moves elements"),
        (sort, NotImplementedError, "sort moves elements"),
        (iteration, NotImplementedError, "iterating over a tensor, takes it apart"),
        (not_broadcast, TypeError, "shapes do not broadcast; the function sees"),
        (decorated_without_gradient, NotImplementedError, "no_grad or the like, or .* is not supported"),
        (named_without_gradient, NotImplementedError, "no_grad or the like, or .* is not supported"),
        (hooked, NotImplementedError, "register_hook is not supported"),
        (detached_in_place, NotImplementedError, "detach_ writes in place"),
        (own_derivative, NotImplementedError, "a torch.autograd.Function, is not supported"),
        (derivative_of_nothing, NotImplementedError, "a torch.autograd.Function, is not supported"),
        (requires_grad, NotImplementedError, "requires_grad reads a state"),
        (gradient_mode, NotImplementedError, "is_grad_enabled reads a state"),
        (device_by_name, NotImplementedError, "the device is read"),
        (swallows, NotImplementedError, "item reads a tensor's value"),
        (swallows_all, NotImplementedError, "use torch.where"),
        (python_random, NotImplementedError, "traced twice, and computes two things"),
        (the_time, NotImplementedError, "traced twice, and computes two things"),
        (integer_of_scalar, NotImplementedError, "its result is of torch.int64; integers"),
        (global_module, TypeError, "'LEAKY' is captured, and a LeakyReLU may change unseen"),
        (global_tensor, NotImplementedError, "mul takes a captured tensor of shape \\[7\\]"),
        (global_list, TypeError, "'LIST' is captured, and a list may change unseen"),
        (attribute_tensor, NotImplementedError, "captured tensor"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_refusals(function: Callable[..., Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        trace(function)
    first = inspect.unwrap(function).__code__.co_firstlineno
    last = first + len(inspect.getsource(function).rstrip().split("\n")) - 1
    named = re.search(rf"{re.escape(__file__)}:(\d+)", str(caught.value))
    assert named is not None and first <= int(named[1]) <= last, str(caught.value)
    assert function.__name__ in str(caught.value)
