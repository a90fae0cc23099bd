"""BatchNorm by the batch's own statistics, and its derivative, against float64: on a GPU by the kernels."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from epigemm._native import ops
from epigemm.calls import batch_norm, moments
from epigemm.calls.batch_norm import NOTHING_RUNS, Norm, Running
from epigemm.epilogues.registry import compute_dtype
from tests.support import norm_calls
from tests.support.cases import poisoned
from tests.support.moments import poison_free_memory

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHAPES = [(2, 1), (3, 5), (9, 32), (33, 257), (64, 512), (300, 264), (1025, 72), (5000, 8), (70, 2048)]
PRESENT = {"all": (True, True, True), "none": (False, False, False), "scale": (True, False, False)}
PARTS = 1100
"""No sum has more additions one after the other: those of a part of the rows, and those of at most 1024 parts."""
OTHERS = 16
"""Operations on a value beside those of a sum."""

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
relus = pytest.mark.parametrize("relu", [False, True], ids=["plain", "relu"])


@pytest.fixture(autouse=True)
def _passes_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    norm_calls.pretended(monkeypatch)


class Case(NamedTuple):
    """A product, the gradient of what is made of it, and what follows; and float64's moments of the product."""

    u: Tensor
    grad: Tensor
    norm: Norm
    mean: Tensor
    var: Tensor

    @property
    def spread(self) -> Tensor:
        """What an error of u - mean is relative to: u, and the terms of the mean's sum.

        These are u's distances from its first row. |u| + |mean| may be far smaller, where the mean is near 0.
        """
        size = self.u.double().abs()
        return size + size.mean(0) + size[0]

    @property
    def var_size(self) -> Tensor:
        """The same for the variance."""
        return self.spread.square().mean(0)


def draw(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    rng: torch.Generator,
    *,
    present: str = "all",
    relu: bool = False,
    shift: float = 0.5,
    vector_dtype: torch.dtype | None = None,
    offset: int = 0,
) -> Case:
    """`offset`: elements between an aligned address and the matrices."""
    rows, columns = shape

    def matrix() -> Tensor:
        values = torch.randn(rows * columns + offset, generator=rng).to(device, dtype)
        return values[offset:].view(shape)

    vectors = [
        torch.randn(columns, generator=rng).to(device, vector_dtype or dtype) if is_there else None
        for is_there in PRESENT[present]
    ]
    if vectors[0] is not None:
        vectors[0][0] = 0.0  # a scale of 0 hides the product, not its gradients
    u, grad = matrix(), matrix()
    u += shift
    var, mean = torch.var_mean(u.double(), 0, correction=0)
    scale, weight, bias = vectors
    return Case(u, grad, Norm(scale, weight, bias, 1e-3, relu), mean, var)


def wide(vector: Tensor | None, like: Tensor, absent: float) -> Tensor:
    return torch.full_like(like, absent) if vector is None else vector.double()


def assert_near(actual: Tensor | None, expected: Tensor, size: Tensor, rows: int) -> None:
    """Within one rounding to the result's type, and those of the two computations: `size` is that of a sum's terms.

    A sum of n terms is off by n - 1 roundings of the terms' sizes, in any order (N. J. Higham, Accuracy and Stability
    of Numerical Algorithms, section 4.2). What is expected has the roundings of float64.
    """
    assert actual is not None
    unit, step = torch.finfo(actual.dtype).eps / 2, torch.finfo(compute_dtype(actual.dtype)).eps / 2
    steps = (min(rows, PARTS) + OTHERS) * (step + torch.finfo(torch.float64).eps / 2)
    floor = torch.finfo(actual.dtype).tiny
    allowed = unit * expected.abs() + steps * size + floor
    error = (actual.double() - expected).abs()
    assert not (excess := ~(error <= allowed)).any(), (error / allowed)[excess].max()


def run(case: Case, running: Running = NOTHING_RUNS) -> Tensor:
    return batch_norm.normalise(case.u, moments.column_moments(case.u), case.norm, running)


