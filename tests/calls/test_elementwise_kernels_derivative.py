"""The kernels of the derivatives (`epigemm::_derivative_out`) against autograd in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm._native import ops
from epigemm.calls import elementwise_kernels
from epigemm.epilogues.library import RELU_DIV, SCALE_BATCH_NORM, SIGMOID_SCALE_RESIDUAL
from epigemm.epilogues.registry import EPILOGUES
from tests.support.arithmetic import STORAGE, Arithmetic
from tests.support.cases import ELEMENTWISE, Operands, draw_operands, poisoned, signed

dtypes = pytest.mark.parametrize("arithmetic", STORAGE, ids=lambda a: a.name)
epilogues = pytest.mark.parametrize("name", ELEMENTWISE)
# The kernels are for GPUs; on a CPU derivatives are autograd's of the reference.
DEVICE = torch.device("cuda")
SHAPES = [(1,), (7,), (), (3, 8), (5, 33), (64, 264), (2, 3, 40), (300, 263), (4, 0), (0, 8)]


def run(name: str, grad: Tensor, x: Tensor, operands: Operands) -> Tensor:
    out = poisoned(tuple(x.shape), x.dtype, x.device)
    given = (operands.bias, operands.tensors, operands.scalars)
    assert elementwise_kernels.has_native(x), "the question makes the device known"
    assert ops._derivative_out(name, grad, x, *given, out, None, None, None) == 0
    return out


def exact(name: str, grad: Tensor, x: Tensor, operands: Operands) -> Tensor:
    variable = x.detach().double().requires_grad_()
    wide = operands.map(torch.Tensor.double)
    given = EPILOGUES[name].in_order(wide.bias, wide.tensors, wide.scalars)
    assert given is not None
    result = EPILOGUES[name].reference(variable.reshape(grad.shape or (1,)), given).view_as(grad)
    return torch.autograd.grad(result, variable, grad.double())[0]


def steepest(name: str, operands: Operands) -> Tensor:
    """A bound of |d epilogue / dx|, per column or one for all."""
    numbers = [torch.as_tensor(value).double() for value in (*operands.tensors, *operands.scalars)]
    if name == SCALE_BATCH_NORM.name:
        return numbers[0].abs()
    if name == SIGMOID_SCALE_RESIDUAL.name:
        return 1 + numbers[-1].abs()
    return 1 / numbers[-1].abs() if name == RELU_DIV.name else torch.ones((), dtype=torch.float64)


def check(name: str, arithmetic: Arithmetic, grad: Tensor, x: Tensor, operands: Operands) -> None:
    expected = exact(name, grad, x, operands)
    # Some ten operations in fp32 (fp64); the exponential of 16-bit results is good to 2^-17.
    unit = 2**-16 if x.dtype.itemsize == 2 else 16 * arithmetic.epilogue_unit
    z = x.double() if operands.bias is None else x.double() + operands.bias.double()
    bound = unit * grad.double().abs() * steepest(name, operands).to(x.device)
    if (
        name == "bias_gelu_tanh"
    ):  # z u' (1 - s^2), where 1 - s^2 is off by a unit of 1: u = sqrt(2 / pi) (z + 0.045 z^3)
        bound = bound * (1 + z.abs() * (1 + 0.134 * z.square()))
    bound = bound + 1.01 * arithmetic.output_unit * expected.abs() + 2 * arithmetic.output_floor
    at_the_kink = z.abs() < 1e-5 * x.double().abs()
    error = (run(name, grad, x, operands).double() - expected).abs()
    assert bool(((error <= bound) | at_the_kink).all()), float((error - bound).max())


@pytest.mark.gpu
@epilogues
@dtypes
def test_every_epilogue_and_shape(name: str, arithmetic: Arithmetic, rng: torch.Generator) -> None:
    device = DEVICE
    for shape in SHAPES:
        x, grad = (signed(shape, rng).to(device, arithmetic.dtype) for _ in range(2))
        columns = shape[-1] if shape else 1
        for with_bias in (True, False):
            operands = draw_operands(name, columns, arithmetic, device, rng)
            if not with_bias:
                operands = Operands(None, operands.tensors, operands.scalars)
            if shape or (operands.bias is None and not operands.tensors):  # along no axis lies no vector
                check(name, arithmetic, grad, x, operands)


@pytest.mark.gpu
@epilogues
def test_tensors_that_begin_anywhere(name: str, rng: torch.Generator) -> None:
    device = DEVICE
    arithmetic = STORAGE[0]
    x, grad = (signed((5 * 33 + 1,), rng).to(device, arithmetic.dtype)[1:].view(5, 33) for _ in range(2))
    check(name, arithmetic, grad, x, draw_operands(name, 33, arithmetic, device, rng))


@pytest.mark.parametrize("name", ["bias_relu", "linear_scale"])
def test_a_single_column_beside_a_vector_with_a_stride(name: str, device: torch.device) -> None:
    """A vector of one element is contiguous to torch, whatever its stride."""
    vector = torch.randn(8, device=device)[::8]
    assert vector.stride() == (8,) and vector.is_contiguous()
    x = torch.randn(5, 1, device=device, requires_grad=True)
    if name == "bias_relu":
        found, plain = epigemm.bias_relu(x, vector), torch.relu(x + vector)
    else:
        weight = torch.ones(1, 1, device=device)
        found, plain = epigemm.linear_scale(x, weight, None, vector), x * vector
    upstream = torch.randn(5, 1, device=device)
    mine, other = (torch.autograd.grad(result, x, upstream)[0] for result in (found, plain))
    torch.testing.assert_close(mine, other)


@pytest.mark.gpu
@dtypes
def test_kinks_and_special_values_are_torchs(arithmetic: Arithmetic) -> None:
    """relu'(0) = relu'(-0) = 0; a NaN passes the gradient on; where it is cut off, an infinite gradient gives 0."""
    device = DEVICE
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([0.0, -0.0, nan, inf, -inf, 1.0, -1.0, -1.0], dtype=arithmetic.dtype, device=device)
    grad = torch.tensor([1.0, 1.0, 2.0, 3.0, 4.0, inf, inf, nan], dtype=arithmetic.dtype, device=device)
    nothing = Operands(None, [], [])
    variable = x.clone().requires_grad_()
    expected = torch.autograd.grad(torch.relu(variable), variable, grad)[0]
    torch.testing.assert_close(run("bias_relu", grad, x, nothing), expected, rtol=0, atol=0, equal_nan=True)
    expected = torch.autograd.grad(torch.sigmoid(variable), variable, torch.ones_like(grad))[0]
    ones = torch.ones_like(grad)
    torch.testing.assert_close(
        run("sigmoid", ones, x, nothing).nan_to_num(7.0), expected.nan_to_num(7.0), rtol=2**-7, atol=0
    )


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("divisor", [0.0, -0.0, float("nan"), float("inf"), -2.0, 1e-40])
def test_what_relu_cuts_stays_zero_behind_a_division(arithmetic: Arithmetic, divisor: float) -> None:
    device = DEVICE
    x = torch.tensor([-1.0, 0.0, -0.0, 2.0, float("nan")], dtype=arithmetic.dtype, device=device)
    variable = x.clone().requires_grad_()
    grad = torch.ones_like(x)
    expected = torch.autograd.grad(torch.relu(variable) / divisor, variable, grad)[0]
    actual = run("relu_div", grad, x, Operands(None, [], [divisor]))
    torch.testing.assert_close(actual[:3], torch.zeros_like(actual[:3]), rtol=0, atol=0)
    if abs(divisor) != 1e-40:  # CUDA's division by a number below 2^-128 is torch's, a CPU's is another
        torch.testing.assert_close(actual, expected, equal_nan=True)
