"""What has no operand of the five models: 8-bit products. A case is its contestants, ours first."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm

OURS, BLOCKS = "epigemm", "1x128"
_E4M3 = torch.float8_e4m3fn
_BLOCK, _LARGEST = 128, 448.0  # columns that share a scale; e4m3's largest number
_scaled_mm: Any = torch._scaled_mm
# M, N, K of PRODUCTS' table, and of layers with a short K.
SIZES_OF_8_BITS = (
    *((4096, 4096, 4096), (8192, 8192, 8192), (4096, 14336, 4096), (1024, 8192, 8192)),
    *((16384, 3072, 768), (128, 8192, 8192), (16, 8192, 8192), (2048, 2048, 2048)),
)
# A layer of Llama-3-8B: hidden size, size between the products.
SIZES_OF_MLPS, TOKENS_OF_MLPS = (4096, 14336), (16, 512, 4096)


@dataclass(frozen=True)
class Contest:
    """One case.

    Attributes:
        name: of the case.
        runs: by contestant, ours first.
        ratios: by the record's key, whose time is divided by ours.
        exact: the result in float64 of the same rows, and how far a result may be from it.
        read: makes a matrix of what a run of ours returns.
        errors: by contestant, how far its result is from float64: the root of the mean square, relative.
    """

    name: str
    runs: Mapping[str, Callable[[], Any]]
    ratios: Mapping[str, str]
    exact: Callable[[], tuple[Tensor, Tensor]]
    read: Callable[[Any], Tensor] = lambda result: result
    errors: Callable[[], dict[str, float]] = dict

    def part_of_bound(self) -> float:
        """The largest error of ours over what is allowed; infinite for a NaN."""
        found, (expected, bound) = self.read(self.runs[OURS]()), self.exact()
        parts = (found[: len(expected)].double() - expected).abs() / bound
        return float(parts.max().nan_to_num(math.inf)) if parts.numel() else 0.0


_SUMS = {"fast": 2.0**-10, "promoted": 2.0**-11}
"""The errors of sums, of the sum of magnitudes.

