"""A Python function becomes an epilogue: what it declares, what it may do, and what its functor and reference give."""

from __future__ import annotations

import inspect
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from epigemm.epilogues.declaring import OperandSpec, Traced, trace
from epigemm.epilogues.kinds import MATRIX, PER_COLUMN, PER_ROW, SCALAR, Matrix, PerColumn, PerRow, Scalar
from epigemm.epilogues.tracing.source import describe_compile_error, number_text, prelude


def swish_clamp(
    acc: Tensor,
    bias: PerColumn,
    residual: Matrix,
    gain: PerRow,
    limit: Scalar = 6.0,
) -> Tensor:
    z = acc + bias
    return torch.clamp(z * torch.sigmoid(z), -limit, limit) * gain + residual


def draw(operand: OperandSpec, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    shape = {"per_column": (columns,), "per_row": (rows, 1), "scalar": (), "matrix": (rows, columns)}[
        operand.kind
    ]
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def arguments(traced: Traced, rows: int = 6, columns: int = 9) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    acc = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return acc, [draw(operand, rows, columns, generator) for operand in traced.operands]


def test_declaration() -> None:
    traced = trace(swish_clamp)
    assert traced.name == "swish_clamp"
    assert traced.operands == (
        OperandSpec(PER_COLUMN, "bias"),
        OperandSpec(MATRIX, "residual"),
        OperandSpec(PER_ROW, "gain"),
        OperandSpec(SCALAR, "limit", 6.0),
    )
    assert traced.slots == (0, 10, 8, 4)
    assert traced.reads == (True, True, True, True)
    assert traced.special_functions == 2
    assert trace(lambda acc: acc * 2.0).special_functions == 0


def test_source_holds_no_name_of_the_users() -> None:
    def odd(acc: Tensor, operator: PerColumn, delete: Scalar) -> Any:
        return acc * operator + delete

    source = trace(odd).source
    assert "delete" not in source and "operator" not in source
    assert re.search(r"const T v0 = acc \* c0;\n    const T v1 = v0 \+ s0;\n    return v1;", source)


def test_digest_is_of_what_is_computed() -> None:
    def other_name(acc: Tensor, b: PerColumn) -> Tensor:
        return torch.relu(acc + b)

    first = trace(lambda_with_bias())
    assert first.digest == trace(other_name).digest
    assert first.digest != trace(lambda acc: torch.relu(acc)).digest
    code = (
        "from epigemm.epilogues.declaring import trace\nimport sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.epilogues.test_trace import lambda_with_bias\nprint(trace(lambda_with_bias()).digest)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == first.digest


def lambda_with_bias() -> Callable[..., Tensor]:
    def biased(acc: Tensor, bias: PerColumn) -> Tensor:
        return torch.relu(acc + bias)

    return biased


def test_importing_the_package_does_not_import_the_tracer() -> None:
    asked = "print('torch.fx.experimental.proxy_tensor' in sys.modules)"
    code = f"import sys, epigemm, epigemm.epilogues.declaring; {asked}"
    before = f"import sys, torch; {asked}"
    answers = [
        subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
        for text in (code, before)
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_reference(dtype: torch.dtype) -> None:
    traced = trace(swish_clamp)
    acc, operands = arguments(traced)
    operands[3] = operands[3].abs()
    acc, *operands = (value.to(dtype) for value in (acc, *operands))
    expected = swish_clamp(acc, *operands)  # type: ignore[arg-type]
    torch.testing.assert_close(traced.reference(acc, *operands), expected)
    torch.testing.assert_close(traced.reference(acc, *operands[:3], float(operands[3])), expected)
    with pytest.raises(TypeError, match="got 1 operands; accepted are 4"):
        traced.reference(acc, operands[0])


def test_reference_is_differentiable_twice_by_everything() -> None:
    traced = trace(swish_clamp)
    acc, operands = arguments(traced, 3, 4)
    inputs = [value.requires_grad_() for value in (acc, *operands)]
    inputs[4].data.abs_().add_(0.37)
    assert torch.autograd.gradcheck(traced.reference, inputs)
    assert torch.autograd.gradgradcheck(traced.reference, inputs)


def test_reference_under_vmap_and_compile() -> None:
    traced = trace(swish_clamp)
    acc, operands = arguments(traced)
    batch = torch.stack([acc, -acc])
    mapped = torch.vmap(lambda one: traced.reference(one, *operands))(batch)
    torch.testing.assert_close(mapped, torch.stack([traced.reference(one, *operands) for one in batch]))
    compiled = torch.compile(traced.reference, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(acc, *operands), traced.reference(acc, *operands))


def test_scalars_stay_run_time() -> None:
    def scalars(acc: Tensor, low: Scalar, high: Scalar) -> Any:
        return torch.where(acc > low, acc * (high - low) ** 2, torch.full_like(acc, high)) / abs(high)

    traced = trace(scalars)
    acc, _ = arguments(traced)
    for low, high in ((-0.5, 0.25), (0.75, -2.0), (0.0, 1.0)):
        expected = torch.where(acc > low, acc * (high - low) ** 2, torch.full_like(acc, high)) / abs(high)
        torch.testing.assert_close(traced.reference(acc, low, high), expected)


def test_unread_operands_are_seen() -> None:
    def unread(acc: Tensor, bias: PerColumn, other: PerColumn) -> Tensor:
        return acc + other + 0.0 * 2.0

    traced = trace(unread)
    assert traced.reads == (False, True)
    text = traced.kernel_source((1, 2))
    assert "if (slot == 0)" not in text and "if (slot == 1) return 2;" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "T(0.5)"),
        (-0.0, "T(-0.0)"),
        (0.1, "T(0.1)"),
        (1 / 3, "T(0x1.5555555555555p-2)"),
        (math.inf, "T(epigemm::math::infinity())"),
        (-math.inf, "T(-epigemm::math::infinity())"),
        (math.nan, "T(epigemm::math::not_a_number())"),
        (1e300, "T(0x1.7e43c8800759cp+996)"),
    ],
)
def test_numbers_are_written_exactly(value: float, text: str) -> None:
    assert number_text(value) == text


