"""Classes of inputs. Each draws x [M, K] and a weight [N, K] in fp32, on the device where they are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Draw:
    """Random fp32 tensors on one device, the same for the same seed (and device type)."""

    generator: torch.Generator

    @classmethod
    def seeded(cls, seed: int, device: torch.device) -> Draw:
        """A source of its own for each seed."""
        return cls(torch.Generator(device).manual_seed(seed))

    def uniform(self, rows: int, columns: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """U(low, high)."""
        values = torch.rand(rows, columns, generator=self.generator, device=self.generator.device)
        return values * (high - low) + low

    def normal(self, rows: int, columns: int) -> Tensor:
        """N(0, 1)."""
        return torch.randn(rows, columns, generator=self.generator, device=self.generator.device)

    def exponents(self, rows: int, columns: int, spread: int) -> Tensor:
        """Integers in [-spread, spread]."""
        shape, device = (rows, columns), self.generator.device
        return torch.randint(-spread, spread + 1, shape, generator=self.generator, device=device)

    def linear(self, rows: int, columns: int) -> Tensor:
        """A weight as `torch.nn.Linear` initialises it: U(-1/sqrt(K), 1/sqrt(K))."""
        bound = columns**-0.5
        return self.uniform(rows, columns, -bound, bound)


@dataclass(frozen=True)
class DataClass:
    """A way to draw x and weight; `title` says what they are."""

    name: str
    title: str
    draw: Callable[[Draw, int, int, int], Pair]

    def make(self, m: int, n: int, k: int, seed: int, device: torch.device) -> Pair:
        """x [m, k] and weight [n, k], fp32 and finite."""
        return self.draw(Draw.seeded(seed, device), m, n, k)


def _wide(spread: int) -> DataClass:
    """Each element has an exponent of its own."""

    def draw(draw: Draw, m: int, n: int, k: int) -> Pair:
        x = torch.ldexp(draw.normal(m, k), draw.exponents(m, k, spread))
        return x, torch.ldexp(draw.normal(n, k), draw.exponents(n, k, spread))

    return DataClass(f"wide_{spread}", f"exponents in +-{spread}", draw)


def _rows(spread: int) -> DataClass:
    """Each row of x and each row of the weight has a scale of its own."""

    def draw(draw: Draw, m: int, n: int, k: int) -> Pair:
        x = torch.ldexp(draw.normal(m, k), draw.exponents(m, 1, spread))
        return x, torch.ldexp(draw.linear(n, k), draw.exponents(n, 1, spread))

    return DataClass(f"rows_{spread}", f"rows x 2^+-{spread}", draw)


def _columns(spread: int) -> DataClass:
    """Columns of x scaled by D, those of the weight by 1/D: the product is the unscaled one."""

    def draw(draw: Draw, m: int, n: int, k: int) -> Pair:
        scale = draw.exponents(1, k, spread)
        return torch.ldexp(draw.normal(m, k), scale), torch.ldexp(draw.linear(n, k), -scale)

    return DataClass(f"columns_{spread}", f"columns x 2^+-{spread}, inverse", draw)


def _columns_of_x(spread: int) -> DataClass:
    """Features of different units: columns of x scaled, the weight not."""

    def draw(draw: Draw, m: int, n: int, k: int) -> Pair:
        return torch.ldexp(draw.normal(m, k), draw.exponents(1, k, spread)), draw.linear(n, k)

    return DataClass(f"columns_of_x_{spread}", f"columns of x x 2^+-{spread}", draw)


def _outliers(exponent: int) -> DataClass:
    """One element of every row of x, and of every row of the weight, is 2^exponent times larger."""

    def draw(draw: Draw, m: int, n: int, k: int) -> Pair:
        x, weight = draw.normal(m, k), draw.linear(n, k)
        for matrix in (x, weight):
            place = draw.uniform(matrix.shape[0], 1).mul(k).long().clamp(max=k - 1)
            matrix.scatter_(1, place, matrix.gather(1, place) * 2.0**exponent)
        return x, weight

    return DataClass(f"outlier_{exponent}", f"one 2^{exponent} outlier a row", draw)


def _sparse(zeros: int, pruned: int) -> DataClass:
    """Activations after ReLU, so many percent of them 0, against a weight of which so many percent are 0."""

    def draw(draw: Draw, m: int, n: int, k: int) -> Pair:
        shift = 2**0.5 * float(torch.erfinv(torch.tensor(2 * (zeros / 100) - 1)))
        weight = draw.linear(n, k) * (draw.uniform(n, k) >= pruned / 100)
        return torch.relu(draw.normal(m, k) - shift), weight

    return DataClass(f"sparse_{zeros}_{pruned}", f"ReLU {zeros}% zeros x {pruned}% pruned", draw)


CLASSES = [
    DataClass("uniform_linear", "U(0,1) x Linear", lambda d, m, n, k: (d.uniform(m, k), d.linear(n, k))),
    DataClass("normal", "N(0,1) x N(0,1)", lambda d, m, n, k: (d.normal(m, k), d.normal(n, k))),
    DataClass("positive", "U(0,1) x U(0,1)", lambda d, m, n, k: (d.uniform(m, k), d.uniform(n, k))),
    _wide(20),
    *map(_rows, (8, 30, 60)),
    *map(_columns, (8, 15, 30, 60)),
    *map(_columns_of_x, (8, 30)),
    *map(_outliers, (10, 20)),
]
# Sums of which one product in a hundred is not zero, or counts, are short sums, whatever K says: the split's error
# stays below its bound, but what a few products of fp32 lose is less. Recorded, and no part of the thresholds.
EXTREME = [_sparse(50, 50), _sparse(90, 50), _sparse(90, 90), _wide(30)]
BY_NAME = {data.name: data for data in [*CLASSES, *EXTREME]}
