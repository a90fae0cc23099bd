"""What the tests of 8 bits share: their bounds, and properties that calls with all kinds of scales have."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm._native import ops
from epigemm.arguments.calls import EightBits, LinearCall
from epigemm.epilogues.library import FUNCTIONS, gelu_epilogue
from epigemm.epilogues.registry import typed
from epigemm.planner import dry_runs
from epigemm.planner.dry_runs import DryRun
from tests.ops.op import TWO_WEIGHTS, Arguments, Op, Result

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
BLOCK, LARGEST = 128, 448.0
HOPPER = (90, 132, 1755, 3350000)
Case = tuple[type[Exception], str, Arguments]
"""An error, a part of its text, and the arguments that it is for."""


def takes_8_bits(op: Op) -> bool:
    """Functions of one product and one result."""
    of_user = not op.name.startswith("@") or isinstance(op.function, epigemm.UserEpilogue)
    is_single = not op.of_kind(TWO_WEIGHTS) and "weight2" not in op.operands and op.results == (Result(),)
    return op.is_linear and op.function is not None and is_single and of_user


def scaled(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=rng) + 0.5


def variant(op: Op, number: int) -> Arguments:
    """Of the function's options, every second time."""
    every = [*op.variants()]
    return {} if number % 2 else every[number // 2 % len(every)]


def widen(op: Op, given: Arguments) -> None:
    """Make fp32 of the operands that may be so beside 16 bits."""
    for name in op.wide_beside_16_bits():
        given[name] = None if given[name] is None else given[name].float()


def called(op: Op, given: Arguments) -> Tensor:
    """The result of a call, which is the same in an `out`."""
    result: Tensor = op.call(**given)
    if op.takes_out:
        out = torch.full_like(result, float("nan"))
        assert op.call(**given, out=out) is out
        assert same(out, result)
    return result


def same(got: Any, expected: Any) -> bool:
    """Bit for bit, but for the signs of NaN: one result, or several."""
    if isinstance(got, tuple):
        return all(same(*each) for each in zip(got, expected, strict=True))
    a, b = got.cpu().float(), expected.cpu().float()
    bits = [each.nan_to_num(0).view(torch.int32) for each in (a, b)]
    return bool(got.dtype == expected.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(*bits))


def close(got: Tensor, expected: Tensor) -> None:
    """Within a rounding of the result, and some of fp32 of what it is computed from."""
    largest = max(float(expected.abs().max()), 1.0)
    rtol = torch.finfo(got.dtype).eps / 2
    torch.testing.assert_close(got.double(), expected, rtol=rtol, atol=3e-5 * largest, check_dtype=False)


def cast(y: Tensor) -> Tensor:
    """As torch casts, saturated."""
    return y.clamp(-LARGEST, LARGEST).to(E4M3)


def in_blocks(y: Tensor) -> tuple[Tensor, Tensor]:
    """A bf16 result, quantised, and the scales: block after block."""
    results, scales = [], []
    for part in torch.split(y.float(), BLOCK, dim=-1):
        scale = part.abs().amax(-1, keepdim=True).clamp(min=2.0**-100) / LARGEST
        results.append(cast(part / scale))
        scales.append(scale)
    return torch.cat([each.view(torch.uint8) for each in results], -1).view(E4M3), torch.cat(scales, -1)


def check_quantised(got: Tensor, expected: Tensor, scale: float) -> None:
    """Within a rounding of e4m3, and some of fp32 of what it is computed from."""
    exact = (expected / scale).clamp(-LARGEST, LARGEST)
    by_sums = 3e-5 * (1 + float(expected.abs().max())) / scale
    bound = (exact.abs() * 2.0**-4).clamp(min=2.0**-10) * 1.001 + by_sums
    assert got.dtype is E4M3 and bool(((got.double() - exact).abs() <= bound).all())


def check_vmap(given: Arguments, scales: Tensor) -> None:
    """A call for each of several scales of x has the bits of one call for each."""

    def call(scale: Tensor) -> Any:
        return epigemm.linear_relu(**given | {"x_scale": scale})

    found = torch.vmap(call)(scales)
    for number, each in enumerate(scales):
        expected = call(each)
        one = tuple(got[number] for got in found) if isinstance(found, tuple) else found[number]
        assert same(one, expected)


def check_compiled_and_exported(op: Op, given: Arguments) -> None:
    """A compiled and an exported call give the same bits as the call."""
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in given.items() if name not in tensors}

    class Program(torch.nn.Module):
        def forward(self, *values: Tensor) -> Any:
            return op.call(**dict(zip(tensors, values, strict=True)), **rest)

    expected = op.call(**given)
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(Program(), fullgraph=True, backend="aot_eager")
        exported = torch.export.export(Program(), tuple(tensors.values())).module()
        for program in (compiled, exported):
            assert same(program(*tensors.values()), expected)


def check_operators(given: Arguments, bias: Tensor, accumulate: str, options: Arguments) -> None:
    """What torch asks of operators; of `linear` with these options, and of results in blocks."""
    head: Any = ("bias_relu", given["x"], given["weight"], bias, [], [], accumulate)
    scales = {name: given[name] for name in ("x_scale", "weight_scale")}
    # Not the schema: that test has no numbers of 8 bits.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(ops.linear.default, head, scales | options, test_utils=checks)
    rest = (True, False, False, *scales.values())
    torch.library.opcheck(ops.linear_in_blocks.default, (*head, *rest), {}, test_utils=checks)


def check_error(function: Any, given: Arguments, case: Case) -> None:
    """It names the argument, what was got and what is accepted."""
    error, text, other = case
    with pytest.raises(error) as caught:
        function(**given | other)
    assert text in str(caught.value) and "accept" in str(caught.value), caught.value


def planned(
    result: torch.dtype, accumulate: str, n: int, *, types: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    scale: Any = None, is_pair: bool = False, m: int = 256,
) -> DryRun:  # fmt: skip
    """What an H100 would run, whatever this machine has. `scale`: of the result."""

    def meta(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    scale = meta(math.ceil(n / BLOCK), m) if scale == "1x128" else scale
    scales = EightBits(meta(m), meta(), result, accumulate, scale)
    x, weight = meta(m, 512, dtype=types[0]), meta(n, 512, dtype=types[1])
    epilogue = typed(FUNCTIONS["gated_silu"], [False] * 2) if is_pair else gelu_epilogue("none")
    call = LinearCall(epilogue, x, weight, (None, *[None] * is_pair), accumulate, False, eight_bits=scales)
    return dry_runs.dry_run(call._replace(weight2=weight if is_pair else None), gpu=HOPPER, tried=True)