def test_prelude_is_one_text() -> None:
    lines = prelude().splitlines()
    assert not [line for line in lines if line.startswith("#include") and '"' in line]
    depth = 0  # standard headers stand inside of a condition that NVRTC does not meet
    for line in lines:
        depth += line.startswith("#if")
        depth -= line.startswith("#endif")
        assert not line.startswith("#include <") or depth >= 1, line


def test_kernel_source_has_what_is_asked_for() -> None:
    traced = trace(swish_clamp)
    text = traced.kernel_source(
        (1, 1, 2, 2), ("operand", "apply_16", "slope", "slope_double", "apply_double")
    )
    for name in ("int epigemm_operand(int", "float epigemm_apply(float", "float epigemm_slope(float"):
        assert text.count(f'extern "C" __device__ {name}') == 1
    assert "epigemm::Rounded(c0)" in text and text.count("double epigemm_slope_double(double acc") == 1
    assert "epigemm_slope" not in traced.kernel_source((1, 1, 2, 2))


def test_compile_errors_name_the_users_line() -> None:
    traced = trace(swish_clamp)
    text = traced.kernel_source((1, 1, 2, 2))
    number = next(n for n, line in enumerate(text.splitlines(), 1) if "clamp(v" in line)
    log = f'user.cu({number}): error: identifier "x" is undefined\n\n1 error detected'
    line = inspect.getsourcelines(swish_clamp)[1] + inspect.getsource(swish_clamp).split("\n").index(
        next(part for part in inspect.getsource(swish_clamp).split("\n") if "torch.clamp" in part)
    )
    message = describe_compile_error(traced.program, text, log)
    assert message == f'{__file__}:{line}: identifier "x" is undefined'


def test_whole_numbers_are_not_made_of_short_instructions() -> None:
    """An approximate quotient just below a whole number would be one too small behind `trunc`."""

    def quotient(acc: Tensor, step: PerColumn) -> Tensor:
        return torch.trunc(acc / step)

    def share(acc: Tensor, step: PerColumn) -> Tensor:
        return acc / step

    def whole(acc: Tensor, step: PerColumn) -> Tensor:
        return torch.div(acc, step, rounding_mode="trunc")

    def positive(acc: Tensor, step: PerColumn) -> Tensor:
        return torch.where(torch.exp(acc) > 0, step, 0.0)

    def chosen(acc: Tensor, step: PerColumn) -> Tensor:
        return torch.where(acc > 0, acc, torch.exp(acc) * step)

    for stepped, plain in ((quotient, share), (positive, chosen), (whole, chosen)):
        assert "Rounded(acc)" not in trace(stepped).kernel_source((1,), ("operand", "apply_16"))
        assert "Rounded(acc)" in trace(plain).kernel_source((1,), ("operand", "apply_16"))


