"""Every primitive on the device, linked into the open elementwise kernels: values and derivatives against float64.

The steps are those of a user's epilogue: it is traced, its functor compiled by NVRTC and linked by nvJitLink, and the
operators launch it. Each primitive is linked once for each dtype and kind of kernel.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from epigemm._native import ops
from epigemm.arguments.calls import ElementwiseCall
from epigemm.calls import resolve
from epigemm.calls.elementwise_kernels import has_native
from epigemm.epilogues.registry import Epilogue, typed
from epigemm.epilogues.tracer.accuracy import ROUNDED_TO, short_number
from epigemm.epilogues.tracer.source import primitives
from epigemm.linker import cubins, libraries
from tests.csrc.test_primitives import NO_DERIVATIVE_IN_TORCH, SLOPE_TERMS, SLOPE_TOLERANCE, size_of
from tests.csrc.test_short_forms import ERRORS, FAR_ERRORS, FAR_LEFT, FORMS, RELATIVE
from tests.support.primitives import FUNCTIONS, points, traced_of
from tests.support.threads import processes
from tools.cost_functors import PLAIN

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

OF_ELEMENT = 1  # csrc/open/contract.h's element
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
# So many times the units of the test on the CPU: CUDA's functions are up to twice as far off as the C library's.
DEVICE_UNITS = 2.0
# What `Rounded` promises: exp is off by up to 2^-17 at the ends of its range, and what is made of it by some of those.
ROUNDED_TRANSCENDENTAL, ROUNDED_PLAIN = 2.0**-15, 4.0
# By the primitives that bf16 has functions of its own for: their names in the tables of test_short_forms.
OWN_OF_BFLOAT16 = {
    **{name: f"{name}_bfloat16" for name in ("tanh", "gelu", "expm1", "log1p")},
    "elu": "expm1_bfloat16",
    **dict.fromkeys(["softplus", "logaddexp", "logaddexp2"], "log1p_bfloat16"),
}
SLOPE_UNITS = 64.0


def one_plus(x: Tensor) -> Tensor:
    return 1.0 + x.abs()


def reflected(x: Tensor) -> Tensor:
    """The terms of lgamma left of 0: CUDA's own documentation excepts the neighbourhood of its zeros there."""
    sine = torch.sin(torch.pi * (x - x.round())).abs()
    terms = torch.lgamma(x.abs()).abs() + (x * sine).abs().clamp(min=1e-300).log().abs() + 2.0
    return torch.where(x < 0, terms, 0.0).nan_to_num(0.0, 0.0, 0.0)


# The size of terms that cancel, beside those of the test on the CPU.
TERMS: dict[str, Callable[..., Tensor]] = {
    "lgamma": reflected,
    # pi x is rounded before its sine is taken: that moves sin(pi x) / (pi x) by as much as a unit of 1.
    "sinc": lambda x: torch.ones(()),
}
# torch 2.11 leaves out a bound that is NaN, torch 2.13 gives NaN: so does the functor.
NOT_ALIKE_IN_TORCH = {"clamp_nan_"}
WHOLE = {"round", "trunc", "floor", "ceil", "to_half", "fmod", "remainder", "floor_div", "trunc_div"}
QUOTIENTS = {"div", "div_by_scalar", "reciprocal", "sqrt", "rsqrt"}
SLOPE_TERMS_MORE: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(["sigmoid", "silu_", "lerp_number_", "softplus_", "logsigmoid_", "lgamma"], one_plus),
    "gelu_tanh_": lambda x: 4.0 * (1.0 + x.abs()),
    "softsign_": lambda x: 1.0 / (1.0 + x.abs()),
    "gate_": lambda a, b: (1.0 + a.abs()) * (1.0 + b.abs()),
    "logaddexp": lambda a, b: torch.ones(()),
    "logaddexp2": lambda a, b: torch.ones(()),
    "sinc": lambda x: 4.0 + 1.0 / x.abs().clamp(min=1e-300),
}


@functools.cache
def registered(function: str) -> Epilogue:
    traced = traced_of(function)
    return typed(traced, [False] * len(traced.operands))


