"""What stands in a function's place: its operands in order, pickles, copies, as an attribute of a class."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn, ResultsEpilogue, Scalar, UserEpilogue
from epigemm.decorated import Decorated, absent


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


@pytest.mark.parametrize("function", BOTH)
def test_operands_in_order(function: Any) -> None:
    bias = torch.ones(3)
    assert function._in_order((bias,), {}) == [bias, 2.0]
    assert function._in_order((), {"scale": 3.0, "bias": bias}) == [bias, 3.0]
    assert function._in_order((bias, 4.0), {}) == (bias, 4.0)
    for operands, named, words in (
        ((bias, 1.0, 2.0), {}, r"got 3 operands; accepted are \['bias', 'scale'\]"),
        ((bias,), {"gain": 1.0}, "got an operand 'gain'"),
        ((bias,), {"bias": bias}, "got the operand 'bias' twice"),
        ((), {}, r"bias: got None; accepted is a tensor \[N\]"),
    ):
        with pytest.raises(TypeError, match=words):
            function._in_order(operands, named)


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


def test_it_is_no_method() -> None:
    class Holder:
        function = two

    assert Holder().function is two is Holder.function


def test_operands_that_are_none() -> None:
    assert absent([1.0, None, torch.ones(1), None]) == (1, 3)  # type: ignore[list-item]


def test_whether_a_layer_has_its_bias() -> None:
    @epigemm.epilogue
    def of_a_matrix(acc: Tensor, bias: Matrix) -> tuple[Tensor]:
        return (acc + bias,)

    assert one.takes_bias and two.takes_bias and not of_a_matrix.takes_bias


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
