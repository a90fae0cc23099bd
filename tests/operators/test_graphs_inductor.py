"""The operator of graphs that Inductor compiles: any epilogue, its operands in order, without Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import epigemm
from epigemm._native import ops
from epigemm.arguments import forms
from epigemm.arguments.calls import LinearCall
from epigemm.autograd import nodes
from epigemm.epilogues.library import BIAS, BIAS_RELU, gelu_epilogue
from epigemm.epilogues.registry import EPILOGUES, Epilogue
from epigemm.operators import graphs
from epigemm.packs import weight_packs
from epigemm.planner import dry_runs
from tests.support.pretended import compile_natively
from tests.support.watching import results_of

_run = ops._into.default
FOLDS, USES_PACK = 16, 32
M, N, K = 5, 8, 16


@epigemm.epilogue
def mixed(acc: Tensor, bias: epigemm.PerColumn, other: epigemm.Matrix, scale: epigemm.Scalar) -> Tensor:
    return torch.sin(acc + bias) * scale + other


def operands(epilogue: str) -> list[Tensor]:
    bias = [torch.randn(N)]
    return [*bias, torch.randn(M, N), torch.tensor(2.0)] if epilogue == "mixed" else bias


def named(epilogue: str, given: list[Tensor]) -> Epilogue:
    return EPILOGUES.get(epilogue) or forms.of_types(mixed.traced, torch.empty(M, K), given)


def call_of(
    epilogue: Epilogue, x: Tensor, weight: Tensor, given: list[Tensor | None], number: int | None = None
) -> Tensor:
    at = epilogue.number if number is None else number
    return by_digest(at, graphs.digest_of(epilogue.name), x, weight, given)


def by_digest(at: int, digest: int, x: Tensor, weight: Tensor, given: list[Tensor | None]) -> Tensor:
    places: list[Any] = [*given, *[None] * (2 - len(given))]
    first, second, *others = places
    out = torch.full((M, N), torch.nan)
    _run(at, digest, x, weight, first, second, others or None, 0.0, USES_PACK, out, None)
    return out


def expected(epilogue: str, x: Tensor, weight: Tensor, given: list[Tensor]) -> Tensor:
    z = F.linear(x, weight, given[0])
    if epilogue == "mixed":
        return torch.sin(z) * given[2] + given[1]
    return z.relu() if epilogue == "bias_relu" else z


@pytest.mark.parametrize("epilogue", ["bias", "bias_relu", "mixed"])
@pytest.mark.parametrize("number", [None, 0, 7, 100_000, -1])
def test_numbers_are_right(epilogue: str, number: int | None) -> None:
    """A graph from another process has another epilogue's number, or one that is none; the digest tells."""
    x, weight, given = torch.randn(M, K), torch.randn(N, K), operands(epilogue)
    result = call_of(named(epilogue, given), x, weight, [*given], number)
    torch.testing.assert_close(result, expected(epilogue, x, weight, given), rtol=1e-5, atol=1e-5)


def test_the_module_knows_the_digest() -> None:
    """A call whose digest is right comes to no Python."""
    x, weight, bias = torch.randn(M, K), torch.randn(N, K), torch.randn(N)
    with results_of(nodes.forward) as by_python:
        torch.testing.assert_close(call_of(BIAS, x, weight, [bias]), F.linear(x, weight, bias))
        torch.testing.assert_close(call_of(BIAS, x, weight, [None]), F.linear(x, weight))
        assert not by_python
        call_of(BIAS, x, weight, [bias], BIAS_RELU.number)
    assert len(by_python) == 1


def test_what_csrc_calls_for_a_gemm_with_a_relu() -> None:
    x, weight, bias, out = torch.randn(M, K), torch.randn(N, K), torch.randn(N), torch.full((M, N), torch.nan)
    ops._addmm_relu(bias, x, weight.t(), out)
    torch.testing.assert_close(out, F.linear(x, weight, bias).relu())


