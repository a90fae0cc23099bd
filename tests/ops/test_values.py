"""What a call gives: the numbers of the PyTorch program, its shapes and dtypes; and it changes nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_structure

from epigemm import pack
from tests.ops.bounds import assert_right
from tests.ops.op import (
    COLUMN,
    COUNT,
    NUMBER,
    TWO_WEIGHTS,
    VARIANCE,
    WEIGHT,
    Arguments,
    Op,
    map_tensors,
    results_of,
    tensors_of,
    wide,
)
from tests.ops.table import rows
from tests.support.thorough import is_thorough
from tests.support.threads import at_once
from tests.support.untyped import backends

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
of_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
SIZES = [((9,), 16, 24), ((5,), 13, 7), ((1,), 40, 33), ((33,), 8, 64)]
OF_BATCHES = [((19,), 13, 7), ((33,), 8, 64)]  # whose statistics are not those of a few rows


def ieee(op: Op) -> dict[str, Any]:
    """Products of fp32 without slices, whose errors have a derivation of their own."""
    return {"precision": "ieee"} if op.takes_precision else {}


@rows("values")
@of_each_dtype
def test_values(op: Op, dtype: torch.dtype, device: torch.device, rng: torch.Generator) -> None:
    """With every argument there is, without each that may be absent, and of one size in turn."""
    place = DTYPES.index(dtype)
    every = OF_BATCHES if op.of_kind(COUNT) else SIZES
    sizes = every if is_thorough() or device.type == "cuda" else [every[place % len(every)]]
    for lead, n, k in sizes:
        for options in op.variants():
            arguments = op.draw(rng, lead, n, k, dtype=dtype, device=device, **options)
            assert_right(op, op.call(**arguments, **ieee(op)), arguments, dtype, about=(lead, n, k, options))


@rows("inputs")
def test_inputs_are_not_changed(op: Op, device: torch.device, rng: torch.Generator) -> None:
    """And results are new tensors: written to, they change no argument, and no other result."""
    arguments = op.draw(rng, device=device, tensor_numbers=True)
    kept = map_tensors(arguments, torch.clone)
    results = results_of(op.call(**arguments))
    copies = [each.clone() for each in results]
    for place, each in enumerate(results):
        each.fill_(7)
        assert all(torch.equal(a, b) for a, b in zip(results[place + 1 :], copies[place + 1 :], strict=True))
    for name, value in tensors_of(arguments).items():
        assert torch.equal(value, kept[name]), name


@rows("structure", lambda op: len(op.results) > 1)
def test_results_are_returned_as_the_program_returns_them(op: Op, rng: torch.Generator) -> None:
    """In tuples and lists of the same structure."""
    arguments = op.draw(rng, (19,))
    got, want = op.call(**arguments), op.reference(**arguments)
    assert tree_structure(got) == tree_structure(want)


FAMILIES = [
    (m, n, k)
    for m in (1, 5, 16, 33, 64, 100, 256, 1000)
    for n, k in ((256, 512), (264, 136), (1000, 1024), (17, 40))
]


@pytest.mark.gpu
@rows("sizes of kernels", lambda op: op.is_linear)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_sizes_of_every_family_of_kernels(op: Op, dtype: torch.dtype, rng: torch.Generator) -> None:
    """On a GPU: few rows and many, ragged sizes and whole tiles, with all operands."""
    for m, n, k in FAMILIES:
        if m == 1 and op.of_kind(COUNT):
            continue
        arguments = op.draw(rng, (m,), n, k, dtype=dtype, device="cuda")
        assert_right(op, op.call(**arguments, **ieee(op)), arguments, dtype, about=(m, n, k))


@rows("cancelling", lambda op: op.is_linear and "bias" in op.operands and not op.of_kind(COUNT))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "recorded"])
def test_a_bias_that_cancels_the_product(
    op: Op, dtype: torch.dtype, device: torch.device, rng: torch.Generator, *, recorded: bool
) -> None:
    """It is added before the product is rounded, as by `F.linear`, or what is left would be the rounding's error.

    Of functions of users PyTorch rounds the product first, and so may the call.
    """
    arguments = cancelling(op, dtype, device, rng)
    if recorded:
        arguments["x"].requires_grad_()
    assert_right(op, op.call(**arguments), arguments, dtype)
    if not op.name.startswith("@"):
        with torch.autocast(device.type, dtype=dtype):
            got = results_of(op.call(**map_tensors(arguments, torch.Tensor.float)))
        rounded = [each.to(result.dtype(dtype)) for each, result in zip(got, op.results, strict=True)]
        assert_right(op, tuple(rounded), arguments, dtype)


def cancelling(op: Op, dtype: torch.dtype, device: torch.device, rng: torch.Generator) -> Arguments:
    arguments = op.draw(rng, (19,), n=16, k=40, dtype=dtype, device=device)
    arguments["x"], arguments["weight"] = arguments["x"] / 8 + 4, arguments["weight"] / 8 + 1
    arguments["bias"] = torch.full_like(arguments["bias"], -160.0)
    return arguments


WAYS: dict[str, Callable[[Any, Tensor], Any]] = {
    "vmap": lambda call, x: torch.vmap(call)(x[:, None])[:, 0],
    "vjp": lambda call, x: torch.func.vjp(call, x)[0],
    "compiled": lambda call, x: torch.compile(call, backend="aot_eager")(x),  # type: ignore[no-untyped-call]
}


@rows("cancelling elsewhere", lambda op: op.name in ("linear", "linear_scale", "linear_scale_batch_norm"))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("fresh_compiler")
def test_a_bias_that_cancels_within_transforms(
    op: Op, dtype: torch.dtype, way: str, device: torch.device, rng: torch.Generator
) -> None:
    """Also one that is folded into an offset, and one beside an operand that is absent."""
    for without in ((), *((name,) for name in op.optional if name != "bias")):
        arguments = cancelling(op, dtype, device, rng) | dict.fromkeys(without)
        arguments["weight"].requires_grad_(way == "compiled")

        def of_x(x: Tensor, given: Arguments = arguments) -> Any:
            return op.call(**{**given, "x": x})

        found = WAYS[way](of_x, arguments["x"])
        assert_right(op, found, arguments, dtype, about=without)


@rows("precision", lambda op: op.takes_precision)
def test_precision(op: Op, device: torch.device, rng: torch.Generator) -> None:
    """Each arithmetic, of a plain weight and of a packed one; "ieee" is fp32 whatever torch's own setting is."""
    arguments = op.draw(rng, (64,), 40, 96, device=device)
    weight = op.of_kind(WEIGHT, TWO_WEIGHTS)[0]
    packs = (
        [arguments]
        if op.of_kind(TWO_WEIGHTS)
        else [arguments, {**arguments, weight: pack(arguments[weight])}]
    )
    want = results_of(op.reference(**wide(arguments)))
    for given in packs:
        for precision in ("highest", "ieee", "high", "medium", "tf32", None):
            got = results_of(op.call(**given, precision=precision))
            # TF32 has the error of fp16, of each factor of the product.
            unit = 2.0**-20 if precision in ("highest", "ieee", None) else 2.0**-8
            for one, other in zip(got, want, strict=True):
                error = torch.linalg.vector_norm(one.double() - other)
                assert float(error) <= unit * float(torch.linalg.vector_norm(other)), precision
    exact = results_of(op.call(**arguments, precision="ieee"))
    backends.mkldnn.matmul.fp32_precision = "bf16"
    again = results_of(op.call(**arguments, precision="ieee"))
    assert backends.mkldnn.matmul.fp32_precision == "bf16"
    assert all(torch.equal(one, other) for one, other in zip(exact, again, strict=True))


