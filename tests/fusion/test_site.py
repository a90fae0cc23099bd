"""One fused call of a graph: the values of its chain, in all layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from epigemm.fusion import matmuls
from epigemm.fusion.chains import ChainFinder
from epigemm.fusion.site import Site
from epigemm.fusion.values import tensor_of

x, weight, bias = torch.randn(6, 8), torch.randn(4, 8), torch.randn(4)
matrix, row = torch.randn(6, 4), torch.randn(6, 1)


def site_of(function: Callable[..., Any], *inputs: Tensor) -> tuple[Site, list[str]]:
    """The site of the one product, and the names of what it is called with: x, the weight, and its sources."""
    found: list[tuple[Site, list[str]]] = []

    def backend(graph_module: fx.GraphModule, _: Any) -> Any:
        finder = ChainFinder(graph_module.graph)
        for node in graph_module.graph.nodes:
            product = matmuls.understand(node)
            if isinstance(product, matmuls.Product):
                chain = finder.chain(product)
                sources = [each for one in chain.operands for each in one.sources if each is not None]
                assert all(tensor_of(each) is not None for each in sources)
                names = [str(each) for each in (product.x, product.weight, *sources)]
                found.append((Site(chain, keeps_pack=False), names))
        return graph_module.forward

    torch.compiler.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    ((site, names),) = found
    return site, names


def by_name(names: list[str], **given: Tensor) -> list[Tensor]:
    """The arguments of a call, by how Dynamo calls a function's parameters."""
    return [next(value for name, value in given.items() if f"_{name}_" in f"_{each}_") for each in names]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "a bias": lambda x, w, b, m, r: F.linear(x, w, b),
    "nothing behind": lambda x, w, b, m, r: x @ w.t(),
    "relu": lambda x, w, b, m, r: F.linear(x, w, b).relu(),
    "a bias twice": lambda x, w, b, m, r: torch.tanh(F.linear(x, w, b)) * b,
    "a gate": lambda x, w, b, m, r: F.silu(F.linear(x, w, b)) * m,
    "a row": lambda x, w, b, m, r: torch.tanh(x @ w.t()) * r,
    "all": lambda x, w, b, m, r: (torch.sigmoid(F.linear(x, w, b)) - m) * r,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_site_computes_its_chain(name: str, dtype: torch.dtype) -> None:
    given = [each.to(dtype) for each in (x, weight, bias, matrix, row)]
    site, names = site_of(FUNCTIONS[name], *given)
    arguments = by_name(names, **dict(zip("xwbmr", given, strict=True)))
    assert arguments[0] is given[0] and arguments[1] is given[1]
    expected = FUNCTIONS[name](*(each.double() for each in given))
    bound = 1e-5 if dtype is torch.float32 else 2e-2
    for _ in range(2):  # the first call finds the epilogue, the next ones have it
        torch.testing.assert_close(site(*arguments).double(), expected, rtol=bound, atol=bound)


def test_a_weight_that_is_no_transpose() -> None:
    columns = weight.t().contiguous()
    site, names = site_of(lambda x, w: torch.relu(x @ w), x, columns)
    found = site(*by_name(names, x=x, w=columns))
    torch.testing.assert_close(found, torch.relu(x @ columns), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_recorded_site_has_its_chains_gradients(
    name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Of all that it reads, also through a residual that lies otherwise; and of a frozen layer that of x alone."""
    other = matrix.t().contiguous().t() if len(shape) == 1 else matrix.reshape(*shape, 4)
    given = [x.reshape(*shape, 8), weight, bias, other, row.reshape(*shape, 1)]
    for learns in ("xwbmr", "x", "wb"):
        leaves = [
            each.detach().clone().to(dtype).detach().requires_grad_(n in learns)
            for n, each in zip("xwbmr", given, strict=True)
        ]
        site, names = site_of(FUNCTIONS[name], *leaves)
        arguments = by_name(names, **dict(zip("xwbmr", leaves, strict=True)))
        wide = [each.detach().double().requires_grad_(each.requires_grad) for each in leaves]
        expected = FUNCTIONS[name](*wide)
        wanted = [place for place, n in enumerate("xwbmr") if n in learns]
        for _ in range(2):
            found = site(*arguments)
            bound = 1e-4 if dtype is torch.float32 else 5e-2
            torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)
            of_mine = torch.autograd.grad(found.sum(), [leaves[p] for p in wanted], allow_unused=True)
            of_wide = torch.autograd.grad(
                expected.sum(), [wide[p] for p in wanted], allow_unused=True, retain_graph=True
            )
            for mine, right in zip(of_mine, of_wide, strict=True):
                assert (mine is None) == (right is None)
                if mine is not None and right is not None:
                    torch.testing.assert_close(mine.double(), right, rtol=bound, atol=4 * bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("learns", ["", "x", "w", "bc", "xwbc"])
def test_a_vector_beside_the_bias(learns: str, dtype: torch.dtype) -> None:
    """What follows the product looks like a bias of its own, which the product's must survive."""

    def both(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return F.linear(x, w, b) + c

    leaves = [
        each.to(dtype).detach().clone().requires_grad_(n in learns)
        for n, each in zip("xwbc", (x, weight, bias, torch.randn(4)), strict=True)
    ]
    site, names = site_of(both, *leaves)
    found = site(*by_name(names, **dict(zip("xwbc", leaves, strict=True))))
    bound = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, both(*leaves), rtol=bound, atol=bound)


def test_its_name_is_an_identifier() -> None:
    """torch.fx writes it into a graph's code."""
    site, _ = site_of(lambda x, w: torch.tanh(x @ w.t()) / 3.0, x, weight)
    assert site.__name__.isidentifier() and site.__name__.startswith("fused_linear_tanh")
    assert repr(site) == f"<fused {site.__name__.removeprefix('fused_')}>"
