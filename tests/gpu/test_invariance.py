"""Batch invariance on a GPU, bit by bit: every epilogue and arithmetic, rows at every place among any others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from tests.gpu.launching import captured
from tests.gpu.properties import gate_last
from tests.ops.op import Op
from tests.support.cases import poisoned, signed
from tests.support.invariance import assert_each_row_alone, assert_rows_keep_their_bits, bits
from tests.support.layouts import LAYOUTS
from tests.support.public import PUBLIC_ELEMENTWISE, PUBLIC_LINEAR

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels", "inside")]

CALLS: list[tuple[torch.dtype, str | None]] = [
    *((torch.float16, None), (torch.bfloat16, None)),
    *((torch.float32, each) for each in ("highest", "high", "tf32", "ieee")),
]
functions = pytest.mark.parametrize("function", PUBLIC_LINEAR, ids=lambda f: f.name)
calls = pytest.mark.parametrize(("dtype", "precision"), CALLS, ids=str)


@pytest.fixture
def inside() -> Iterator[None]:
    with epigemm.batch_invariant():
        yield


def drawn(
    function: Op, shape: tuple[int, int, int], dtype: torch.dtype, precision: str | None, rng: torch.Generator
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The call as a function of x alone, and an x."""
    arguments = function.draw(rng, shape[:1], *shape[1:], dtype=dtype, device="cuda")
    x = arguments.pop("x")
    return lambda rows: function.call(rows, **arguments, precision=precision), x