@rows("extreme numbers", lambda op: bool(op.of_kind(NUMBER)) and len(op.results) == 1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_beyond_fp32_and_zero(
    op: Op, dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    """They are infinite where the arithmetic is fp32; a division by zero is no error."""
    arguments = op.draw(rng, (5,), dtype=dtype, device=device)
    arithmetic = torch.float64 if dtype is torch.float64 else torch.float32
    for name in op.of_kind(NUMBER):
        for value in (1e39, -1e300, float("inf"), float("nan"), 0.0, -0.0, 2**200):
            of_arithmetic = float(torch.tensor(value, dtype=torch.float64).to(arithmetic))
            got = op.call(**{**arguments, name: value})
            # A tensor: what PyTorch's clamp makes of a number that is NaN depends on the device.
            number = torch.tensor(of_arithmetic, dtype=arithmetic, device=device)
            want = op.reference(**map_tensors({**arguments, name: number}, lambda t: t.to(arithmetic)))
            for other in (want.to(dtype), op.call(**{**arguments, name: of_arithmetic})):
                assert torch.equal(got.isnan(), other.isnan()), value
                assert torch.equal(got[got.isinf()], other[got.isinf()]), value


@rows("special vectors", lambda op: bool(op.of_kind(COLUMN)) and len(op.results) == 1)
@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "recorded"])
def test_infinite_and_nan_vectors(op: Op, recorded: bool, rng: torch.Generator) -> None:
    """NaN and infinities are where PyTorch's operators have them, beside a bias and without."""
    values = (0.0, -0.0, 1.0, float("inf"), -float("inf"), float("nan"))
    for _ in range(40 if is_thorough() else 8):
        without = [name for name in op.optional if torch.rand((), generator=rng) < 0.4]
        arguments = op.draw(rng, without=without)
        for name in op.of_kind(COLUMN, VARIANCE):
            if (vector := arguments[name]) is not None and torch.rand((), generator=rng) < 0.6:
                for place in torch.randint(len(vector), (4,), generator=rng):
                    value = values[int(torch.randint(len(values), (), generator=rng))]
                    vector[place] = abs(value) if op.operands[name] == VARIANCE else value
        want = op.reference(**arguments)
        if recorded:
            arguments[op.input].requires_grad_()
        found = op.call(**arguments).detach()
        for test in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(test(found), test(want)), (without, test)


