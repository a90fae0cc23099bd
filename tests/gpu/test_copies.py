"""16-bit products on copies of what TMA cannot address: odd K and N, addresses, transposed weights.

Outputs, and the memory that copies are made in, are poisoned with NaN.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm.planner import dry_runs
from epigemm.planner import plans as planner
from tests.gpu.launching import DEVICE, Kernel, captured
from tests.gpu.properties import of_text
from tests.support import plans
from tests.support.arithmetic import BF16, FP16, Arithmetic
from tests.support.cases import poisoned
from tests.support.layouts import LAYOUTS
from tests.support.problems import Problem, make
from tests.support.watching import poisoned_memory

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels")]

DEPTHS = [1, 7, 63, 65, 127, 250]
SHAPES = [(129, 64), (129, 77), (33, 130), (259, 264)]
"""M and N: M odd; N whole, odd, even."""
ROWS = ["padded_rows", "aligned_rows", "odd_rows", "misaligned", "every_second_row"]


@pytest.fixture(autouse=True)
def nan_in_workspaces() -> Iterator[None]:
    with poisoned_memory():
        yield


def by_force(problem: Problem, kernel: Kernel, out: Tensor | None = None) -> Tensor:
    """The result of a fused plan, on whatever copies it takes."""
    out = problem.out() if out is None else out
    planner.has_gpu_kernels(out)  # makes the device ready
    found = problem.run_fused(kernel.plan(), out)
    assert found is out
    problem.check(out)
    return out


with_matrices = of_text(
    "acc, bias: PerColumn, row: PerRow, other: Matrix, more: Matrix -> (acc + bias) * row * other + more"
)


class TestCopies:
    kernels = tuple(Kernel(family, 0, each) for family in (plans.TMA, plans.SWAP_AB) for each in (BF16, FP16))

    @pytest.mark.parametrize("k", DEPTHS)
    @pytest.mark.parametrize(("m", "n"), SHAPES)
    def test_every_depth(self, kernel: Kernel, m: int, n: int, k: int, rng: torch.Generator) -> None:
        """Bias and ReLU, in one kernel between copies: K is never a whole 16 bytes."""
        problem = make("bias_relu", kernel.arithmetic, (m, n, k), rng)
        planner.has_gpu_kernels(problem.x)  # makes the device ready
        numbers = (dry_runs.ARITHMETICS.index("ieee"), *kernel.plan())
        found = dry_runs.dry_run(problem.call(problem.out()), plan=numbers)
        assert not found.answer and not found.refused, found
        assert found.launches == ["copy", "fused", *["copy"] * (n % 8 != 0)]
        by_force(problem, kernel)

    @pytest.mark.parametrize("k", [64, 250])
    @pytest.mark.parametrize(
        ("x", "weight"),
        [
            *itertools.product(["misaligned", "odd_rows", "transposed", "aligned_rows"], ["contiguous"]),
            *itertools.product(["contiguous", "misaligned"], ["misaligned", "odd_rows", "transposed"]),
            ("transposed", "transposed"),
        ],
    )
    def test_every_layout(self, kernel: Kernel, k: int, x: str, weight: str, rng: torch.Generator) -> None:
        of_x, of_weight = LAYOUTS[x], LAYOUTS[weight]
        for m, n in SHAPES:
            sizes = (m, n, k)
            problem = make(
                "bias_gelu_tanh", kernel.arithmetic, sizes, rng, x_layout=of_x, weight_layout=of_weight
            )
            by_force(problem, kernel)

    @pytest.mark.parametrize("layout", ROWS)
    @pytest.mark.parametrize("n", [77, 80, 130])
    def test_every_out(self, kernel: Kernel, layout: str, n: int, rng: torch.Generator) -> None:
        """What lies between the rows of `out` stays as it is."""
        problem = make("bias_relu", kernel.arithmetic, (131, n, 63), rng)
        inner = LAYOUTS[layout](poisoned((131, n), kernel.dtype, DEVICE))
        storage = torch.empty(0, dtype=kernel.dtype, device=DEVICE).set_(inner.untyped_storage())
        before = storage.clone()
        written = torch.zeros_like(storage, dtype=torch.bool)
        written.as_strided(inner.shape, inner.stride(), inner.storage_offset()).fill_(True)
        by_force(problem, kernel, inner)
        as_bits = torch.int16
        assert torch.equal(storage.view(as_bits)[~written], before.view(as_bits)[~written])

    @pytest.mark.parametrize("k", DEPTHS)
    @pytest.mark.parametrize("weight", ["contiguous", "transposed"])
    def test_an_epilogue_with_matrices(
        self, kernel: Kernel, k: int, weight: str, rng: torch.Generator
    ) -> None:
        for m, n in SHAPES:
            problem = make(with_matrices, kernel.arithmetic, (m, n, k), rng, wide=("more",))
            problem.weight = LAYOUTS[weight](problem.weight)
            by_force(problem, kernel)

    @pytest.mark.parametrize("layout", ROWS)
    def test_where_matrices_lie(self, kernel: Kernel, layout: str, rng: torch.Generator) -> None:
        """TMA brings one of whole 16 bytes a row, whose last columns are beyond a result of odd rows; others not."""
        for m, n in [*SHAPES, (1, 77), (131, 1)]:
            problem = make(with_matrices, kernel.arithmetic, (m, n, 63), rng, wide=("more",))
            tensors = problem.operands.tensors
            tensors[-2:] = [LAYOUTS[layout](each) for each in tensors[-2:]]
            by_force(problem, kernel, LAYOUTS[layout](problem.out()))

    @pytest.mark.parametrize("k", [7, 63, 65])
    @pytest.mark.parametrize("weight", ["contiguous", "transposed"])
    def test_what_is_not_finite_stays_in_its_rows(
        self, kernel: Kernel, k: int, weight: str, rng: torch.Generator
    ) -> None:
        """Zeros lie behind the columns of both: infinity times nothing is NaN."""
        for m, n in SHAPES:
            problem = make("bias_relu", kernel.arithmetic, (m, n, k), rng)
            x, of_weight, inf = problem.x, problem.weight, math.inf
            x[3, -1], x[5, 0], x[-1, -1] = inf, math.nan, -inf
            of_weight[2, -1], of_weight[-1, 0] = -inf, inf
            problem.weight = LAYOUTS[weight](of_weight)
            by_force(problem, kernel)


arithmetics = pytest.mark.parametrize("arithmetic", [BF16, FP16], ids=lambda a: a.name)


@arithmetics
def test_what_is_decided_runs(arithmetic: Arithmetic, rng: torch.Generator) -> None:
    """By the planner's own choice: copies, and a result that is right, in new memory and in the caller's."""
    for sizes, weight, copies in plans.ON_COPIES:
        problem = make("bias_gelu_tanh", arithmetic, sizes, rng, weight_layout=LAYOUTS[weight])
        planner.has_gpu_kernels(problem.x)
        found = dry_runs.dry_run(problem.call())
        assert found.fused and found.launches.count("copy") == copies
        problem.check(problem.run())
        new = epigemm.linear_gelu(problem.x, problem.weight, problem.operands.bias, approximate="tanh")
        problem.check(new)
        assert new.is_contiguous()


@arithmetics
def test_in_a_cuda_graph(arithmetic: Arithmetic, rng: torch.Generator) -> None:
    """Copies are made at each replay: x and the weight may have changed."""
    problem = make("bias_relu", arithmetic, (1025, 1023, 1023), rng)
    x, weight, bias, out = problem.x, problem.weight, problem.operands.bias, problem.out()
    graph = captured(lambda: epigemm.linear_relu(x, weight, bias, out=out))
    assert "copied" in epigemm.explain("linear_relu", x, weight, bias).kernels[0]
    for _ in range(3):
        x.copy_(torch.randn(x.shape, device=DEVICE))
        weight.copy_(torch.randn(weight.shape, device=DEVICE) / 8)
        out.fill_(math.nan)
        graph.replay()
        problem.check(out)


@pytest.mark.slow
def test_more_than_2_to_the_31_elements(rng: torch.Generator) -> None:
    """Rows of x whose offsets need 64 bits."""
    m = 36_000_001
    problem = make("bias_relu", BF16, (1, 9, 65), rng)
    weight, operands = problem.weight, problem.operands
    problem.x = torch.randn(m, 65, device=DEVICE, dtype=torch.bfloat16)
    found = problem.run_fused(plans.numbers(plans.TMA))
    assert found is not None
    for rows in (slice(0, 64), slice(m // 2, m // 2 + 64), slice(m - 64, m)):
        Problem("bias_relu", BF16, problem.x[rows], weight, operands).check(found[rows])
