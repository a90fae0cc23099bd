"""The split of fp32 rows into fp16 slices, bit for bit against the formula in NumPy's float64.

On a GPU these are tests of the kernel, on a CPU of what stands in for it in other tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

import epigemm

POISON = 0xFF  # every fp16, fp32 and count of such bytes is wrong
ALIGNMENT = 256
INTERLEAVE = 64

LARGE_MASK = (1 << 28) - 1
TINY, INFINITE, NAN = 1 << 28, 1 << 29, 1 << 30

# One, short, at and around the interleave, rows held in registers and rows that are read twice.
SIZES = [(1, 1), (3, 7), (5, 64), (2, 65), (33, 130), (16, 1000), (130, 257), (2, 20001), (300, 9000)]


@dataclass(frozen=True)
class Split:
    """The sections of a buffer."""

    roots: npt.NDArray[np.float32]
    facts: npt.NDArray[np.int32]
    tiny: npt.NDArray[np.int32]
    high: npt.NDArray[np.float16]  # [rows, padded columns]
    low: npt.NDArray[np.float16] | None


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def padded(columns: int, pieces: int) -> int:
    return up(columns, INTERLEAVE if pieces == 2 else 8)


def split_bytes(rows: int, columns: int, pieces: int) -> int:
    return 3 * up(4 * rows, ALIGNMENT) + up(2 * pieces * rows * padded(columns, pieces), ALIGNMENT)


def split_into(matrix: Tensor, pieces: int, pack: Tensor) -> Split:
    """Run the operator and take the buffer apart."""
    torch.ops.epigemm._split_rows_out(matrix, pieces, pack)
    rows, columns = matrix.shape
    section, width = up(4 * rows, ALIGNMENT), padded(columns, pieces)
    raw = pack.cpu().numpy()
    halves = raw[3 * section : 3 * section + 2 * pieces * rows * width].view(np.float16)
    roots = raw[: 4 * rows].view(np.float32)
    facts, tiny = (raw[i * section : i * section + 4 * rows].view(np.int32) for i in (1, 2))
    if pieces == 1:
        return Split(roots, facts, tiny, halves.reshape(rows, width), None)
    blocks = halves.reshape(rows, width // INTERLEAVE, 2, INTERLEAVE)
    return Split(roots, facts, tiny, *(blocks[:, :, i].reshape(rows, width) for i in (0, 1)))


def split(matrix: Tensor, pieces: int) -> Split:
    size = split_bytes(matrix.shape[0], matrix.shape[1], pieces)
    return split_into(matrix, pieces, torch.full((size,), POISON, dtype=torch.uint8, device=matrix.device))


def row_exponent(largest: float) -> int:
    """The even e with 2^13 <= largest * 2^e < 2^15; at most 126, so that 2^e is a normal number."""
    if largest == 0:
        return 0
    wanted = next(e for e in range(-114, 164, 2) if 2.0**13 <= largest * 2.0**e < 2.0**15)
    return min(wanted, 126)


def expected(matrix: Tensor, pieces: int) -> Split:
    """The formula. Every step before a conversion is exact in float64."""
    x = matrix.cpu().numpy().astype(np.float64)
    columns = x.shape[1]
    finite = np.where(np.isfinite(x), x, 0.0)
    largest = np.abs(finite).max(axis=1, initial=0.0)
    exponents = np.array([row_exponent(value) for value in largest], dtype=np.float64)
    scaled = (finite * 2.0 ** exponents[:, None]).astype(np.float32).astype(np.float64)
    high = scaled.astype(np.float16)
    low = ((scaled - high) * 2.0**11).astype(np.float16)
    size = np.abs(scaled)
    large = (size >= size.max(axis=1, initial=0.0)[:, None] * 2.0**-8).sum(axis=1)
    facts = np.where(largest > 0, large, columns)
    tiny = (finite != 0) & (size < 2.0**-14)
    for flag, where in (
        (TINY, tiny),
        (INFINITE, np.isinf(x)),
        (NAN, np.isnan(x)),
    ):
        facts = facts | np.where(where.any(axis=1), flag, 0)
    padding = ((0, 0), (0, padded(columns, pieces) - columns))
    return Split(
        (2.0 ** (-exponents / 2)).astype(np.float32),
        facts.astype(np.int32),
        tiny.sum(axis=1).astype(np.int32),
        np.pad(high, padding),
        np.pad(low, padding) if pieces == 2 else None,
    )


def assert_same(actual: Split, wanted: Split) -> None:
    """The same bits, except that zeros may have either sign."""
    np.testing.assert_array_equal(actual.roots, wanted.roots)
    np.testing.assert_array_equal(actual.facts, wanted.facts)
    np.testing.assert_array_equal(actual.tiny, wanted.tiny)
    np.testing.assert_array_equal(actual.high, wanted.high)
    if wanted.low is None:
        assert actual.low is None
    else:
        assert actual.low is not None
        np.testing.assert_array_equal(actual.low, wanted.low)


def check(matrix: Tensor, pieces: int) -> Split:
    actual = split(matrix, pieces)
    assert_same(actual, expected(matrix, pieces))
    return actual


@pytest.fixture(params=[1, 2], ids=["one-piece", "two-pieces"])
def pieces(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def normal(rng: torch.Generator, *size: int) -> Tensor:
    return torch.randn(*size, generator=rng)


def wide(rng: torch.Generator, *size: int) -> Tensor:
    """Exponents from 2^-40 to 2^40 in every row: most elements lose bits."""
    return normal(rng, *size) * torch.exp2(torch.randint(-40, 41, size, generator=rng).float())


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("draw", [normal, wide], ids=["normal", "wide"])
def test_formula(
    draw: Callable[..., Tensor],
    size: tuple[int, int],
    pieces: int,
    device: torch.device,
    rng: torch.Generator,
) -> None:
    check(draw(rng, *size).to(device), pieces)


@pytest.mark.every(5)
@pytest.mark.parametrize("exponent", range(-149, 128, 3))
def test_every_magnitude_of_a_row(
    exponent: int, pieces: int, device: torch.device, rng: torch.Generator
) -> None:
    """A row's largest element anywhere in fp32's range, subnormals included."""
    row = torch.rand(1, 96, generator=rng, dtype=torch.float64) * 2.0**exponent
    row[0, 17] = 2.0**exponent
    found = check(row.float().to(device), pieces)
    largest = abs(float(found.high.astype(np.float64).max()))
    assert largest < 2.0**15 and (exponent <= -113 or largest >= 2.0**13)


def test_largest_numbers_do_not_overflow(pieces: int, device: torch.device) -> None:
    largest = torch.finfo(torch.float32).max
    matrix = torch.tensor([[largest, -largest, 1.0], [largest, 0.0, 2.0**-149]], device=device)
    assert np.isfinite(check(matrix, pieces).high).all()


def test_two_pieces_keep_22_bits(device: torch.device, rng: torch.Generator) -> None:
    matrix = normal(rng, 20, 500)
    found = split(matrix.to(device), 2)
    assert found.low is not None
    values = found.high[:, :500].astype(np.float64) + found.low[:, :500] * 2.0**-11
    back = values * found.roots.astype(np.float64)[:, None] ** 2
    exact = matrix.numpy().astype(np.float64)
    # Below 2^-14 on the row's scale the error has an absolute bound, 2^-36, in place of a relative one.
    floor = 2.0**-36 * found.roots.astype(np.float64)[:, None] ** 2
    assert (np.abs(back - exact) <= np.maximum(2.0**-22 * np.abs(exact), floor)).all()


def test_facts_of_hand_made_rows(pieces: int, device: torch.device) -> None:
    one = 1.0
    rows: list[tuple[list[float], int]] = [
        ([0.0, -0.0, 0.0, 0.0], 4),  # a row of zeros loses nothing: all of it counts as large
        ([one, one, one, one], 4),
        ([one, 2.0**-8, -(2.0**-8), 2.0**-8 * (1 - 2.0**-23)], 3),
        ([one, 2.0**-28, 0.0, 0.0], 1),  # at 2^-14 once scaled: whole still
        ([one, 2.0**-29, 0.0, 0.0], 1 | TINY),
        ([2.0**127, 2.0**-149, 0.0, 0.0], 1 | TINY),  # underflows to zero: it loses everything
        ([one, float("inf"), 0.0, 0.0], 1 | INFINITE),
        ([one, float("-inf"), float("nan"), one], 2 | INFINITE | NAN),
        ([float("nan"), 0.0, 0.0, 0.0], 4 | NAN),  # nothing finite but zeros
        ([float("inf")] * 4, 4 | INFINITE),
    ]
    matrix = torch.tensor([row for row, _ in rows], device=device)
    assert check(matrix, pieces).facts.tolist() == [facts for _, facts in rows]


def test_numbers_that_are_not_finite_leave_the_rest_alone(
    pieces: int, device: torch.device, rng: torch.Generator
) -> None:
    """They count as zeros: in the pieces, and for the row's scale."""
    matrix = normal(rng, 6, 200)
    special = matrix.clone()
    for row, value in enumerate((float("inf"), float("-inf"), float("nan"))):
        special[row, 3 + 60 * row] = value
    found = check(special.to(device), pieces)
    plain = split(torch.where(special.isfinite(), special, 0.0).to(device), pieces)
    assert (found.facts & (INFINITE | NAN)).tolist() == [INFINITE, INFINITE, NAN, 0, 0, 0]
    np.testing.assert_array_equal(found.high, plain.high)
    np.testing.assert_array_equal(found.roots, plain.roots)