@rows("positions", lambda op: op.layer is None)
def test_arguments_by_position(op: Op, rng: torch.Generator) -> None:
    """In the order of the PyTorch program."""
    arguments = op.draw(rng)
    if "weight2" in arguments or op.fixed:
        return
    by_name, by_place = op.call(**arguments), op.call(*arguments.values())
    assert all(torch.equal(a, b) for a, b in zip(results_of(by_name), results_of(by_place), strict=True))


@rows("numbers", lambda op: bool(op.of_kind(NUMBER)))
def test_numbers(op: Op, device: torch.device, rng: torch.Generator) -> None:
    """A float, an int, and a tensor of any floating dtype on the device are the same number."""
    arguments = op.draw(rng, device=device)
    for name in op.of_kind(NUMBER):
        results = [
            results_of(op.call(**{**arguments, name: value}))
            for value in (2.0, 2, *(torch.tensor(2.0, device=device, dtype=dtype) for dtype in DTYPES[:3]))
        ]
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@rows("vectors of fp32", lambda op: op.layer is None)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fp32_operands_beside_16_bits(
    op: Op, dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    """What an epilogue reads beside the product may be fp32: the result has the dtype of x."""
    arguments = op.draw(rng, dtype=dtype, device=device)
    for name in op.wide_beside_16_bits():
        arguments[name] = arguments[name].float() * 1.001
    assert_right(op, op.call(**arguments), arguments, dtype)


@rows("threads", lambda op: op.layer is None)  # a layer that several threads share has one set of parameters
def test_calls_from_several_threads(op: Op, device: torch.device, rng: torch.Generator) -> None:
    """Each thread gets what it would alone."""
    each_arguments = [op.draw(rng, device=device) for _ in range(3)]
    expected = [results_of(op.call(**arguments)) for arguments in each_arguments]
    torch_threads = torch.get_num_threads()

    def work(place: int) -> None:
        # The first product of a new thread would take all cores, which is another order of sums.
        torch.set_num_threads(torch_threads)
        for _ in range(8):
            got = results_of(op.call(**each_arguments[place]))
            assert all(torch.equal(a, b) for a, b in zip(got, expected[place], strict=True))

    at_once(len(each_arguments), work)


@rows("changed statistics", lambda op: "running_mean" in op.operands)
def test_nothing_of_the_arguments_is_kept(op: Op, device: torch.device, rng: torch.Generator) -> None:
    """Nothing folded or converted outlives a call: one that follows a change in place sees the change."""
    arguments = op.draw(rng, lead=(19,), device=device)
    op.call(**arguments)
    for name in ("running_mean", "running_var", "bn_weight"):
        arguments[name].add_(1)
    assert_right(op, op.call(**arguments, **ieee(op)), arguments, torch.float32)


@rows("meta")
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_meta_tensors_and_inference_mode(op: Op, dtype: torch.dtype, rng: torch.Generator) -> None:
    """Shapes, dtypes and strides without numbers; the same bits in `torch.inference_mode`."""
    arguments = op.draw(rng, (2, 3) if op.takes_any_lead else (6,), dtype=dtype)
    expected = results_of(op.call(**arguments))
    with torch.inference_mode():
        got = results_of(op.call(**arguments))
    assert all(torch.equal(a, b) and a.is_inference() for a, b in zip(got, expected, strict=True))
    on_meta = results_of(op.call(**map_tensors(arguments, lambda t: t.to("meta"))))
    with FakeTensorMode() as mode:
        fake = results_of(op.call(**map_tensors(arguments, mode.from_tensor)))
    for found in (on_meta, fake):
        assert [(each.shape, each.dtype, each.stride()) for each in found] == [
            (each.shape, each.dtype, each.stride()) for each in expected
        ]
    assert all(each.is_meta for each in on_meta) and all(each.device.type == "cpu" for each in fake)
