"""float64 references, and error bounds that are derived instead of tuned.

Write u for the relative error of one operation, and for n of them gamma_n(u) = n u / (1 - n u).

1. The product. A sum of K products in precision u, in any order, is off by at most gamma_K(u) (|x| |W|^T)
   (Higham, Accuracy and Stability, section 3.1). fp32 accumulation has u = 2^-24; tensor cores truncate
   instead of rounding: u = 2^-23. Where fp32 operands are rounded on their way in (TF32 keeps ten
   explicit bits and hardware may truncate: d = 2^-10), each product is off by a further
   (1 + d)^2 - 1 of itself. The split and the scaled product have a bound of their own, derived in
   benchmarks/gradings/bounds.py.
2. The second path stores the product before the epilogue reads it: one more rounding to the dtype,
   u_dtype |acc|. cuBLAS may also split K and round the partial sums of 16-bit products; whatever the number of
   parts, they sum to at most |x| |W|^T, hence 2 u_dtype |x| |W|^T there (one rounding of each part, one of each sum).
3. The epilogue f turns an error e of its accumulator into at most max |f(acc +- e) - f(acc)|. That is e
   times f's Lipschitz constant on [acc - e, acc + e], read at the ends of the interval, because e is
   small against f's curvature: no constant has to be written down for each epilogue.
4. The epilogue's own operations are backward stable: each is exact for operands perturbed by some u. We take
   `EPILOGUE_OPERATIONS` of them for every operand and propagate each as in 3, where cancellation shows.
5. One rounding to the output dtype at the end: u_dtype |f| and, for results that may be flushed to zero, the
   smallest normal number (fp16 is never flushed: its smallest subnormal one).

For fp64 the reference commits the same errors as the implementation, so the bound doubles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from epigemm.epilogues import registry
from tests.support.arithmetic import Arithmetic
from tests.support.cases import Operands

# The longest built-in has 6: add bias, negate, exp, add one, divide, fused multiply-add.
EPILOGUE_OPERATIONS = 8
# The relative perturbation by which operands' effects are read: small, and far above float64's own error.
PROBE = 2.0**-20


@dataclass
class Bounded:
    """An expected result in float64 and how far from it a correct implementation may be."""

    expected: torch.Tensor
    tolerance: torch.Tensor


Formula = Callable[[torch.Tensor, Operands], torch.Tensor]
"""What an epilogue is in place of the registry's name of one: of an accumulator and its operands, in float64."""

CANCELLING = ("bias_gelu", "bias_gelu_tanh")
"""z (1 + s) / 2, as PyTorch has it, the reference in float64 as well: the sum loses its digits where s is near -1, and
is off by a unit of 1, times z."""


OWN_OF_BFLOAT16 = {"bias_tanh": 2.0**-10.9, "bias_gelu": 2.0**-11.3}
"""How far the functions are off that a GPU takes for bf16 alone: csrc/epilogue/primitives/short_bfloat16.h."""


def gamma(operations: int, unit: float) -> float:
    """Bound of the relative error that `operations` roundings of relative error `unit` accumulate."""
    assert operations * unit < 0.5
    return operations * unit / (1 - operations * unit)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.float64)


def evaluate(name: str | Formula, acc: torch.Tensor, operands: Operands) -> torch.Tensor:
    """The registry's reference in float64, or a formula."""
    exact = operands.map(wide)
    if not isinstance(name, str):
        return name(acc, exact)
    epilogue = registry.EPILOGUES[name]
    given = epilogue.in_order(exact.bias, exact.tensors, exact.scalars)
    assert given is not None
    result = epilogue.reference(acc, given)
    assert result.dtype is torch.float64
    return result


def _product_bound(k: int, arithmetic: Arithmetic) -> float:
    """|error| / |A||B| of a sum of k products (step 1)."""
    if arithmetic.product_bound is not None:
        return arithmetic.product_bound(k)
    inputs = (1 + arithmetic.input_rounding) ** 2 - 1
    return inputs + gamma(k, arithmetic.accumulation_unit) * (1 + inputs)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    arithmetic: Arithmetic,
    *,
    second_path: bool = False,
    bias: torch.Tensor | None = None,
) -> Bounded:
    """x @ weight.T in float64 and the error of its accumulation (steps 1 and 2).

    `bias`: what the fallback's GEMM adds before it rounds.
    """
    exact = wide(x) @ wide(weight).mT
    magnitude = wide(x).abs() @ wide(weight).abs().mT
    # An infinite or NaN sum is what it is: no error is added to it (inf - inf would hide a relu's 0 behind NaN).
    error = torch.where(exact.isfinite(), _product_bound(x.shape[-1], arithmetic) * magnitude, 0.0)
    if second_path:
        unit = arithmetic.output_unit
        split_k = 2 * unit * magnitude if x.is_cuda and unit > 2.0**-24 else 0.0
        rounded = exact if bias is None else (exact + wide(bias)).nan_to_num(torch.inf)
        error = error + unit * (rounded.abs() + error) + arithmetic.output_floor + split_k
    return Bounded(exact, error)


