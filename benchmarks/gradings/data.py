"""Classes of inputs. Each draws x [M, K] and a weight [N, K] in fp32, on the device where they are used."""

from __future__ import annotations

import functools
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


def _uniform_linear(draw: Draw, m: int, n: int, k: int) -> Pair:
    return draw.uniform(m, k), draw.linear(n, k)


def _normal(draw: Draw, m: int, n: int, k: int) -> Pair:
    return draw.normal(m, k), draw.normal(n, k)


def _positive(draw: Draw, m: int, n: int, k: int) -> Pair:
    return draw.uniform(m, k), draw.uniform(n, k)


def _wide(draw: Draw, m: int, n: int, k: int, spread: int) -> Pair:
    """Each element has an exponent of its own."""
    x = torch.ldexp(draw.normal(m, k), draw.exponents(m, k, spread))
    return x, torch.ldexp(draw.normal(n, k), draw.exponents(n, k, spread))


def _rows(draw: Draw, m: int, n: int, k: int, spread: int) -> Pair:
    """Each row of x and each row of the weight has a scale of its own."""
    x = torch.ldexp(draw.normal(m, k), draw.exponents(m, 1, spread))
    return x, torch.ldexp(draw.linear(n, k), draw.exponents(n, 1, spread))


def _columns(draw: Draw, m: int, n: int, k: int, spread: int) -> Pair:
    """Columns of x scaled by D, those of the weight by 1/D: the product is the unscaled one."""
    scale = draw.exponents(1, k, spread)
    return torch.ldexp(draw.normal(m, k), scale), torch.ldexp(draw.linear(n, k), -scale)


def _columns_of_x(draw: Draw, m: int, n: int, k: int, spread: int) -> Pair:
    """Features of different units: columns of x scaled, the weight not."""
    return torch.ldexp(draw.normal(m, k), draw.exponents(1, k, spread)), draw.linear(n, k)


def _outliers(draw: Draw, m: int, n: int, k: int, exponent: int) -> Pair:
    """One element of every row of x, and of every row of the weight, is 2^exponent times larger."""
    x, weight = draw.normal(m, k), draw.linear(n, k)
    for matrix in (x, weight):
        place = draw.uniform(matrix.shape[0], 1).mul(k).long().clamp(max=k - 1)
        matrix.scatter_(1, place, matrix.gather(1, place) * 2.0**exponent)
    return x, weight


def _sparse(draw: Draw, m: int, n: int, k: int, zeros: float, pruned: float) -> Pair:
    """Activations after ReLU, a fraction `zeros` of them 0, against a weight of which a fraction `pruned` is 0."""
    shift = 2**0.5 * float(torch.erfinv(torch.tensor(2 * zeros - 1)))
    weight = draw.linear(n, k) * (draw.uniform(n, k) >= pruned)
    return torch.relu(draw.normal(m, k) - shift), weight


def _make_classes() -> list[DataClass]:
    classes = [
        DataClass("uniform_linear", "U(0,1) x Linear", _uniform_linear),
        DataClass("normal", "N(0,1) x N(0,1)", _normal),
        DataClass("positive", "U(0,1) x U(0,1)", _positive),
        DataClass("wide_20", "exponents in +-20", functools.partial(_wide, spread=20)),
    ]
    for spread in (8, 30, 60):
        draw = functools.partial(_rows, spread=spread)
        classes.append(DataClass(f"rows_{spread}", f"rows x 2^+-{spread}", draw))
    for spread in (8, 15, 30, 60):
        draw = functools.partial(_columns, spread=spread)
        classes.append(DataClass(f"columns_{spread}", f"columns x 2^+-{spread}, inverse", draw))
    for spread in (8, 30):
        draw = functools.partial(_columns_of_x, spread=spread)
        classes.append(DataClass(f"columns_of_x_{spread}", f"columns of x x 2^+-{spread}", draw))
    for exponent in (10, 20):
        draw = functools.partial(_outliers, exponent=exponent)
        classes.append(DataClass(f"outlier_{exponent}", f"one 2^{exponent} outlier a row", draw))
    return classes


def _sparse_class(zeros: int, pruned: int) -> DataClass:
    draw = functools.partial(_sparse, zeros=zeros / 100, pruned=pruned / 100)
    return DataClass(f"sparse_{zeros}_{pruned}", f"ReLU {zeros}% zeros x {pruned}% pruned", draw)


CLASSES = _make_classes()
# Sums of which one product in a hundred is not zero, or counts, are short sums, whatever K says: the split's error
# stays below its bound, but what a few products of fp32 lose is less. Recorded, and no part of the thresholds.
EXTREME = [
    _sparse_class(50, 50),
    _sparse_class(90, 50),
    _sparse_class(90, 90),
    DataClass("wide_30", "exponents in +-30", functools.partial(_wide, spread=30)),
]
BY_NAME = {data.name: data for data in [*CLASSES, *EXTREME]}