Fast ones truncate every product to 13 bits of the sum so far. For normal numbers the standard deviation of K such
errors is 2^-13 of the magnitudes, whatever K is, and the largest of seven million results has 6.5 of them. A promoted
sum has 128.
"""


def rounded(expected: Tensor, magnitudes: Tensor, sums: float, eps: float) -> Tensor:
    """A rounding of the result, and the truncated additions of the sums. GELU and SiLU are no steeper than 1.13."""
    return expected.abs() * eps * 0.51 + magnitudes * sums * 1.13 + 1e-6


def of_8_bits(seed: int, count: int, device: torch.device) -> Iterator[Contest]:
    """GELU behind products of e4m3, by every recipe and accumulation; SwiGLU to blocks of e4m3; quantised layers."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    drawn = [
        (round(2 ** draw.uniform(0, 15)), 16 * draw.randint(3, 640), 16 * draw.randint(3, 640))
        for _ in range(count)
    ]
    for m, n, k in SIZES_OF_8_BITS:
        yield swiglu_to_blocks(m, n, k, device)
    ways = (("tensor", "rows"), ("fast", "promoted"))
    for m, n, k in (*SIZES_OF_8_BITS, *drawn):
        for recipe, accumulate in itertools.product(*ways):
            yield gelu_of_8_bits(m, n, k, recipe, accumulate, device)
        # Sizes at which PyTorch reads scales of blocks.
        whole = -(-m // 4) * 4, n, -(-k // (4 * _BLOCK)) * 4 * _BLOCK
        yield gelu_of_8_bits(*whole, BLOCKS, "promoted", device)
    for tokens, recipe in itertools.product(TOKENS_OF_MLPS, ("row", BLOCKS)):
        yield quantised_mlp(tokens, *SIZES_OF_MLPS, recipe, device)
    for tokens, recipe in itertools.product(TOKENS_OF_MLPS[1:], ("row", BLOCKS)):
        yield quantised_block(tokens, *SIZES_OF_MLPS, recipe, device)


def gelu_of_8_bits(m: int, n: int, k: int, recipe: str, accumulate: str, device: torch.device) -> Contest:
    """GELU, with a scale for each tensor, row or block."""
    x, weight = (torch.randn(rows, k, device=device).to(_E4M3) for rows in (m, n))
    # Of blocks, as `_scaled_mm` reads them.
    blocks = (k // _BLOCK, m), (-(-n // _BLOCK), k // _BLOCK)
    sizes = {"tensor": ((), ()), "rows": ((m, 1), (1, n)), BLOCKS: blocks}[recipe]
    x_scale, weight_scale = others = [torch.rand(size, device=device) + 0.5 for size in sizes]
    if recipe == BLOCKS:
        x_scale, others = x_scale.t(), [x_scale.t(), weight_scale.t()]

    def product() -> Tensor:
        about: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": accumulate == "fast"}
        result: Tensor = _scaled_mm(x, weight.t(), *others, **about)
        return result

    def ours() -> Tensor:
        about: dict[str, Any] = {"x_scale": x_scale, "weight_scale": weight_scale, "accumulate": accumulate}
        return epigemm.linear_gelu(x, weight, **about)

    def dequantised(numbers: Tensor, scale: Tensor, down: int) -> Tensor:
        if not scale.dim():
            return numbers.double() * scale.double()
        spread = scale.double().repeat_interleave(down, 0)[: len(numbers)]
        return numbers.double() * spread.repeat_interleave(k // scale.shape[1], 1)

    def exact() -> tuple[Tensor, Tensor]:
        of_weight, down = (weight_scale, _BLOCK) if recipe == BLOCKS else (weight_scale.t(), 1)
        rows, columns = dequantised(x[:512], x_scale, 1), dequantised(weight, of_weight, down)
        sums, magnitudes = rows @ columns.t(), rows.abs() @ columns.abs().t()
        expected = F.gelu(sums)
        return expected, rounded(expected, magnitudes, _SUMS[accumulate], torch.finfo(torch.bfloat16).eps)

    key = f"vs_scaled_mm_{'blocks' if recipe == BLOCKS else accumulate}"
    runs = {OURS: ours, "scaled_mm": product, "eager": lambda: F.gelu(product())}
    ratios = {key: "scaled_mm", f"{key}_eager": "eager"}
    return Contest(f"{m}x{n}x{k}/{recipe}/{accumulate}", runs, ratios, exact)


def swiglu_to_blocks(m: int, n: int, k: int, device: torch.device) -> Contest:
    """SwiGLU whose result is e4m3 with a scale for each 128 columns, against `_scaled_mm` and one compiled kernel."""
    x, weight = (torch.randn(rows, k, device=device).to(_E4M3) for rows in (m, 2 * n))
    scale = torch.full((), k**-0.5, device=device)
    one = torch.ones((), device=device)

    def quantised(sums: Tensor) -> tuple[Tensor, Tensor]:
        first, second = sums.float().chunk(2, 1)
        blocks = (F.silu(first) * second).to(torch.bfloat16).float().reshape(m, -1, _BLOCK)
        scales = blocks.abs().amax(2, keepdim=True).clamp(min=2.0**-100) / _LARGEST
        return (blocks / scales).to(_E4M3).flatten(1), scales[..., 0]

    torch._dynamo.reset()  # each size is compiled for itself
    compiled: Any = torch.compile(quantised, dynamic=False)

    def others() -> Any:
        return compiled(_scaled_mm(x, weight.t(), scale, one, out_dtype=torch.bfloat16, use_fast_accum=True))

    def ours() -> Any:
        about: dict[str, Any] = {"x_scale": scale, "weight_scale": one, "accumulate": "fast"}
        return epigemm.linear_glu(x, weight, **about, out_dtype=_E4M3, out_scale="1x128")

    def exact() -> tuple[Tensor, Tensor]:
        rows, factor = x[:512].double(), scale.double()
        first, second = (rows @ weight.double().t() * factor).chunk(2, 1)
        magnitudes = (rows.abs() @ weight.double().abs().t() * factor).chunk(2, 1)
        silu = F.silu(first)
        expected = silu * second
        sums = second.abs() * magnitudes[0] + silu.abs() * magnitudes[1]
        bound = rounded(expected, sums, _SUMS["fast"], torch.finfo(torch.bfloat16).eps)
        largest = (
            (expected.abs() + bound).reshape(len(expected), -1, _BLOCK).amax(2).repeat_interleave(_BLOCK, 1)
        )
        # Half a unit of e4m3, of its subnormals too; the block's scale may be off by what its largest number is.
        return expected, bound + (expected.abs() + bound) * 2.0**-4 + largest / _LARGEST * 2.0**-10

    def read(result: tuple[Tensor, Tensor]) -> Tensor:
        matrix, scales = result
        return matrix.float() * scales.repeat_interleave(_BLOCK, 1)

    name = f"{m}x{2 * n}x{k}/swiglu to 1x128"
    runs = {OURS: ours, "scaled_mm and compiled": others}
    return Contest(name, runs, {"vs_compiled_swiglu_quantised": "scaled_mm and compiled"}, exact, read)


def quantised_mlp(m: int, hidden: int, between: int, recipe: str, device: torch.device) -> Contest:
    """A SwiGLU MLP in bf16 by `epigemm.nn.quantise`, against `_scaled_mm` with PyTorch's operators, and bf16."""
    in_bf16: Any = {"bias": False, "device": device, "dtype": torch.bfloat16}
    first = nn.Linear(hidden, 2 * between, **in_bf16).requires_grad_(False)
    second = nn.Linear(between, hidden, **in_bf16).requires_grad_(False)
    x = torch.randn(m, hidden, device=device, dtype=torch.bfloat16)
    layers = [epigemm.nn.LinearGLU.from_linear(first), epigemm.nn.Linear.from_linear(second)]
    ours = epigemm.nn.quantise(copy.deepcopy(nn.Sequential(*layers)), recipe)
    up_8, down_8 = (_composed_product(each.weight.detach(), recipe) for each in (first, second))

    def composed(rows: Tensor) -> Tensor:
        return down_8(_gated(up_8(rows)))

    def exact() -> tuple[Tensor, Tensor]:
        """Of the numbers before they were quantised: e4m3 has 2^-4 of each, and both products have two of them."""
        rows, up = x[:512].double(), first.weight.double()
        sums, magnitudes = rows @ up.t(), rows.abs() @ up.abs().t()
        between_them, steepest = _gated(sums), 1.1
        errors = (
            2.0**-3
            * steepest
            * sum(a.abs() * b for a, b in zip(sums.chunk(2, -1), magnitudes.chunk(2, -1)[::-1], strict=True))
        )
        down = second.weight.double().abs().t()
        return between_them @ second.weight.double().t(), (
            errors + between_them.abs() * 2.0**-3
        ) @ down * 1.1 + 1e-6

    torch._dynamo.reset()
    compiled: Any = torch.compile(composed, dynamic=False)
    ours_compiled: Any = torch.compile(ours, backend="epigemm", dynamic=False)
    runs = {
        OURS: lambda: ours_compiled(x),
        "ours in eager": lambda: ours(x),
        "composed in eager": lambda: composed(x),
        "composed, compiled": lambda: compiled(x),
        "bf16 in eager": lambda: second(_gated(first(x))),
    }
    ratios = {"vs_ours_eager": "ours in eager", "vs_composed_eager": "composed in eager"}
    ratios |= {"vs_composed_compiled": "composed, compiled", "vs_bf16": "bf16 in eager"}

    def errors() -> dict[str, float]:
        up, down = first.weight.double(), second.weight.double()
        exact = _gated(x.double() @ up.t()) @ down.t()
        ways: dict[str, Any] = {OURS: ours, "composed": composed, "bf16": lambda x: second(_gated(first(x)))}
        return {name: _relative(way(x), exact) for name, way in ways.items()}

    return Contest(f"{m}x{hidden}x{between}/mlp/{recipe}", runs, ratios, exact, errors=errors)


def quantised_block(m: int, hidden: int, between: int, recipe: str, device: torch.device) -> Contest:
    """A layer of Llama-3-8B, of one sequence: attention, four heads of queries for one of keys; the MLP; RMSNorms."""
    head, keys = 128, hidden // 4
    in_bf16: Any = {"bias": False, "device": device, "dtype": torch.bfloat16}
    sizes = ((hidden, hidden + 2 * keys), (hidden, hidden), (hidden, 2 * between), (between, hidden))
    layers = [nn.Linear(*size, **in_bf16).requires_grad_(False) for size in sizes]
    x = torch.randn(1, m, hidden, device=device, dtype=torch.bfloat16)

    def block(x: Tensor, read: _Layer, project: _Layer, gate: _Layer, down: _Layer) -> Tensor:
        parts = torch.split(read(F.rms_norm(x, (hidden,))), [hidden, keys, keys], -1)
        q, k, v = (each.view(1, m, -1, head).transpose(1, 2) for each in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + project(attended.transpose(1, 2).flatten(2))
        return x + down(gate(F.rms_norm(x, (hidden,))))

    def of_pytorch(products: list[_Layer]) -> Callable[[Tensor], Tensor]:
        read, project, gate, down = products
        return lambda x: block(x, read, project, lambda rows: _gated(gate(rows)), down)

    made: list[nn.Module] = [epigemm.nn.Linear.from_linear(each) for each in layers]
    made[2:3] = [epigemm.nn.LinearGLU.from_linear(layers[2])]
    quantised: Any = epigemm.nn.quantise(nn.ModuleList(copy.deepcopy(made)), recipe)
    composed = of_pytorch([_composed_product(each.weight.detach(), recipe) for each in layers])
    in_float64 = of_pytorch([copy.deepcopy(each).double() for each in layers])
    ways: dict[str, _Layer] = {
        OURS: lambda x: block(x, *quantised),
        "composed": composed,
        "bf16": of_pytorch(list(layers)),
    }
    torch._dynamo.reset()
    compiled: Any = torch.compile(composed, dynamic=False)
    ours_compiled: Any = torch.compile(ways[OURS], backend="epigemm", dynamic=False)
    of_bf16: Any = torch.compile(ways["bf16"], dynamic=False)
    runs = {
        OURS: lambda: ours_compiled(x),
        "ours in eager": lambda: ways[OURS](x),
        "composed in eager": lambda: composed(x),
        "composed, compiled": lambda: compiled(x),
        "bf16, compiled": lambda: of_bf16(x),
    }
    keys_of = {"ours in eager": "ours_eager", "composed in eager": "composed_eager"}
    keys_of |= {"composed, compiled": "composed_compiled", "bf16, compiled": "bf16_compiled"}

    def errors() -> dict[str, float]:
        exact = in_float64(x.double())
        return {name: _relative(way(x), exact) for name, way in ways.items()}

    def exact() -> tuple[Tensor, Tensor]:
        """Twice as far as PyTorch's composition is where that is farthest."""
        expected = in_float64(x.double())
        farthest = (composed(x).double() - expected).abs().max()
        return expected[0], (2 * farthest).expand_as(expected[0])

    ratios = {f"vs_block_{key}": name for name, key in keys_of.items()}
    name = f"{m}x{hidden}x{between}/block/{recipe}"
    return Contest(name, runs, ratios, exact, lambda result: result[0], errors)


_Layer = Callable[[Tensor], Tensor]


def _gated(sums: Tensor) -> Tensor:
    gate, up = sums.chunk(2, -1)
    return F.silu(gate) * up


def _composed_product(weight: Tensor, recipe: str) -> _Layer:
    """By `_scaled_mm`, of a weight that is quantised once; x is by PyTorch's operators."""
    columns = _BLOCK if recipe == BLOCKS else None
    in_8_bits, of_weight = _quantised(weight, columns, columns or 1)

    def product(x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        numbers, scale = _quantised(rows, columns, 1)
        if columns:  # as `_scaled_mm` reads them
            scale = scale.t().contiguous().t()
        result: Tensor = _scaled_mm(numbers, in_8_bits.t(), scale, of_weight.t(), out_dtype=torch.bfloat16)
        return result.view(*x.shape[:-1], -1)

    return product


def _relative(found: Tensor, exact: Tensor) -> float:
    error = (found.double() - exact).square().mean() / exact.square().mean()
    return round(float(error.sqrt()), 5)


def _quantised(matrix: Tensor, columns: int | None, rows: int) -> tuple[Tensor, Tensor]:
    """In e4m3, and the scales of blocks; no `columns`: of whole rows."""
    down, across = matrix.shape[0] // rows, 1 if columns is None else matrix.shape[1] // columns
    blocks = matrix.view(down, rows, across, -1).float()
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=2.0**-100) / _LARGEST
    return (blocks / scale).to(_E4M3).view(matrix.shape), scale.view(down, across)
