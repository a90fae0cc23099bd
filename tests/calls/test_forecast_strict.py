"""strict=True: an error with the reason, before anything is launched, wherever no fused kernel would run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import epigemm
from tests.support.cases import fused_unavailable, poisoned
from tests.support.public import PUBLIC_LINEAR, Public

functions = pytest.mark.parametrize("function", PUBLIC_LINEAR, ids=lambda f: f.name)
MODULES = ["LinearReLU", "LinearSigmoidScaleResidual", "LinearReLUDiv", "LinearScaleBatchNorm1d"]


@functions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_cpu_has_no_fused_kernels(function: Public, dtype: torch.dtype, rng: torch.Generator) -> None:
    arguments = function.draw(rng, dtype=dtype)
    out = poisoned((9, 16), dtype, "cpu")
    version = out._version
    for options in ({}, {"out": out}):
        with pytest.raises(RuntimeError, match=r"^strict: got True .*CUDA.*; accepted there is False"):
            function.call(**arguments, **options, strict=True)
    assert bool(out.isnan().all()) and out._version == version


@functions
def test_nothing_is_launched_before(function: Public, rng: torch.Generator) -> None:
    """Not even the fold of a BatchNorm."""
    arguments = function.draw(rng)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=activities) as profile,
        pytest.raises(RuntimeError, match="strict"),
    ):
        function.call(**arguments, strict=True)
    names = {event.key for event in profile.key_averages()}
    assert not names & {
        "aten::mm",
        "aten::addmm",
        "epigemm::_fold_batch_norm_out",
    }


@functions
def test_under_autograd_compile_and_explain(function: Public, rng: torch.Generator) -> None:
    arguments = function.draw(rng)
    with pytest.raises(RuntimeError, match="strict: got True"):
        epigemm.explain(function.name, **arguments, strict=True)
    arguments["x"].requires_grad_()
    with pytest.raises(RuntimeError, match="strict: got True"):
        function.call(**arguments, strict=True)
    torch.compiler.reset()
    compiled = torch.compile(lambda given: function.call(**given, strict=True), backend="aot_eager")
    with pytest.raises(RuntimeError, match="strict: got True"):
        compiled(arguments)


@functions
def test_under_functional_derivatives(function: Public, rng: torch.Generator) -> None:
    arguments = function.draw(rng)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return function.call(**{**arguments, "x": x}, strict=True).sum()

    with pytest.raises(RuntimeError, match=r"strict: got True under a derivative of torch\.func"):
        torch.func.grad(loss)(arguments["x"])


@functions
@pytest.mark.parametrize("value", [1, None, "yes"])
def test_it_is_a_switch(function: Public, value: Any, rng: torch.Generator) -> None:
    with pytest.raises(TypeError, match=r"strict: got \w+; accepted is True or False"):
        function.call(**function.draw(rng), strict=value)


@pytest.mark.parametrize("name", MODULES)
def test_modules_pass_it_on(name: str) -> None:
    module = getattr(epigemm.nn, name)(8, 4, strict=True)
    assert module.strict and "strict=True" in repr(module)
    assert "strict" not in repr(getattr(epigemm.nn, name)(8, 4))
    for training in (True, False):
        with pytest.raises(RuntimeError, match="strict: got True"):
            module.train(training)(torch.randn(3, 8))
    linear = torch.nn.Linear(8, 4)
    if name == "LinearScaleBatchNorm1d":
        again = epigemm.nn.LinearScaleBatchNorm1d.from_layers(
            linear, None, torch.nn.BatchNorm1d(4), strict=True
        )
    else:
        again = getattr(epigemm.nn, name).from_linear(linear, strict=True)
    with pytest.raises(RuntimeError, match="strict: got True"):
        again(torch.randn(3, 8))


@pytest.mark.gpu
@functions
def test_fused_calls_pass_on_a_gpu(function: Public, rng: torch.Generator) -> None:
    if reason := fused_unavailable():
        pytest.skip(f"gpu: {reason}")
    for dtype, precision in ((torch.bfloat16, None), (torch.float32, "highest"), (torch.float32, "high")):
        if function.name in ("linear", "linear_relu") and dtype is torch.bfloat16:
            continue  # cuBLAS adds a bias itself, and a ReLU behind it
        arguments = function.draw(rng, shape=(4096, 2048, 2048), dtype=dtype, device="cuda")
        expected = function.call(**arguments, precision=precision)
        assert torch.equal(function.call(**arguments, precision=precision, strict=True), expected)


@pytest.mark.gpu
@functions
@pytest.mark.parametrize(
    ("dtype", "shape", "word"),
    [
        (torch.float64, (256, 256, 256), "float64"),
        (torch.bfloat16, (256, 256, 255), "copies take"),
        (torch.float32, (256, 256, 64), "K = 64"),
    ],
    ids=str,
)
def test_others_are_refused_on_a_gpu(
    function: Public, dtype: torch.dtype, shape: tuple[int, int, int], word: str, rng: torch.Generator
) -> None:
    if reason := fused_unavailable():
        pytest.skip(f"gpu: {reason}")
    arguments = function.draw(rng, shape=shape, dtype=dtype, device="cuda")
    with pytest.raises(RuntimeError, match=f"strict: got True .*{word}"):
        function.call(**arguments, strict=True)
