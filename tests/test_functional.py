"""The public functions against the plain PyTorch programs that they replace."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

import epigemm
from tests.support.arithmetic import STORAGE, Arithmetic
from tests.support.cases import poisoned, signed
from tests.support.public import PUBLIC, PUBLIC_ELEMENTWISE, PUBLIC_LINEAR, Arguments, Public, map_tensors

functions = pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.name)
linear_functions = pytest.mark.parametrize("function", PUBLIC_LINEAR, ids=lambda f: f.name)
scaled_functions = pytest.mark.parametrize("function", [f for f in PUBLIC if f.scalar], ids=lambda f: f.name)
OPTIONAL_BIAS = [f for f in PUBLIC_LINEAR if "bias" in f.vectors and "scale" not in f.vectors]
dtypes = pytest.mark.parametrize("arithmetic", STORAGE, ids=lambda a: a.name)


def close(actual: torch.Tensor, function: Public, arguments: Arguments, arithmetic: Arithmetic) -> None:
    """Within a few roundings of the float64 value of the plain program.

    The arguments are O(1) and K is 24, so the sharp, derived bounds of tests/support/reference.py are not repeated
    here: this holds each public function to the formula that its user expects, not its kernel to the last bit.
    """
    assert actual.dtype is arithmetic.dtype
    exact = function.eager(**map_tensors(arguments, lambda t: t.double()))
    unit = arithmetic.output_unit
    magnitude = 1 + exact.abs() + float(exact.abs().median())
    assert actual.shape == exact.shape
    error = (actual.double() - exact).abs() / magnitude
    assert float(error.max() if error.numel() else 0) <= 40 * unit


@functions
@dtypes
def test_equals_the_plain_program(
    function: Public, arithmetic: Arithmetic, device: torch.device, rng: torch.Generator
) -> None:
    for tensor_scalar in (False, True):
        arguments = function.draw(rng, dtype=arithmetic.dtype, device=device, tensor_scalar=tensor_scalar)
        precision = {"precision": "ieee"} if function.is_linear else {}
        close(function.call(**arguments, **precision), function, arguments, arithmetic)


@functions
@dtypes
def test_out(function: Public, arithmetic: Arithmetic, device: torch.device, rng: torch.Generator) -> None:
    """`out=` is returned, is filled, and where it is contiguous holds the same bits as a fresh result."""
    arguments = function.draw(rng, dtype=arithmetic.dtype, device=device)
    expected = function.call(**arguments)
    out = poisoned(expected.shape, expected.dtype, device)
    assert function.call(**arguments, out=out) is out
    assert torch.equal(out, expected)
    # torch's own product may add in another order for another layout of its output: no bits promised there.
    transposed = poisoned((16, 9), expected.dtype, device).mT
    assert function.call(**arguments, out=transposed) is transposed
    close(transposed, function, arguments, arithmetic)


@functions
def test_positional_arguments_are_those_of_the_plain_program(function: Public, rng: torch.Generator) -> None:
    arguments = function.draw(rng)
    assert torch.equal(function.call(*arguments.values()), function.call(**arguments))


@linear_functions
@dtypes
def test_one_dimensional_x(
    function: Public, arithmetic: Arithmetic, device: torch.device, rng: torch.Generator
) -> None:
    arguments = function.draw(rng, shape=(1, 16, 24), dtype=arithmetic.dtype, device=device)
    arguments["x"] = arguments["x"][0]
    actual = function.call(**arguments)
    assert actual.shape == (16,)
    close(actual, function, arguments, arithmetic)


@linear_functions
@dtypes
@pytest.mark.parametrize("shape", [(0, 16, 24), (9, 0, 24), (9, 16, 0), (1, 1, 1)], ids=str)
def test_degenerate_shapes(
    function: Public,
    arithmetic: Arithmetic,
    shape: tuple[int, int, int],
    device: torch.device,
    rng: torch.Generator,
) -> None:
    arguments = function.draw(rng, shape=shape, dtype=arithmetic.dtype, device=device)
    close(function.call(**arguments), function, arguments, arithmetic)


@linear_functions
def test_leading_dimensions_and_views(function: Public, device: torch.device, rng: torch.Generator) -> None:
    arguments = function.draw(rng, device=device)
    for x in (
        signed((2, 3, 24), rng),
        signed((3, 2, 24), rng).transpose(0, 1),
        signed((5, 48), rng)[:, ::2],
        signed((24, 7), rng).mT,
        signed((24,), rng).expand(2, 5, 24),
    ):
        arguments["x"] = x.float().to(device)
        expected = torch.stack([function.call(**{**arguments, "x": row.contiguous()})
                                for row in arguments["x"].reshape(-1, 24)])  # fmt: skip
        actual = function.call(**arguments).reshape(-1, 16)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", OPTIONAL_BIAS, ids=lambda f: f.name)
def test_bias_may_be_absent(function: Public, rng: torch.Generator) -> None:
    arguments = function.draw(rng)
    del arguments["bias"]
    torch.testing.assert_close(function.call(**arguments), function.eager(**arguments), rtol=1e-5, atol=1e-5)
    assert torch.equal(function.call(**arguments), function.call(**arguments, bias=None))


@pytest.mark.parametrize("name", ["linear_scale", "linear_scale_batch_norm"])
def test_none_for_a_required_bias(name: str, rng: torch.Generator) -> None:
    """A linear layer without a bias before the scale: None takes its place."""
    function = next(f for f in PUBLIC if f.name == name)
    arguments = {**function.draw(rng), "bias": None}
    torch.testing.assert_close(function.call(**arguments), function.eager(**arguments), rtol=1e-4, atol=1e-5)


def test_batch_norm_without_affine_parameters(device: torch.device, rng: torch.Generator) -> None:
    """`bn_weight` and `bn_bias` of None, as BatchNorm1d(affine=False) has them; each alone too."""
    function = next(f for f in PUBLIC if f.name == "linear_scale_batch_norm")
    arguments = function.draw(rng, device=device)
    for absent in (("bn_weight", "bn_bias"), ("bn_weight",), ("bn_bias",)):
        given = {**arguments, **dict.fromkeys(absent)}
        z = F.linear(arguments["x"], arguments["weight"], arguments["bias"]) * arguments["scale"]
        expected = F.batch_norm(
            z, given["running_mean"], given["running_var"], given["bn_weight"], given["bn_bias"]
        )
        torch.testing.assert_close(function.call(**given, precision="ieee"), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_batch_norm_vectors_in_fp32_beside_16_bit_tensors(
    dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    """Statistics of a half-precision model usually stay fp32; the result is the more accurate for it."""
    function = next(f for f in PUBLIC if f.name == "linear_scale_batch_norm")
    arguments = function.draw(rng, dtype=dtype, device=device)
    exact = map_tensors(arguments, lambda t: t.double())
    for name in function.vectors[1:]:
        arguments[name] = arguments[name].float() * 1.001
        exact[name] = arguments[name].double()
    actual = function.call(**arguments)
    expected = function.eager(**exact)
    assert actual.dtype is dtype
    error = (actual.double() - expected).abs() / (1 + expected.abs())
    assert float(error.max()) <= 40 * torch.finfo(dtype).eps


def test_batch_norm_reads_live_statistics(rng: torch.Generator) -> None:
    """Nothing folded is kept: a changed running mean is seen by the next call."""
    function = next(f for f in PUBLIC if f.name == "linear_scale_batch_norm")
    arguments = function.draw(rng)
    weight = arguments["weight"].clone()
    before = function.call(**arguments)
    arguments["running_mean"] += 1
    after = function.call(**arguments)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, function.eager(**arguments), rtol=1e-4, atol=1e-4)
    assert torch.equal(arguments["weight"], weight)


@functions
def test_inputs_are_not_changed(function: Public, device: torch.device, rng: torch.Generator) -> None:
    arguments = function.draw(rng, device=device, tensor_scalar=True)
    copies = map_tensors(arguments, lambda t: t.clone())
    function.call(**arguments)
    for name, copy in copies.items():
        assert not isinstance(copy, torch.Tensor) or torch.equal(arguments[name], copy)


@pytest.mark.parametrize("function", PUBLIC_ELEMENTWISE, ids=lambda f: f.name)
def test_elementwise_in_place(function: Public, device: torch.device, rng: torch.Generator) -> None:
    arguments = function.draw(rng, device=device)
    expected = function.call(**arguments)
    function.call(**arguments, out=arguments["x"])
    assert torch.equal(arguments["x"], expected)


@scaled_functions
def test_scalar_tensor_on_the_device_is_read_when_the_kernel_runs(
    function: Public, device: torch.device, rng: torch.Generator
) -> None:
    arguments = function.draw(rng, device=device, tensor_scalar=True)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        scalar = torch.tensor(0.5, device=device, dtype=dtype)
        by_number = function.call(**{**arguments, function.scalar: 0.5})
        assert torch.equal(function.call(**{**arguments, function.scalar: scalar}), by_number)


@scaled_functions
def test_integer_scalars(function: Public, rng: torch.Generator) -> None:
    """A Python int is a number too."""
    arguments = function.draw(rng)
    assert torch.equal(
        function.call(**{**arguments, function.scalar: 2}),
        function.call(**{**arguments, function.scalar: 2.0}),
    )


@functions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(function: Public, dtype: torch.dtype, device: torch.device, rng: torch.Generator) -> None:
    """Products are in the autocast dtype, as of F.linear; fp64 and elementwise functions stay."""
    arguments = function.draw(rng, device=device)
    with torch.autocast(device.type, dtype=dtype):
        actual = function.call(**arguments)
        want = function.eager(**arguments)
        wide = function.call(**map_tensors(arguments, lambda t: t.double()))
    assert actual.dtype is (want.dtype if function.is_linear else torch.float32)
    assert wide.dtype is torch.float64
    exact = function.eager(**map_tensors(arguments, lambda t: t.double()))
    unit = torch.finfo(dtype).eps
    assert float(((actual.double() - exact).abs() / (2 + exact.abs())).max()) <= 60 * unit
    with torch.autocast(device.type, enabled=False):
        assert function.call(**arguments).dtype is torch.float32


@functions
def test_calls_from_several_threads(function: Public, device: torch.device, rng: torch.Generator) -> None:
    arguments = [function.draw(rng, device=device) for _ in range(4)]
    expected = [function.call(**each) for each in arguments]
    wrong: list[int] = []
    torch_threads = torch.get_num_threads()

    def work(index: int) -> None:
        # The first product of a new thread would take all cores, which is another order of sums.
        torch.set_num_threads(torch_threads)
        for _ in range(50):
            if not torch.equal(function.call(**arguments[index]), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_every_public_name_is_exported_and_documented() -> None:
    for function in PUBLIC:
        assert function.name in epigemm.__all__
        doc = function.call.__doc__ or ""
        for word in ("D = ", "Matches", "Args:", "Returns:", "Raises:", "Example"):
            assert word in doc, f"{function.name}: no {word!r} in its docstring"
    for word in ("out", "precision", "TypeError", "ValueError", "RuntimeError"):
        assert word in (epigemm.functional.__doc__ or "")
