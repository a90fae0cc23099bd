"""Plain calls that the C++ entry takes: right results, and how they treat memory, threads and processes."""

from __future__ import annotations

import gc
import os
import sys
import threading
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
from tests.support.public import PUBLIC, Public
from tests.support.untyped import backends
from tests.support.watching import DONE, WITH_ENTRY, linear_arguments

pytestmark = WITH_ENTRY
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def test_the_entry_is_there() -> None:
    """A build that lost it would be right, and slow."""
    assert entry._module is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.name)
@pytest.mark.parametrize("where", ["new", "out"])
def test_answers_are_those_of_the_cold_path(
    function: Public, dtype: torch.dtype, where: str, answered: list[Reason | str], device: torch.device,
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    arguments = function.draw(rng, dtype=dtype, device=device)
    shape = function.call(**arguments).shape
    answered.clear()

    def run() -> Tensor:
        out = torch.full(shape, float("nan"), dtype=dtype, device=device) if where == "out" else None
        result = function.call(**arguments, out=out)
        assert out is None or result is out
        return result

    found = run()
    assert answered == [DONE]
    elementwise = entry.elementwise

    def refuse(*given: Any) -> Tensor | Reason:
        return elementwise(*given) if len(given) > 5 and given[5] else Reason.NOT_READABLE

    monkeypatch.setattr(entry, "linear", lambda *given: Reason.NOT_READABLE)
    monkeypatch.setattr(entry, "elementwise", refuse)
    expected = run()
    assert found.dtype == dtype and found.stride() == expected.stride()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.name)
