"""explain(): what it says about each path, and that it agrees with what happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import epigemm
from epigemm.arguments.calls import ElementwiseCall
from epigemm.epilogues.registry import EPILOGUES
from epigemm.explain.explanation import arithmetic_text, in_its_own_kernel, kernel_owner
from epigemm.explain.log import CallLog, explained
from epigemm.packs import weight_packs
from epigemm.planner import plans
from tests.support.cases import fused_unavailable
from tests.support.pieces import HOPPER, Road
from tests.support.public import PUBLIC, PUBLIC_ELEMENTWISE, PUBLIC_LINEAR, Public

functions = pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.name)


@functions
def test_by_function_and_by_name(function: Public, rng: torch.Generator) -> None:
    arguments = function.draw(rng)
    by_function = epigemm.explain(function.call, **arguments)
    by_name = epigemm.explain(function.name, **arguments)
    positional = epigemm.explain(function.name, *arguments.values())
    assert by_function == by_name == positional


@functions
def test_batch_norm_lists_its_fold(function: Public, device: torch.device, rng: torch.Generator) -> None:
    """Every launch is listed: the fold of N elements too."""
    explanation = epigemm.explain(function.name, **function.draw(rng, device=device))
    folds = [kernel for kernel in explanation.kernels if "fold" in kernel]
    assert len(folds) == ("scale" in function.vectors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_who_adds_the_bias_of_a_fold(dtype: torch.dtype, has_bias: bool) -> None:
    """PyTorch's GEMM where the product is rounded to 16 bits, the fold elsewhere."""
    x, weight, *vectors = (
        torch.rand(*size, dtype=dtype) for size in ((4, 16), (8, 16), (8,), (8,), (8,), (8,))
    )
    bias, *others = vectors
    found = epigemm.explain("linear_scale_batch_norm", x, weight, bias if has_bias else None, *others)
    by_torch = has_bias and dtype is torch.bfloat16
    assert found.kernels[1] == f"torch GEMM ({'addmm, with the bias' if by_torch else 'mm'})" == found.kernel


@functions
def test_launches_and_writes_nothing(function: Public, rng: torch.Generator) -> None:
    arguments = function.draw(rng)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        epigemm.explain(function.name, **arguments)
    names = {event.key for event in profile.key_averages()}
    assert not names & {"aten::mm", "aten::addmm", "epigemm::linear"}, names
    assert not any(f"epigemm::{name}" in names for name in EPILOGUES), names


@pytest.mark.parametrize("wrong", ["no_such", "explain", "", torch.sigmoid, 3])
def test_unknown_functions(wrong: str | Callable[..., torch.Tensor] | int) -> None:
    with pytest.raises((ValueError, TypeError), match="fn_or_name: got"):
        epigemm.explain(wrong, torch.zeros(2, 2))  # type: ignore[arg-type]


# --- derivatives ------------------------------------------------------------------------------------------------------


# --- fp32 on fp16 slices --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", PUBLIC_LINEAR, ids=lambda f: f.name)
def test_launches_on_fp16_pieces(function: Public, road: Road, rng: torch.Generator) -> None:
    """Every launch in order, the arithmetic, the guard, what else was considered, and that it launches nothing."""
    arguments = function.draw(rng, shape=road.size, device=road.device)
    explanation = epigemm.explain(function.name, **arguments)
    assert explanation.path == "fused" and explanation.arithmetic.startswith("split: three products")
    words = ["split of weight", "split of x", "fused GEMM on fp16 slices", "fixup"]
    if "scale" in function.vectors:
        words.insert(0, "fold")
    assert len(explanation.kernels) == len(words)
    assert all(word in kernel for word, kernel in zip(words, explanation.kernels, strict=True))
    assert explanation.kernel == explanation.kernels[-2]
    reasons = " ".join(explanation.reasons)
    assert "against" in reasons and "torch's fp32 GEMM" in reasons and "range check" in reasons
    assert all(candidate["predicted_us"] > 0 for candidate in explanation.candidates)
    assert not road.take() and not weight_packs.kept(arguments["weight"])
    packed = {**arguments, "weight": epigemm.pack(arguments["weight"])}
    assert len(epigemm.explain(function.name, **packed).kernels) == len(words) - 1


def weight_notes(weight: torch.Tensor | epigemm.PackedWeight, road: Road) -> str:
    return next(
        reason for reason in epigemm.explain("linear", road.x(), weight).reasons if "weight" in reason
    )


