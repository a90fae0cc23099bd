"""That `explain` agrees with what happens, and does nothing else. What it says is held by `tests/net`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epigemm
from epigemm.packs import weight_packs
from tests.net.explanations import several
from tests.ops.op import COLUMN, Op
from tests.support.pieces import Road
from tests.support.public import PUBLIC, PUBLIC_LINEAR
from tests.support.untyped import backward

functions = pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.name)
NOTHING_RUNS = {
    "aten::mm",
    "aten::addmm",
    "aten::mul",
    "aten::gelu",
    "aten::sum",
    "aten::_to_copy",
    "epigemm::linear",
}


def launched(run: Any) -> dict[str, int]:
    """The operators that run, by their names, and how often."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return {event.key: event.count for event in profile.key_averages()}


def test_nothing_runs_of_several_results() -> None:
    x, weight, bias, other = (torch.ones(size).bfloat16() for size in ((6, 16), (8, 16), (8,), (6, 8)))
    names = launched(lambda: epigemm.explain(several, x, weight, bias, other))
    names |= launched(lambda: epigemm.explain(several.elementwise, other, bias, other))
    assert not names.keys() & NOTHING_RUNS


# --- derivatives ------------------------------------------------------------------------------------------------------


@functions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", ["x", "all"])
def test_the_derivative_does_what_it_says(
    function: Op, dtype: torch.dtype, which: str, rng: torch.Generator
) -> None:
    arguments = function.draw(rng, dtype=dtype, tensor_numbers=True)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and "running" not in name:
            value.requires_grad_(which == "all" or name == "x")
    explanation = epigemm.explain(function.name, **arguments)
    said, results = explanation.backward, list[Tensor]()
    forward = launched(lambda: results.append(function.call(**arguments)))
    run = launched(lambda: backward(results[0].sum()))
    products = sum(run.get(f"aten::{name}", 0) for name in ("mm", "addmm"))
    wanted = (1 if which == "x" else 2) if function.is_linear else 0
    assert products == wanted + said.startswith("the product again"), said
    assert ("epigemm::_derivative_out" in run) is ("one derivative kernel" in said), said
    assert ("the saved result" not in said) or run["aten::threshold_backward"] == 1
    calls = sum(count for key, count in forward.items() if key.startswith("epigemm::"))
    assert calls > 0 or "torch relu" in explanation.kernels
    saves = "on the saved product" in said
    assert saves == any(reason.startswith("gradients are recorded") for reason in explanation.reasons)


@pytest.mark.parametrize("strict", [False, True])
def test_a_saved_product_takes_the_fused_epilogue(strict: bool, road: Road) -> None:
    """fp32 on fp16 slices: one kernel stores the product, too, unless the call is strict."""
    x, weight = road.x().requires_grad_(), road.weight()
    explanation = epigemm.explain("linear_relu_div", x, weight, divisor=2.0, strict=strict)
    epigemm.linear_relu_div(x, weight, divisor=2.0, strict=strict)
    assert len(road.take()) == 1
    gemm = next(kernel for kernel in explanation.kernels if "fused GEMM" in kernel)
    if strict:
        assert explanation.path == "fused" and gemm.endswith("epilogue relu_div")
        assert explanation.backward.startswith("the product again")
    elif explanation.path != "fused":  # the planner expects two kernels to be faster on this GPU
        assert road.device.type == "cuda" and "a kernel of its own" in explanation.reasons[0]
    else:
        assert gemm == explanation.kernel
        assert not any(kernel.endswith(" relu_div") for kernel in explanation.kernels)
        assert "stores the product" in explanation.reasons[0]


# --- fp32 on fp16 slices --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", PUBLIC_LINEAR, ids=lambda f: f.name)
def test_launches_on_fp16_pieces(function: Op, road: Road, rng: torch.Generator) -> None:
    """In order, and none is made: neither a product nor a pack."""
    shape = (4096, *road.size[1:])  # so many rows that the weight is not read as it lies
    arguments = function.draw(rng, shape[:1], *shape[1:], device=road.device)
    explanation = epigemm.explain(function.name, **arguments)
    assert explanation.path == "fused" and explanation.arithmetic.startswith("split: three products")
    words = ["split of weight", "split of x", "fused GEMM on fp16 slices", "fixup"]
    words = ["fold", *words] if function.operands.get("scale") == COLUMN else words
    assert len(explanation.kernels) == len(words)
    assert all(word in kernel for word, kernel in zip(words, explanation.kernels, strict=True))
    assert explanation.kernel == explanation.kernels[-2]
    assert explanation.us == explanation.candidates[0]["predicted_us"] > 0
    assert not road.take() and not weight_packs.kept(arguments["weight"])
    packed = {**arguments, "weight": epigemm.pack(arguments["weight"])}
    assert len(epigemm.explain(function.name, **packed).kernels) == len(words) - 1


def test_a_stale_packs_plan_is_the_one_that_was_chosen(road: Road) -> None:
    """Made again for this call: the time includes the weight's split, and agrees with dispatch's for a plain weight."""
    weight, x = road.weight(), road.x()
    packed = epigemm.pack(weight)
    kept = epigemm.explain("linear", x, packed)
    weight.mul_(2)
    stale, plain = epigemm.explain("linear", x, packed), epigemm.explain("linear", x, weight)
    assert stale.candidates == plain.candidates
    assert stale.candidates[0]["predicted_us"] > kept.candidates[0]["predicted_us"]
    assert not weight_packs.kept(weight)[2].is_current(weight), "explaining made the pack"


def test_strict_is_explained_with_the_pack_as_it_is(road: Road) -> None:
    """A pack that is worth it alone, and a gradient for which it does not count."""
    weight = nn.Parameter(road.weight())
    x, packed = road.x(road.rows_worth_a_pack_alone()), epigemm.pack(weight)
    with torch.no_grad():
        assert epigemm.explain("linear", x, packed, strict=True).path == "fused"
    for call in (epigemm.explain, lambda name, *args, **options: epigemm.linear(*args, **options)):
        with pytest.raises(RuntimeError, match="strict: got True"):
            call("linear", x, packed, strict=True)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.usefixtures("fused_kernels")
@pytest.mark.parametrize(
    "function",
    # torch's GEMM does all of the others.
    [f for f in PUBLIC_LINEAR if f.name not in ("linear", "linear_relu")],
    ids=lambda f: f.name,
)
def test_fused_on_hopper(function: Op, rng: torch.Generator) -> None:
    for dtype, precision, arithmetic in (
        (torch.bfloat16, None, "bfloat16"),
        (torch.float16, None, "float16"),
        (torch.float32, "tf32", "tf32"),
    ):
        arguments = function.draw(rng, (8192,), 4096, 1024, dtype=dtype, device="cuda")
        explanation = epigemm.explain(function.name, **arguments, precision=precision)
        assert explanation.path == "fused" and explanation.candidates
        assert arithmetic in f"{explanation.arithmetic} {explanation.kernel}".lower()
