"""Built-in epilogues that read a matrix, and BatchNorm with ReLU, against PyTorch; and GELU, SiLU, tanh."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import epigemm
from epigemm import formula_functions
from epigemm.epilogues import declaring, formulas, registry
from epigemm.epilogues.traced import LinkedEpilogue
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
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("name", NAMES)
def test_against_pytorch(name: str, dtype: torch.dtype, has_bias: bool) -> None:
    function, tensors, formula, keywords = case(name, dtype, has_bias)
    wide: list[Any] = [None if each is None else each.double() for each in tensors]
    x, weight, bias, *rest = wide
    expected = formula(F.linear(x, weight, bias), *rest)
    actual = function(*tensors, **keywords)
    assert actual.dtype is dtype
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name: str) -> None:
    function, tensors, formula, keywords = case(name, torch.float64, has_bias=True)
    ours = [each.clone().requires_grad_() for each in tensors]
    theirs = [each.clone().requires_grad_() for each in tensors]
    grad = torch.randn(2, M // 2, N, dtype=torch.float64)
    function(*ours, **keywords).backward(grad)
    x, weight, bias, *rest = theirs
    formula(F.linear(x, weight, bias), *rest).backward(grad)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("is_cast", [False, True], ids=["given", "autocast"])
@pytest.mark.parametrize("name", NAMES)
def test_a_bias_is_rounded_with_the_product(
    name: str, is_cast: bool, recorded: bool, dtype: torch.dtype
) -> None:
    """As PyTorch's operators do: where the two cancel, the product alone would lose what is left."""
    function, tensors, formula, keywords = case(name, dtype, has_bias=True)
    x, weight, bias, *rest = tensors
    x, weight, bias = x / 8 + 4, weight / 8 + 1, torch.full_like(bias, -4.0 * K)
    wide = [each.double() for each in (x, weight, bias, *rest)]
    z = F.linear(*wide[:3])
    exact = formula(z, *wide[3:])
    given = [each.requires_grad_(recorded) for each in (x, weight, bias, *rest)]
    if is_cast:
        given = [each.detach().float().requires_grad_(recorded) for each in given]
    with torch.autocast("cpu", dtype, enabled=is_cast):
        fused = function(*given, **keywords)
    # Two roundings, of z and of the result; no activation is steeper than 1.2. The product alone is 160.
    steepest = 1.2 * max(1.0, *(float(each.abs().max()) for each in wide[3:]))
    if name == "batch_norm":
        steepest *= float(wide[4].min()) ** -0.5
    bound = torch.finfo(dtype).eps * (steepest * z.abs().max() + exact.abs().max())
    assert z.abs().max() < K and (fused - exact).abs().max() <= bound


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_multiply(name: str) -> None:
    """Of no rows; with operands that lie anyhow."""
    function, tensors, _, keywords = case(name, torch.float32, has_bias=True)
    _, weight, bias, *rest = tensors
    spread = [each if each.dim() < 2 else torch.empty(0, 2 * N)[:, ::2] for each in rest]
    assert function(torch.empty(0, K), weight, bias, *spread, **keywords).shape == (0, N)


@pytest.mark.parametrize("name", NAMES)
def test_explained(name: str) -> None:
    function, tensors, _, keywords = case(name, torch.float32, has_bias=True)
    for which in (function, function.__name__):
        assert epigemm.explain(which, *tensors, **keywords).op.startswith(
            f"{function.__name__}: epigemm::linear"
        )


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
    stem = {"residual": "bias_residual.00", "batch_norm": "scale_relu.00"}[name]
    assert repr(stem) in program.code
    monkeypatch.delitem(registry.LINKED, stem)
    monkeypatch.setattr(formula_functions, "_made", SimpleNamespace())
    torch.testing.assert_close(program(*tensors), function(*tensors, **keywords))
    assert registry.named(f"{stem}0") is registry.named("bias_residual.") is registry.named("x.00") is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["residual", "layer_scale"])
def test_compiled_with_fp32_operands_beside_16_bits(name: str) -> None:
    function, tensors, _, keywords = case(name, torch.bfloat16, has_bias=True)
    tensors = (*tensors[:-1], tensors[-1].float())
    compiled = torch.compile(lambda *given: function(*given, **keywords), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), function(*tensors, **keywords))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["residual", "batch_norm", "silu"])
def test_compiled(name: str) -> None:
    function, tensors, _, keywords = case(name, torch.float32, has_bias=True)
    compiled = torch.compile(lambda *given: function(*given, **keywords), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), function(*tensors, **keywords), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", sorted(formulas.FORMULAS))
def test_a_program_is_what_a_trace_would_make(name: str) -> None:
    """So that a copy of the user's is the same kernel: at most the order of a sum's two sides differs."""
    traced = declaring.own(name)
    assert traced.digest == formula_functions.epilogue(name).traced.digest
    assert traced.name == name
    acc = torch.randn(M, N)
    sizes = {"per_column": (N,), "matrix": (M, N)}
    given = [torch.randn(sizes[operand.kind]) for operand in traced.operands]
    assert traced.reference(acc, *given).shape == (M, N)


def test_the_package_has_kernels_of_a_users_copy() -> None:
    @epigemm.epilogue
    def add(acc: Tensor, bias: epigemm.PerColumn, other: epigemm.Matrix) -> Tensor:
        return acc + bias + other

    assert add.linked([False, False]).prelinked == "bias_residual"
    assert add.linked([False, True]).prelinked == "", "these read operands of x's type"
    own = formula_functions.epilogue("residual").linked([False])
    assert isinstance(own, LinkedEpilogue) and own.prelinked == "residual"


@pytest.mark.parametrize(
    ("layer", "like"),
    [
        (epigemm.nn.LinearGELU(K, N, approximate="tanh"), ACT["gelu_tanh"]),
        (epigemm.nn.LinearGELU(K, N), ACT["gelu"]),
        (epigemm.nn.LinearSiLU(K, N), ACT["silu"]),
        (epigemm.nn.LinearTanh(K, N, bias=False), ACT["tanh"]),
    ],
)
def test_layers(layer: Any, like: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, K)
    torch.testing.assert_close(layer(x), like(F.linear(x, layer.weight, layer.bias)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(approximate: str) -> None:
    x, weight, bias = torch.randn(5, K), torch.randn(N, K), torch.randn(N)
    expected = F.gelu(F.linear(x, weight, bias), approximate=approximate)
    actual = epigemm.linear_gelu(x, weight, bias, approximate=approximate)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_bad_input() -> None:
    x, weight, matrix = torch.randn(M, K), torch.randn(N, K), torch.randn(M, N)
    with pytest.raises(ValueError, match="approximate: got 'erf'; accepted is 'none' or 'tanh'"):
        epigemm.linear_gelu(x, weight, approximate="erf")
    with pytest.raises(TypeError, match="approximate: got NoneType"):
        epigemm.linear_gelu(x, weight, approximate=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="activation: got 'swish'; accepted are gelu,"):
        epigemm.linear_gated(x, weight, None, matrix, activation="swish")
    with pytest.raises(TypeError, match="residual: got None"):
        epigemm.linear_residual(x, weight, None, None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"residual: got shape \[12, 23\]; accepted is \[12, 24\]"):
        epigemm.linear_residual(x, weight, None, matrix[:, 1:].contiguous())
    with pytest.raises(ValueError, match="running_var: got None"):
        epigemm.linear_batch_norm_relu(x, weight, None, torch.zeros(N), None)  # type: ignore[arg-type]