def test_what_it_says_of_a_pack(road: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not kept, kept and current, stale, not made on purpose, or not believed because of a gradient."""
    weight = road.weight()
    assert "split at every call: no pack of it is kept" in weight_notes(weight, road)
    packed = epigemm.pack(weight)
    for each in (weight, packed):
        assert "kept and current" in weight_notes(each, road)
    weight.mul_(2)
    assert "stale" in weight_notes(packed, road) and "same memory" in weight_notes(packed, road)
    assert "its kept pack is stale" in weight_notes(weight, road)
    assert not weight_packs.kept(weight)[2].is_current(weight), "explaining made the pack"
    parameter = torch.nn.Parameter(road.weight())
    weight_packs.keep(parameter, 2)
    assert "a gradient of it is asked for" in weight_notes(parameter, road)
    assert "split of weight" in epigemm.explain("linear", road.x(), parameter).kernels[0]
    with torch.no_grad():
        assert "kept and current" in weight_notes(parameter, road)
        monkeypatch.setattr(weight_packs, "capturing", lambda device: True)
        assert "at every replay" in weight_notes(parameter, road)


def test_a_module_about_to_pack_says_so(road: Road) -> None:
    call: tuple[Any, ...] = ("bias", road.x(), road.weight(), None, [], [], "highest", "keep", False, False)
    opened = CallLog()
    with opened:
        torch.ops.epigemm.linear(*call)
    reasons = explained("linear", opened.told).reasons
    assert any("made by this call and kept" in reason for reason in reasons)


def test_scaled_arithmetic_is_named(road: Road) -> None:
    road.measure(1.0, 100.0)  # a size that is small enough for a CPU is not one that dispatch would put there
    explanation = epigemm.explain("linear", road.x(), road.weight(), precision="high")
    assert explanation.arithmetic.startswith("scaled: ")
    assert any("torch's fp32 GEMM" in reason for reason in explanation.reasons)
    torch.set_float32_matmul_precision("high")
    explanation = epigemm.explain("linear", road.x(), road.weight())
    assert any("torch's TF32 GEMM" in reason for reason in explanation.reasons)


def test_what_an_assumed_speed_is_worth_is_said(road: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    if road.device.type == "cuda":
        pytest.skip("gpu: this one tells its speed")

    def fastest() -> str:
        reasons = epigemm.explain("linear", road.x(), road.weight()).reasons
        return next(reason for reason in reasons if "fastest by prediction" in reason)

    assert fastest().endswith(": cost model, for a device that does not tell its speed: an H100's is assumed")
    monkeypatch.setattr(plans, "gpu_numbers", lambda device: (*HOPPER, 1980, 4285000))
    road.forget()
    assert fastest().endswith(" us for torch's fp32 GEMM: cost model")


def test_a_stale_packs_plan_is_the_one_that_was_chosen(road: Road) -> None:
    """Made again for this call: the time includes the weight's split, and agrees with dispatch's for a plain weight."""
    weight, x = road.weight(), road.x()
    packed = epigemm.pack(weight)
    kept = epigemm.explain("linear", x, packed)
    weight.mul_(2)
    stale, plain = epigemm.explain("linear", x, packed), epigemm.explain("linear", x, weight)
    assert stale.candidates == plain.candidates
    assert stale.candidates[0]["predicted_us"] > kept.candidates[0]["predicted_us"]


def test_strict_is_explained_with_the_pack_as_it_is(road: Road) -> None:
    """A pack that is worth it alone, and a gradient for which it does not count."""
    weight = torch.nn.Parameter(road.weight())
    x, packed = road.x(road.rows_worth_a_pack_alone()), epigemm.pack(weight)
    with torch.no_grad():
        assert epigemm.explain("linear", x, packed, strict=True).path == "fused"
    for call in (epigemm.explain, lambda name, *args, **options: epigemm.linear(*args, **options)):
        with pytest.raises(RuntimeError, match="strict: got True"):
            call("linear", x, packed, strict=True)


def test_copies_are_listed(road: Road) -> None:
    m, n, k = road.size
    x = torch.randn(2, m, k, device=road.device).transpose(0, 1)
    kernels = epigemm.explain("linear", x, torch.randn(2 * n - 1, k, device=road.device)).kernels
    assert "torch copy of x" in kernels[0] and "torch copy of the result" in kernels[-1]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "function",
    # torch's GEMM does all of the others.
    [f for f in PUBLIC_LINEAR if f.name not in ("linear", "linear_relu")],
    ids=lambda f: f.name,
)
def test_fused_on_hopper(function: Public, rng: torch.Generator) -> None:
    if reason := fused_unavailable():
        pytest.skip(f"gpu: {reason}")
    for dtype, precision, arithmetic in (
        (torch.bfloat16, None, "bfloat16"),
        (torch.float16, None, "float16"),
        (torch.float32, "tf32", "tf32"),
    ):
        arguments = function.draw(rng, shape=(8192, 4096, 1024), dtype=dtype, device="cuda")
        explanation = epigemm.explain(function.name, **arguments, precision=precision)
        assert explanation.path == "fused"
        assert explanation.arithmetic and explanation.kernel
        assert arithmetic in f"{explanation.arithmetic} {explanation.kernel}".lower()
        assert explanation.candidates
        assert any(
            "mainloop" in kernel or "fused" in kernel or "x" in kernel for kernel in explanation.kernels
        )


@pytest.mark.gpu
@pytest.mark.parametrize("function", PUBLIC_LINEAR, ids=lambda f: f.name)
def test_reasons_on_a_gpu(function: Public, rng: torch.Generator) -> None:
    """Each obstacle is named: precision, dtype, alignment, odd sizes."""
    cases: list[tuple[dict[str, object], str | None, str]] = [
        ({"dtype": torch.float32}, "ieee", "IEEE"),
        ({"dtype": torch.float64}, None, "float64"),
        ({"dtype": torch.float32, "shape": (1024, 1023, 1024)}, "tf32", "1023"),
        ({"dtype": torch.float32, "shape": (1024, 1024, 1023)}, "tf32", "1023"),
    ]
    if reason := fused_unavailable():
        pytest.skip(f"gpu: {reason}")
    for options, precision, word in cases:
        options = {"shape": (1024, 1024, 1024), "device": "cuda", **options}
        arguments = function.draw(rng, **options)  # type: ignore[arg-type]
        explanation = epigemm.explain(function.name, **arguments, precision=precision)
        assert explanation.path == "gemm+elementwise"
        assert any(word.lower() in reason.lower() for reason in explanation.reasons), explanation.reasons


@pytest.mark.parametrize(("sizes", "copied"), [
    ((1987, 432, 55), []), ((113, 1568, 183), []), ((179, 784, 159), []),
    ((70046, 151, 152), ["the result, from padded rows"]), ((8192, 1023, 1024), ["the result, from padded rows"]),
    ((1024, 1024, 1023), ["x is copied to padded rows, weight is copied to padded rows"]),
], ids=str)  # fmt: skip
def test_rows_that_are_no_whole_16_bytes(
    sizes: tuple[int, int, int], copied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tiles are read as they lie, by elements, and nothing is said of copies."""
    monkeypatch.setattr(plans, "gpu_numbers", lambda device: (*HOPPER, 1980, 4285000))
    m, n, k = sizes
    x, weight, bias = (torch.empty(size, dtype=torch.bfloat16) for size in ((m, k), (n, k), (n,)))
    found = epigemm.explain("linear_silu", x, weight, bias)
    copies = [kernel.rpartition("copy: ")[2] for kernel in found.kernels if kernel != found.kernel]
    assert found.path == "fused" and found.kernel in found.kernels and copies == copied
    assert ("by elements" in found.kernel) == (not copied)
    assert ("cop" in str(found)) == bool(copied)


@pytest.mark.gpu
def test_copies_on_a_gpu() -> None:
    """Every copy is a launch, in its place."""
    if reason := fused_unavailable():
        pytest.skip(f"gpu: {reason}")
    x, weight, bias = (
        torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in ((4096, 1023), (1023, 999), (999,))
    )
    found = epigemm.explain("linear_relu", x, weight.t(), bias)
    assert found.path == "fused" and len(found.kernels) == 3
    assert found.kernels[0].endswith("x is copied to padded rows, weight is transposed by a copy")
    assert found.kernels[1] == found.kernel and "the result" in found.kernels[2]


@pytest.mark.gpu
@pytest.mark.parametrize("function", PUBLIC_ELEMENTWISE, ids=lambda f: f.name)
def test_elementwise_on_a_gpu(function: Public, rng: torch.Generator) -> None:
    explanation = epigemm.explain(function.name, **function.draw(rng, device="cuda"))
    assert explanation.path == "elementwise"


@epigemm.epilogue
def times_tanh(acc: torch.Tensor, bias: epigemm.PerColumn, m: epigemm.Matrix) -> torch.Tensor:
    return torch.tanh(acc + bias) * m


@pytest.mark.parametrize("form", ["linear", "elementwise", "own"])
@pytest.mark.parametrize("of_operands", [False, True])
def test_no_derivative_kernel_of_a_users_epilogue_on_a_cpu(form: str, of_operands: bool) -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(5, 8)
    bias, m = torch.randn(5, requires_grad=of_operands), torch.randn(4, 5)
    calls: dict[str, tuple[Any, tuple[torch.Tensor, ...]]] = {
        "linear": (times_tanh, (x, weight, bias, m)),
        "elementwise": (times_tanh.elementwise, (x[:, :5], bias, m)),
        "own": (epigemm.linear_gated, (x, weight, bias, m)),
    }
    call, args = calls[form]
    said = epigemm.explain(call, *args).backward
    assert "differentiable PyTorch reference" in said and "one derivative kernel" not in said
    assert "registry" not in said and "operand is asked for" not in said


@pytest.mark.parametrize(
    ("dtype", "arithmetic", "expected"),
    [
        (torch.float64, "ieee", "float64"),
        (torch.float32, "ieee", "ieee float32"),
        (torch.float32, "tf32", "tf32 products, float32 accumulation"),
        (torch.bfloat16, "ieee", "bfloat16 products, float32 accumulation"),
    ],
)
def test_what_numbers_are_multiplied_in(dtype: torch.dtype, arithmetic: str, expected: str) -> None:
    assert arithmetic_text(dtype, arithmetic) == expected


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_whose_kernel_it_is(device: str) -> None:
    x, owner = torch.ones(2, 3, device=device), "PyTorch reference,"
    assert kernel_owner(x) == owner
    call = ElementwiseCall(EPILOGUES["relu_div"], x, (None, 2.0))
    assert in_its_own_kernel(call) == f"{owner} relu_div"
