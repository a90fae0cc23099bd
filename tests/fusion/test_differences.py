"""What torch.compile does otherwise than eager: the table of docs/models.md, cell by cell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm

WIDTH = 16
COLUMNS: dict[str, Callable[[nn.Module], Any]] = {
    "eager": lambda model: model,
    "`fuse(model)`": lambda model: epigemm.fuse(model),
    '`options={"backend": "eager"}`': lambda model: epigemm.fuse(model, options={"backend": "eager"}),
}


class Chain(nn.Module):
    """A LayerNorm and pointwise operators that follow no product, a product with a chain, and a dropout."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.norm, self.fc, self.rate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), rate

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.norm(x) * 1.1 + 0.3) * 0.7
        return F.dropout(torch.tanh(self.fc(h)), self.rate)


class Pointwise(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.sigmoid(x * 1.1 + 0.3) * 0.7 - x


def rounding(prepared: Callable[[nn.Module], Any]) -> str:
    x, model = torch.randn(64, WIDTH, dtype=torch.bfloat16), Pointwise()
    with torch.no_grad():
        found = prepared(model)(x)
    return {True: "after each operator", False: "once"}[torch.equal(found, model(x))]


def dropout(prepared: Callable[[nn.Module], Any]) -> str:
    model, x = Chain(0.5), torch.randn(8, WIDTH)
    torch.manual_seed(3)
    expected = model(x)
    made = prepared(model)
    torch.manual_seed(3)
    return {True: "eager's", False: "Inductor's"}[torch.equal(made(x) == 0, expected == 0)]


def second_derivative(prepared: Callable[[nn.Module], Any]) -> str:
    x = torch.randn(4, WIDTH, requires_grad=True)
    (once,) = torch.autograd.grad(prepared(Chain())(x).sum(), x, create_graph=True)
    try:
        torch.autograd.grad(once.square().sum(), x)
    except RuntimeError:
        return "RuntimeError"
    return "works"


def second_pass(prepared: Callable[[nn.Module], Any]) -> str:
    x = torch.randn(4, WIDTH, requires_grad=True)
    total = prepared(Chain())(x).sum()
    found = [torch.autograd.grad(total, x, retain_graph=True)[0] for _ in range(2)]
    return {True: "works"}[torch.equal(*found)]


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + torch.from_numpy(np.random.rand(3))


def numpy_numbers(prepared: Callable[[nn.Module], Any]) -> str:
    made, x = prepared(Noisy()), torch.zeros(3)
    made(x)
    drawn = []
    for seed in (np.random.seed, torch.manual_seed):
        for _ in range(2):
            seed(5)
            drawn.append(float(made(x)[0]))
    return {(True, False): "NumPy", (False, True): "torch"}[(drawn[0] == drawn[1], drawn[2] == drawn[3])]


NORMAL, ZERO = object(), object()


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mode = NORMAL

    def activation(self, x: Tensor) -> Any:
        return torch.exp(x)

    def forward(self, x: Tensor) -> Any:
        return self.activation(x) if self.mode is NORMAL else x * 0


def noticed(made: Any, change: Callable[[pytest.MonkeyPatch], None]) -> str:
    """Whether a call after a change is all zeros."""
    x = torch.ones(3)
    assert made(x).all()
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        return {True: "noticed", False: "not noticed"}[not made(x).any()]


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Calls()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


def hook(prepared: Callable[[nn.Module], Any]) -> str:
    made = prepared(Holds())
    return noticed(made, lambda _: made.inner.register_forward_hook(lambda module, given, result: result * 0))


ROWS: dict[str, Callable[[Callable[[nn.Module], Any]], str]] = {
    "16-bit operators that are in no fused call are rounded": rounding,
    "random numbers of dropout in training": dropout,
    "a second derivative (`create_graph=True`)": second_derivative,
    "a second backward pass (`retain_graph=True`)": second_pass,
    "`np.random` in a forward draws from the generator of": numpy_numbers,
    "a function of torch that is replaced after the first call": lambda prepared: noticed(
        prepared(Calls()), lambda patch: patch.setattr(torch, "exp", lambda x: x * 0)
    ),
    "a method of the model's class that is replaced after the first call": lambda prepared: noticed(
        prepared(Calls()), lambda patch: patch.setattr(Calls, "activation", lambda self, x: x * 0)
    ),
    "a hook that a layer inside the model gets after the first call": hook,
    "another object in `self.mode`, where the forward asks `self.mode is MODE`": lambda prepared: noticed(
        made := prepared(Calls()), lambda patch: patch.setattr(made, "mode", ZERO)
    ),
}
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def table() -> list[list[str]]:
    """The page's table."""
    section = PAGE.read_text("utf-8").partition("## What differs from eager")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_page_has_these_rows() -> None:
    heads, _, *rows = table()
    assert heads == ["", *COLUMNS]
    assert [row[0] for row in rows] == list(ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_rows(row: str) -> None:
    (said,) = [each[1:] for each in table() if each[0] == row]
    assert [ROWS[row](prepared) for prepared in COLUMNS.values()] == said
