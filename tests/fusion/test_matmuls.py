"""Every spelling and every broadcast of PyTorch's matrix products: fused or left alone, the values are PyTorch's."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fusion.eager import fuse_eagerly
from tests.support.thorough import in_turn

M, K, N, B = 5, 8, 6, 3
_torch: Any = torch
Spelled = Callable[[Any, Tensor, Tensor], Any]


def _in_place(c: Tensor, *args: Any, **kwargs: Any) -> Any:
    made: Any = c.clone()
    return made.addmm_(*args, **kwargs)


def _imatmul(c: Tensor, x: Tensor, w: Tensor) -> Tensor:
    x @= w
    return x


def _out(x: Tensor, *sizes: int) -> Tensor:
    return x.detach().new_empty(sizes)


# Of a summand c, x [M, K] and w [K, N].
TAKEN: dict[str, Spelled] = {
    "mm": lambda c, x, w: torch.mm(x, w),
    "mm by names": lambda c, x, w: torch.mm(input=x, mat2=w),
    "mm out=None": lambda c, x, w: torch.mm(x, w, out=None),
    ".mm": lambda c, x, w: x.mm(w),
    ".mm by name": lambda c, x, w: x.mm(mat2=w),
    "matmul": lambda c, x, w: torch.matmul(x, w),
    "matmul by names": lambda c, x, w: torch.matmul(other=w, input=x),
    ".matmul": lambda c, x, w: x.matmul(w),
    "Tensor.matmul": lambda c, x, w: torch.Tensor.matmul(x, w),
    ".__matmul__": lambda c, x, w: x.__matmul__(w),
    "@": lambda c, x, w: x @ w,
    "@=": _imatmul,
    "operator.matmul": lambda c, x, w: operator.matmul(x, w),
    "linear": lambda c, x, w: F.linear(x, w.t()),
    "linear by names": lambda c, x, w: F.linear(weight=w.t(), input=x, bias=None),
    "linear of a summand": lambda c, x, w: F.linear(x, w.t(), c),
    "linear of a summand by name": lambda c, x, w: F.linear(x, w.t(), bias=c),
    "addmm": lambda c, x, w: torch.addmm(c, x, w),
    "addmm by names": lambda c, x, w: torch.addmm(mat2=w, input=c, mat1=x),
    "addmm of ones": lambda c, x, w: torch.addmm(c, x, w, beta=1, alpha=1.0),
    "addmm beta": lambda c, x, w: torch.addmm(c, x, w, beta=0.5),
    "addmm alpha": lambda c, x, w: torch.addmm(c, x, w, alpha=2),
    "addmm both": lambda c, x, w: torch.addmm(c, x, w, beta=0.5, alpha=2),
    ".addmm both": lambda c, x, w: c.addmm(x, w, alpha=0.5, beta=2),
    "addmm(beta=, ...)": lambda c, x, w: _torch.addmm(beta=0.5, input=c, mat1=x, mat2=w),
    ".addmm": lambda c, x, w: c.addmm(x, w),
    ".addmm by names": lambda c, x, w: c.addmm(mat1=x, mat2=w),
}
LEFT: dict[str, Spelled] = {
    ".__rmatmul__": lambda c, x, w: w.__rmatmul__(x),
    "mm out=": lambda c, x, w: torch.mm(x.detach(), w.detach(), out=_out(x, M, N)),
    "matmul out=": lambda c, x, w: torch.matmul(x.detach(), w.detach(), out=_out(x, M, N)),
    "addmm beta 0": lambda c, x, w: torch.addmm(c.detach() * float("nan"), x, w, beta=0),
    "addmm alpha 0": lambda c, x, w: torch.addmm(c, x, w, alpha=0),
    "addmm out=": lambda c, x, w: torch.addmm(c.detach(), x.detach(), w.detach(), out=_out(x, M, N)),
    "addmm(beta, ...)": lambda c, x, w: _torch.addmm(0.5, c, x, w),
    "addmm(beta, ..., mat2=)": lambda c, x, w: _torch.addmm(0.5, c, x, mat2=w),
    "addmm(beta, ..., alpha, ...)": lambda c, x, w: _torch.addmm(0.5, c, 2.0, x, w),
    ".addmm(beta, ...)": lambda c, x, w: c.addmm(0.5, x, w),
    ".addmm(beta, alpha, ...)": lambda c, x, w: c.addmm(0.5, 2.0, x, w),
    ".addmm_": lambda c, x, w: _in_place(c, x, w),
    ".addmm_ both": lambda c, x, w: _in_place(c, x, w, beta=0.5, alpha=2),
    ".addmm_(beta, ...)": lambda c, x, w: _in_place(c, 0.5, x, w),
    ".addmm_(beta, alpha, ...)": lambda c, x, w: _in_place(c, 0.5, 2.0, x, w),
    "addmv": lambda c, x, w: torch.addmv(c[..., 0].expand(M), x, w[:, 0]),
    "addr": lambda c, x, w: torch.addr(c, x[:, 0], w[0]),
    "linalg.matmul": lambda c, x, w: torch.linalg.matmul(x, w),
    "multi_dot": lambda c, x, w: torch.linalg.multi_dot([x, w, w.t()]),
    "einsum": lambda c, x, w: torch.einsum("mk,kn->mn", x, w),
    "inner": lambda c, x, w: torch.inner(x, w.t()),
    "tensordot": lambda c, x, w: torch.tensordot(x, w, 1),
    "1-d @": lambda c, x, w: x[0] @ w,
    "@ 1-d": lambda c, x, w: x @ w[:, 0],
}

# Of a summand, x [B, M, K] and w [B, K, N].
BATCHED: dict[str, Spelled] = {
    "bmm": lambda c, x, w: torch.bmm(x, w),
    "bmm by names": lambda c, x, w: torch.bmm(input=x, mat2=w),
    "bmm out=": lambda c, x, w: torch.bmm(x.detach(), w.detach(), out=_out(x, B, M, N)),
    ".bmm": lambda c, x, w: x.bmm(w),
    "matmul": lambda c, x, w: torch.matmul(x, w),
    "@": lambda c, x, w: x @ w,
    "linear": lambda c, x, w: F.linear(x, w[0].t()),
    "linear of a summand": lambda c, x, w: F.linear(x, w[0].t(), c),
    "baddbmm": lambda c, x, w: torch.baddbmm(c, x, w),
    "baddbmm both": lambda c, x, w: torch.baddbmm(c, x, w, beta=0.5, alpha=2),
    "baddbmm(beta, ...)": lambda c, x, w: _torch.baddbmm(0.5, c, x, w),
    "baddbmm(beta, ..., alpha, ...)": lambda c, x, w: _torch.baddbmm(0.5, c, 2.0, x, w),
    ".baddbmm": lambda c, x, w: c.baddbmm(x, w),
    ".baddbmm_": lambda c, x, w: c.expand(B, M, N).clone().baddbmm_(x, w, beta=0.5),
    "addbmm": lambda c, x, w: torch.addbmm(c, x, w),
    "addbmm(beta, ..., alpha, ...)": lambda c, x, w: _torch.addbmm(0.5, c, 2.0, x, w),
    ".addbmm": lambda c, x, w: c.addbmm(x, w, beta=0.5),
    ".addbmm_": lambda c, x, w: c.expand(M, N).clone().addbmm_(x, w, alpha=2),
}

SUMMANDS = {"[M, N]": (M, N), "[N]": (N,), "[1, N]": (1, N), "[M, 1]": (M, 1), "[1]": (1,), "[]": ()}
BATCHED_SUMMANDS = {"[N]": (N,), "[M, N]": (M, N), "[1, M, N]": (1, M, N), "[B, 1, N]": (B, 1, N)}


class Spellings(nn.Module):
    """A ReLU behind each of some spellings."""

    def __init__(self, spelled: Mapping[str, Spelled]) -> None:
        super().__init__()
        self.spelled = [*spelled.values()]

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [torch.relu(each(*inputs)) for each in self.spelled]


def accepted(spelled: Mapping[str, Spelled], *inputs: Tensor) -> dict[str, Spelled]:
    """Those that PyTorch accepts."""
    found = {}
    for name, each in spelled.items():
        try:
            each(*inputs)
        except (RuntimeError, IndexError):
            continue
        found[name] = each
    return found


def run(road: str, model: nn.Module, *inputs: Tensor) -> tuple[Any, list[Any]]:
    """The results, and the reports of all graphs."""
    if road == "fuse":
        fused: Any = fuse_eagerly(model, strict=True)
        return fused(*inputs), [fused.fusion_report]
    reports: list[Any] = []
    options: dict[str, Any] = {"backend": "aot_eager", "report": reports.append, "strict": True}
    return torch.compile(model, backend="epigemm", options=options)(*inputs), reports


def compare(road: str, spelled: Mapping[str, Spelled], *inputs: Tensor) -> int:
    """Values, shapes and gradients; returns how many products were fused."""
    model = Spellings(spelled)
    expected, (actual, reports) = model(*inputs), run(road, model, *inputs)
    for name, one, other in zip(spelled, actual, expected, strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")  # type: ignore[misc]
        assert one.requires_grad == other.requires_grad, name
    learns = [each for each in inputs if each.requires_grad]
    seeds = [torch.randn_like(each) for each in expected]
    found = [
        torch.autograd.grad(
            [each for each in results if each.requires_grad],
            learns,
            [seed for seed, each in zip(seeds, results, strict=True) if each.requires_grad],
            materialize_grads=True,
        )
        for results in (actual, expected)
    ]
    torch.testing.assert_close(*found, equal_nan=True, rtol=1e-4, atol=1e-4)
    return sum(len(report.sites) for report in reports)


@pytest.mark.parametrize(("summand", "road"), in_turn([*SUMMANDS], ["fuse", "backend"]))
def test_spellings(road: str, summand: str) -> None:
    c, x, w = (torch.randn(shape, requires_grad=True) for shape in (SUMMANDS[summand], (M, K), (K, N)))
    of_taken, of_left = TAKEN, LEFT
    if summand not in ("[M, N]", "[N]"):  # by each road once those that read none
        of_taken, of_left = (
            {name: each for name, each in of.items() if "add" in name or "summand" in name}
            for of in (TAKEN, LEFT)
        )
    taken, left = (accepted(spelled, c, x, w) for spelled in (of_taken, of_left))
    assert len(taken) >= len(of_taken) - 2 and len(left) >= len(of_left) - 6
    both = {**taken, **{f"left: {name}": each for name, each in left.items()}}
    assert compare(road, both, c, x, w) == len(taken)


@pytest.mark.parametrize("one", [True, False], ids=["one weight", "a batch of weights"])
@pytest.mark.parametrize(("summand", "road"), in_turn([*BATCHED_SUMMANDS], ["fuse", "backend"]))
def test_spellings_of_batches(road: str, one: bool, summand: str) -> None:
    c, x = torch.randn(BATCHED_SUMMANDS[summand]), torch.randn(B, M, K, requires_grad=True)
    w = torch.randn(K, N).expand(B, K, N) if one else torch.randn(B, K, N)
    spelled = accepted(BATCHED, c, x, w)
    assert len(spelled) >= 10
    assert compare(road, spelled, c, x, w) >= (6 if one else 1)


# --- broadcast batches -----------------------------------------------------------------------------------------------


def _drawn(draw: random.Random, batch: list[int], rows: int, columns: int) -> Tensor:
    """A side of a product: with some of the batch's axes, some of them 1, some of them repeated in memory."""
    lead = batch[draw.randint(0, len(batch)) :] if draw.random() < 0.5 else batch
    sizes = [draw.choice([size, size, 1]) for size in lead]
    stored = [draw.choice([size, 1]) for size in sizes]
    made = torch.randn(*stored, rows, columns)
    if draw.random() < 0.2:
        made = made.mT.contiguous().mT
    return made.expand(*sizes, rows, columns)