def job_of(function: str, dtype: torch.dtype, is_derivative: bool) -> cubins.Job:
    what = "derivative" if is_derivative else "elementwise"
    symbol = f"epigemm_open_{what}_{str(dtype).removeprefix('torch.')}"
    ir = cubins.ir_path(symbol)
    if ir is None:
        pytest.skip("gpu: this build has no open kernels")
    if is_derivative:
        part = "slope_double" if dtype == torch.float64 else "slope"
    else:
        short = f"apply_{str(dtype).removeprefix('torch.')}"
        part = {torch.float32: "apply", torch.float64: "apply_double"}.get(dtype, short)
    traced = registered(function).traced
    source = traced.kernel_source([OF_ELEMENT] * len(traced.operands), ("operand", part))
    return cubins.Job(source, symbol, ir, torch.cuda.get_device_capability())


@functools.cache
def link_all(dtype: torch.dtype, is_derivative: bool) -> None:
    """All primitives' kernels, in threads. What cannot be made is told by the test of its primitive.

    Of several processes each would link all of them. They link the kernels of their own tests instead.
    """
    if reason := libraries.unavailable():
        pytest.skip(f"gpu: {reason}")
    if processes() > 1:
        return
    jobs = [job_of(function, dtype, is_derivative) for function in FUNCTIONS]
    try:
        cubins.build_cubins(jobs)
    except libraries.LinkingError:
        return


@functools.cache
def add_kernel(function: str, dtype: torch.dtype, is_derivative: bool) -> str:
    """Loads a primitive's kernel; the name by which the operators know the primitive."""
    link_all(dtype, is_derivative)
    job = job_of(function, dtype, is_derivative)
    code = torch.frombuffer(bytearray(cubins.cubin(*job)), dtype=torch.uint8)
    name = registered(function).name
    major, minor = job.capability
    ops._add_kernel(name, 10 * major + minor, job.symbol, code)
    return name


def on_device(inputs: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor] | None]:
    """The accumulator as a matrix of one row, and the columns."""
    first, *others = (given.cuda() for given in inputs)
    return first.reshape(1, -1), others or None


def device_values(function: str, inputs: tuple[Tensor, ...]) -> Tensor:
    add_kernel(function, inputs[0].dtype, False)
    acc, columns = on_device(inputs)
    out = torch.full_like(acc, float("nan"))
    assert resolve.elementwise(ElementwiseCall(registered(function), acc, columns or (), out)) is out
    return out.cpu()[0]