def test_without_the_module_torch_computes(
    function: Public, dtype: torch.dtype, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a CPython without the stable ABI."""
    arguments = function.draw(rng, dtype=dtype)
    expected = function.call(**arguments)
    monkeypatch.setattr(entry, "_module", None)
    out = torch.full_like(expected, float("nan"))
    assert function.call(**arguments, out=out) is out
    for found in (out, function.call(**arguments)):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["rows", "transposed", "strided"])
def test_products_of_a_backward_pass(
    dtype: torch.dtype, layout: str, answered: list[Reason | str], device: torch.device, rng: torch.Generator
) -> None:
    """rows @ matrix as `linear` computes it with the transposed weight."""
    rows = torch.randn(48, 64, generator=rng).to(device, dtype)
    matrix = torch.randn(64, 32, generator=rng).to(device, dtype)
    if layout == "transposed":
        rows, matrix = rows.t().contiguous().t(), matrix.t().contiguous().t()
    elif layout == "strided":
        rows, matrix = rows[:, ::2], matrix[::2]
    found, _ = entry.products(rows, None, matrix, "default")
    assert answered == [DONE] and found is not None
    expected = epigemm.linear(rows, matrix.t())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wanted", ["x", "weight", "both"])
def test_both_products_of_a_backward_pass(
    dtype: torch.dtype, wanted: str, device: torch.device, rng: torch.Generator
) -> None:
    rows, x, weight = (
        torch.randn(*size, generator=rng).to(device, dtype) for size in ((48, 64), (48, 32), (64, 32))
    )
    given = (None if wanted == "x" else x, None if wanted == "weight" else weight)
    of_x, of_weight = entry.products(rows, *given, "default")
    for found, left, right in ((of_x, rows, given[1]), (of_weight, rows.t(), given[0])):
        assert (found is None) == (right is None)
        if right is not None:
            torch.testing.assert_close(found, epigemm.linear(left, right.t()), rtol=0, atol=0)


def test_products_that_the_entry_leaves_to_others() -> None:
    rows, x, weight = torch.randn(4, 6), torch.randn(4, 8), torch.randn(6, 8)
    assert entry.products(rows[0], x, weight, "default") == (None, None)
    assert entry.products(rows, x.requires_grad_(), weight, "default") == (None, None)
    of_x, of_weight = entry.products(rows, x.detach()[:3], weight, "default")
    assert of_x is not None and of_weight is None


def test_products_more_accurate_than_torchs_setting() -> None:
    """The setting is switched for both; the one that does not fit stays open."""
    backends.mkldnn.matmul.fp32_precision = "bf16"
    rows, x, weight = torch.randn(48, 64), torch.randn(48, 32), torch.randn(64, 32)
    of_x, of_weight = entry.products(rows, x, weight, "ieee")
    assert of_x is not None and of_weight is not None
    torch.testing.assert_close(of_x.double(), rows.double() @ weight.double(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(of_weight.double(), rows.double().t() @ x.double(), rtol=1e-5, atol=1e-4)
    of_x, of_weight = entry.products(rows, x[:3], weight, "ieee")
    assert of_x is not None and of_weight is None
    assert backends.mkldnn.matmul.fp32_precision == "bf16"


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


@pytest.mark.parametrize("layout", ["contiguous", "axes swapped"])
def test_an_out_of_three_dimensions(layout: str) -> None:
    x, weight, out = torch.randn(2, 3, 8), torch.randn(16, 8), torch.zeros(2, 3, 16)
    if layout == "axes swapped":
        x = torch.randn(3, 2, 8).transpose(0, 1)
    assert entry.linear(*linear_arguments(x, weight, out=out)) is out
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("with_out", [False, True])
def test_a_folded_bias_has_the_dtype_of_x(with_out: bool) -> None:
    """As every other bias has, whatever computes the call. The other folded vectors may be fp32 beside 16 bits."""
    x, weight, bias = torch.ones(2, 4).half(), torch.ones(3, 4).half(), torch.ones(3)
    out = torch.zeros(2, 3).half() if with_out else None
    with pytest.raises(RuntimeError, match=r"bias: got dtype torch\.float32"):
        epigemm.linear_scale(x, weight, bias, torch.ones(3), out=out)
    assert out is None or not out.any()
    assert epigemm.linear_scale(x, weight, bias.half(), torch.ones(3)).shape == (2, 3)


@pytest.mark.gpu
def test_no_memory_for_a_fold() -> None:
    """The cold path answers where torch.empty finds no memory for the workspace; other errors are the caller's."""
    x, vector = torch.randn(4, 8, device="cuda"), torch.rand(8, device="cuda")
    expected = epigemm.scale_batch_norm(x, vector, vector, vector, None, None)
    calls = []

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        raise torch.OutOfMemoryError("none")

    native = sys.modules["epigemm._entry"]
    members = entry.members() | {"empty": empty}
    native.init(Tensor.__dlpack_c_exchange_api__, torch.ops.epigemm._call_functions(), members)
    try:
        assert torch.equal(epigemm.scale_batch_norm(x, vector, vector, vector, None, None), expected)
        members["empty"] = lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt())
        native.init(Tensor.__dlpack_c_exchange_api__, torch.ops.epigemm._call_functions(), members)
        with pytest.raises(KeyboardInterrupt):
            epigemm.scale_batch_norm(x, vector, vector, vector, None, None)
    finally:
        native.init(Tensor.__dlpack_c_exchange_api__, torch.ops.epigemm._call_functions(), entry.members())
    assert calls


def test_bad_functions_are_refused() -> None:
    native = sys.modules["epigemm._entry"]
    exchange = Tensor.__dlpack_c_exchange_api__
    for given, error in (
        ((exchange, 0, entry.members()), ImportError),
        ((exchange, torch.ops.epigemm._call_functions(), {}), KeyError),
        ((None, torch.ops.epigemm._call_functions(), entry.members()), ValueError),
    ):
        with pytest.raises(error):
            native.init(*given)
    assert epigemm.linear(torch.ones(2, 8), torch.ones(4, 8)).shape == (2, 4)


