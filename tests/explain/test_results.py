"""`explain` of functions with several results: which result each launch is. What it says is held by `tests/net`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import epigemm
from tests.net.explanations import several
from tests.support.results import FUNCTIONS, NAMES, draw, gelu_and_product, statistics
from tests.support.stage import Stage


@pytest.mark.parametrize("function", FUNCTIONS, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_result_is_named(function: Any, dtype: torch.dtype, rng: torch.Generator) -> None:
    call = draw(function, rng, dtype, lead=(2, 3))
    found = epigemm.explain(function, call.x, call.weight, *call.operands)
    named = {f"r{number}" for number in range(len(function.results))}
    assert {word.strip(",") for kernel in found.kernels for word in kernel.split(": ")[-1].split()} >= named
    assert epigemm.explain(function.elementwise, call.product.to(dtype), *call.operands).kernels


def test_on_a_gpu_the_product_is_one_kernel(stage: Stage) -> None:
    """A pretended one, whose kernels are in Python; and the kernel that multiplies is tuned."""
    x, weight, bias, other = (
        torch.ones(size).bfloat16() for size in ((256, 256), (64, 256), (64,), (256, 64))
    )
    found = epigemm.explain(gelu_and_product, x, weight, bias)
    assert "gelu_and_product_and_stored" in found.kernels[0] and found.kernels[0].endswith(": r0, r1")
    assert not any("gelu_and_product_result0" in kernel for kernel in found.kernels)
    got = gelu_and_product(x, weight, bias)
    assert got[0].shape == (256, 64)
    tuned = epigemm.tune(several, x, weight, bias, other)
    assert {entry.epilogue for entry in tuned.entries} == {"bias"}
    tuned = epigemm.tune(statistics, x, weight, bias, bias)
    assert all(entry.epilogue.startswith("statistics_shared") for entry in tuned.entries) and tuned.entries


def test_the_errors_are_those_of_the_call() -> None:
    x, weight, bias, other = (torch.ones(size) for size in ((6, 16), (8, 16), (8,), (6, 8)))
    bad: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        (r"bias: got shape \[7\]", (bias[:-1], other), {}),
        ("strict: got True", (bias, other), {"strict": True}),
        ("out: got Tensor; accepted is None", (bias, other), {"out": x}),
    ]
    for message, operands, options in bad:
        with pytest.raises(RuntimeError, match=message):
            epigemm.explain(several, x, weight, *operands, **options)
