"""Plain calls that the C++ entry takes, derivatives among them. Streams, threads and devices: gpu/test_execution.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm.arguments import checks
from epigemm.arguments.calls import ElementwiseCall
from epigemm.calls import derivative, entry
from epigemm.calls.elementwise_kernels import has_native
from epigemm.planner.reasons import Reason
from tests.support.pretended import MODULE, another_empty
from tests.support.watching import WITH_ENTRY

pytestmark = WITH_ENTRY
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def test_the_entry_is_there() -> None:
    """A build that lost it would be right, and slow."""
    assert entry._module is not None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tensor_scalar", [False, True])
@pytest.mark.parametrize("name", ["sigmoid", "bias_relu", "relu_div", "sigmoid_scale_residual"])
def test_derivatives_are_those_of_the_operator(
    name: str, dtype: torch.dtype, tensor_scalar: bool, rng: torch.Generator
) -> None:
    device = torch.device("cuda")
    grad, x = (torch.randn(9, 16, generator=rng).to(device, dtype) for _ in range(2))
    epilogue = checks.epilogue_named(name, linear=False)
    wide = torch.promote_types(dtype, torch.float32)
    bias = torch.randn(16, generator=rng).to(device, dtype) if epilogue.bias_place else None
    scalar = torch.tensor(2.5, dtype=wide, device=device) if tensor_scalar else 2.5
    scalars = (scalar,) if epilogue.has_scalar else ()
    call = ElementwiseCall(epilogue, x, (bias, *scalars) if epilogue.bias_place else scalars)
    assert has_native(x), "the question makes the device known"
    found = entry.derivative(call, grad)
    assert isinstance(found, Tensor)
    of_operator = derivative.gradients(call, grad, (True, *(False for _ in call.operands)))
    assert of_operator is not None and of_operator[0] is not None
    torch.testing.assert_close(found, of_operator[0], rtol=0, atol=0)
    for wrong in (grad.t(), grad.t().contiguous().t(), grad[:8], grad.to(torch.complex64)):
        assert isinstance(entry.derivative(call, wrong), Reason)
    assert isinstance(entry.derivative(call._replace(operands=(*call.operands, 2.0)), grad), Reason)
    if bias is not None:
        strided = torch.stack((bias, bias), 1)[:, 0]
        assert entry.derivative(call._replace(operands=(strided, *scalars)), grad) is Reason.NOT_READABLE
    assert isinstance(entry.derivative(call._replace(x=x.detach().requires_grad_()), grad), Reason)
    assert isinstance(entry.derivative(call._replace(x=x[:0]), grad[:0]), Tensor)
    if bias is None:
        point = entry.derivative(call._replace(x=x[0, 0]), grad[0, 0])
        assert isinstance(point, Tensor)
        torch.testing.assert_close(point, found[0, 0], rtol=0, atol=0)


@pytest.mark.gpu
def test_no_memory_for_a_fold() -> None:
    """The cold path answers where torch.empty finds no memory for the workspace; other errors are the caller's."""
    x, vector = torch.randn(4, 8, device="cuda"), torch.rand(8, device="cuda")
    expected = epigemm.scale_batch_norm(x, vector, vector, vector, None, None)
    calls = []

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        raise torch.OutOfMemoryError("none")

    def interrupted(*args: Any, **kwargs: Any) -> Tensor:
        raise KeyboardInterrupt

    with another_empty(MODULE, empty):
        assert torch.equal(epigemm.scale_batch_norm(x, vector, vector, vector, None, None), expected)
    with another_empty(MODULE, interrupted), pytest.raises(KeyboardInterrupt):
        epigemm.scale_batch_norm(x, vector, vector, vector, None, None)
    assert calls


def test_results_can_be_resized() -> None:
    """They are torch's own allocations."""
    result = epigemm.linear(torch.randn(4, 8), torch.randn(16, 8))
    assert result.resize_(8, 16).shape == (8, 16)
