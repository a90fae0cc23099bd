"""Every epilogue x arithmetic x shape x layout through the public op, on every device, against float64."""

from __future__ import annotations

import pytest
import torch

from tests.support import problems, reference
from tests.support.arithmetic import ARITHMETICS, FP32, FP64, STORAGE, Arithmetic
from tests.support.cases import LINEAR, declared, draw_operands, has_bias, signed
from tests.support.layouts import LAYOUTS
from tests.support.problems import EMPTY_SHAPES, SMALL_SHAPES, Problem, make, ternary

arithmetics = pytest.mark.parametrize("arithmetic", ARITHMETICS, ids=lambda a: a.name)
epilogues = pytest.mark.parametrize("name", LINEAR)

# Whether these small problems fuse on a GPU is dispatch's choice, so both paths' bounds are allowed here;
# tests/gemm/test_fused_gpu.py holds the fused kernels to their own, tighter one.
EITHER_PATH = True


@pytest.mark.every(7)
@epilogues
@arithmetics
@pytest.mark.parametrize("shape", SMALL_SHAPES, ids=str)
def test_shapes(
    name: str,
    arithmetic: Arithmetic,
    shape: tuple[int, int, int],
    device: torch.device,
    rng: torch.Generator,
) -> None:
    problem = make(name, arithmetic, shape, device, rng)
    problem.check(problem.run(), second_path=EITHER_PATH)


@pytest.mark.every(7)
@epilogues
@arithmetics
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_x_and_weight(
    name: str, arithmetic: Arithmetic, layout: str, device: torch.device, rng: torch.Generator
) -> None:
    for shape in [(24, 40, 32), (9, 7, 5)]:
        problem = make(name, arithmetic, shape, device, rng, x_layout=LAYOUTS[layout])
        problem.check(problem.run(), second_path=EITHER_PATH)
        problem = make(name, arithmetic, shape, device, rng, weight_layout=LAYOUTS[layout])
        problem.check(problem.run(), second_path=EITHER_PATH)


@pytest.mark.every(7)
@epilogues
@arithmetics
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_out(
    name: str, arithmetic: Arithmetic, layout: str, device: torch.device, rng: torch.Generator
) -> None:
    problem = make(name, arithmetic, (24, 40, 32), device, rng)
    out = LAYOUTS[layout](problem.out())
    problem.check(problem.run(out), second_path=EITHER_PATH)


@epilogues
@pytest.mark.parametrize("arithmetic", STORAGE, ids=lambda a: a.name)
def test_out_leaves_its_surroundings_alone(
    name: str, arithmetic: Arithmetic, device: torch.device, rng: torch.Generator
) -> None:
    problem = make(name, arithmetic, (24, 40, 32), device, rng)
    frame = torch.full((26, 56), 5.0, dtype=arithmetic.dtype, device=device)
    problem.run(frame[1:25, 8:48])
    problem.check(frame[1:25, 8:48], second_path=EITHER_PATH)
    frame[1:25, 8:48] = 5.0
    assert bool((frame == 5.0).all())


@pytest.mark.every(7)
@epilogues
@pytest.mark.parametrize("arithmetic", STORAGE, ids=lambda a: a.name)
@pytest.mark.parametrize("leading", [(), (1,), (6,), (2, 3), (2, 1, 3), (3, 0, 2)], ids=str)
def test_leading_dimensions(
    name: str, arithmetic: Arithmetic, leading: tuple[int, ...], device: torch.device, rng: torch.Generator
) -> None:
    operands = draw_operands(name, 16, arithmetic, device, rng)
    x = signed((*leading, 24), rng).to(device, arithmetic.dtype)
    weight = signed((16, 24), rng).to(device, arithmetic.dtype)
    problem = Problem(name, arithmetic, x, weight, operands)
    actual = problem.run()
    assert actual.shape == (*leading, 16)
    problem.check(actual, second_path=EITHER_PATH)


@epilogues
@pytest.mark.parametrize("arithmetic", STORAGE, ids=lambda a: a.name)
def test_leading_dimensions_that_do_not_merge(
    name: str, arithmetic: Arithmetic, device: torch.device, rng: torch.Generator
) -> None:
    operands = draw_operands(name, 16, arithmetic, device, rng)
    weight = signed((16, 24), rng).to(device, arithmetic.dtype)
    base = signed((4, 6, 24), rng).to(device, arithmetic.dtype)
    row = signed((24,), rng).to(device, arithmetic.dtype)
    for x in [base.transpose(0, 1), base[:, ::2], row.expand(3, 5, 24), base[:, :1].expand(4, 7, 24)]:
        problem = Problem(name, arithmetic, x, weight, operands)
        problem.check(problem.run(), second_path=EITHER_PATH)