@pytest.mark.parametrize("where", ["new", "out"])
def test_a_call_more_accurate_than_torchs_setting(
    where: str, answered: list[Reason | str], device: torch.device
) -> None:
    """The fallback runs under another setting, for that call alone."""
    setting = backends.cuda.matmul if device.type == "cuda" else backends.mkldnn.matmul
    setting.fp32_precision = reduced = "tf32" if device.type == "cuda" else "bf16"
    x, weight = torch.randn(64, 48, device=device), torch.randn(32, 48, device=device)
    out = torch.empty(64, 32, device=device) if where == "out" else None
    result = entry.linear(*linear_arguments(x, weight, precision="ieee", out=out))
    assert isinstance(result, Tensor) and answered == [Reason.OTHER_SETTING, DONE]
    assert out is None or result is out
    assert setting.fp32_precision == reduced
    exact = x.double() @ weight.double().t()
    assert float((result - exact).abs().max()) < 1e-4
    assert entry.linear(*linear_arguments(x, weight, precision="ieee", strict=True)) is Reason.NOT_FUSED
    assert answered[2:] == [Reason.NOT_FUSED]


def test_writes_are_counted(device: torch.device) -> None:
    out = torch.empty(4, 16, device=device)
    before = out._version
    epigemm.linear(torch.randn(4, 8, device=device), torch.randn(16, 8, device=device), out=out)
    assert out._version > before


def test_nothing_leaks(device: torch.device) -> None:
    """References of arguments and results, over calls that are answered and calls that are not."""
    x, weight, bias = (torch.randn(*size, device=device) for size in ((4, 8), (16, 8), (16,)))
    others = (torch.randn(15, device=device), x.double())
    kept = (x, weight, bias, *others)

    def count() -> list[int]:
        return [sys.getrefcount(tensor) for tensor in kept]

    def call() -> None:
        for _ in range(100):
            entry.linear(*linear_arguments(x, weight, bias=bias))
            entry.linear(*linear_arguments(x, weight, bias=others[0]))
            entry.linear(*linear_arguments(others[1], weight))
            epigemm.sigmoid(x)

    call()
    before, tensors = count(), _live_tensors()
    call()
    assert count() == before and _live_tensors() == tensors


def _live_tensors() -> int:
    gc.collect()
    return sum(type(found) is Tensor for found in gc.get_objects())


def test_threads() -> None:
    x, weight = torch.randn(64, 128), torch.randn(32, 128)
    expected, wrong = x @ weight.t(), []

    def work() -> None:
        for _ in range(200):
            if not torch.allclose(epigemm.linear(x, weight), expected, atol=1e-4):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.gpu
def test_a_stream_for_each_thread(device: torch.device) -> None:
    """Each launches on its own, after what it has written there itself."""
    if device.type != "cuda":
        pytest.skip("streams are CUDA's")
    weight, wrong = torch.randn(512, 512, device=device), []
    torch.cuda.synchronize()

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            for step in range(50):
                x = torch.full((256, 512), float(seed + step), device=device)
                found = epigemm.linear(x, weight, precision="ieee")
                if not torch.allclose(found[0], (seed + step) * weight.sum(1), rtol=1e-3, atol=1e-2):
                    wrong.append((seed, step))

    threads = [threading.Thread(target=work, args=(100 * index,)) for index in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.gpu
def test_the_current_device_stays_what_it_is() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("gpu: only one CUDA device")
    x, weight = torch.randn(64, 512, device="cuda:1"), torch.randn(512, 512, device="cuda:1")
    epigemm.linear(x, weight)
    found = entry.linear(*linear_arguments(x, weight))
    assert isinstance(found, Tensor) and found.device == x.device and torch.cuda.current_device() == 0
    torch.testing.assert_close(found, x @ weight.t(), rtol=1e-3, atol=1e-3)


def test_a_child_process_may_call() -> None:
    x, weight = torch.randn(4, 8), torch.randn(16, 8)
    expected = epigemm.linear(x, weight)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(epigemm.linear(x, weight), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_results_can_be_resized() -> None:
    """They are torch's own allocations."""
    result = epigemm.linear(torch.randn(4, 8), torch.randn(16, 8))
    assert result.resize_(8, 16).shape == (8, 16)
