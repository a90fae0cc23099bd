"""`grouped_linear` and `grouped_linear_glu` on a CPU: values, gradients, compiled graphs; and dry runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import epigemm
from epigemm.arguments.calls import LinearCall
from epigemm.epilogues.library import BIAS, FUNCTIONS
from epigemm.epilogues.registry import EPILOGUES
from epigemm.planner import dry_runs
from epigemm.planner.gpus import KNOWN
from epigemm.planner.reasons import Reason

ENDS = (3, 3, 8)
ROWS, GROUPS, N, K = 10, 3, 32, 64
ACTIVATIONS: dict[str, Any] = {
    "identity": lambda z: z,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
}


def offs(*ends: int) -> Tensor:
    return torch.tensor(ends or ENDS, dtype=torch.int32)


def draw(dtype: torch.dtype, n: int = N, k: int = K) -> tuple[Tensor, Tensor, Tensor]:
    """x, weights and biases."""
    shapes = ((ROWS, k), (GROUPS, n, k), (GROUPS, n))
    x, weight, bias = ((torch.randn(shape) / 4).to(dtype) for shape in shapes)
    return x, weight, bias


def products(x: Tensor, weight: Tensor, bias: Tensor | None = None, ends: tuple[int, ...] = ENDS) -> Tensor:
    """In float64, group by group."""
    parts, begin = [], 0
    for group, end in enumerate(ends):
        z = x[begin:end].double() @ weight[group].double().t()
        parts.append(z if bias is None else z + bias[group].double())
        begin = max(begin, end)
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(N, K), (17, 33)], ids=str)
def test_values(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    """Of every activation; sizes that PyTorch's grouped product refuses, too."""
    x, weight, bias = draw(dtype, *sizes)
    tolerance = 8 * torch.finfo(dtype).eps
    for name, function in ACTIVATIONS.items():
        found = epigemm.grouped_linear(x, weight, bias, offs=offs(), epilogue=name)
        expected = function(products(x, weight, bias))
        assert found.dtype is dtype and found.shape == (ROWS, sizes[0])
        torch.testing.assert_close(found[:8].double(), expected, rtol=tolerance, atol=4 * tolerance)