def device_slopes(function: str, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """By the accumulator in its own dtype, by the columns in the arithmetic's: not of kernels that the build made."""
    name = add_kernel(function, inputs[0].dtype, True)
    acc, columns = on_device(inputs)
    wide = torch.float64 if acc.dtype == torch.float64 else torch.float32
    slots = [] if registered(function).is_compiled else [*registered(function).traced.slots]
    of_acc, *outs = [torch.full_like(acc, 7.0, dtype=each) for each in (acc.dtype, *(wide for _ in slots))]
    bias, others, _ = registered(function).apart(columns or ())
    given = (bias, others or None, None)
    assert has_native(acc), "the question makes the device known"
    assert ops._derivative_out(name, torch.ones_like(acc), acc, *given, of_acc, None, slots, outs) == 0
    return [out.cpu()[0] for out in (of_acc, *outs)]


def is_transcendental(name: str) -> bool:
    """Whether it calls an exponential or the like, or a short form of one."""
    traced = registered(name).traced
    return bool(set(primitives(traced.program, traced.kinds).split(",")) - {*PLAIN, *WHOLE, *QUOTIENTS})


def own_forms(name: str, dtype: torch.dtype) -> list[str]:
    """bf16's own forms that a function's results are made with."""
    traced = registered(name).traced
    if dtype != torch.bfloat16 or short_number(traced.program, ROUNDED_TO["bfloat16"]) != "RoundedToBFloat16":
        return []
    called = primitives(traced.program, traced.kinds).split(",")
    return [own for primitive, own in OWN_OF_BFLOAT16.items() if primitive in called]


def arithmetic_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_within(actual: Tensor, expected: Tensor, margin: Tensor) -> Tensor:
    """Which results lie between the rounded ends of what the arithmetic may give: half a unit comes by itself.

    `expected` and `margin` are fp64. The sum of a number and a margin is rounded like a result, to infinity as well.
    """
    margin = torch.where(expected.isfinite(), margin, 0.0)
    if actual.dtype == torch.float64:
        low, high = expected - margin, expected + margin
    else:
        low, high = ((expected + way * margin).to(actual.dtype).double() for way in (-1.0, 1.0))
    wide = actual.double()
    same = (wide == expected) | (wide.isnan() & expected.isnan())
    return same | ((low <= wide) & (wide <= high))


def assert_within(
    what: str, actual: Tensor, expected: dict[str, Tensor], margin: Tensor, inputs: tuple[Tensor, ...]
) -> None:
    """Every result as float64 has it, or as torch has it in the arithmetic: what overflows on the way does in both."""
    wrong = ~torch.stack([is_within(actual, one, margin) for one in expected.values()]).any(0)
    if wrong.any():
        rows = []
        for place in wrong.nonzero().flatten().tolist()[:12]:
            given = [float(one[place]) for one in inputs]
            wanted = ", ".join(f"{name} {float(one[place])!r}" for name, one in expected.items())
            rows.append(
                f"  at {given}: got {float(actual[place])!r}, want {wanted} within {float(margin[place])!r}"
            )
        raise AssertionError(f"{what}, {actual.dtype}: {int(wrong.sum())} points differ:\n" + "\n".join(rows))


@dtypes
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in NOT_ALIKE_IN_TORCH])
def test_values(name: str, dtype: torch.dtype) -> None:
    function, arity, units = FUNCTIONS[name]
    inputs = points(arity, dtype)
    arithmetic = arithmetic_of(dtype)
    numbers = torch.finfo(arithmetic)
    given = tuple(one.to(arithmetic) for one in inputs)
    if name in ("fmod", "remainder"):  # where torch's vectorised fmod gives NaN: see test_primitives
        normal = (given[1] == 0) | (given[1].abs() >= numbers.tiny)
        normal &= (given[1] == 0) | (given[0] / given[1]).isfinite() | given[0].isinf()
        inputs, given = tuple(one[normal] for one in inputs), tuple(one[normal] for one in given)
    exact = function(*[one.double() for one in inputs]).double()
    own = function(*given).to(arithmetic).double()
    size = size_of(name, exact.to(arithmetic), given).double()
    if name in TERMS:
        size = size + TERMS[name](*[one.double() for one in inputs])
    # An exact result is rounded to the arithmetic's type, half a unit; in 16 bits that is rounded once more.
    if dtype in (torch.float32, torch.float64):
        relative = max(DEVICE_UNITS * units, 0.5) * numbers.eps
    elif is_transcendental(name):
        relative = ROUNDED_TRANSCENDENTAL
    else:
        relative = ROUNDED_PLAIN * max(units, 1.0) * numbers.eps
    # Terms that overflow while the result does not: it may overflow, too, as a product is contracted or not.
    is_finite = torch.stack(inputs).isfinite().all(0)
    size = torch.where(size.isfinite() | (is_finite & exact.isfinite()), size, exact.abs())
    own_of_bfloat16 = own_forms(name, dtype)
    relative = max(relative, 1.01 * sum(ERRORS[form] for form in own_of_bfloat16))
    margin = relative * size + (numbers.tiny if units else 0.0)
    margin = margin + sum(FAR_ERRORS.get(form, 0.0) for form in own_of_bfloat16)
    if dtype.itemsize == 2 and units:  # exp gives 0 for a subnormal result, whatever that is multiplied with
        margin = margin + numbers.tiny * torch.stack(given).double().abs().amax(0).nan_to_num(0.0, 0.0)
    assert_within(name, device_values(name, inputs), {"float64": exact, "torch": own}, margin, inputs)