def gradients(case: Case, dtypes: tuple[torch.dtype | None, ...] | None = None) -> batch_norm.Gradients:
    vectors = [None if each is None else each.dtype for each in case.norm[:3]]
    wanted = dtypes or (case.u.dtype, case.u.dtype, *vectors)
    mean, var, *_ = moments.column_moments(case.u)
    return batch_norm.gradients(case.grad, case.u, mean, var, case.norm, wanted)


def of_inverse(case: Case, scale: Tensor) -> tuple[Tensor, Tensor]:
    """1 / sqrt(scale^2 * var + eps), and what a relative error of its square is a multiple of."""
    inverse = (scale * scale * case.var + case.norm.eps).rsqrt()
    return inverse, (scale * inverse).square() * case.var_size


def check_result(case: Case, found: Tensor) -> None:
    u, _, norm, mean, _ = case
    scale, weight, bias = (
        wide(vector, mean, absent) for vector, absent in zip(norm[:3], (1.0, 1.0, 0.0), strict=True)
    )
    inverse, of_var = of_inverse(case, scale)
    slope, centred = weight * scale * inverse, u.double() - mean
    expected = centred * slope + bias
    size = (case.spread + centred.abs() * of_var / 2) * slope.abs() + bias.abs()
    assert_near(found, torch.relu(expected) if norm.relu else expected, size, len(u))


def check_gradients(case: Case, found: batch_norm.Gradients) -> None:
    """Where a ReLU has cut is read off the forward pass, which may round a 0 to either side."""
    u, grad, norm, mean, _ = case
    scale, weight, _ = (
        wide(vector, mean, absent) for vector, absent in zip(norm[:3], (1.0, 1.0, 0.0), strict=True)
    )
    inverse, of_var = of_inverse(case, scale)
    t = scale * inverse
    g = torch.where(run(case) <= 0, 0.0, grad.double()) if norm.relu else grad.double()
    centred, rows = u.double() - mean, u.shape[0]
    spread = case.spread + centred.abs() * of_var * 1.5  # three factors `inverse`
    total, total_size = g.sum(0), g.abs().sum(0)
    second, second_size = (g * centred).sum(0), (g.abs() * spread).sum(0)
    slope = weight * t
    expected = slope * (g - total / rows - centred * (t * t * second / rows))
    size = slope.abs() * (
        (g.abs() + total_size / rows) * (1 + of_var / 2) + spread * (t * t * second_size / rows)
    )
    assert_near(found.u, expected, size, rows)
    of_scale = weight * norm.eps * inverse**3
    for actual, vector, factor, sums in (
        (found.scale, norm.scale, of_scale, (second, second_size)),
        (found.weight, norm.weight, t, (second, second_size)),
        (found.bias, norm.bias, torch.ones_like(t), (total, total_size)),
    ):
        if vector is None:
            assert actual is None
        else:
            assert_near(actual, factor * sums[0], factor.abs() * sums[1], rows)
    assert found.shift is not None and not found.shift.any()


@dtypes
@pytest.mark.parametrize(
    ("shape", "present"),
    [*((shape, "all") for shape in SHAPES), *(((33, 257), name) for name in PRESENT), ((40, 264), "none")],
    ids=str,
)
@relus
@pytest.mark.every(5)
def test_values_and_gradients(
    dtype: torch.dtype,
    shape: tuple[int, int],
    present: str,
    relu: bool,
    device: torch.device,
    rng: torch.Generator,
) -> None:
    """With vectors of the product's dtype, and in fp32 beside one in 16 bits."""
    for wide_vectors in {None, torch.float32 if dtype.itemsize == 2 else None}:
        case = draw(shape, dtype, device, rng, present=present, relu=relu, vector_dtype=wide_vectors)
        check_result(case, run(case))
        found = gradients(case)
        check_gradients(case, found)
        assert found.u is not None and found.u.dtype is dtype
        assert found.weight is None or found.weight.dtype is (wide_vectors or dtype)


