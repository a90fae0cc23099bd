"""Gradings with a right answer: integers, Demmel's tests, and the worst cases of the split.

Demmel et al. ("How to grade the accuracy of an implementation of the BLAS") tell a conventional sum of products
from algorithms that are only stable in norm. Zeros that are exact in every conventional order are not so in
Strassen's; and a product ``X D . D^-1 X^T`` loses everything in arithmetics that hold a whole row at one fixed
point.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gradings import bounds
from benchmarks.gradings.data import Draw, Pair
from benchmarks.gradings.measures import Exact, errors, ratios
from benchmarks.gradings.products import Product

CIRCULANT_SPREADS = (0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50)
INTEGER_KS = (1, 7, 64, 1000, 4096, 32768)
# An fp32 number whose split loses as much as any: a tie is broken downwards in lo, and lo * lo is dropped.
WORST_MANTISSA = 1 + 2.0**-11 * (1 - 3 * 2.0**-12)


@dataclass(frozen=True)
class Verdict:
    """One check of one product: `measure` must not exceed `limit`."""

    name: str
    measure: float
    limit: float

    @property
    def ok(self) -> bool:
        """Whether it passed (a NaN has not)."""
        return self.measure <= self.limit


def integers(kind: str, m: int, n: int, k: int, device: torch.device, seed: int = 0) -> Pair:
    """Integers whose every partial sum is below 2^24: "ternary" {-1, 0, 1}, "binary" {0, 1}, "bytes" up to 127."""
    low, high = {"ternary": (-1, 2), "binary": (0, 2), "bytes": (-127, 128)}[kind]
    generator = torch.Generator(device).manual_seed(seed)
    x, weight = (
        torch.randint(low, high, (rows, k), generator=generator, device=device).float() for rows in (m, n)
    )
    return x, weight


def different_bits(result: Tensor, expected: Tensor) -> int:
    """How many entries differ from the exact integer result."""
    return int((result.double() != expected).sum())


def integer_verdicts(product: Product, device: torch.device, size: int = 256) -> Iterator[Verdict]:
    """Bit for bit, since nothing has to be rounded."""
    cases = [(kind, k) for kind in ("ternary", "binary") for k in INTEGER_KS] + [("bytes", 1024)]
    for kind, k in cases:
        x, weight = integers(kind, size, size, k, device)
        wrong = different_bits(product(x, weight), Exact.of(x, weight).product)
        yield Verdict(f"integers {kind}, K = {k}", wrong, 0)


def zero_blocks(size: int, device: torch.device, seed: int = 0) -> Pair:
    """The first half of the result's rows and columns is exactly zero: there the factors' supports are disjoint.

    The other blocks are 2^20 times larger, so that an algorithm that mixes blocks shows.
    """
    draw = Draw.seeded(seed, device)
    x, weight, half = draw.normal(size, size), draw.normal(size, size), size // 2
    x[:half, :half] = 0
    weight[:half, half:] = 0
    x[half:] *= 2.0**20
    weight[half:] *= 2.0**20
    return x, weight


def circulant(size: int, spread: int, device: torch.device, seed: int = 0) -> Pair:
    """X D and X D^-1 for a circulant X of positive numbers; D = diag(2^e), e from -spread to spread."""
    values = Draw.seeded(seed, device).uniform(1, size, 0.5, 1.0)[0]
    index = torch.arange(size, device=device)
    matrix = values[(index[:, None] + index[None, :]) % size]
    exponents = torch.linspace(-spread, spread, size, device=device).round().long()
    exponents = exponents[torch.randperm(size, generator=torch.Generator().manual_seed(seed)).to(device)]
    return torch.ldexp(matrix, exponents), torch.ldexp(matrix, -exponents)


def demmel_verdicts(product: Product, device: torch.device, size: int = 1024) -> Iterator[Verdict]:
    """Exact zeros, then the circulant test over its range, with Demmel's tolerance of 10 n eps."""
    x, weight = zero_blocks(size, device)
    corner = product(x, weight)[: size // 2, : size // 2]
    yield Verdict("exact zeros: entries that are not", int((corner != 0).sum()), 0)
    for spread in CIRCULANT_SPREADS:
        x, weight = circulant(size, spread, device)
        found = errors(product(x, weight), Exact.of(x, weight))
        yield Verdict(f"circulant 2^+-{spread}: error / eps |A||B|", found.max_ratio, 10.0 * size)


def constant(size: int, k: int, device: torch.device) -> Pair:
    """Every element is the number that the split represents worst: representation errors of one sign."""
    return torch.full((size, k), WORST_MANTISSA, device=device), torch.full(
        (size, k), WORST_MANTISSA, device=device
    )


def tightest_unguarded(k: int, device: torch.device, size: int = 16) -> Pair:
    """The data on which the guard comes closest to letting too much pass.

    Just as many k have both factors "large" as the guard asks for, each at the lower end, 2^-8 of its row's largest;
    everywhere else a factor below what the slices hold meets the other row's largest.
    """
    both = max(1, k // 64)
    x, weight = (torch.full((size, k), 2.0**-8, device=device) for _ in range(2))
    middle = both + (k - both) // 2
    lost = 2.0**-50 * 1.5
    x[:, both:middle], weight[:, both:middle] = 1.0, lost
    x[:, middle:], weight[:, middle:] = lost, 1.0
    return x, weight


def representation_verdicts(product: Product, device: torch.device) -> Iterator[Verdict]:
    """Adversarial data of the split, held against its derived bound."""
    for k in (64, 512, 4096):
        for name, pair in (
            ("worst mantissas", constant(64, k, device)),
            ("guard's edge", tightest_unguarded(k, device)),
        ):
            measure = float(ratios(product(*pair), Exact.of(*pair)).max())
            yield Verdict(f"{name}, K = {k}: error / eps |A||B|", measure, bounds.split(k) / bounds.EPS)
