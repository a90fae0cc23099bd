"""`Call`, which holds what a call is given: its sizes, its tensors by name, and the product that it computes."""

from __future__ import annotations

import torch

from epigemm.arguments.calls import FIND, KEEP, ElementwiseCall, LinearCall
from epigemm.epilogues.kinds import MATRIX, PER_COLUMN
from epigemm.epilogues.library import BIAS, BIAS_RELU, FUNCTIONS, RELU_DIV
from epigemm.epilogues.registry import typed

x, weight, bias = torch.randn(2, 3, 8), torch.randn(5, 8), torch.randn(5)
residual, scale = torch.randn(2, 3, 5), torch.randn(5)


def test_sizes() -> None:
    call = LinearCall(BIAS, x, weight, (bias,))
    assert call.rows == 6 and not call.is_empty
    assert (call.new_out().shape, call.new_out().dtype) == ((2, 3, 5), torch.float32)
    assert LinearCall(BIAS, x[0].double(), weight).new_out().shape == (3, 5)
    assert LinearCall(BIAS, x[:0], weight).is_empty and LinearCall(BIAS, x, weight[:0]).is_empty


def test_tensors_by_name() -> None:
    divisor = torch.tensor(2.0)
    call = LinearCall(RELU_DIV, x, weight, (bias, divisor))
    assert call.others == {"weight": weight, "bias": bias, "divisor": divisor}
    assert call.inputs == (x, weight, bias, divisor)
    assert LinearCall(RELU_DIV, x, weight, (None, 2.0)).others == {"weight": weight}
    assert ElementwiseCall(BIAS_RELU, x, (bias,)).others == {"bias": bias}


def test_the_operators_arguments() -> None:
    call = LinearCall(RELU_DIV, x, weight, (bias, 2.0), "high", KEEP, True, True, torch.empty(2, 3, 5))
    assert call.arguments == ("relu_div", x, weight, bias, (), (2.0,), "high", KEEP, True, True)


def test_the_bare_product_keeps_how_it_is_to_be_computed() -> None:
    call = LinearCall(RELU_DIV, x, weight, (bias, 2.0), "high", KEEP, True, True, torch.empty(2, 3, 5))
    product = call.product()
    assert (product.epilogue, product.bias, product.operands, product.scalars) == (BIAS, bias, (), ())
    assert (product.precision, product.pack_use, product.invariant) == ("high", KEEP, True)
    assert not product.strict and product.out is None


def test_a_bias_that_goes_into_the_product() -> None:
    """What is left of the epilogue computes the same behind it."""
    product, with_bias = x @ weight.t(), x @ weight.t() + bias
    for name, operands in (
        ("bias_residual", [bias, residual]),
        ("bias_layer_scale_residual", [bias, scale, residual]),
    ):
        epilogue = typed(FUNCTIONS[name], [False] * len(operands))
        call = LinearCall(epilogue, x, weight, operands)
        moved = call.with_bias_in_product()
        assert moved.bias is bias
        after = moved.epilogue.reference(with_bias, None, moved.operands, ())
        torch.testing.assert_close(after, epilogue.reference(product, None, operands, ()))
        assert moved.with_bias_in_product() is moved
    call = LinearCall(RELU_DIV, x, weight, (bias, 2.0))
    assert call.with_bias_in_product() is call


def test_a_product_keeps_the_bias_that_it_has() -> None:
    """Where what follows adds a vector of its own."""
    epilogue = typed(FUNCTIONS["residual"], [False, False])
    call = LinearCall(epilogue, x, weight, (bias, scale, residual))
    assert call.with_bias_in_product() is call


def test_what_each_operand_is_broadcast_along() -> None:
    epilogue = typed(FUNCTIONS["residual"], [False, False])
    assert LinearCall(epilogue, x, weight, [bias, residual]).kinds == (PER_COLUMN, MATRIX)
    assert LinearCall(RELU_DIV, x, weight, (bias, 2.0)).pack_use == FIND