def drawn(seed: int) -> tuple[Tensor, Tensor]:
    """Two tensors that PyTorch multiplies."""
    draw = random.Random(seed)
    batch = [draw.choice([0, 1, 2, 2, 3, 3]) for _ in range(draw.randint(0, 3))]
    m, k, n = (draw.choice([0, 1, 2, 5, 5, 5]) for _ in range(3))
    x, w = _drawn(draw, batch, m, k), _drawn(draw, batch, k, n)
    which = draw.random()
    if which < 0.05:
        x = torch.randn(k)
    elif which < 0.1:
        w = torch.randn(k)
    return x, w


class Products(nn.Module):
    """Many products of two tensors each, with something behind each."""

    def forward(self, pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        found = []
        for x, w in pairs:
            for z in [torch.matmul(x, w), *([torch.bmm(x, w)] if _fits_bmm(x, w) else [])]:
                found.append(torch.relu(z) * 2 if z.numel() % 2 else torch.sigmoid(z + 1))
        return found


def _fits_bmm(x: Tensor, w: Tensor) -> bool:
    return x.dim() == w.dim() == 3 and x.shape[0] == w.shape[0]


@pytest.mark.parametrize(("first", "road"), in_turn(range(0, 160, 40), ["fuse", "backend"]))
def test_batches(road: str, first: int) -> None:
    pairs = [drawn(seed) for seed in range(first, first + 40)]
    for x, _ in pairs:
        x.requires_grad_(first % 80 < 40)
    expected = Products()(pairs)
    actual, reports = run(road, Products(), cast(Any, pairs))
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape and one.requires_grad == other.requires_grad
        torch.testing.assert_close(one, other)
    assert sum(len(report.sites) for report in reports) >= 4


BIASES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "[1, L, N]": ((1, M, N), torch.float32),
    "[1, 1, N]": ((1, 1, N), torch.float32),
    "[B, 1, N]": ((B, 1, N), torch.float32),
    "[1, L, 1]": ((1, M, 1), torch.float32),
    "[B, L, N]": ((B, M, N), torch.float32),
    "fp16": ((N,), torch.float16),
    "fp64": ((N,), torch.float64),
    "bf16": ((N,), torch.bfloat16),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("name", "road"), in_turn([*BIASES], ["fuse", "backend"]))
