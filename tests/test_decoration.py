"""What stands in a function's place: its operands in order, pickles, copies, as an attribute of a class."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import PerColumn, ResultsEpilogue, Scalar, UserEpilogue
from epigemm.decoration import Decorated
from tests.support.formulas import formula


@epigemm.epilogue
def one(acc: Tensor, bias: PerColumn, scale: Scalar = 2.0) -> Tensor:
    return (acc + bias) * scale


@epigemm.epilogue
def two(acc: Tensor, bias: PerColumn, scale: Scalar = 2.0) -> tuple[Tensor, Tensor]:
    return (acc + bias) * scale, acc.sum(0)


def plain(acc: Tensor, bias: PerColumn) -> tuple[Tensor, Tensor]:
    return acc + bias, acc.sum(0)


BOTH: list[Any] = [one, two]


def test_the_kinds() -> None:
    assert type(one) is UserEpilogue and type(two) is ResultsEpilogue
    assert all(isinstance(each, Decorated) for each in BOTH)
    assert [repr(each) for each in BOTH] == ["epigemm.epilogue(one)", "epigemm.epilogue(two)"]


def of_name(name: str, returned: str) -> Any:
    """A function of one operand with this name, which is the product's own in the call."""
    return epigemm.epilogue(formula(f"acc, {name}: Matrix -> {returned.format(name)}"))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("returned", ["acc * 2 + {}", "(acc * 2 + {0}, acc - {0})"])
@pytest.mark.parametrize(
    "name", ["x", "weight", "z", "self", "operands", "named", "call", "fn", "fn_or_name", "_"]
)
def test_operands_of_any_name(name: str, returned: str) -> None:
    function = of_name(name, returned)
    x, weight, matrix = torch.randn(4, 8), torch.randn(6, 8), torch.randn(4, 6)
    z = x @ weight.t()
    want = (z * 2 + matrix, z - matrix)

    def by_name() -> Any:
        return function(x, weight, **{name: matrix})

    calls: list[Any] = [
        lambda: function(x, weight, matrix),
        by_name,
        lambda: function.elementwise(z, matrix),
        lambda: function.elementwise(z, **{name: matrix}),
        torch.compile(by_name, fullgraph=True, backend="eager"),
    ]
    for call in calls:
        found = call()
        for each, expected in zip(found if isinstance(found, tuple) else (found,), want, strict=False):
            torch.testing.assert_close(each, expected)
    layer = epigemm.nn.Linear.from_linear(torch.nn.Linear(8, 6, bias=False), function)
    found, z = layer(x, matrix), x @ layer.weight.t()
    torch.testing.assert_close(found[0] if isinstance(found, tuple) else found, z * 2 + matrix)
    assert epigemm.explain(function, x, weight, **{name: matrix}).kernels
    assert epigemm.explain(function.elementwise, z, **{name: matrix}).kernels
    (first, second), shown = ("x", "weight"), list(inspect.signature(function).parameters)
    assert shown[:3] == [first + "_" * (name == first), second + "_" * (name == second), name]


def test_names_of_the_product_and_where_a_result_goes() -> None:
    """Neither tensor hides the other one of its name from the search for common memory."""
    x, weight, matrix = torch.randn(4, 8), torch.randn(6, 8), torch.randn(4, 6)
    for name, hidden in (("weight", weight), ("x", x)):
        function = of_name(name, "acc + {}")
        for out in (hidden.view(-1)[:24].view(4, 6), matrix):
            with pytest.raises(RuntimeError, match=f"out: some of its elements share memory with {name}"):
                function(x, weight, matrix, out=out)
    function = of_name("z", "acc + {}")
    z = torch.randn(8, 6)
    with pytest.raises(RuntimeError, match="out: some of its elements share memory with z"):
        function.elementwise(z[:4], z[2:6], out=z[3:7])


@pytest.mark.parametrize("function", BOTH)
def test_pickles_and_copies(function: Any) -> None:
    assert copy.copy(function) is copy.deepcopy(function) is function
    assert pickle.loads(pickle.dumps(function)) is function
    layer = epigemm.nn.Linear(4, 3, epilogue=function)
    assert copy.deepcopy(layer).epilogue is pickle.loads(pickle.dumps(layer)).epilogue is function


def test_a_function_that_keeps_its_name_is_pickled_by_it() -> None:
    made: Any = epigemm.epilogue(plain)
    again = pickle.loads(pickle.dumps(made))
    assert again is not made and type(again) is ResultsEpilogue
    given = torch.ones(2, 4), torch.ones(3, 4), torch.ones(3)
    assert all(torch.equal(a, b) for a, b in zip(again(*given), made(*given), strict=True))


def test_an_attribute_of_a_module_is_in_its_graph() -> None:
    """Also where the package makes the epilogue while Dynamo traces."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 8))
            self.activation = one

        def forward(self, x: Tensor) -> Tensor:
            y = epigemm.linear_gated(x, self.weight, None, gate=torch.ones(3, 4))
            return self.activation(x, self.weight, y[0]) + epigemm.linear_residual(
                x, self.weight, None, residual=y
            )

    layer, x = Layer(), torch.randn(3, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), layer(x))