def transposed(rng: torch.Generator, rows: int, columns: int, device: torch.device) -> Tensor:
    return normal(rng, columns, rows).to(device).t()


def every_other_column(rng: torch.Generator, rows: int, columns: int, device: torch.device) -> Tensor:
    return normal(rng, rows, 2 * columns).to(device)[:, ::2]


def every_other_of_both(rng: torch.Generator, rows: int, columns: int, device: torch.device) -> Tensor:
    return normal(rng, 2 * columns, 2 * rows).to(device).t()[::2, ::2]


def misaligned(rng: torch.Generator, rows: int, columns: int, device: torch.device) -> Tensor:
    return normal(rng, rows, columns + 3).to(device)[:, 3:]


def aligned_rows_of_a_wider_matrix(
    rng: torch.Generator, rows: int, columns: int, device: torch.device
) -> Tensor:
    return normal(rng, rows, up(columns, 4) + 8).to(device)[:, 4 : 4 + columns]


def one_row_expanded(rng: torch.Generator, rows: int, columns: int, device: torch.device) -> Tensor:
    return normal(rng, 1, columns).to(device).expand(rows, columns)


def one_column_expanded(rng: torch.Generator, rows: int, columns: int, device: torch.device) -> Tensor:
    return normal(rng, rows, 1).to(device).expand(rows, columns)