@pytest.mark.every(7)
@epilogues
@arithmetics
@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
def test_empty(
    name: str,
    arithmetic: Arithmetic,
    shape: tuple[int, int, int],
    device: torch.device,
    rng: torch.Generator,
) -> None:
    """K = 0 is an empty sum: the epilogue of zeros, as in torch."""
    problem = make(name, arithmetic, shape, device, rng)
    problem.check(problem.run(), second_path=EITHER_PATH)


@pytest.mark.parametrize("name", [name for name in LINEAR if has_bias(name)])
@arithmetics
def test_without_bias(name: str, arithmetic: Arithmetic, device: torch.device, rng: torch.Generator) -> None:
    for shape in [(24, 40, 32), (5, 7, 9)]:
        problem = make(name, arithmetic, shape, device, rng, with_bias=False)
        problem.check(problem.run(), second_path=EITHER_PATH)


@pytest.mark.parametrize("name", [name for name in LINEAR if declared(name, "scalar")])
@arithmetics
def test_scalars_as_tensors(
    name: str, arithmetic: Arithmetic, device: torch.device, rng: torch.Generator
) -> None:
    """A 0-d tensor is read on the device: the same bits as the number it holds."""
    problem = make(name, arithmetic, (24, 40, 32), device, rng, tensor_scalars=True)
    actual = problem.run()
    problem.check(actual, second_path=EITHER_PATH)
    scalars = [float(tensor) for tensor in problem.operands.tensors if tensor.dim() == 0]
    problem.operands.tensors = [tensor for tensor in problem.operands.tensors if tensor.dim() != 0]
    problem.operands.scalars = scalars
    assert torch.equal(problem.run(), actual)


@pytest.mark.every(7)
@epilogues
@arithmetics
@pytest.mark.parametrize("shape", [(40, 24, 200), (7, 9, 11), (128, 128, 256)], ids=str)
def test_integers_are_exact(
    name: str,
    arithmetic: Arithmetic,
    shape: tuple[int, int, int],
    device: torch.device,
    rng: torch.Generator,
) -> None:
    """Sums of -1, 0, 1 are exact in every arithmetic, also after the second path's rounding to 16 bits.

    Operands are powers of two and small integers, so wherever the epilogue is piecewise linear its value is exact
    as well: those must match bit for bit. A transcendental one is compared after the bound of its own operations
    with no error at all in the accumulator.
    """
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
def test_sums_beyond_the_operands_precision(name: str, arithmetic: Arithmetic, device: torch.device) -> None:
    """K ones sum to K in the accumulator even where K has no 16-bit neighbours: nothing adds in 16 bits."""
    k = 4096
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


@epilogues
def test_repeats_bit_for_bit(name: str, device: torch.device, rng: torch.Generator) -> None:
    for arithmetic in ARITHMETICS:
        problem = make(name, arithmetic, (96, 72, 136), device, rng)
        first = problem.run()
        for _ in range(3):
            assert torch.equal(problem.run(), first)


@epilogues
def test_allocating_op_equals_its_out_twin(name: str, device: torch.device, rng: torch.Generator) -> None:
    for arithmetic in ARITHMETICS:
        problem = make(name, arithmetic, (24, 40, 32), device, rng)
        returned = torch.ops.epigemm.linear(
            name,
            problem.x,
            problem.weight,
            problem.operands.bias,
            problem.operands.tensors,
            problem.operands.scalars,
            arithmetic.op_precision,
        )
        assert returned.is_contiguous() and returned.dtype is arithmetic.dtype
        assert torch.equal(returned, problem.run())


@pytest.mark.parametrize("arithmetic", [FP32, FP64], ids=lambda a: a.name)
def test_cpu_equals_torch_bit_for_bit_where_nothing_follows(
    arithmetic: Arithmetic, rng: torch.Generator
) -> None:
    """No bias and the plain epilogue: the second path is torch's product and nothing else."""
    if "bias" not in LINEAR:
        pytest.skip("no plain epilogue registered")
    problem = make("bias", arithmetic, (33, 65, 17), "cpu", rng, with_bias=False)
    assert torch.equal(problem.run(), torch.nn.functional.linear(problem.x, problem.weight))


def test_problem_shapes_cover_what_they_claim() -> None:
    assert any(k * 2 % 16 for _, _, k in problems.SMALL_SHAPES)
    assert any(n * 2 % 16 for _, n, _ in problems.SMALL_SHAPES)