@pytest.mark.gpu
def test_a_gemm_with_a_relu_asks_python_for_nothing_else() -> None:
    """Where PyTorch's is expected to be no slower than ours."""
    checked = 0
    for m, n, k in [(16, 1000, 8), (64, 64, 64), (4096, 2048, 512), (512, 512, 512), (2048, 1024, 24)]:
        x, weight, bias = (
            torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in ((m, k), (n, k), (n,))
        )
        found = dry_runs.dry_run(LinearCall(BIAS_RELU, x, weight, (bias,)))
        if found.fused or found.gemm != dry_runs.WITH_BIAS_AND_RELU:
            continue
        for lead in ((m,), (2, m // 2)):
            out = x.new_full((*lead, n), torch.nan)
            about = (BIAS_RELU.number, graphs.digest_of(BIAS_RELU.name), x.view(*lead, k), weight, bias)
            with results_of(nodes.forward) as by_python:
                _run(*about, None, None, 0.0, USES_PACK, out, None)
            assert not by_python
            torch.testing.assert_close(out.view(m, n), F.linear(x, weight, bias).relu(), rtol=2e-2, atol=2e-2)
            checked += 1
    assert checked


def test_another_epilogue_folds_nothing() -> None:
    out, about = torch.full((M, N), 7.0), (torch.ones(M, K), torch.ones(N, K), None, None)
    with pytest.raises(RuntimeError, match="accepts"):
        _run(0, graphs.digest_of("bias"), *about, [None] * 4, 0.0, FOLDS, out, None)
    assert bool((out == 7.0).all())


def test_which_calls_become_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(M, K), torch.randn(N, K)
    given = operands("mixed")
    call = LinearCall(named("mixed", given), x, weight, given)
    assert graphs.in_inductor(call) is NotImplemented, "on a CPU the function runs in Python"
    compile_natively(monkeypatch)
    found = graphs.in_inductor(call)
    torch.testing.assert_close(found, expected("mixed", x, weight, given), rtol=1e-5, atol=1e-5)
    assert torch.equal(graphs.in_inductor(call._replace(operands=[*given[:-1], 2.0])), found)
    assert torch.equal(graphs.in_inductor(call._replace(uses_pack=False)), found)
    behind = call.behind(F.linear(x, weight, given[0]))
    torch.testing.assert_close(graphs.in_inductor(behind), found, rtol=1e-5, atol=1e-5)
    for other in (
        call._replace(invariant=True),
        call._replace(weight=torch.ones(2, N, K)),
        call._replace(x=x.to(torch.float8_e4m3fn)),
    ):
        assert graphs.in_inductor(other) is NotImplemented


class Stores(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Of each `_into`, whether it stores a second matrix."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[bool] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _run:
            self.found.append(args[-1] is not None)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "stores"), [(torch.bfloat16, [True]), (torch.float32, []), (torch.float64, [])], ids=str
)
def test_a_recorded_call_and_its_product(
    dtype: torch.dtype, stores: list[bool], monkeypatch: pytest.MonkeyPatch, rng: torch.Generator
) -> None:
    """One kernel where the planner expects it for the sizes. What is left to PyTorch's GEMM becomes no call of ours."""
    compile_natively(monkeypatch, for_h200=True)
    x, weight, bias = (
        torch.randn(*size, generator=rng).to(dtype) for size in ((4096, 64), (2048, 64), (2048,))
    )
    call = LinearCall(gelu_epilogue("none"), x, weight, (bias,), uses_pack=False)
    with torch.no_grad(), Stores() as mode:
        result, product = graphs.with_product_in_inductor(call)
    assert mode.found == stores
    z = F.linear(x.double(), weight.double(), bias.double())
    bound = {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(product.double(), z, rtol=bound, atol=bound)
    torch.testing.assert_close(result.double(), F.gelu(z), rtol=bound, atol=bound)


def test_rows_that_lie_apart(monkeypatch: pytest.MonkeyPatch, rng: torch.Generator) -> None:
    """By PyTorch's GEMM, too, product and bias are rounded once."""
    compile_natively(monkeypatch, for_h200=True)
    x = (torch.rand(4, 16, 64, generator=rng).bfloat16() + 1).transpose(0, 1)
    weight = torch.randn(12, 64, generator=rng).bfloat16()
    bias = -F.linear(x, weight).mean((0, 1))
    call = LinearCall(BIAS, x, weight, (bias,))
    with Stores() as mode:
        found = graphs.in_inductor(call)
    expected = F.linear(x.double(), weight.double(), bias.double())
    assert not mode.found
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
def test_strides_that_are_symbols(monkeypatch: pytest.MonkeyPatch, fresh_compiler: None) -> None:
    """Of a part of constant sizes."""
    compile_natively(monkeypatch, for_h200=True)
    big, weight = torch.randn(8, 100), torch.randn(32, 64, requires_grad=True)
    call = torch.compile(lambda x, w: epigemm.linear_gelu(x[:4, :64], w), dynamic=True)
    torch.testing.assert_close(call(big, weight), F.gelu(F.linear(big[:4, :64], weight)))


def test_a_weight_that_learns_has_no_current_pack(rng: torch.Generator) -> None:
    """The operator's counterpart in Python makes it stale, as in an eager call."""
    x, weight, bias = (torch.randn(*size, generator=rng) for size in ((M, K), (N, K), (N,)))
    with results_of(weight_packs.expire) as expired:
        for uses_pack in (True, False):
            out = torch.full((M, N), torch.nan)
            # The number is that of another process: to Python.
            about = (7, graphs.digest_of("bias"), x, weight, bias, None, None)
            _run(*about, 0.0, USES_PACK * uses_pack, out, None)
            torch.testing.assert_close(out, F.linear(x, weight, bias))
            assert len(expired) == (not uses_pack)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(K, 32), nn.Linear(32, K), nn.Linear(K, N, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.b(F.gelu(self.a(x))) + x
        return self.c(F.layer_norm(y, (K,))), self.c(y)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inductor_writes_into_its_own_memory(
    monkeypatch: pytest.MonkeyPatch, fresh_compiler: None, dtype: torch.dtype
) -> None:
    """Each site is one operator, and nothing is copied for it."""
    from torch._inductor.utils import run_and_get_code

    compile_natively(monkeypatch)
    model = Model().eval().to(dtype)
    fast: Callable[..., Any] = torch.compile(model, backend="epigemm")
    bound = 1e-5 if dtype is torch.float32 else 4e-2
    with torch.no_grad():
        x = torch.randn(M, K, dtype=dtype)
        found, (code,) = run_and_get_code(fast, x)
        torch.testing.assert_close(found, model(x), rtol=bound, atol=bound)
    assert code.count("epigemm._into.default(") == 4
    assert "clone" not in code and "epigemm.linear.default" not in code


class Training(nn.Module):
    """Public functions, in which Inductor alone finds the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(K, 32), nn.Linear(32, N)

    def forward(self, x: Tensor) -> Tensor:
        y = epigemm.linear_gelu(x, self.a.weight, self.a.bias)
        return epigemm.linear(y, self.b.weight, self.b.bias)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inductor", "epigemm"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training(
    monkeypatch: pytest.MonkeyPatch, fresh_compiler: None, backend: str, dynamic: bool, dtype: torch.dtype
) -> None:
    """Forward and backward graph hold the native operator alone, and give the bits of the public one."""
    from torch._inductor.utils import run_and_get_code

    plain = nn.Sequential(nn.Linear(K, 32), nn.ReLU(), nn.Linear(32, N))
    forward = 3 if backend == "inductor" else 2  # the product of a gelu is kept
    model = (Training() if backend == "inductor" else plain).to(dtype)
    x = torch.randn(M, K, dtype=dtype, requires_grad=True)
    learnt = [x, *model.parameters()]

    def step() -> list[Tensor]:
        torch.compiler.reset()
        with torch._inductor.config.patch(force_disable_caches=True):
            y = torch.compile(model, backend=backend, dynamic=dynamic)(x)
            return [y.detach(), *torch.autograd.grad(y.float().square().sum(), learnt)]

    expected = step()
    compile_natively(monkeypatch)
    found, codes = run_and_get_code(step)
    assert [code.count("epigemm._into.default(") for code in codes] == [forward, 4]
    for code in codes:
        assert (
            "ops.epigemm.linear" not in code and "ops.epigemm.elementwise" not in code and "clone" not in code
        )
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(fresh_compiler: None, dtype: torch.dtype, packed: bool) -> None:
    """Once its kernels are linked a call asks Python for nothing; where packs are kept, fp32 calls do."""
    layers = nn.Linear(1024, 2048), nn.Linear(2048, 1024)
    model = nn.Sequential(layers[0], nn.GELU(), layers[1]).cuda().eval().to(dtype)
    fast: Callable[..., Any] = torch.compile(model, backend="epigemm")
    bound = 1e-4 if dtype is torch.float32 else 4e-2
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(4096, 1024, device="cuda", dtype=dtype)
            torch.testing.assert_close(fast(x), model(x), rtol=bound, atol=bound)
        if packed:
            packs = [epigemm.pack(layer.weight.float()) for layer in layers]
            assert len(packs) == 2
        for _ in range(3):
            for parameter in model.parameters():
                parameter.mul_(1.01)
            with results_of(nodes.forward) as by_python:
                found = fast(x)
            torch.testing.assert_close(found, model(x), rtol=bound, atol=bound)
            assert dtype is torch.float32 or not by_python
