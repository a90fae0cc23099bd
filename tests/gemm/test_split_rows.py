"""The split of fp32 rows into fp16 slices: on a GPU the kernel, bit by bit what stands in for it on a CPU.

That (tests/support/splitting.py) is the formula in PyTorch, which is held to what the slices promise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm.packs.weight_packs import pack_bytes
from tests.support import layouts
from tests.support.packs import INTERLEAVE, decode
from tests.support.splitting import INFINITE, NAN, TINY, split_rows
from tests.support.watching import POISON

ALIGNMENT = 256
INF = float("inf")
# One, short, at and around the interleave, rows held in registers and rows that are read twice. Of a transposed matrix:
# strips of 8, 16 and 32 rows, whole or not, in one CTA or in up to eight.
SIZES = [(1, 1), (3, 7), (5, 64), (2, 65), (33, 130), (16, 1000), (130, 257), (2, 20001), (300, 9000)]
STRIPS = [(64, 64), (64, 4097), (200, 1025), (400, 300), (803, 2100), (1000, 640)]
one_or_two = pytest.mark.parametrize("slices", [1, 2])


class Split(NamedTuple):
    """The sections of a pack, with each pair of slices as it lies."""

    roots: Tensor
    facts: Tensor
    tiny: Tensor
    slices: Tensor


def apart(pack: Tensor, matrix: Tensor, slices: int) -> Split:
    rows, columns = matrix.shape
    width = -(-columns // INTERLEAVE) * INTERLEAVE if slices == 2 else -(-columns // 8) * 8
    section = -(-4 * rows // ALIGNMENT) * ALIGNMENT
    roots, facts, tiny = (pack[i * section :][: 4 * rows] for i in range(3))
    halves = pack[3 * section :][: 2 * slices * rows * width].view(torch.float16)
    return Split(roots.view(torch.float32), facts.view(torch.int32), tiny.view(torch.int32), halves)


def split(matrix: Tensor, slices: int) -> Split:
    """By the operator; nothing is written behind the sections."""
    size, behind = pack_bytes(*matrix.shape, slices), 512
    pack = torch.full((size + behind,), POISON, dtype=torch.uint8, device=matrix.device)
    torch.ops.epigemm._split_rows_out(matrix, slices, pack)
    assert bool((pack[size:] == POISON).all())
    return apart(pack[:size].cpu(), matrix, slices)


def check(matrix: Tensor, slices: int) -> Split:
    """The same bits as the formula's, except that zeros may have either sign."""
    found, size = split(matrix, slices), pack_bytes(*matrix.shape, slices)
    pack = torch.full((size,), POISON, dtype=torch.uint8)
    split_rows(matrix.cpu(), slices, pack)
    for one, other in zip(found, apart(pack, matrix, slices), strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    return found


def normal(rng: torch.Generator, *size: int) -> Tensor:
    return torch.randn(*size, generator=rng)


def wide(rng: torch.Generator, *size: int) -> Tensor:
    """Exponents from 2^-40 to 2^40 in every row: most elements lose bits."""
    return normal(rng, *size) * torch.exp2(torch.randint(-40, 41, size, generator=rng).float())


def not_finite(rng: torch.Generator, *size: int) -> Tensor:
    """Some of it, and some zeros: a few in most rows, or all of a row."""
    matrix, kind = normal(rng, *size), torch.randint(0, 60, size, generator=rng)
    for value, special in enumerate((INF, -INF, float("nan"), 0.0, 2.0**-149)):
        matrix[kind == value] = special
        matrix[value::31] = special
    return matrix


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    **layouts.LAYOUTS,
    "every other of both": lambda matrix: (
        matrix.t().repeat_interleave(2, 0).repeat_interleave(2, 1).t()[::2, ::2]
    ),
    "behind three columns": lambda matrix: torch.nn.functional.pad(matrix, (3, 0))[:, 3:],
    "one row expanded": lambda matrix: matrix[:1].expand(matrix.shape),
    "one column expanded": lambda matrix: matrix[:, :1].expand(matrix.shape),
}


