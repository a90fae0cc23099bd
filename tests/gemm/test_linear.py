"""Products through the operator on a GPU, where sums are exact, and beyond what 16 bits hold.

On a CPU PyTorch's operators add up. Layouts, leading dimensions and `out`: tests/ops.
"""

from __future__ import annotations

import pytest
import torch

from tests.support import reference
from tests.support.arithmetic import ARITHMETICS, STORAGE, Arithmetic
from tests.support.cases import LINEAR, draw_operands
from tests.support.problems import Problem, make, ternary

pytestmark = pytest.mark.gpu
arithmetics = pytest.mark.parametrize("arithmetic", ARITHMETICS, ids=lambda a: a.name)
epilogues = pytest.mark.parametrize("name", LINEAR)

# Whether these small problems fuse on a GPU is dispatch's choice, so both paths' bounds are allowed here;
# tests/gemm/test_fused_gpu.py holds the fused kernels to their own, tighter one.
EITHER_PATH = True


@epilogues
@pytest.mark.parametrize("arithmetic", STORAGE, ids=lambda a: a.name)
def test_out_leaves_its_surroundings_alone(name: str, arithmetic: Arithmetic, rng: torch.Generator) -> None:
    device = torch.device("cuda")
    problem = make(name, arithmetic, (24, 40, 32), device, rng)
    frame = torch.full((26, 56), 5.0, dtype=arithmetic.dtype, device=device)
    problem.run(frame[1:25, 8:48])
    problem.check(frame[1:25, 8:48], second_path=EITHER_PATH)
    frame[1:25, 8:48] = 5.0
    assert bool((frame == 5.0).all())


@epilogues
@arithmetics
@pytest.mark.parametrize("shape", [(40, 24, 200), (7, 9, 11), (128, 128, 256)], ids=str)
def test_integers_are_exact(
    name: str,
    arithmetic: Arithmetic,
    shape: tuple[int, int, int],
    rng: torch.Generator,
) -> None:
    """Sums of -1, 0, 1 are exact in every arithmetic, also after the second path's rounding to 16 bits.

    Operands are powers of two and small integers, so wherever the epilogue is piecewise linear its value is exact
    as well: those must match bit for bit. A transcendental one is compared after the bound of its own operations
    with no error at all in the accumulator.
    """
    device = torch.device("cuda")
    m, n, k = shape
    x = ternary((m, k), rng).to(device, arithmetic.dtype)
    weight = ternary((n, k), rng).to(device, arithmetic.dtype)
    drawn = draw_operands(name, n, arithmetic, device, rng)
    operands = drawn.map(lambda tensor: ternary(tuple(tensor.shape), rng).to(tensor))
    operands.scalars = [2.0 for _ in operands.scalars]
    problem = Problem(name, arithmetic, x, weight, operands)
    acc = reference.wide(x) @ reference.wide(weight).mT
    assert float(acc.abs().max()) <= 256, "not representable in bf16: choose a smaller K"
    exact_acc = reference.Bounded(acc, torch.zeros_like(acc))
    actual = problem.run()
    bounded = reference.after_epilogue(name, exact_acc, operands, arithmetic)
    reference.assert_within(actual, bounded)
    if torch.equal(bounded.expected, (bounded.expected * 2).round() / 2):
        assert torch.equal(actual, bounded.expected.to(arithmetic.dtype))


@epilogues
@arithmetics
def test_sums_beyond_the_operands_precision(name: str, arithmetic: Arithmetic) -> None:
    """K ones sum to K in the accumulator even where K has no 16-bit neighbours: nothing adds in 16 bits."""
    device, k = torch.device("cuda"), 4096
    x = torch.ones(16, k, dtype=arithmetic.dtype, device=device)
    weight = torch.ones(16, k, dtype=arithmetic.dtype, device=device)
    rng = torch.Generator().manual_seed(1)
    operands = draw_operands(name, 16, arithmetic, device, rng).map(torch.zeros_like)
    operands.tensors = [torch.ones_like(tensor) for tensor in operands.tensors]
    operands.scalars = [1.0 for _ in operands.scalars]
    problem = Problem(name, arithmetic, x, weight, operands)
    acc = torch.full((16, 16), float(k), dtype=torch.float64, device=device)
    rounding = (
        k * arithmetic.output_unit
    )  # the second path may round a product of 4096 plus an epilogue's own
    bounded = reference.after_epilogue(
        name, reference.Bounded(acc, torch.full_like(acc, rounding)), operands, arithmetic
    )
    reference.assert_within(problem.run(), bounded)
