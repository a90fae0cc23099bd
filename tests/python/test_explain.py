"""explain(): what it says about each path, and that it agrees with what happens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import epigemm
from tests.support.arithmetic import STORAGE, Arithmetic
from tests.support.cases import fused_unavailable
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
@pytest.mark.parametrize("arithmetic", STORAGE, ids=lambda a: a.name)
def test_on_a_cpu(function: Public, arithmetic: Arithmetic, rng: torch.Generator) -> None:
    explanation = epigemm.explain(function.name, **function.draw(rng, dtype=arithmetic.dtype))
    assert explanation.path == ("gemm+elementwise" if function.is_linear else "elementwise")
    assert explanation.reasons, "why not fused?" if function.is_linear else "why?"
    assert explanation.kernels and explanation.backward
    if function.is_linear:
        assert any("CUDA" in reason for reason in explanation.reasons), explanation.reasons
    text = str(explanation)
    for word in (explanation.path, *explanation.reasons, *explanation.kernels):
        assert word in text


@functions
def test_batch_norm_lists_its_fold(function: Public, device: torch.device, rng: torch.Generator) -> None:
    """Every launch is listed: the fold of N elements too."""
    explanation = epigemm.explain(function.name, **function.draw(rng, device=device))
    folds = [kernel for kernel in explanation.kernels if "fold" in kernel]
    assert len(folds) == ("scale" in function.vectors)


@functions
def test_launches_and_writes_nothing(function: Public, rng: torch.Generator) -> None:
    arguments = function.draw(rng)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        epigemm.explain(function.name, **arguments)
    names = {event.key for event in profile.key_averages()}
    assert not names & {"aten::mm", "aten::addmm", "epigemm::_elementwise_out", "epigemm::linear"}, names


@functions
def test_bad_input_is_refused_as_by_the_call(function: Public, rng: torch.Generator) -> None:
    arguments = {**function.draw(rng), "x": torch.zeros(3, 3, dtype=torch.int32)}
    with pytest.raises(RuntimeError, match=r"x: got dtype torch\.int32") as explained:
        epigemm.explain(function.name, **arguments)
    with pytest.raises(RuntimeError) as called:
        function.call(**arguments)
    assert str(explained.value) == str(called.value)


@pytest.mark.parametrize("wrong", ["no_such", "explain", "", torch.sigmoid, 3])
def test_unknown_functions(wrong: str | Callable[..., torch.Tensor] | int) -> None:
    with pytest.raises((ValueError, TypeError), match="fn_or_name: got"):
        epigemm.explain(wrong, torch.zeros(2, 2))  # type: ignore[arg-type]


@functions
def test_says_how_the_derivative_is_made(function: Public, rng: torch.Generator) -> None:
    arguments = function.draw(rng)
    arguments["x"].requires_grad_()
    assert "reference" in epigemm.explain(function.name, **arguments).backward


@pytest.mark.gpu
@pytest.mark.parametrize("function", [f for f in PUBLIC_LINEAR if f.name != "linear"], ids=lambda f: f.name)
def test_fused_on_hopper(function: Public, rng: torch.Generator) -> None:
    if reason := fused_unavailable():
        pytest.skip(f"gpu: {reason}")
    for dtype, precision, arithmetic in (
        (torch.bfloat16, None, "bfloat16"),
        (torch.float16, None, "float16"),
        (torch.float32, "high", "tf32"),
    ):
        arguments = function.draw(rng, shape=(2048, 2048, 2048), dtype=dtype, device="cuda")
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
        ({"dtype": torch.bfloat16, "shape": (1024, 1023, 1024)}, None, "1023"),
        ({"dtype": torch.bfloat16, "shape": (1024, 1024, 1023)}, None, "1023"),
    ]
    if reason := fused_unavailable():
        pytest.skip(f"gpu: {reason}")
    for options, precision, word in cases:
        options = {"shape": (1024, 1024, 1024), "device": "cuda", **options}
        arguments = function.draw(rng, **options)  # type: ignore[arg-type]
        explanation = epigemm.explain(function.name, **arguments, precision=precision)
        assert explanation.path == "gemm+elementwise"
        assert any(word.lower() in reason.lower() for reason in explanation.reasons), explanation.reasons


@pytest.mark.gpu
@pytest.mark.parametrize("function", PUBLIC_ELEMENTWISE, ids=lambda f: f.name)
def test_elementwise_on_a_gpu(function: Public, rng: torch.Generator) -> None:
    explanation = epigemm.explain(function.name, **function.draw(rng, device="cuda"))
    assert explanation.path == "elementwise"