def test_what_is_behind_the_groups_stays() -> None:
    x, weight, bias = draw(torch.float32)
    out = torch.full((ROWS, N), 7.0)
    assert epigemm.grouped_linear(x, weight, bias, offs=offs(), out=out) is out
    assert bool((out[8:] == 7.0).all())
    torch.testing.assert_close(out[:8].double(), products(x, weight, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ends", [(5, 2, 9), (-3, 4, 99), (10, 0, 0), (0, 0, 0)], ids=str)
def test_wrong_ends_lead_nowhere(ends: tuple[int, int, int]) -> None:
    x, weight, _ = draw(torch.float32)
    found = epigemm.grouped_linear(x, weight, offs=offs(*ends))
    clamped = torch.tensor(ends).clamp(0, ROWS).cummax(0).values.tolist()
    expected = products(x, weight, None, tuple(clamped))
    torch.testing.assert_close(found[: clamped[-1]].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_batches(dtype: torch.dtype, is_transposed: bool) -> None:
    """A weight with a matrix for each of x's: of functions of the library, and of one's own; gradients, and a graph."""
    torch.compiler.reset()
    count, rows = 3, 5
    x, weight, bias = (
        (torch.randn(each) / 4).to(dtype) for each in ((count, rows, K), (count, N, K), (count, N))
    )
    weight = weight.mT.contiguous().mT if is_transposed else weight
    share, rest = torch.randn(count, rows).to(dtype), torch.randn(count, rows, N).to(dtype)
    calls: list[tuple[Callable[..., Tensor], tuple[Tensor, ...], Callable[..., Tensor]]] = [
        (epigemm.linear, (), lambda z: z),
        (epigemm.linear, (bias,), lambda z, b: z + b[:, None]),
        (epigemm.linear_gelu, (bias,), lambda z, b: F.gelu(z + b[:, None])),
        (epigemm.linear_residual, (bias, rest), lambda z, b, m: z + b[:, None] + m),
        (weighted, (bias, share, rest), lambda z, b, r, m: torch.relu(z + b[:, None]) * r[..., None] + 2 * m),
    ]
    tolerance = 16 * torch.finfo(dtype).eps
    for function, given, formula in calls:
        inputs = [each.clone().requires_grad_() for each in (x, weight, *given)]
        wide = [each.detach().double().requires_grad_() for each in inputs]
        expected = formula(torch.bmm(wide[0], wide[1].mT), *wide[2:])
        out = torch.empty(count, rows, N, dtype=dtype)
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        found = [
            function(x, weight, *given),
            function(x, weight, *given, out=out),
            compiled(x, weight, *given),
        ]
        for each in (*found, function(*inputs)):
            torch.testing.assert_close(each.double(), expected, rtol=tolerance, atol=4 * tolerance)
        gradients = torch.autograd.grad(function(*inputs).sum(), inputs)
        for one, other in zip(gradients, torch.autograd.grad(expected.sum(), wide), strict=True):
            torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=16 * tolerance)


@pytest.mark.parametrize("where", ["eager", "recorded", "compiled", "autocast"])
def test_ends_without_a_weight_of_each_group(where: str) -> None:
    """They are refused on every way, and not left out of the call."""
    x, weight, rest = torch.randn(6, K), torch.randn(N, K), torch.randn(6, N)
    x.requires_grad_(where == "recorded")

    def call(x: Tensor) -> Tensor:
        return weighted(x, weight, torch.randn(N), torch.randn(6), rest, offs=offs(2, 6))

    def plain(x: Tensor) -> Tensor:
        return epigemm.grouped_linear(x, weight, offs=offs(2, 6), epilogue="relu")

    torch.compiler.reset()
    for function in (call, plain):
        called = (
            torch.compile(function, backend="aot_eager", fullgraph=True) if where == "compiled" else function
        )
        under = torch.autocast("cpu", torch.bfloat16, enabled=where == "autocast")
        with under, pytest.raises(RuntimeError, match="weight: got shape"):
            called(x)


@epigemm.epilogue
def weighted(
    acc: Tensor, bias: epigemm.PerColumn, share: epigemm.PerRow, rest: epigemm.Matrix, s: epigemm.Scalar = 2.0
) -> Tensor:
    result: Tensor = torch.relu(acc + bias) * share + rest * s
    return result


def test_a_function_of_ones_own() -> None:
    """Vectors are the groups', numbers a row and matrices the rows'."""
    x, weight, bias = draw(torch.float32)
    share, rest = torch.randn(ROWS), torch.randn(ROWS, N)
    found = weighted(x, weight, bias, share, rest, offs=offs())
    expected = torch.relu(products(x, weight, bias)) * share[:8, None].double() + rest[:8].double() * 2
    torch.testing.assert_close(found[:8].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "identity"])
def test_pairs(activation: str) -> None:
    x, weight, bias = draw(torch.float32, 2 * N)
    found = epigemm.grouped_linear_glu(x, weight, bias, offs=offs(), activation=activation)
    first, second = products(x, weight, bias).chunk(2, 1)
    expected = ACTIVATIONS[activation](first) * second
    torch.testing.assert_close(found[:8].double(), expected, rtol=1e-5, atol=1e-5)
    halves, biases = weight.chunk(2, 1), bias.chunk(2, 1)
    again = epigemm.grouped_linear_glu(
        x, halves[0], biases[0], offs=offs(), weight2=halves[1], bias2=biases[1], activation=activation
    )
    assert torch.equal(again[:8], found[:8])


def test_gradients() -> None:
    """Those of the groups' products; what is in no group has none."""
    x, weight, bias = tensors = [each.requires_grad_() for each in draw(torch.float64)]
    found = epigemm.grouped_linear(x, weight, bias, offs=offs(), epilogue="gelu")[:8]
    grads = torch.autograd.grad(found.sin().sum(), tensors)
    expected = torch.autograd.grad(F.gelu(products(x, weight, bias)).sin().sum(), tensors)
    for grad, exact in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, exact)
    assert not grads[0][8:].any() and not grads[1][1].any() and not grads[2][1].any()


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """What torch allocates and nobody writes is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("dtype", "n"), [(torch.bfloat16, 8), (torch.bfloat16, 12), (torch.float32, 3)], ids=str
)
def test_what_is_undefined_reaches_no_gradient(dtype: torch.dtype, n: int) -> None:
    """PyTorch's product leaves rows behind the last group as they were, and refuses some sizes' derivatives."""
    x, weight, bias = tensors = [each.requires_grad_() for each in draw(dtype, n, 16)]
    found = epigemm.grouped_linear(x, weight, bias, offs=offs(2, 2, 4), epilogue="silu")
    grads = torch.autograd.grad(found.float().sum(), tensors)
    inputs = [each.detach().double().requires_grad_() for each in tensors]
    exact = F.silu(products(inputs[0], inputs[1], inputs[2], (2, 2, 4)))
    expected = torch.autograd.grad(exact.sum(), inputs)
    for grad, wanted in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad.double(), wanted, rtol=0.05, atol=0.05)
    assert not grads[0][4:].any()


@epigemm.epilogue
def gated_by_what_is_fixed(acc: Tensor, bias: epigemm.PerColumn, gate: epigemm.Matrix) -> Tensor:
    result: Tensor = (acc + bias) * torch.sigmoid(gate.detach())
    return result


def test_a_gradient_ends_where_the_function_ends_it() -> None:
    x, weight, bias = (each.requires_grad_() for each in draw(torch.float64))
    gate = torch.randn(ROWS, N, dtype=torch.float64, requires_grad=True)
    found = gated_by_what_is_fixed(x, weight, bias, gate, offs=offs())
    grads = torch.autograd.grad(found.sum(), (x, weight, bias, gate), allow_unused=True)
    exact = products(x, weight, bias) * torch.sigmoid(gate.detach()[:8])
    expected = torch.autograd.grad(exact.sum(), (x, weight, bias))
    assert grads[3] is None
    for grad, wanted in zip(grads, expected, strict=False):
        torch.testing.assert_close(grad, wanted)


def test_no_rows() -> None:
    x, weight, bias = draw(torch.bfloat16)
    for given in (x[:0], x[:0].clone().requires_grad_()):
        assert epigemm.grouped_linear(given, weight, bias, offs=offs(0, 0, 0)).shape == (0, N)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_no_data(dtype: torch.dtype) -> None:
    given = [each.to("meta") for each in (*draw(dtype), offs())]
    for call in COMPILED.values():
        assert call(*given).is_meta and call(given[0].requires_grad_(), *given[1:]).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_derivatives_in_forward_mode(dtype: torch.dtype) -> None:
    x, weight, bias = draw(dtype)

    def call(x: Tensor) -> Tensor:
        return epigemm.grouped_linear(x, weight, bias, offs=offs(), epilogue="silu")[:8]

    wide, jvp = x.double(), torch.func.jvp
    found, exact = (
        jvp(call, (x,), (x,))[1],
        jvp(lambda x: F.silu(products(x, weight, bias)), (wide,), (wide,))[1],
    )
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=4 * tolerance)


def test_scalars_are_those_of_other_calls() -> None:
    x, weight, bias = draw(torch.float32)
    share, rest = torch.randn(ROWS), torch.randn(ROWS, N)
    whole = weighted(x, weight, bias, share, rest, 0.5, offs=offs())
    again = weighted(x, weight, bias, share, rest, torch.tensor(0.5, dtype=torch.float64), offs=offs())
    assert torch.equal(whole[:8], again[:8])


COMPILED: dict[str, Callable[..., Tensor]] = {
    "activation": lambda x, w, b, ends: epigemm.grouped_linear(x, w, b, offs=ends, epilogue="silu"),
    "pair": lambda x, w, b, ends: epigemm.grouped_linear_glu(x, w, b, offs=ends),
    "operands": lambda x, w, b, ends: weighted(x, w, b, x[:, 0].contiguous(), x[:, 1:2].expand(-1, N), 0.5, offs=ends),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_call_is_one_node(name: str, dtype: torch.dtype) -> None:
    """Of any compiler, and in fp32, too, where PyTorch's operators would read the ends on the host."""
    (x, weight, bias), graphs, call = draw(dtype), [], COMPILED[name]

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph.code)
        return graph.forward

    found = torch.compile(call, backend=backend, fullgraph=True)(x, weight, bias, offs())
    torch.testing.assert_close(found[:8], call(x, weight, bias, offs())[:8])
    assert graphs[0].count("epigemm.grouped_linear") == 1 and "mm(" not in graphs[0]
    assert "as_tensor" not in graphs[0]  # which would wait for the device at each run


