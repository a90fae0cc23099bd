"""16-bit products on copies of what TMA cannot address: odd K and N, addresses, transposed weights.

Outputs, and the memory that copies are made in, are poisoned with NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn, PerRow
from epigemm.arguments.calls import LinearCall
from epigemm.calls import entry, resolve
from epigemm.epilogues.library import BIAS_RELU
from epigemm.epilogues.registry import typed
from epigemm.planner import dry_runs
from epigemm.planner import plans as planner
from tests.support import plans
from tests.support.arithmetic import BF16, FP16, Arithmetic
from tests.support.cases import poisoned
from tests.support.layouts import LAYOUTS
from tests.support.pretended import another_empty
from tests.support.problems import Problem, make

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

DEVICE = torch.device("cuda")
DEPTHS = [1, 7, 63, 65, 127, 250]
SHAPES = [(129, 64), (129, 77), (33, 130), (259, 264)]
"""M and N: M odd; N whole, odd, even."""
PLANS = {
    "large": plans.numbers(plans.TMA),
    "few rows": plans.numbers(plans.SWAP_AB),
}
arithmetics = pytest.mark.parametrize("arithmetic", [BF16, FP16], ids=lambda a: a.name)
by_plan = pytest.mark.parametrize("plan", list(PLANS))


@pytest.fixture(autouse=True)
def nan_in_workspaces() -> Iterator[list[int]]:
    """Every byte that the entry's module allocates is 255: NaN in both types. The sizes of its workspaces."""
    workspaces: list[int] = []

    def empty(*sizes: int, **options: Any) -> Tensor:
        made = torch.empty(*sizes, **options)
        if options.get("dtype") is torch.uint8:
            workspaces.append(made.numel())
        made.view(torch.uint8).fill_(255)
        return made

    with another_empty(entry._module, empty):
        yield workspaces


def by_force(problem: Problem, plan: str, out: Tensor | None = None) -> Tensor:
    """The result of a fused plan, on whatever copies it takes."""
    out = problem.out() if out is None else out
    planner.has_gpu_kernels(out)  # makes the device ready
    actual = resolve.linear(problem.call(out), (dry_runs.ARITHMETICS.index("ieee"), *PLANS[plan]))
    assert actual is out
    return out


def launches(problem: Problem, plan: str) -> list[str]:
    planner.has_gpu_kernels(problem.x)  # makes the device ready
    numbers = (dry_runs.ARITHMETICS.index("ieee"), *PLANS[plan])
    found = dry_runs.dry_run(problem.call(problem.out()), plan=numbers)
    assert not found.answer and not found.refused, found
    return found.launches


@arithmetics
@by_plan
@pytest.mark.parametrize("k", DEPTHS)
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_every_depth(
    arithmetic: Arithmetic,
    plan: str,
    m: int,
    n: int,
    k: int,
    rng: torch.Generator,
    nan_in_workspaces: list[int],
) -> None:
    """Bias and ReLU, in one kernel between copies: K is never a whole 16 bytes."""
    problem = make("bias_relu", arithmetic, (m, n, k), DEVICE, rng)
    assert launches(problem, plan) == ["copy", "fused", *["copy"] * (n % 8 != 0)]
    problem.check(by_force(problem, plan), second_path=False)
    assert nan_in_workspaces, "copies lie in a workspace"


@arithmetics
@by_plan
@pytest.mark.parametrize("k", [64, 250])
@pytest.mark.parametrize(
    ("x", "weight"),
    [
        *itertools.product(["misaligned", "odd_rows", "transposed", "aligned_rows"], ["contiguous"]),
        *itertools.product(["contiguous", "misaligned"], ["misaligned", "odd_rows", "transposed"]),
        ("transposed", "transposed"),
    ],
)
def test_every_layout(
    arithmetic: Arithmetic, plan: str, k: int, x: str, weight: str, rng: torch.Generator
) -> None:
    for m, n in SHAPES:
        problem = make(
            "bias_gelu_tanh",
            arithmetic,
            (m, n, k),
            DEVICE,
            rng,
            x_layout=LAYOUTS[x],
            weight_layout=LAYOUTS[weight],
        )
        problem.check(by_force(problem, plan), second_path=False)