@one_or_two
@pytest.mark.parametrize("draw", [normal, wide, not_finite])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.gpu
def test_the_kernel(layout: str, draw: Callable[..., Tensor], slices: int, rng: torch.Generator) -> None:
    """Twice, with the same bits."""
    for size in [*SIZES, *STRIPS, (1, 5), (5, 1), (70, 1000), (3, 9001), (0, 0), (0, 8), (4, 0)]:
        matrix = LAYOUTS[layout](draw(rng, *size).cuda())
        first, second = check(matrix, slices), split(matrix, slices)
        assert all(
            torch.equal(one.nan_to_num(7.0), two.nan_to_num(7.0))
            for one, two in zip(first, second, strict=True)
        )


@one_or_two
@pytest.mark.every(5)
@pytest.mark.parametrize("exponent", range(-149, 128, 3))
def test_every_magnitude_of_a_row(
    exponent: int, slices: int, device: torch.device, rng: torch.Generator
) -> None:
    """A row's largest element anywhere in fp32's range, subnormals included."""
    row = torch.rand(1, 96, generator=rng, dtype=torch.float64) * 2.0**exponent
    row[0, 17] = 2.0**exponent
    largest = float(check(row.float().to(device), slices).slices[: 96 * slices].abs().max())
    assert largest < 2.0**15 and (exponent <= -113 or largest >= 2.0**13)


@one_or_two
def test_what_slices_keep(slices: int, device: torch.device, rng: torch.Generator) -> None:
    """22 or 11 bits; below 2^-14 on the row's scale the error has an absolute bound in place of a relative one."""
    matrix = torch.cat([normal(rng, 20, 500), wide(rng, 20, 500)])
    pack = torch.empty(pack_bytes(40, 500, slices), dtype=torch.uint8, device=device)
    torch.ops.epigemm._split_rows_out(matrix.to(device), slices, pack)
    roots = apart(pack.cpu(), matrix, slices).roots.double()[:, None]
    kept, floor = (2.0**-22, 2.0**-36) if slices == 2 else (2.0**-11, 2.0**-25)
    error = (decode(pack.cpu(), 40, 500, slices) - matrix.double()).abs()
    assert bool((error <= torch.maximum(kept * matrix.double().abs(), floor * roots**2)).all())


ROWS: list[tuple[list[float], int]] = [
    ([0.0, -0.0, 0.0, 0.0], 4),  # a row of zeros loses nothing: all of it counts as large
    ([1.0, 1.0, 1.0, 1.0], 4),
    ([1.0, 2.0**-8, -(2.0**-8), 2.0**-8 * (1 - 2.0**-23)], 3),
    ([1.0, 2.0**-28, 0.0, 0.0], 1),  # at 2^-14 once scaled: whole still
    ([1.0, 2.0**-29, 0.0, 0.0], 1 | TINY),
    ([2.0**127, 2.0**-149, 0.0, 0.0], 1 | TINY),  # underflows to zero: it loses everything
    ([torch.finfo(torch.float32).max] * 2 + [1.0, 0.0], 2 | TINY),  # and does not overflow
    ([1.0, INF, 0.0, 0.0], 1 | INFINITE),
    ([1.0, -INF, float("nan"), 1.0], 2 | INFINITE | NAN),
    ([float("nan"), 0.0, 0.0, 0.0], 4 | NAN),  # nothing finite but zeros
    ([INF] * 4, 4 | INFINITE),
]


@one_or_two
def test_facts_of_hand_made_rows(slices: int, device: torch.device) -> None:
    """What is not finite counts as zero: in the slices, and for the row's scale."""
    matrix = torch.tensor([row for row, _ in ROWS], device=device)
    found = check(matrix, slices)
    assert found.facts.tolist() == [facts for _, facts in ROWS]
    plain = split(torch.where(matrix.isfinite(), matrix, 0.0), slices)
    assert torch.equal(found.slices, plain.slices) and torch.equal(found.roots, plain.roots)
    assert bool(found.slices.isfinite().all())


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
    pack = torch.zeros(pack_bytes(4, 8, 2) + change, dtype=torch.uint8, device="cuda")
    with pytest.raises(RuntimeError, match=message):
        torch.ops.epigemm._split_rows_out(matrix.cuda(), count, pack)


assert epigemm.__version__  # importing the package is what defines the operator above