class Module(torch.nn.Module):
    """A call of `COMPILED`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.call = COMPILED[name]

    def forward(self, *given: Tensor) -> Tensor:
        return self.call(*given)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "export": lambda call, given: torch.export.export(call, given).module(),
    "strict export": lambda call, given: torch.export.export(call, given, strict=True).module(),
    "make_fx": lambda call, given: make_fx(call)(*given),
    "make_fx, fake": lambda call, given: make_fx(call, tracing_mode="fake")(*given),
    "jit": lambda call, given: torch.jit.trace(call, given, check_trace=False),  # type: ignore[no-untyped-call]
    "vmap": lambda call, given: in_a_batch(torch.vmap(call)),
    "compiled vmap": lambda call, given: in_a_batch(torch.compile(torch.vmap(call), backend="eager")),
}


def in_a_batch(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *given: call(*(each[None] for each in given))[0]


@pytest.mark.filterwarnings("ignore")  # of torch.jit, that it is deprecated, and of what it asks
@pytest.mark.parametrize("made", PROGRAMS)
@pytest.mark.parametrize("name", ["activation", "pair"])
def test_a_program_reads_where_groups_end(name: str, made: str) -> None:
    """At each run, also of types and sizes whose products PyTorch computes group by group."""
    for dtype, k in ((torch.float32, 33), (torch.float64, K), (torch.bfloat16, 33), (torch.bfloat16, K)):
        given = draw(dtype, k=k)
        program, now = PROGRAMS[made](Module(name), (*given, offs())), (*given, offs(1, 6, 7))
        torch.testing.assert_close(program(*now)[:7], COMPILED[name](*now)[:7])
        if made == "export":  # it may run where there is no Python, and be differentiated
            assert "epigemm" not in program.code


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("made", PROGRAMS)
def test_a_program_may_be_the_first_use_of_a_function(made: str) -> None:
    """Whose registration is no part of it."""
    given = (*draw(torch.float32), offs())
    FUNCTIONS["gated_silu"].forms.clear()
    program = PROGRAMS[made](Module("pair"), given)
    torch.testing.assert_close(program(*given)[:8], COMPILED["pair"](*given)[:8])


def test_a_compiled_call_that_is_recorded_has_a_gradient() -> None:
    x, weight, bias = (each.requires_grad_() for each in draw(torch.bfloat16))
    given = (x, weight, bias)
    call = torch.compile(COMPILED["activation"], backend="aot_eager", fullgraph=True)
    found, wanted = (
        torch.autograd.grad(made(*given, offs())[:8].float().sum(), given)
        for made in (call, COMPILED["activation"])
    )
    for grad, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("traced", ["dynamo", "make_fx"])
def test_transforms_in_a_graph(traced: str) -> None:
    """torch.func's transforms need PyTorch's operators; a tensor does not tell there that it has a gradient."""
    x, weight, bias = draw(torch.bfloat16)

    def summed(x: Tensor) -> Tensor:
        return epigemm.grouped_linear(x, weight, bias, offs=offs(), epilogue="silu")[:8].float().sum()

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.grad(summed)(x), torch.func.vmap(summed)(torch.stack([x, 2 * x]))

    made: Any = torch.compile(both, backend="aot_eager", fullgraph=True)
    if traced == "make_fx":
        made = make_fx(both, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    grad, sums = made(x)
    exact = x.double().requires_grad_()
    (expected,) = torch.autograd.grad(F.silu(products(exact, weight, bias)).sum(), exact)
    torch.testing.assert_close(grad.double(), expected, rtol=0.05, atol=0.05)
    assert not grad[8:].any()
    wanted = torch.stack([F.silu(products(each, weight, bias)).sum() for each in (x, 2 * x)])
    torch.testing.assert_close(sums.double(), wanted, rtol=0.05, atol=0.5)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("is_own", [True, False])
def test_the_first_call_may_be_compiled(has_bias: bool, is_own: bool) -> None:
    """Of an epilogue that nobody has called; `is_own`: its formula is none of the package's."""

    @epigemm.epilogue
    def unseen(acc: Tensor, bias: epigemm.PerColumn | None = None) -> Tensor:
        z = acc if bias is None else acc + bias
        return torch.sigmoid(z) * 3 if is_own else torch.relu(z)

    x, weight, bias = draw(torch.bfloat16)
    operands = (bias,) * has_bias
    compiled: Any = torch.compile(lambda *given: unseen(*given, offs=offs()), backend="eager", fullgraph=True)
    found = compiled(x, weight, *operands)[:8]
    torch.testing.assert_close(found, unseen(x, weight, *operands, offs=offs())[:8])


