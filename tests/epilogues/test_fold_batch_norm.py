"""The fold of scale and inference BatchNorm into one multiplier and one offset for each column."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import epigemm
from epigemm.arguments.calls import FoldCall
from epigemm.autograd import nodes
from epigemm.epilogues.registry import compute_dtype, fold_batch_norm_reference
from tests.support.arithmetic import STORAGE, Arithmetic
from tests.support.cases import signed

ops: Any = torch.ops.epigemm
NAMES = ("bias", "scale", "running_mean", "running_var", "bn_weight", "bn_bias")


def exact(vectors: dict[str, torch.Tensor | None], eps: float, columns: int) -> torch.Tensor:
    """Multiplier and offset in float64, spelled without the library."""

    def read(name: str, absent: float) -> torch.Tensor:
        vector = vectors[name]
        return (
            torch.full((columns,), absent, dtype=torch.float64) if vector is None else vector.cpu().double()
        )

    gain = read("bn_weight", 1.0)
    if vectors["running_var"] is not None:
        gain = gain / (read("running_var", 1.0) + eps).sqrt()
    scale = read("scale", 1.0)
    offset = (read("bias", 0.0) * scale - read("running_mean", 0.0)) * gain + read("bn_bias", 0.0)
    return torch.stack([scale * gain, offset])


def draw(columns: int, dtype: torch.dtype, rng: torch.Generator, device: Any = "cpu") -> dict[str, Any]:
    vectors: dict[str, Any] = {name: signed((columns,), rng).to(device, dtype) for name in NAMES}
    vectors["running_var"] = vectors["running_var"].abs() + 0.01
    return vectors


def assert_folded(actual: torch.Tensor, vectors: dict[str, Any], eps: float, arithmetic: Arithmetic) -> None:
    """fp64 registers, rounded once: within half a unit in the last place (and fp64's own few)."""
    assert actual.dtype is arithmetic.vector_dtype
    assert actual.shape[0] == 2
    expected = exact(vectors, eps, actual.shape[1])
    bound = arithmetic.epilogue_unit * expected.abs() * (1 + 1e-6)
    # Cancellation inside the offset: fp64 errors of its terms, none of which cancels with all of one sign.
    terms = {name: None if vector is None else vector.abs() for name, vector in vectors.items()}
    if terms["running_mean"] is not None:
        terms["running_mean"] = -terms["running_mean"]
    magnitude = exact(terms, eps, actual.shape[1])
    assert bool(((actual.cpu().double() - expected).abs() <= bound + 16 * 2.0**-53 * magnitude).all())


@pytest.mark.parametrize("arithmetic", STORAGE, ids=lambda a: a.name)
@pytest.mark.parametrize("columns", [1, 2, 7, 64, 1000])
def test_every_dtype(
    arithmetic: Arithmetic, columns: int, device: torch.device, rng: torch.Generator
) -> None:
    like = torch.empty(0, dtype=arithmetic.dtype, device=device)
    for dtype in {arithmetic.dtype, arithmetic.vector_dtype}:
        vectors = draw(columns, dtype, rng, device)
        assert_folded(ops.fold_batch_norm(like, *vectors.values(), 1e-5), vectors, 1e-5, arithmetic)


@pytest.mark.parametrize("count", range(6))
def test_every_combination_of_absent_vectors(count: int, device: torch.device, rng: torch.Generator) -> None:
    for absent in itertools.combinations(NAMES, count):
        for arithmetic in STORAGE:
            vectors = draw(9, arithmetic.vector_dtype, rng, device)
            vectors.update(dict.fromkeys(absent))
            like = torch.empty(0, dtype=arithmetic.dtype, device=device)
            assert_folded(ops.fold_batch_norm(like, *vectors.values(), 1e-3), vectors, 1e-3, arithmetic)


def test_variance_of_zero_and_below(device: torch.device) -> None:
    """As F.batch_norm: 1 / sqrt(eps) at zero, inf for eps of 0, NaN below."""
    like = torch.empty(0, device=device)
    variance = torch.tensor([0.0, 1.0, -1.0], device=device)
    multiplier = ops.fold_batch_norm(like, None, None, None, variance, None, None, 0.25)[0].tolist()
    assert multiplier[:2] == [2.0, pytest.approx(1.25**-0.5, rel=1e-7)] and multiplier[2] != multiplier[2]
    assert ops.fold_batch_norm(like, None, None, None, variance, None, None, 0.0)[0, 0].item() == float("inf")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_every_choice_of_vectors(
    dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    """They are written out (`gradients.gradients_of_fold`); the reference under autograd says what they have to be."""
    like = torch.empty(0, dtype=dtype, device=device)
    upstream = signed((2, 5), rng).to(device, compute_dtype(dtype))
    for present in itertools.product((False, True), repeat=len(NAMES)):
        drawn = draw(5, dtype, rng, device)
        given = [drawn[name] if there else None for name, there in zip(NAMES, present, strict=True)]
        inputs = [vector.requires_grad_() for vector in given if vector is not None]
        if not inputs:
            continue
        folded = torch.stack(nodes.fold_batch_norm(FoldCall(like, 5, given, 1e-3)))
        expected = fold_batch_norm_reference(like, given, 1e-3)
        found = torch.autograd.grad(folded, inputs, upstream, allow_unused=True)
        wanted = torch.autograd.grad(expected, inputs, upstream, allow_unused=True)
        for mine, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, other)


def test_which_gradients_the_derivative_of_a_folded_call_has() -> None:
    """That of x reads the scale, not the bias: as PyTorch's, it needs no gradient where only the bias does."""
    x, weight, scale = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    bias = torch.randn(5, requires_grad=True)
    found = torch.func.grad(lambda x: epigemm.linear_scale(x, weight, bias, scale).sum())(x)
    want = torch.func.grad(lambda x: (torch.nn.functional.linear(x, weight, bias) * scale).sum())(x)
    assert found.requires_grad is want.requires_grad is False
    torch.testing.assert_close(found, want)