FP16, BF16 = torch.float16, torch.bfloat16
EDGES = [0.0, 0.1, 0.3, -0.5, 1.0, 2.5, -2.0, 3.0, 65504.0, -104.0, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        # A negative number on the left of an operator.
        lambda acc: (-2.0) ** acc,
        lambda acc: (-2.0) ** (-acc) - (-1.0) * acc / -3.0,
        lambda acc: torch.where(acc > -2.0, -2.5 % acc, -2.5 // acc),
        # What is filled has the type that is asked for.
        lambda acc: torch.full((), 2.7, dtype=torch.bool) * acc,
        lambda acc: torch.full((), 0.1, dtype=FP16) * acc,
        # Numbers of fp32 beside fp64.
        lambda acc: torch.full((), 0.1) * acc,
        lambda acc: torch.tensor(0.1) * acc + torch.scalar_tensor(0.3),
        lambda acc: torch.full_like(acc, 0.1, dtype=torch.float32) * acc,
        lambda acc: torch.full_like(acc, 0.1) * acc + acc.new_tensor(0.7),
        lambda acc: torch.full((), 0.1, dtype=acc.dtype) * torch.where(acc > 1, 0.1, acc),
        lambda acc: torch.where(acc > 1, 0.1, 0.2) * acc + (acc > 2) * 0.3,
        # A cast to fp32 rounds fp64, and what is made of the result until it meets fp64.
        lambda acc: (acc.float() * 0.1 + 1e-9) * acc,
        lambda acc: acc.to(torch.float32).to(acc.dtype) * 0.1,
        lambda acc: (acc.type(torch.float32) % 0.3 > 0.1) * acc + (acc.float() == 0.1).to(acc.dtype),
        lambda acc: (acc.float().nan_to_num() - acc.half().float() / 3.0).to(acc.dtype),
    ],
)
def test_numbers_are_those_of_torch(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    acc = torch.tensor([EDGES], dtype=dtype)
    assert torch.equal(torch.nan_to_num(trace(function).reference(acc), 7.0), function(acc).nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        # A number beside a value of 16 bits is rounded like it, but not as a divisor.
        *(lambda h: h == 0.1, lambda h: h > 0.1, lambda h: h <= 0.3, lambda h: h >= torch.full((), 0.3)),
        *(lambda h: h % 0.3, lambda h: 0.3 % h, lambda h: torch.fmod(h, 0.3), lambda h: h // 0.3),
        *(
            lambda h: 0.3 // h,
            lambda h: h**0.3,
            lambda h: 0.3**h,
            lambda h: torch.atan2(h, torch.full((), 0.3)),
        ),
        # The largest number is that of the type.
        *(lambda h: h.nan_to_num(), lambda h: h.nan_to_num(0.1, 1e9, -0.3)),
        # What PyTorch computes in fp32 and rounds once.
        *(F.hardswish, F.hardsigmoid, F.mish, F.silu, F.logsigmoid, lambda h: torch.lerp(h, -h, 0.3)),
        *(lambda h: F.threshold(h, 0.1, 0.2), lambda h: torch.addcmul(h, h, h), lambda h: F.celu(h, 0.7)),
    ],
)
def test_steps_of_16_bits_round_as_torch_does(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    def casts(acc: Tensor) -> Tensor:
        return function(acc.to(dtype)).to(acc.dtype)

    acc = torch.cat([torch.tensor(EDGES), torch.linspace(-4, 4, 243)])[None]
    actual, expected = trace(casts).reference(acc), casts(acc)
    # A last bit of fp32 may turn a tie: one unit of 16 bits then.
    bound = torch.finfo(dtype).eps * expected.abs().nan_to_num(0.0, 0.0, 0.0)
    exact = (actual == expected) | (actual.isnan() & expected.isnan())
    assert bool((exact | ((actual - expected).abs() <= bound)).all())
    assert int(exact.sum()) >= 0.99 * exact.numel()
