"""Products with scales of blocks in a graph: PyTorch's, which CPUs do not compute, and epigemm's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from epigemm.fusion import matmuls, profit
from tests.fusion.eager import graph_of
from tests.fusion.test_profit import chain_of
from tests.ops.eight_bits import BF16, E4M3, E5M2, FP32, close
from tests.ops.test_eight_bit_blocks import count, meant

M, N, K = 6, 256, 384  # lists of torch have whole blocks
_torch: Any = torch


def mm(x: Tensor, w: Tensor, xs: Tensor, ws: Tensor, **options: Any) -> Tensor:
    found: Tensor = _torch._scaled_mm(x, w.t(), xs, ws.t(), **{"out_dtype": BF16, **options})
    return found


def listed(x: Tensor, w: Tensor, xs: Tensor, ws: Tensor) -> Tensor:
    """The blocks of K of the weight's scales are padded to fours."""
    of_x, of_weight = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    return F.scaled_mm(x, w.t(), xs, of_x, F.pad(ws, (0, -ws.shape[1] % 4)).t(), of_weight)


def own(x: Tensor, w: Tensor, xs: Tensor, ws: Tensor, **options: Any) -> Tensor:
    return epigemm.linear(x, w, x_scale=xs, weight_scale=ws, **options)


def exact(x: Tensor, w: Tensor, xs: Tensor, ws: Tensor, **options: Any) -> Tensor:
    """In float64."""
    bias = options.get("bias")
    return meant(x, xs, 1) @ meant(w, ws, 128).t() + (0 if bias is None else bias.double())


Function = Callable[..., Tensor]
PRODUCTS: dict[str, Function] = {
    "mm": mm,
    "own": own,
    **({"listed": listed} if hasattr(F, "scaled_mm") else {}),
}
# A function of a product, the operands, a bias and a matrix; the formula of the fused call.
TAKEN: dict[str, tuple[Function, str]] = {
    "gelu": (lambda f, *of, b, r: F.gelu(f(*of)), "gelu(acc)"),
    "several": (lambda f, *of, b, r: torch.relu(f(*of) + b) * r, "relu(acc + c1) * m1"),
    "cast": (lambda f, *of, b, r: torch.tanh(f(*of)).to(r.dtype), "tanh(acc)"),
}


def drawn(n: int = N, k: int = K) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(3)
    x, w = torch.randn(M, k, generator=rng).to(E4M3), torch.randn(n, k, generator=rng).to(E4M3)
    xs = torch.rand(count(k), M, generator=rng).t()
    return x, w, xs / 4 if k > 128 else xs.contiguous(), torch.rand(count(n), count(k), generator=rng)


@pytest.mark.parametrize(("name", "chain"), [*itertools.product(PRODUCTS, TAKEN)], ids=str)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@torch.no_grad()
def test_chains(name: str, chain: str, backend: str) -> None:
    """The product and the operators behind it are rounded once."""
    function, formula = TAKEN[chain]
    n = N if name == "listed" else 208
    of = drawn() if name == "listed" else drawn(n, 272)
    b, r = torch.randn(n).bfloat16(), torch.randn(M, n).bfloat16()

    class Model(nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            *of, b, r = given
            return function(PRODUCTS[name], *of, b=b, r=r)

    fused: Any = epigemm.fuse(Model(), strict=True, options={"backend": backend})
    found = fused(*of, b, r)
    (site,) = fused.fusion_report.sites
    assert not fused.fusion_report.skipped and site.formula == formula, fused.fusion_report
    assert found.dtype is BF16
    close(found, function(exact, *of, b=b.double(), r=r.double()))


@torch.no_grad()
def test_a_quantised_result() -> None:
    """As the next product reads it; the block of K of a small one may also be a row's."""
    scale = torch.tensor(0.05)

    def model(*given: Tensor) -> Tensor:
        *of, scale = given
        return (F.gelu(mm(*of)).float() / scale).clamp(-448, 448).to(E4M3)

    for n, k in ((208, 272), (N, 64), (64, 64)):
        torch.compiler.reset()
        reports: list[Any] = []
        options: Any = {"backend": "eager", "report": reports.append, "strict": True}
        of = drawn(n, k)
        found = torch.compile(model, backend="epigemm", options=options)(*of, scale)
        (site,) = reports[0].sites
        assert site.formula == "e4m3((gelu(acc)) / scale)", reports[0]
        expected = (F.gelu(exact(*of)) / 0.05).clamp(-448, 448)
        bound = (expected.abs() * 2.0**-4).clamp(min=2.0**-10) * 1.001 + 1e-3
        assert bool(((found.double() - expected).abs() <= bound).all())


def rows_of(weight_scale: Tensor) -> Tensor:
    """One for each 128 columns of each row of a weight."""
    return weight_scale.repeat_interleave(N // 2, 0)


LEFT: dict[str, tuple[Function, str]] = {
    "fast sums": (lambda *of: mm(*of, use_fast_accum=True), "its scales are not"),
    "e5m2": (lambda x, *of: mm(x.to(E5M2), *of), "its scales are not"),
    "rows": (lambda x, w, xs, ws: mm(x, w, xs, rows_of(ws)), "its scales are not"),
    "a scale_result": (lambda *of: mm(*of, scale_result=of[2][0, 0]), "it has a scale_result"),
}
if "listed" in PRODUCTS:
    LEFT["rows, listed"] = (
        lambda x, w, xs, ws: F.scaled_mm(
            x,
            w.t(),
            xs,
            F.ScalingType.BlockWise1x128,
            rows_of(ws).t().contiguous().t(),
            F.ScalingType.BlockWise1x128,
        ),
        "its scales are not",
    )


@pytest.mark.parametrize("name", LEFT)
def test_what_stays_pytorchs(name: str) -> None:
    function, reason = LEFT[name]
    graph = graph_of(lambda *of: torch.relu(function(*of)), *drawn())
    (found,) = (each for each in map(matmuls.understand, graph.nodes) if each is not None)
    assert isinstance(found, str) and reason in found


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_the_planner_is_asked(name: str) -> None:
    """The scales of the call to come are those of the weight as epigemm reads them."""
    chain = chain_of(lambda *of: F.gelu(PRODUCTS[name](*of)), *drawn())
    about = profit.call_of(chain).eight_bits
    assert about is not None and about.accumulate == "promoted" and about.out_dtype is BF16
    assert about.x_scale is not None and about.x_scale.shape == (M, 3) and about.x_scale.dtype is FP32
    assert about.weight_scale is not None and about.weight_scale.shape == (2, 3)
