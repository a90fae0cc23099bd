"""Cases of batch invariance: rows at many places among other rows, compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def bits(tensor: Tensor) -> Tensor:
    """For comparisons in which a NaN equals itself, and -0 is not 0."""
    return tensor.contiguous().view(BITS[tensor.dtype])


def selections(rows: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Which rows make a batch: a permutation, random ones with repetitions, stretches from odd starts, few and one."""
    yield torch.randperm(rows, generator=rng)
    yield torch.randint(rows, (min(2 * rows, rows + 100),), generator=rng)
    for start, count in ((1, 1), (3, 5), (rows // 3, rows // 2), (rows - 1, 1), (0, 1)):
        yield torch.arange(start, min(start + max(count, 1), rows))
    yield torch.randperm(rows, generator=rng)[: max(rows // 7, 1)]


def assert_rows_keep_their_bits(call: Callable[[Tensor], Tensor], x: Tensor, rng: torch.Generator) -> None:
    """`call` gives each row of `x` the same bits in every batch: gathered rows, and views of x where they lie."""
    together = bits(call(x))
    for chosen in selections(x.shape[0], rng):
        chosen = chosen.to(x.device)
        assert torch.equal(bits(call(x[chosen])), together[chosen]), f"rows {chosen.tolist()[:9]} ..."
    for start in (1, 3, x.shape[0] // 2):
        assert torch.equal(bits(call(x[start:])), together[start:]), f"x[{start}:]"
    padded = torch.cat([torch.full_like(x[:5], 3.0), x, torch.zeros_like(x[:77])])
    assert torch.equal(bits(call(padded))[5 : 5 + x.shape[0]], together), "a padded batch"


def assert_each_row_alone(call: Callable[[Tensor], Tensor], x: Tensor, rows: list[int]) -> None:
    """`call` gives each of these rows the bits that it has in the whole."""
    together = bits(call(x))
    for row in rows:
        assert torch.equal(bits(call(x[row : row + 1])), together[row : row + 1]), f"row {row}"