@arithmetics
@by_plan
@pytest.mark.parametrize(
    "layout", ["padded_rows", "aligned_rows", "odd_rows", "misaligned", "every_second_row"]
)
@pytest.mark.parametrize("n", [77, 80, 130])
def test_every_out(arithmetic: Arithmetic, plan: str, layout: str, n: int, rng: torch.Generator) -> None:
    """What lies between the rows of `out` stays as it is."""
    problem = make("bias_relu", arithmetic, (131, n, 63), DEVICE, rng)
    inner = LAYOUTS[layout](poisoned((131, n), arithmetic.dtype, DEVICE))
    storage = torch.empty(0, dtype=arithmetic.dtype, device=DEVICE).set_(inner.untyped_storage())
    before = storage.clone()
    written = torch.zeros_like(storage, dtype=torch.bool)
    written.as_strided(inner.shape, inner.stride(), inner.storage_offset()).fill_(True)
    problem.check(by_force(problem, plan, inner), second_path=False)
    as_bits = torch.int16
    assert torch.equal(storage.view(as_bits)[~written], before.view(as_bits)[~written])


@epigemm.epilogue
def with_matrices(acc: Tensor, bias: PerColumn, row: PerRow, other: Matrix, more: Matrix) -> Tensor:
    return (acc + bias) * row * other + more


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@by_plan
@pytest.mark.parametrize("k", DEPTHS)
@pytest.mark.parametrize("is_kn", [False, True])
def test_an_epilogue_with_matrices(dtype: torch.dtype, plan: str, k: int, is_kn: bool) -> None:
    torch.manual_seed(k)
    for m, n in SHAPES:
        x = torch.randn(m, k, device=DEVICE, dtype=dtype)
        weight = (torch.randn(n, k, device=DEVICE) / k**0.5).to(dtype)
        weight = LAYOUTS["transposed" if is_kn else "contiguous"](weight)
        bias, row = (torch.randn(size, device=DEVICE, dtype=dtype) for size in ((n,), (m, 1)))
        other, more = torch.randn(m, n, device=DEVICE, dtype=dtype), torch.randn(m, n, device=DEVICE)
        operands = [bias, row, other, more]
        spec = typed(with_matrices.traced, [each.dtype != dtype for each in operands])
        out = poisoned((m, n), dtype, DEVICE)
        call = LinearCall(spec, x, weight, operands, out=out)
        planner.has_gpu_kernels(out)
        resolve.linear(call, (dry_runs.ARITHMETICS.index("ieee"), *PLANS[plan]))
        sums = x.double() @ weight.double().t() + bias.double()
        expected = sums * row.double() * other.double() + more.double()
        torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=3e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@by_plan
@pytest.mark.parametrize(
    "layout", ["aligned_rows", "padded_rows", "odd_rows", "misaligned", "every_second_row"]
)
def test_where_matrices_lie(dtype: torch.dtype, plan: str, layout: str) -> None:
    """TMA brings one of whole 16 bytes a row, whose last columns are beyond a result of odd rows; others it refuses."""
    torch.manual_seed(0)
    k = 63
    for m, n in [*SHAPES, (1, 77), (131, 1)]:
        x, weight = (torch.randn(side, k, device=DEVICE, dtype=dtype) / 4 for side in (m, n))
        bias, row = (torch.randn(size, device=DEVICE, dtype=dtype) for size in ((n,), (m, 1)))
        other = LAYOUTS[layout](torch.randn(m, n, device=DEVICE, dtype=dtype))
        more = LAYOUTS[layout](torch.randn(m, n, device=DEVICE))
        spec = typed(with_matrices.traced, [False, False, False, True])
        out = LAYOUTS[layout](poisoned((m, n), dtype, DEVICE))
        call = LinearCall(spec, x, weight, [bias, row, other, more], out=out)
        planner.has_gpu_kernels(out)
        resolve.linear(call, (dry_runs.ARITHMETICS.index("ieee"), *PLANS[plan]))
        sums = x.double() @ weight.double().t() + bias.double()
        expected = sums * row.double() * other.double() + more.double()
        torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=3e-2)