LAYOUTS = [
    transposed,
    every_other_column,
    every_other_of_both,
    misaligned,
    aligned_rows_of_a_wider_matrix,
    one_row_expanded,
    one_column_expanded,
]


@pytest.mark.every(5)
@pytest.mark.parametrize("size", [(1, 5), (5, 1), (33, 130), (64, 64), (70, 1000), (3, 9001)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_any_strides(
    layout: Callable[..., Tensor],
    size: tuple[int, int],
    pieces: int,
    device: torch.device,
    rng: torch.Generator,
) -> None:
    check(layout(rng, *size, device), pieces)


def test_transposed_with_every_kind_of_element(
    pieces: int, device: torch.device, rng: torch.Generator
) -> None:
    matrix = wide(rng, 700, 45)
    matrix[:, 0] = 0
    matrix[5, 1], matrix[699, 2], matrix[64, 3] = float("inf"), float("nan"), 3e38
    matrix[:, 4] *= 2.0**-120
    check(matrix.to(device).t(), pieces)


@pytest.mark.parametrize("size", [(0, 0), (0, 8), (4, 0)], ids=str)
def test_empty(size: tuple[int, int], pieces: int, device: torch.device) -> None:
    found = split(torch.empty(size, device=device), pieces)
    assert found.high.size == 0
    assert found.roots.tolist() == [1.0] * size[0]
    assert found.facts.tolist() == [0] * size[0]


def test_nothing_is_written_behind_the_sections(
    pieces: int, device: torch.device, rng: torch.Generator
) -> None:
    matrix = normal(rng, 5, 70).to(device)
    size, behind = split_bytes(5, 70, pieces), 512
    pack = torch.full((size + behind,), POISON, dtype=torch.uint8, device=device)
    assert_same(split_into(matrix, pieces, pack), expected(matrix, pieces))
    assert bool((pack[size:] == POISON).all())


def test_every_device_gives_the_same_bits_twice(
    pieces: int, device: torch.device, rng: torch.Generator
) -> None:
    matrix = wide(rng, 40, 3000).to(device)
    packs = [torch.zeros(split_bytes(40, 3000, pieces), dtype=torch.uint8, device=device) for _ in range(2)]
    for pack in packs:
        torch.ops.epigemm._split_rows_out(matrix, pieces, pack)
    assert torch.equal(packs[0], packs[1])


@pytest.mark.parametrize(
    ("matrix", "count", "change", "message"),
    [
        (torch.zeros(4, 8), 3, 0, "slices must be 1 or 2, got 3"),
        (torch.zeros(4, 8), 0, 0, "slices must be 1 or 2, got 0"),
        (torch.zeros(4, 8, dtype=torch.float64), 2, 0, "matrix must be float32"),
        (torch.zeros(8), 2, 0, "matrix has shape .*, expected 2 dimensions"),
        (torch.zeros(4, 8), 2, -1, "pack has .* bytes, expected at least"),
    ],
)
@pytest.mark.gpu
def test_refused(matrix: Tensor, count: int, change: int, message: str) -> None:
    size = split_bytes(4, 8, 2) + change
    pack = torch.zeros(size, dtype=torch.uint8, device="cuda")
    with pytest.raises(RuntimeError, match=message):
        torch.ops.epigemm._split_rows_out(matrix.cuda(), count, pack)


assert epigemm.__version__  # importing the package is what defines the operator above