def _deviation(
    name: str | Formula, acc: torch.Tensor, error: torch.Tensor, operands: Operands
) -> torch.Tensor:
    """Step 3."""
    center = evaluate(name, acc, operands)
    ends = [evaluate(name, acc + sign * error, operands) - center for sign in (1, -1)]
    return torch.maximum(ends[0].abs(), ends[1].abs())


def _perturbations(acc: torch.Tensor, operands: Operands) -> list[tuple[torch.Tensor, Operands]]:
    """Every operand, one at a time, off by a relative +-PROBE."""
    cases: list[tuple[torch.Tensor, Operands]] = []
    for factor in (1 + PROBE, 1 - PROBE):
        cases.append((acc * factor, operands))
        if operands.bias is not None:
            cases.append((acc, Operands(wide(operands.bias) * factor, operands.tensors, operands.scalars)))
        for index, tensor in enumerate(operands.tensors):
            tensors = list(operands.tensors)
            tensors[index] = wide(tensor) * factor
            cases.append((acc, Operands(operands.bias, tensors, operands.scalars)))
        for index, scalar in enumerate(operands.scalars):
            scalars = list(operands.scalars)
            scalars[index] = scalar * factor
            cases.append((acc, Operands(operands.bias, operands.tensors, scalars)))
    return cases


def after_epilogue(
    name: str | Formula, accumulator: Bounded, operands: Operands, arithmetic: Arithmetic
) -> Bounded:
    """The epilogue of a bounded accumulator (steps 3 to 5)."""
    acc = accumulator.expected
    expected = evaluate(name, acc, operands)
    tolerance = _deviation(name, acc, accumulator.tolerance, operands)
    unit = EPILOGUE_OPERATIONS * arithmetic.epilogue_unit
    tolerance = tolerance + unit * expected.abs()
    if arithmetic.dtype is torch.bfloat16 and acc.is_cuda:
        tolerance = tolerance + OWN_OF_BFLOAT16.get(str(name), 0.0) * expected.abs()
    if name in CANCELLING or name == "bias_silu":
        z = evaluate("bias", acc, operands).abs().nan_to_num(0.0, posinf=0.0)
        # Of a SiLU's sigmoid where it is no normal number.
        tolerance = tolerance + (unit if name in CANCELLING else torch.finfo(torch.float32).tiny) * z
    for perturbed_acc, perturbed in _perturbations(acc, operands):
        tolerance = tolerance + unit / PROBE * (
            evaluate(name, perturbed_acc, perturbed) - expected
        ).abs().nan_to_num(0.0, posinf=torch.inf)
    tolerance = tolerance + arithmetic.output_unit * (expected.abs() + tolerance) + arithmetic.output_floor
    return Bounded(expected, tolerance * (2 if arithmetic.dtype is torch.float64 else 1))


def linear(
    name: str | Formula,
    x: torch.Tensor,
    weight: torch.Tensor,
    operands: Operands,
    arithmetic: Arithmetic,
    *,
    second_path: bool = False,
    apart: torch.Tensor | None = None,
) -> Bounded:
    """D = epilogue(x @ weight.T).

    `apart`: a bias that the model adds apart. The product is rounded before or behind it.
    """
    bias = operands.bias if arithmetic.dtype.itemsize == 2 else None
    accumulator = product(x, weight, arithmetic, second_path=second_path, bias=bias)
    if apart is not None:
        other = product(x, weight, arithmetic, second_path=second_path, bias=apart if bias is None else None)
        accumulator = Bounded(accumulator.expected, torch.maximum(accumulator.tolerance, other.tolerance))
    return after_epilogue(name, accumulator, operands, arithmetic)


def elementwise(name: str, x: torch.Tensor, operands: Operands, arithmetic: Arithmetic) -> Bounded:
    """D = epilogue(x): the accumulator is exact."""
    acc = wide(x)
    return after_epilogue(name, Bounded(acc, torch.zeros_like(acc)), operands, arithmetic)


def assert_within(actual: torch.Tensor, bounded: Bounded) -> None:
    """Each element lies within its own bound; NaN and infinities stand exactly where they should."""
    expected, tolerance = bounded.expected, bounded.tolerance
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    result = wide(actual)
    assert torch.equal(result.isnan(), expected.isnan()), (
        "NaN in other places than expected (or never written)"
    )
    largest = torch.finfo(actual.dtype).max
    finite = expected.isfinite() & (expected.abs() + tolerance.nan_to_num(0.0) <= largest)
    infinite = expected.isinf()
    assert torch.equal(result[infinite], expected[infinite]), "infinities differ"
    error, allowed = (result - expected).abs()[finite], tolerance[finite]
    if error.numel() and not bool((error <= allowed).all()):
        ratio = error / allowed
        worst = int(ratio.nan_to_num(torch.inf).argmax())
        raise AssertionError(
            f"{int((error > allowed).sum())} of {error.numel()} elements out of bounds; the worst is "
            f"{result[finite][worst].item():.9g}, expected {expected[finite][worst].item():.9g} "
            f"+- {allowed[worst].item():.3g}"
        )