@arithmetics
@by_plan
@pytest.mark.parametrize("k", [7, 63, 65])
@pytest.mark.parametrize("is_kn", [False, True])
def test_what_is_not_finite_stays_in_its_rows(arithmetic: Arithmetic, plan: str, k: int, is_kn: bool) -> None:
    """Zeros lie behind the columns of both: infinity times nothing is NaN."""
    torch.manual_seed(k)
    for m, n in SHAPES:
        x, weight = (torch.randn(side, k, device=DEVICE, dtype=arithmetic.dtype) / 4 for side in (m, n))
        x[3, -1], x[5, 0], x[-1, -1] = float("inf"), float("nan"), float("-inf")
        weight[2, -1], weight[-1, 0] = float("-inf"), float("inf")
        weight = LAYOUTS["transposed" if is_kn else "contiguous"](weight)
        bias = torch.randn(n, device=DEVICE, dtype=arithmetic.dtype)
        out = poisoned((m, n), arithmetic.dtype, DEVICE)
        planner.has_gpu_kernels(out)
        call = LinearCall(BIAS_RELU, x, weight, (bias,), out=out)
        resolve.linear(call, (dry_runs.ARITHMETICS.index("ieee"), *PLANS[plan]))
        expected = torch.relu(x.double() @ weight.double().t() + bias.double())
        torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2, equal_nan=True)


@arithmetics
def test_what_is_decided_runs(arithmetic: Arithmetic, rng: torch.Generator) -> None:
    """By the planner's own choice: copies, and a result that is right, in new memory and in the caller's."""
    for sizes, weight, copies in plans.ON_COPIES:
        problem = make("bias_gelu_tanh", arithmetic, sizes, DEVICE, rng, weight_layout=LAYOUTS[weight])
        planner.has_gpu_kernels(problem.x)
        found = dry_runs.dry_run(problem.call())
        assert found.fused and found.launches.count("copy") == copies
        problem.check(problem.run(), second_path=False)
        new = epigemm.linear_gelu(problem.x, problem.weight, problem.operands.bias, approximate="tanh")
        problem.check(new, second_path=False)
        assert new.is_contiguous()


@arithmetics
def test_in_a_cuda_graph(arithmetic: Arithmetic, rng: torch.Generator) -> None:
    """Copies are made at each replay: x and the weight may have changed."""
    problem = make("bias_relu", arithmetic, (1025, 1023, 1023), DEVICE, rng)
    x, weight, bias = problem.x, problem.weight, problem.operands.bias
    run: Callable[[], Tensor] = lambda: epigemm.linear_relu(x, weight, bias)  # noqa: E731
    run()
    assert "copied" in epigemm.explain("linear_relu", x, weight, bias).kernels[0]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(3):
        x.copy_(torch.randn(x.shape, device=DEVICE))
        weight.copy_(torch.randn(weight.shape, device=DEVICE) / 8)
        out.fill_(float("nan"))
        graph.replay()
        problem.check(out, second_path=False)


def test_calls_in_a_row() -> None:
    """A workspace that is freed serves the next call of the stream; nothing of the one before is seen."""
    torch.manual_seed(0)
    weight = torch.randn(256, 255, device=DEVICE, dtype=torch.bfloat16) / 16
    xs = [torch.randn(8193, 255, device=DEVICE, dtype=torch.bfloat16) for _ in range(8)]
    assert "copied" in epigemm.explain("linear_gelu", xs[0], weight).kernels[0]
    results = [epigemm.linear_gelu(x, weight) for x in xs]
    for x, result in zip(xs, results, strict=True):
        expected = torch.nn.functional.gelu(x.double() @ weight.double().t())
        torch.testing.assert_close(result.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_more_than_2_to_the_31_elements() -> None:
    """Rows of x whose offsets need 64 bits."""
    m, n, k = 36_000_001, 9, 65
    x, weight, bias = (
        torch.randn(size, device=DEVICE, dtype=torch.bfloat16) for size in ((m, k), (n, k), (n,))
    )
    out = poisoned((m, n), torch.bfloat16, DEVICE)
    planner.has_gpu_kernels(out)
    resolve.linear(
        LinearCall(BIAS_RELU, x, weight, (bias,), out=out),
        (dry_runs.ARITHMETICS.index("ieee"), *PLANS["large"]),
    )
    for rows in (slice(0, 64), slice(m // 2, m // 2 + 64), slice(m - 64, m)):
        expected = torch.relu(x[rows].double() @ weight.double().t() + bias.double())
        torch.testing.assert_close(out[rows].double(), expected, rtol=1e-2, atol=1e-2)