@functions
@calls
@pytest.mark.parametrize(
    "shape",
    [
        *((2300, 1024, 1024), (700, 520, 4096), (260, 264, 512), (300, 72, 200)),
        # N and K in odd numbers: padded copies, padded results, multiply-adds.
        *((200, 13, 77), (131, 257, 130), (40, 1, 1), (90, 30, 9001)),
    ],
    ids=str,
)
def test_rows_keep_their_bits(
    function: Op, dtype: torch.dtype, precision: str | None, shape: tuple[int, int, int], rng: torch.Generator
) -> None:
    call, x = drawn(function, shape, dtype, precision, rng)
    assert_rows_keep_their_bits(call, x, rng)
    m = shape[0]
    every = range(m) if m == 260 else {0, 1, 7, 63, 64, 127, 128, 255, m // 2, m - 1}
    assert_each_row_alone(call, x, [row for row in every if row < m])
    together = bits(call(x))
    for rows in (1, 2, 15, 16, 17, 64, 65, 128, 129, 256, 257):
        assert torch.equal(bits(call(x[:rows])), together[:rows]), f"M = {rows}"


@calls
@pytest.mark.parametrize("shape", [(133, 96, 256), (133, 37, 75)], ids=str)
def test_layouts(
    dtype: torch.dtype, precision: str | None, shape: tuple[int, int, int], rng: torch.Generator
) -> None:
    """Of x, weight and out, leading dimensions, and the weight packed: copies change no bits."""
    m, n, k = shape
    x, weight, bias = (signed(size, rng, mixed=False).to("cuda", dtype) for size in ((m, k), (n, k), (n,)))

    def run(x: Tensor, weight: Any, **options: Any) -> Tensor:
        return epigemm.linear_relu(x, weight, bias, precision=precision, **options)

    expected = bits(run(x, weight))
    for name, layout in LAYOUTS.items():
        assert torch.equal(bits(run(layout(x), weight)), expected), name
        assert torch.equal(bits(run(x, layout(weight))), expected), name
        out = layout(poisoned((m, n), dtype, "cuda"))
        assert torch.equal(bits(run(x, weight, out=out)), expected), name
    batches = x.view(7, 19, k)
    assert torch.equal(bits(run(batches, weight)).view(m, n), expected)
    turned = bits(run(batches.transpose(0, 1), weight)).transpose(0, 1)
    assert torch.equal(turned.reshape(m, n), expected)
    assert torch.equal(bits(run(x[5], weight)), expected[5])
    if dtype is torch.float32:
        packed = epigemm.pack(weight, precision=precision)
        assert torch.equal(bits(run(x, packed)), expected)
        assert torch.equal(bits(run(x[3:4], packed)), expected[3:4])


def awkward(x: Tensor) -> list[int]:
    """Writes rows that the guard rejects, or that are no numbers, between ordinary ones; returns their indices."""
    k = x.shape[1]
    rows = list(range(2, x.shape[0], 11))
    for index, row in enumerate(rows):
        match index % 7:
            case 0:
                x[row, index % k] = float("nan")
            case 1:
                x[row, (3 * index) % k] = float("inf")
            case 2:
                x[row, ::2], x[row, 1::2] = 1e30, 1e-30
            case 3:
                x[row] *= 1e-38
            case 4:
                x[row, k // 2] = 3e38
            case 5:
                x[row] = 0.0
            case _:
                x[row, ::3] = float("-inf")
                x[row, 1] = float("nan")
    return rows


@functions
@pytest.mark.parametrize("precision", ["highest", "high", "ieee", "tf32"])
@pytest.mark.parametrize("awkward_weight", [False, True])
def test_the_guard_looks_at_single_rows(
    function: Op, precision: str, awkward_weight: bool, rng: torch.Generator
) -> None:
    """Rows that are recomputed leave their neighbours alone, which keep the bits of a clean batch."""
    arguments = function.draw(rng, (520,), 320, 512, device="cuda")
    x = arguments.pop("x")
    if awkward_weight:
        awkward(arguments["weight"])

    def call(rows: Tensor) -> Tensor:
        found: Tensor = function.call(rows, **arguments, precision=precision)
        return found

    clean = bits(call(x))
    mixed = x.clone()
    rows = awkward(mixed)
    ordinary = torch.ones(520, dtype=torch.bool, device="cuda")
    ordinary[rows] = False
    assert torch.equal(bits(call(mixed))[ordinary], clean[ordinary])
    assert_rows_keep_their_bits(call, mixed, rng)
    assert_each_row_alone(call, mixed, [*rows[:14], 0, 1, 3, 12, 519])


def test_the_guard_has_something_to_do(rng: torch.Generator) -> None:
    """Without its work, rows of two magnitudes would be wrong: the test above is not an empty one."""
    x, weight = (signed((64, 512), rng, mixed=False).float().cuda() for _ in range(2))
    x[5, ::2] = 0.0
    x[5, 1::2] *= 1e-30
    x[5, 0] = 1e30
    weight[:, 0] = 0.0
    result = epigemm.linear(x, weight, precision="highest")[5].double()
    expected = weight.double() @ x[5].double()
    scale = weight.double().abs() @ x[5].double().abs()
    assert float((result - expected).abs().div(scale).max()) < 1e-6


@functions
@calls
def test_graphs_and_repeated_calls(
    function: Op, dtype: torch.dtype, precision: str | None, rng: torch.Generator
) -> None:
    """The same bits every time, and at every replay of a graph that was captured in the mode."""
    call, x = drawn(function, (160, 256, 512), dtype, precision, rng)
    expected = bits(call(x))
    for _ in range(3):
        assert torch.equal(bits(call(x)), expected)
    rows, held = x[32:96].clone(), list[Tensor]()
    graph = captured(lambda: held.append(call(rows)))
    with epigemm.batch_invariant(False):
        for start in (0, 32, 96):
            rows.copy_(x[start : start + 64])
            graph.replay()
            assert torch.equal(bits(held[-1]), expected[start : start + 64])


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@calls
def test_compiled(mode: str, dtype: torch.dtype, precision: str | None, rng: torch.Generator) -> None:
    call, x = drawn(PUBLIC_LINEAR[1], (200, 256, 512), dtype, precision, rng)
    torch.compiler.reset()
    compiled = torch.compile(call, mode=mode, fullgraph=True, dynamic=False)
    with epigemm.batch_invariant(False):
        for _ in range(3):
            compiled(x[:40])
    expected = bits(call(x))
    for rows in (slice(0, 40), slice(7, 8)):
        for _ in range(3):
            assert torch.equal(bits(compiled(x[rows]).clone()), expected[rows])


@pytest.mark.parametrize("function", PUBLIC_ELEMENTWISE, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [1, 3, 8, 37, 512, 1001])
def test_elementwise_functions(function: Op, dtype: torch.dtype, n: int, rng: torch.Generator) -> None:
    """Kernels for aligned and for any other memory: one function of each element."""
    arguments = function.draw(rng, (150,), n, 1, dtype=dtype, device="cuda")
    x = arguments.pop("x")
    assert_rows_keep_their_bits(lambda rows: function.call(rows, **arguments), x, rng)
    assert_each_row_alone(lambda rows: function.call(rows, **arguments), x, [0, 1, 2, 3, 77, 149])
    expected = bits(function.call(x, **arguments))
    for name, layout in LAYOUTS.items():
        assert torch.equal(bits(function.call(layout(x), **arguments)), expected), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "k"), [(264, 72), (259, 75)])
def test_shared_rows(dtype: torch.dtype, n: int, k: int, rng: torch.Generator) -> None:
    """Also where the operands are copied to rows that TMA reads."""

    def random(*shape: int) -> Tensor:
        return signed(shape, rng, mixed=False).to("cuda", dtype)

    x, weight, bias, residual, gate = (
        random(*shape) for shape in ((3, 50, k), (n, k), (n,), (3, 50, n), (3, 1, n))
    )
    whole = gate_last(x, weight, bias, residual, gate)
    part = gate_last(x[1:2, :7], weight, bias, residual[1:2, :7], gate[1:2])
    assert torch.equal(whole[1:2, :7], part)