# Spelled so that the negative tail keeps its digits.
EXACT_FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "expm1": torch.expm1,
    "gelu": lambda x: 0.5 * x * torch.erfc(-x * 0.5**0.5),
    "gelu_tanh": lambda x: x * torch.sigmoid((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [form for form in FORMS if form not in OWN_OF_BFLOAT16.values()])
def test_short_forms_of_every_number(form: str, dtype: torch.dtype) -> None:
    """All 65536 numbers of 16 bits, by what the headers say of their short forms."""
    name = form if form in FUNCTIONS else f"{form}_"
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    exact = EXACT_FORMS.get(form, getattr(torch, form, torch.tanh))(x.double())
    form = next(iter(own_forms(name, dtype)), form)
    _, low, high = FORMS[form]
    is_far = (x.double() < low) | (x.double() > high)
    far = torch.where(is_far, FAR_ERRORS.get(form, FAR_LEFT), 0.0)
    margin = ERRORS.get(form, RELATIVE) * exact.abs() + far + torch.finfo(torch.float32).tiny
    assert_within(form, device_values(name, (x,)), {"float64": exact}, margin, (x,))


def slopes_in_torch(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], dtype: torch.dtype
) -> list[Tensor]:
    leaves = tuple(given.to(dtype).clone().requires_grad_() for given in inputs)
    result = function(*leaves)
    found: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if result.requires_grad:
        found = torch.autograd.grad(result.to(dtype).sum(), leaves, allow_unused=True)
    return [
        torch.zeros_like(leaf).double() if one is None else one.double()
        for leaf, one in zip(leaves, found, strict=True)
    ]


def where_slopes_are_seen(name: str, inputs: tuple[Tensor, ...]) -> Tensor:
    """Points of the test on the CPU. In fp32, where squares overflow and vanish, those of a moderate size."""
    stacked = torch.stack(inputs).double()
    seen = ~stacked.isnan().any(0)
    if "lerp" in name:
        seen &= stacked.isfinite().all(0)
    if name == "digamma":
        seen &= ~((stacked[0] < 0) & (stacked[0] == stacked[0].round())) & (stacked[0] > -1e4)
    if inputs[0].dtype != torch.float64:
        size = stacked.abs()
        seen &= ((size == 0) | ((size >= 1e-6) & (size <= 1e4))).all(0)
    return seen


@dtypes
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in NO_DERIVATIVE_IN_TORCH])
def test_derivatives(name: str, dtype: torch.dtype) -> None:
    function, arity, _ = FUNCTIONS[name]
    plain = points(arity, dtype)
    seen = where_slopes_are_seen(name, plain)
    plain = tuple(one[seen] for one in plain)
    arithmetic = arithmetic_of(dtype)
    eps = torch.finfo(arithmetic).eps
    wide = tuple(one.double() for one in plain)
    exact, own = (slopes_in_torch(function, wide, type_) for type_ in (torch.float64, arithmetic))
    # How far the slope goes when an input does by a unit: that much a rounding on the way may do.
    moved = [
        slopes_in_torch(
            function,
            tuple(one * (1.0 + way * eps) for one, way in zip(wide, ways, strict=True)),
            torch.float64,
        )
        for ways in itertools.product((-1.0, 1.0), repeat=arity)
    ]
    terms = torch.zeros_like(wide[0])
    for table in (SLOPE_TERMS, SLOPE_TERMS_MORE):
        if name in table:
            terms = terms + table[name](*wide).nan_to_num(0.0, 0.0)
    unit = max(SLOPE_UNITS * eps, SLOPE_TOLERANCE.get(name, 0.0))
    for which, actual in enumerate(device_slopes(name, plain)):
        spread = (
            torch.stack([(one[which] - exact[which]).abs() for one in moved]).nan_to_num(0.0, 0.0).amax(0)
        )
        margin = unit * (exact[which].abs() + terms).clamp(min=1e-290) + 2.0 * spread
        expected = {"float64": exact[which], "torch": own[which]}
        assert_within(f"{name} by argument {which}", actual, expected, margin, plain)