def test_a_mean_of_ten_thousand_deviations(device: torch.device, rng: torch.Generator) -> None:
    """What u * slope + offset would lose, (u - mean) * slope + bias keeps: within the rounding of the mean."""
    case = draw((300, 264), torch.float32, device, rng, shift=1e4)
    expected = F.batch_norm(case.u.double(), None, None, training=True, eps=1e-3)
    plain = case._replace(norm=Norm(None, None, None, 1e-3, False))
    rounding = 1e4 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(run(plain).double(), expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("momentum", [0.0, 0.3, 1.0, None], ids=str)
@pytest.mark.parametrize("of_vectors", DTYPES[1:], ids=str)
def test_running_statistics(
    momentum: float | None, of_vectors: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    dtype = torch.float64 if of_vectors is torch.float64 else torch.float32
    for shape in [(33, 257), (40, 264)]:
        case = draw(shape, dtype, device, rng)
        before = [torch.rand(shape[1], generator=rng).to(device, of_vectors) for _ in range(2)]
        mean, var = (each.clone() for each in before)
        versions = [each._version for each in (mean, var)]
        tracked = torch.tensor(3, device=device)
        run(case, Running(mean, var, tracked, momentum))
        assert tracked.item() == 4 and tracked._version == 1
        assert versions == [each._version for each in (mean, var)]  # as with PyTorch's
        scale = wide(case.norm.scale, case.mean, 1.0)
        factor = 0.25 if momentum is None else momentum
        new = (scale * case.mean, scale * scale * case.var * shape[0] / (shape[0] - 1))
        sizes = (scale.abs() * case.spread.mean(0), scale * scale * case.var_size * 2)
        for actual, was, value, of_value in zip((mean, var), before, new, sizes, strict=True):
            expected = (1 - factor) * was.double() + factor * value
            size = was.double().abs() + of_value
            assert_near(actual, expected, size, shape[0])


def test_gradients_that_are_not_finite_reach_the_shift(device: torch.device, rng: torch.Generator) -> None:
    case = draw((33, 40), torch.float32, device, rng)
    case.grad[3, 7] = float("nan")
    found = gradients(case).shift
    assert found is not None and found[7].isnan() and found.isnan().sum() == 1
    case.u[3, 7], case.u[4, 8] = float("nan"), float("inf")
    result = run(case)  # a column with one is NaN, as with PyTorch
    assert result[:, 7:9].isnan().all() and result.isnan().sum() == 2 * 33


# --- the kernels alone -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@dtypes
@relus
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "at any address"])
@pytest.mark.parametrize("chunks", [1, 7, 40])
def test_poisoned_memory_and_two_runs(
    dtype: torch.dtype, relu: bool, offset: int, chunks: int, rng: torch.Generator
) -> None:
    device = torch.device("cuda")
    for shape in [(40, 263), (129, 264), (1000, 520)]:
        case = draw(shape, dtype, device, rng, relu=relu, offset=offset)
        mean, var, *_ = moments.column_moments(case.u)
        results = []
        for _ in range(2):
            y, of_u = (
                poisoned((case.u.numel() + offset,), dtype, device)[offset:].view(shape) for _ in range(2)
            )
            of_vectors = [poisoned((shape[1],), dtype, device) for _ in range(4)]
            workspace = poisoned((2 * chunks + 3, shape[1]), mean.dtype, device)
            ops._batch_norm_out(case.u, mean, var, *case.norm, None, None, None, 0.0, y)
            ops._batch_norm_backward_out(
                case.grad, case.u, mean, var, *case.norm, of_u, *of_vectors, workspace
            )
            results.append((y, of_u, *of_vectors))
        check_result(case, results[0][0])
        of_scale, of_weight, of_bias, of_shift = results[0][2:]
        check_gradients(case, batch_norm.Gradients(results[0][1], of_shift, of_scale, of_weight, of_bias))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("momentum", [0.3, None], ids=str)
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "at any address"])
def test_few_blocks_are_merged_to_the_same_bits(
    dtype: torch.dtype, momentum: float | None, offset: int, rng: torch.Generator
) -> None:
    """As by a kernel of their own: moments, result, running statistics, the number of batches."""
    device = torch.device("cuda")
    for shape in [(2, 1), (63, 40), (64, 264), (65, 33), (700, 8192), (1000, 257), (1024, 520), (1024, 2048)]:
        case = draw(shape, dtype, device, rng, relu=True, shift=3.0, offset=offset)
        results = []
        for leaves_blocks in (False, True, True):
            poison_free_memory(device)
            of_u = moments.column_moments(case.u, leaves_blocks=leaves_blocks)
            assert (of_u.blocks is not None) == leaves_blocks
            mean, var = (torch.ones(shape[1], device=device, dtype=dtype) for _ in range(2))
            tracked = torch.tensor(4, device=device)
            y = batch_norm.normalise(case.u, of_u, case.norm, Running(mean, var, tracked, momentum))
            results.append((y, of_u.mean, of_u.var, mean, var, tracked))
        check_result(case, results[0][0])
        assert int(results[0][-1]) == 5
        for apart, *merged in zip(*results, strict=True):
            assert all(torch.equal(apart, each) for each in merged)


