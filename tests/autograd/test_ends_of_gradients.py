"""Functions in which a gradient ends, by `detach` or a comparison: autograd records what it does for PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from tests.support.formulas import formula

EPILOGUES = {
    text: epigemm.epilogue(formula(f"acc, b: PerColumn, m: Matrix -> {text}"))
    for text in (
        "acc.detach() * b.detach() + m.detach()",
        "torch.sigmoid(acc).detach() * m + b",
        "((acc > b) & (m < 0)).float()",
        "torch.where(acc > b, torch.full_like(m, 2.0), 0.5)",
        "(acc > 0) * b",
        "(lambda z: z + (torch.round(z) - z).detach())(acc + b.detach())",
        "torch.sign(acc) + torch.floor(b)",
        "F.silu(acc) * m",
    )
}


def plain(epilogue: Any, x: Tensor, weight: Tensor, b: Tensor, m: Tensor) -> Tensor:
    result: Tensor = epilogue.__wrapped__(x @ weight.mT, b, m)
    return result


def given() -> list[Tensor]:
    """x, weight, b and m, all of which require a gradient."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((5, 8), (16, 8), (16,), (5, 16))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def assert_alike(function: Callable[..., Tensor], want: Callable[..., Tensor], leaves: list[Tensor]) -> None:
    """The values, whether they are recorded, and of each leaf the gradient, or that there is none."""
    found, expected = function(*leaves), want(*leaves)
    torch.testing.assert_close(found, expected)
    assert found.requires_grad == expected.requires_grad
    if not expected.requires_grad:
        return
    upstream = torch.randn_like(expected)
    mine, other = (
        torch.autograd.grad(result, leaves, upstream, allow_unused=True) for result in (found, expected)
    )
    assert [gradient is None for gradient in mine] == [gradient is None for gradient in other]
    for one, two in zip(mine, other, strict=True):
        if two is not None:
            torch.testing.assert_close(one, two)


@pytest.mark.parametrize("epilogue", EPILOGUES.values(), ids=EPILOGUES)
def test_calls(epilogue: Any) -> None:
    x, weight, b, m = given()
    assert_alike(epilogue, lambda *leaves: plain(epilogue, *leaves), [x, weight, b, m])
    z = torch.randn(5, 16, requires_grad=True)
    assert_alike(epilogue.elementwise, epilogue.__wrapped__, [z, b, m])


@pytest.mark.parametrize("epilogue", list(EPILOGUES.values())[:2], ids=list(EPILOGUES)[:2])
def test_under_torch_compile(epilogue: Any) -> None:
    def layer(*leaves: Tensor) -> Any:
        return epilogue(*leaves)

    compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_alike(compiled, lambda *leaves: plain(epilogue, *leaves), given())
