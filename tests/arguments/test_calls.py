"""`Call`, which holds what a call is given: its sizes, its tensors by name, and the product that it computes."""

from __future__ import annotations

import torch

from epigemm.arguments.calls import (
    FIND,
    KEEP,
    ElementwiseCall,
    LinearCall,
    operator_arguments,
)
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
    assert dict(call.others) == {"weight": weight, "bias": bias, "divisor": divisor}
    assert call.inputs == (x, weight, bias, divisor)
    assert LinearCall(RELU_DIV, x, weight, (None, 2.0)).others == [("weight", weight)]
    assert ElementwiseCall(BIAS_RELU, x, (bias,)).others == [("bias", bias)]


def test_the_operators_arguments() -> None:
    call = LinearCall(RELU_DIV, x, weight, (bias, 2.0), "high", KEEP, True, True, torch.empty(2, 3, 5))
    assert operator_arguments(call) == ("relu_div", x, weight, bias, [], [2.0], "high", KEEP, True, True)
    epilogue = typed(FUNCTIONS["residual"], [False, False])
    found = operator_arguments(ElementwiseCall(epilogue, x, (None, residual)))
    assert found == (epilogue.name, x, None, [residual], [])


def test_the_bare_product_keeps_how_it_is_to_be_computed() -> None:
    call = LinearCall(RELU_DIV, x, weight, (bias, 2.0), "high", KEEP, True, True, torch.empty(2, 3, 5))
    product = call.product()
    assert (product.epilogue, product.bias, product.operands) == (BIAS, bias, (bias,))
    assert (product.precision, product.pack_use, product.invariant) == ("high", KEEP, True)
    assert not product.strict and product.out is None


def test_what_follows_a_product_with_its_bias() -> None:
    """It computes the same behind it."""
    product = x @ weight.t()
    for name, operands in (("residual", [bias, residual]), ("layer_scale_residual", [bias, scale, residual])):
        epilogue = typed(FUNCTIONS[name], [False] * len(operands))
        call = LinearCall(epilogue, x, weight, operands)
        assert call.bias is bias
        after = call.behind(product + bias)
        wanted = epilogue.reference(product, operands)
        torch.testing.assert_close(after.epilogue.reference(after.x, after.operands), wanted)
    call = LinearCall(RELU_DIV, x, weight, (bias, 2.0))
    assert call.behind(product).operands == (None, 2.0) and call.pack_use == FIND