@pytest.mark.gpu
def test_special_columns_are_merged_as_apart(rng: torch.Generator) -> None:
    case = draw((1000, 264), torch.bfloat16, torch.device("cuda"), rng)
    case.u[900, 1], case.u[3, 2], case.u[:, 3] = float("nan"), float("inf"), 3.140625
    apart, left = moments.column_moments(case.u), moments.column_moments(case.u, leaves_blocks=True)
    found = [batch_norm.normalise(case.u, each, case.norm, NOTHING_RUNS) for each in (apart, left)]
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)
    for one, other in zip(apart[:2], left[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert left.var[3] == 0 and found[1][:, 1:3].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16384, 1024), (100_000, 24), (1024, 8192)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_many_rows(shape: tuple[int, int], dtype: torch.dtype, rng: torch.Generator) -> None:
    case = draw(shape, dtype, torch.device("cuda"), rng, relu=True)
    check_result(case, run(case))
    check_gradients(case, gradients(case))


@pytest.mark.gpu
def test_what_does_not_fit_is_refused() -> None:
    def like(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(shape, device="cuda", dtype=dtype)

    u, mean, none = like(4, 8), like(8), (None, None, None)
    rest = (None, None, None, 0.1)
    refused = [
        (like(1, 8), mean, mean, "2 rows or more", like(1, 8)),
        (u, like(7), mean, r"mean must be contiguous of shape \[8\]", like(4, 8)),
        (u, mean, like(8, dtype=torch.float64), "variance must have the arithmetic's dtype", like(4, 8)),
        (u, mean, mean, "out must have u's dtype", like(4, 8, dtype=torch.float16)),
        (u.t(), like(4), like(4), "u must be contiguous", like(8, 4)),
    ]
    for matrix, first, second, message, out in refused:
        with pytest.raises(RuntimeError, match=message):
            ops._batch_norm_out(matrix, first, second, *none, 1e-5, False, *rest, out)
    blocks = like(17, 8, 2)
    for given, message in (
        ((blocks, 0), "block_rows is 0, of 4 rows; accepted are 1 to 16 blocks"),
        ((blocks[1:, :7], 2), r"blocks must be contiguous of shape \[2, 8, 2\]"),
        ((blocks[:1], 2), r"blocks must be contiguous of shape \[2, 8, 2\]"),
        ((blocks.double(), 2), r"blocks must be contiguous of shape \[2, 8, 2\]"),
        ((blocks, 2, like(1)), "counted must be one int64"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops._batch_norm_out(u, mean, mean, *none, 1e-5, False, *rest, like(4, 8), *given)
    with pytest.raises(RuntimeError, match="accepted are 1 to 16 blocks"):
        ops._batch_norm_out(like(17, 8), mean, mean, *none, 1e-5, False, *rest, like(17, 8), blocks, 1)
    wanted = (None,) * 5
    with pytest.raises(RuntimeError, match="workspace must be"):
        ops._batch_norm_backward_out(u, u, mean, mean, *none, 1e-5, False, *wanted, like(4, 8))