def test_a_bias_that_pytorch_broadcasts_or_casts(road: str, autocast: bool, name: str) -> None:
    """An operand or not, it takes nothing from the rest of the graph."""
    shape, dtype = BIASES[name]

    class Model(nn.Module):
        def forward(self, x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return torch.relu(torch.relu(F.linear(x, w, bias)) @ w)

    inputs = torch.randn(B, M, N), torch.randn(N, N), torch.randn(shape).to(dtype)
    try:
        expected = Model()(*inputs)
    except RuntimeError:
        return  # types that PyTorch refuses without autocast
    actual, reports = run(road, Model(), *inputs)
    close = (1e-2, 1e-1) if autocast else (1e-5, 1e-5)
    torch.testing.assert_close(actual, expected, rtol=close[0], atol=close[1])
    assert sum(len(report.sites) for report in reports) >= 1


def _written_later(c: Tensor, x: Tensor, w: Tensor) -> Tensor:
    added = c * 1
    z = torch.addmm(added, x, w)
    added += 1
    return z + added


NO_FACTOR = "its alpha or beta is 0, or no number"
SKIPPED: list[tuple[Spelled, str]] = [
    (LEFT["addmm beta 0"], NO_FACTOR),
    (LEFT["addmm alpha 0"], NO_FACTOR),
    (LEFT["mm out="], "it is written to out="),
    (lambda c, x, w: x.double() @ w.double(), "it is in float64"),
    (_written_later, "what it adds is written before its derivative would read it again"),
    (lambda c, x, w: x.long() @ w.long(), "it is in int64"),
]


@pytest.mark.parametrize(
    ("spelled", "reason"), SKIPPED, ids=lambda each: each if isinstance(each, str) else ""
)
def test_why_a_product_is_skipped(spelled: Spelled, reason: str) -> None:
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((M, N), (M, K), (K, N))]
    report = fuse_eagerly(Spellings({"": spelled}), dry_run=True, example_inputs=inputs)
    assert [reason in each.reason for each in report.skipped] == [True] and not report.sites