def test_a_recorded_pair_in_fp32_compiles() -> None:
    """PyTorch's operators read the ends on the host there, and a compiler does not know the groups' rows."""
    x, weight, _ = draw(torch.float32)
    weight.requires_grad_()

    def pair(x: Tensor, weight: Tensor) -> Tensor:
        return epigemm.grouped_linear_glu(x, weight, offs=offs())

    call: Any = torch.compile(pair, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        found = call(x, weight)
    torch.testing.assert_close(found[:8], pair(x, weight)[:8])


ON_SLICES = ["scales_of_weight", "split_of_x", "fused", "fixup"]
BY_TORCH: list[str] = []


@pytest.mark.parametrize(
    ("dtype", "sizes", "launches"),
    [
        (torch.bfloat16, (128, 32768, 1536, 2048), ["fused"]),
        (torch.float16, (8, 16, 4096, 4096), ["fused"]),
        (torch.bfloat16, (8, 100, 511, 64), BY_TORCH),  # rows of the result that TMA cannot write
        (torch.float32, (128, 32768, 768, 2048), ON_SLICES),
        (torch.float32, (8, 100, 511, 512), [*ON_SLICES, "copy_of_result"]),
        (torch.float32, (8, 100, 512, 64), BY_TORCH),  # sums too short for slices
        (torch.float32, (8, 15, 512, 512), ON_SLICES),  # a group may have as few in any case
        (torch.float32, (8, 100, 512, 511), BY_TORCH),  # weights that TMA cannot read
    ],
    ids=str,
)
def test_what_runs_on_a_gpu(dtype: torch.dtype, sizes: tuple[int, ...], launches: list[str]) -> None:
    count, m, n, k = sizes
    shapes = ((m, k), (count, n, k), (count, n))
    x, weight, bias = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    for each in (weight, weight.mT.contiguous().mT) if n % 4 == 0 else (weight,):
        found = of_groups(LinearCall(BIAS, x, each, (bias,)))
        if k == 511 and each is not weight:
            launches = ON_SLICES  # whose rows are whole
        assert found.fused is (launches != BY_TORCH)
        assert found.launches == launches or not found.fused
        assert found.answer in ((0, Reason.NOT_STORABLE) if found.fused else (Reason.BY_REFERENCE,))


def of_groups(call: LinearCall) -> dry_runs.DryRun:
    ends = torch.empty(len(call.weight), dtype=torch.int32, device="meta")
    return dry_runs.dry_run(call._replace(group_ends=ends), gpu=KNOWN["H200"].numbers, tried=True)


@pytest.mark.parametrize("strides", [(512 * 128 + 1, 128, 1), (0, 128, 1), (512 * 126, 126, 1)], ids=str)
def test_fp32_weights_that_no_kernel_reads(strides: tuple[int, ...]) -> None:
    """Of groups, or rows, that are no whole 16 bytes apart, or are one weight."""
    x = torch.empty(100, 128, device="meta")
    weight = torch.empty_strided((8, 512, 128), strides, device="meta")
    found = of_groups(LinearCall(BIAS, x, weight, (None,)))
    assert not found.fused and "whole 16 bytes apart" in found.tried[0].plan["why_not"]


@pytest.mark.parametrize(
    ("epilogue", "sizes", "fused"),
    [
        ("bias_gelu", (34, 1000, 1264, 448), True),
        ("bias_gelu", (2, 512, 232, 1000), False),  # torch.bmm and GELU took 0.85 times as long on an H200
        ("bias", (34, 1000, 1264, 448), False),  # nothing to fuse
    ],
    ids=str,
)
def test_which_batches_are_fused(epilogue: str, sizes: tuple[int, ...], fused: bool) -> None:
    count, m, n, k = sizes
    x, weight = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((count, m, k), (count, n, k))
    )
    for each in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
        call = LinearCall(EPILOGUES[epilogue], x, each, (None,))
        assert dry_runs.dry_run(call, gpu=KNOWN["H200"].numbers).fused is fused
        wide = dry_runs.dry_run(call._replace(x=x.float(), weight=each.float()), gpu=KNOWN["H200"].numbers)
        assert wide.fused is (count == 34) and (not wide.fused or wide.launches == ON_SLICES)
