"""Built-in epilogues that read a matrix, and BatchNorm with ReLU, against PyTorch; and GELU, SiLU, tanh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm.epilogues import library, registry
from epigemm.epilogues.library import FUNCTIONS
from epigemm.epilogues.registry import typed
from tests.support.activations import ACT

M, N, K = 12, 24, 40


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def case(name: str, dtype: torch.dtype, has_bias: bool) -> tuple[Any, ...]:
    """The function, its tensors, what it is in PyTorch, and its keywords."""
    x, weight = draw(2, M // 2, K, dtype=dtype), draw(N, K, dtype=dtype) / K**0.5
    bias = draw(N, dtype=dtype) if has_bias else None
    matrix, vector = draw(2, M // 2, N, dtype=dtype), draw(N, dtype=dtype)
    if name == "residual":
        return epigemm.linear_residual, (x, weight, bias, matrix), lambda z, m: z + m, {}
    if name == "layer_scale":
        function: Any = epigemm.linear_layer_scale_residual
        return function, (x, weight, bias, vector, matrix), lambda z, v, m: m + v * z, {}
    if name == "batch_norm":
        var = draw(N, dtype=dtype).abs() + 0.5
        tensors = (x, weight, bias, vector, var, draw(N, dtype=dtype), draw(N, dtype=dtype))

        def batch_norm(z: Tensor, *rest: Tensor) -> Tensor:
            mean, variance, gain, offset = (each.to(z.dtype) for each in rest)
            return torch.relu((z - mean) / torch.sqrt(variance + 1e-5) * gain + offset)

        return epigemm.linear_batch_norm_relu, tensors, batch_norm, {}
    activation = ACT[name]
    gated = (x, weight, bias, matrix)
    return epigemm.linear_gated, gated, lambda z, m: activation(z) * m, {"activation": name}


NAMES = ["residual", "layer_scale", "batch_norm", *ACT]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["residual", "batch_norm"])
def test_exported_under_a_name_that_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, tensors, _, keywords = case(name, torch.float32, has_bias=True)

    class Layer(torch.nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            result: Tensor = function(*given, **keywords)
            return result

    with torch.no_grad():
        program = torch.export.export(Layer(), tuple(tensors)).module()
    stem = {"residual": "residual.00", "batch_norm": "scale_relu.000"}[name]
    assert repr(stem) in program.code
    monkeypatch.delitem(registry.LINKED, stem)
    FUNCTIONS[stem.partition(".")[0]].forms.clear()
    torch.testing.assert_close(program(*tensors), function(*tensors, **keywords))
    assert library.named(f"{stem}0") is library.named("residual.") is library.named("x.00") is None


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_a_program_is_what_a_trace_would_make(name: str) -> None:
    """So that a copy of the user's is the same kernel: at most the order of a sum's two sides differs."""
    traced = library.traced(name)
    assert traced.digest == FUNCTIONS[name].digest and traced.name == name
    acc = torch.randn(M, N)
    sizes = {"per_column": (N,), "matrix": (M, N)}
    given = [torch.randn(sizes[operand.kind]) for operand in traced.operands]
    assert traced.reference(acc, *given).shape == (M, N)


def test_the_package_has_kernels_of_a_users_copy() -> None:
    @epigemm.epilogue
    def add(acc: Tensor, bias: epigemm.PerColumn, other: epigemm.Matrix) -> Tensor:
        return acc + bias + other

    assert typed(add.traced, [False, False]).prelinked == "residual"
    assert typed(add.traced, [False, True]).prelinked == "", "these read operands of x's type"
    assert typed(FUNCTIONS["residual"], [False, False]).prelinked == "residual"
