"""Launch every kernel of the built-in epilogues once, at small shapes, for compute-sanitizer; compare with float64.

    compute-sanitizer --tool memcheck python -m tools.run_every_kernel
    compute-sanitizer --tool racecheck python -m tools.run_every_kernel --shard 1/4

Shapes leave every tile partly empty along M and N, so that the predicated edges run too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks.gradings.products import SCALED, SPLIT, forced_into
from epigemm._native import build_info, ops
from epigemm.arguments.calls import ElementwiseCall, tensors_of
from epigemm.calls import batch_norm, elementwise_kernels, entry, resolve
from epigemm.calls.moments import Moments, column_moments
from epigemm.epilogues.kinds import MATRIX
from epigemm.epilogues.library import FUNCTIONS
from epigemm.epilogues.registry import (
    EPILOGUES,
    Epilogue,
    Operands,
    compute_dtype,
    dtype_of,
    fold_batch_norm_reference,
    typed,
)
from epigemm.tuner.tuner import ONE_ORDER
from tools import sharded
from tools.operands import EpilogueInputs, sample_inputs

DEVICE = torch.device("cuda")
M, N, K = 200, 328, 136  # rows of 16 bytes, but no multiple of any tile
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 4e-3, torch.float64: 1e-12}
SLICES_TOLERANCE = {SPLIT: 1e-6, SCALED: 4e-3}


def expect_close(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Exit with a message unless the relative Frobenius error is within the tolerance (NaN never is)."""
    error = ((actual.double() - expected).norm() / expected.norm()).item()
    if not error <= tolerance:
        sys.exit(f"{name}: relative error {error:.3g}, tolerance {tolerance:.3g}")


def inputs(epilogue: Epilogue, dtype: torch.dtype, columns: int, rows: int = M) -> EpilogueInputs:
    """Random operands of one epilogue."""
    if epilogue.is_compiled:
        return sample_inputs(epilogue, columns, dtype, DEVICE)
    operands = [
        torch.randn(*((rows,) if operand.kind == MATRIX else ()), columns, device=DEVICE).to(
            dtype_of(operand, dtype)
        )
        for operand in epilogue.operands
    ]
    return EpilogueInputs(*epilogue.apart(operands))


def reference(epilogue: Epilogue, acc: Tensor, drawn: EpilogueInputs) -> Tensor:
    """The epilogue in float64."""
    given = [each.double() if isinstance(each, Tensor) else each for each in given_of(epilogue, drawn)]
    return epilogue.reference(acc, given)


def given_of(epilogue: Epilogue, drawn: EpilogueInputs) -> Operands:
    """The operands in the epilogue's order."""
    given = epilogue.in_order(*drawn)
    assert given is not None
    return given


def family_number(name: str) -> int:
    """What a plan calls a family."""
    return list(build_info()["families"]).index(name)


def kernels(arithmetic: str) -> list[tuple[int, int]]:
    """Family and tile of every kernel for "16_bits", "tf32", "split" or "scaled"."""
    families: dict[str, dict[str, int]] = build_info()["families"]
    return [
        (family_number(name), tile)
        for name, tiles in families.items()
        for tile in range(tiles.get(arithmetic, 0) + tiles.get(f"{arithmetic}_as_it_lies", 0))
    ]


def reads_weight(family: int, tile: int, arithmetic: str) -> bool:
    """Whether a kernel on slices of x reads the weight as it lies."""
    of_family: dict[str, int] = list(build_info()["families"].values())[family]
    return tile >= of_family[arithmetic]


def divides_k(family: int, tile: int, arithmetic: str) -> bool:
    """Whether several CTAs may share the K of one of a kernel's tiles."""
    by_elements = (8, 9)  # csrc/gemm/sm80_mma/tiles.h: in 16 bits alone, and the others have fewer tiles
    if family == family_number("sm90_fp16x3"):
        has_256_rows = arithmetic == SCALED and not reads_weight(family, tile - 1, arithmetic)
        return reads_weight(family, tile, arithmetic) and not has_256_rows
    return family in map(family_number, ONE_ORDER) or (
        family == family_number("sm80_mma") and tile not in by_elements
    )


def run_fused(epilogue: Epilogue, dtype: torch.dtype) -> int:
    """Every tile of one epilogue and element type."""
    x = torch.randn(M, K, device=DEVICE).to(dtype)
    weight = (torch.randn(N, K, device=DEVICE) / K**0.5).to(dtype)
    drawn = inputs(epilogue, dtype, N)
    expected = reference(epilogue, x.double() @ weight.double().t(), drawn)
    arithmetic = "tf32" if dtype == torch.float32 else "16_bits"
    # Those of few rows have tests of their own (tests/gpu/test_few_rows.py).
    found = [each for each in kernels(arithmetic) if each[0] != family_number("sm90_few_rows")]
    plans = [[family, tile, tile % 2, 2, 1] for family, tile in found]
    plans += [[family, tile, 0, 1, 2] for family, tile in found if divides_k(family, tile, arithmetic)]
    for plan in plans:
        out = torch.full((M, N), float("nan"), dtype=dtype, device=DEVICE)
        forced_into(
            out,
            epilogue.name,
            x,
            weight,
            "tf32" if dtype is torch.float32 else "ieee",
            bias=drawn.bias,
            operands=drawn.operands,
            scalars=drawn.scalars,
            plan=plan,
        )
        expect_close(f"{epilogue.name} {dtype} plan {plan}", out, expected, TOLERANCE[dtype])
    return len(plans)


def run_pairs(name: str, dtype: torch.dtype) -> int:
    """Every tile of pairs of products, from two weights and from the halves of one."""
    spec = typed(FUNCTIONS[name], [False] * len(FUNCTIONS[name].operands))
    x, bias = torch.randn(M, K, device=DEVICE).to(dtype), torch.randn(N, device=DEVICE).to(dtype)
    both = (torch.randn(2 * N, K, device=DEVICE) / K**0.5).to(dtype)
    halves = both[:N], both[N:]
    acc, gate = (x.double() @ half.double().t() for half in halves)
    expected = spec.reference(acc, [bias.double(), gate])
    found = kernels("pairs")
    for family, tile in found:
        for first, second in (halves, (halves[0].clone(), halves[1].clone())):
            out = torch.full((M, N), float("nan"), dtype=dtype, device=DEVICE)
            plan = (family, tile, tile % 2, 2, 1)
            forced_into(out, spec.name, x, first, "ieee", operands=[bias], plan=plan, weight2=second)
            expect_close(f"pair {name} {dtype} tile {tile}", out, expected, TOLERANCE[dtype])
    return 2 * len(found)


def run_statistics(dtype: torch.dtype, arithmetic: str) -> int:
    """Every tile with the statistics of its columns; on slices of a spoiled row, too."""
    x, weight = (
        torch.randn(M, K, device=DEVICE).to(dtype),
        (torch.randn(N, K, device=DEVICE) / K**0.5).to(dtype),
    )
    is_on_slices = arithmetic in SLICES_TOLERANCE
    if is_on_slices:
        x[M - 1, 1:] *= 2.0**-40  # more than two slices hold
    family = "sm90_fp16x3" if is_on_slices else "sm90_tma"
    of_family: dict[str, int] = build_info()["families"][family]
    tiles = of_family["16_bits" if arithmetic == "ieee" else arithmetic]
    tiles += of_family.get(f"{arithmetic}_as_it_lies", 0)
    for tile in range(tiles):
        out = torch.full((M, N), float("nan"), dtype=dtype, device=DEVICE)
        columns = torch.full((2, N), float("nan"), device=DEVICE)
        plan = [family_number(family), tile, tile % 2, 2, 1]
        forced_into(out, "bias", x, weight, arithmetic, plan=plan, moments=columns)
        variance, mean = torch.var_mean(out.double(), 0, correction=0)
        expect_close(
            f"statistics {dtype} {arithmetic} tile {tile}", columns, torch.stack((mean, variance)), 1e-5
        )
    return tiles


def run_copies(dtype: torch.dtype) -> int:
    """Copies of what TMA cannot address, around a large tile: odd sizes, odd addresses, transposed matrices."""
    x, weight = (torch.randn(rows, K, device=DEVICE).to(dtype) for rows in (M, N))
    shifted = torch.randn(M * K + 1, device=DEVICE).to(dtype)[1:].view(M, K)
    layouts = {
        "odd": (x[:, :-1].contiguous(), weight[:-1, :-1].contiguous()),
        "shifted": (shifted, weight),
        "transposed": (x.t().contiguous().t(), weight.t().contiguous().t()),
    }
    for name, (left, right) in layouts.items():
        out = torch.full((M, right.shape[0]), float("nan"), dtype=dtype, device=DEVICE)
        forced_into(out, "bias", left, right, "ieee", plan=[family_number("sm90_tma"), 0, 0, 1, 1])
        expect_close(f"copies {name} {dtype}", out, left.double() @ right.double().t(), TOLERANCE[dtype])
    return len(layouts)


def run_on_slices(epilogue: Epilogue, arithmetic: str) -> int:
    """Every tile of one epilogue on fp16 slices, each also where the range check rejects rows."""
    found = kernels(arithmetic)
    plans = [(*kernel, 1) for kernel in found]
    plans += [(*kernel, 2) for kernel in found if divides_k(*kernel, arithmetic)]
    weight = torch.randn(K, N, device=DEVICE).t() / K**0.5  # transposed: the other way of reading a matrix
    along_k = weight.contiguous()
    launches = [(plan, weight) for plan in plans]
    launches += [(plan, along_k) for plan in plans if reads_weight(*plan[:2], arithmetic)]
    drawn = inputs(epilogue, torch.float32, N)
    for spoiled in (False, True):
        x = torch.randn(M, K, device=DEVICE)
        if spoiled:
            x[M - 1, 1:] *= 2.0**-40  # more than two slices hold
            x[0, 0] = math.inf
        expected = reference(epilogue, x.double() @ weight.double().t(), drawn)
        finite = expected.isfinite().all(dim=1)
        for (family, tile, splits), lying in launches:
            out = torch.full((M, N), float("nan"), device=DEVICE)
            forced_into(
                out,
                epilogue.name,
                x,
                lying,
                arithmetic,
                bias=drawn.bias,
                operands=drawn.operands,
                scalars=drawn.scalars,
                plan=(family, tile, tile % 2, 2, splits),
            )
            order = " along K" * (lying is along_k)
            name = f"{epilogue.name} {arithmetic} tile {tile}, {splits} splits{order}{' spoiled' * spoiled}"
            expect_close(name, out[finite], expected[finite], SLICES_TOLERANCE[arithmetic])
    return 2 * len(launches)


def run_elementwise(epilogue: Epilogue, dtype: torch.dtype) -> int:
    """Wide rows, rows that vectors do not divide, a ragged end without vectors, and a strided layout."""
    wide, odd = torch.randn(70, 264, device=DEVICE), torch.randn(70, 263, device=DEVICE)
    layouts = {"wide": wide, "odd": odd, "single": odd[0], "strided": wide.t()[::2]}
    for name, values in layouts.items():
        x = values.to(dtype)
        drawn = inputs(epilogue, dtype, x.shape[-1])
        out = torch.full_like(x, float("nan"))
        resolve.elementwise(ElementwiseCall(epilogue, x, given_of(epilogue, drawn), out))
        expected = reference(epilogue, x.double(), drawn)
        expect_close(f"{epilogue.name} {dtype} {name}", out, expected, TOLERANCE[dtype])
    return len(layouts)


def run_derivative(epilogue: Epilogue, dtype: torch.dtype) -> int:
    """Wide rows, rows that vectors do not divide, and tensors that begin between two vectors."""
    shapes = {"wide": (70, 264), "odd": (70, 263), "shifted": (70, 264)}
    for name, (rows, columns) in shapes.items():
        shift = int(name == "shifted")
        x, grad = (
            torch.randn(rows * columns + shift, device=DEVICE).to(dtype)[shift:].view(rows, columns)
            for _ in range(2)
        )
        drawn = inputs(epilogue, dtype, columns)
        out = torch.full_like(x, float("nan"))
        assert elementwise_kernels.has_native(x)  # the question makes the device known
        assert ops._derivative_out(epilogue.name, grad, x, *drawn, out, None, None, None) == 0
        variable = x.to(torch.float64, copy=True).requires_grad_()
        expected = torch.autograd.grad(reference(epilogue, variable, drawn), variable, grad.double())[0]
        expect_close(f"derivative of {epilogue.name} {dtype} {name}", out, expected, TOLERANCE[dtype])
        if name == "wide" and elementwise_kernels.sums_columns(x, columns):
            sums = torch.full_like(out[0], float("nan"))
            found = entry.derivative(ElementwiseCall(epilogue, x, given_of(epilogue, drawn)), grad, sums)
            assert isinstance(found, Tensor)
            name = f"sums of the derivative of {epilogue.name} {dtype}"
            expect_close(name, sums, out.double().sum(0), TOLERANCE[dtype])
    return len(shapes) + 1


def run_alone(epilogue: Epilogue, dtype: torch.dtype) -> int:
    """An epilogue that reads a matrix, without a product, and its derivatives."""
    shapes = (70, 264), (70, 263)
    for rows, columns in shapes:
        x, grad = (torch.randn(rows, columns, device=DEVICE).to(dtype) for _ in range(2))
        given = tensors_of(given_of(epilogue, inputs(epilogue, dtype, columns, rows)))
        leaves = [each.requires_grad_() for each in (x, *given)]
        out: Tensor = ops.elementwise(epilogue.name, x, *epilogue.apart(leaves[1:]))
        found = torch.autograd.grad(out, leaves, grad)
        wide = [each.detach().double().requires_grad_() for each in leaves]
        expected = epilogue.reference(wide[0], wide[1:])
        name = f"{epilogue.name} {dtype} {rows}x{columns}"
        expect_close(name, out.detach(), expected.detach(), TOLERANCE[dtype])
        for each, like in zip(found, torch.autograd.grad(expected, wide, grad.double()), strict=True):
            expect_close(f"derivative of {name}", each, like, TOLERANCE[dtype])
    return 2 * len(shapes)


def run_fold() -> int:
    """The BatchNorm fold in both types."""
    for dtype in (torch.float32, torch.float64):
        vectors = [torch.rand(N, device=DEVICE, dtype=dtype) + 0.5 for _ in range(6)]
        folded = torch.empty(2, N, device=DEVICE, dtype=dtype)
        ops._fold_batch_norm_out(*vectors, 1e-5, folded)
        expected = fold_batch_norm_reference(folded, vectors, 1e-5)
        expect_close(f"fold {dtype}", folded, expected.double(), 1e-6)
    return 2


def run_batch_norm(dtype: torch.dtype) -> int:
    """BatchNorm in training and its derivative, by each access to memory, with and without a ReLU."""
    shapes, relus = ((70, 264), (70, 263)), (False, True)
    for (rows, columns), relu in product(shapes, relus):
        u, grad = (torch.randn(rows, columns, device=DEVICE).to(dtype) for _ in range(2))
        scale, weight, bias = (torch.rand(columns, device=DEVICE).to(dtype) + 0.5 for _ in range(3))
        norm = batch_norm.Norm(scale, weight, bias, 1e-3, relu)
        variance, mean = torch.var_mean(u.to(compute_dtype(dtype)), 0, correction=0)
        running = batch_norm.Running(torch.zeros_like(mean), torch.ones_like(mean), None, 0.1)
        y = batch_norm.normalise(u, Moments(mean, variance), norm, running)
        blocks = column_moments(u, leaves_blocks=True)
        merged = batch_norm.normalise(u, blocks, norm, running)
        expect_close(f"{dtype} merged by BatchNorm's kernel", merged, y.double(), TOLERANCE[dtype])
        found = batch_norm.gradients(grad, u, mean, variance, norm, (dtype,) * 5)
        leaves = [each.double().requires_grad_() for each in (u, scale, weight, bias)]
        of_wide = batch_norm.Norm(leaves[1], leaves[2], leaves[3], 1e-3, False)
        expected = batch_norm.reference(leaves[0], of_wide)
        name, masked = f"batch norm {dtype} {columns} {relu}", torch.where(y <= 0, 0.0, grad.double())
        wide = torch.autograd.grad(expected, leaves, masked if relu else grad.double())
        expect_close(name, y, torch.relu(expected) if relu else expected, TOLERANCE[dtype])
        for each, like in zip((found.u, *found[2:]), wide, strict=True):
            assert each is not None
            expect_close(f"derivative of {name}", each, like, TOLERANCE[dtype])
    return 4 * len(shapes) * len(relus)


def jobs() -> sharded.Jobs:
    """Everything to run, by name, in an order in which neighbours take equally long."""
    found: dict[str, Callable[[], int]] = {"fold": run_fold}
    for dtype in (torch.float16, torch.bfloat16):
        found[f"copies {dtype}"] = partial(run_copies, dtype)
        found[f"statistics {dtype}"] = partial(run_statistics, dtype, "ieee")
    for arithmetic in ("tf32", SPLIT, SCALED):
        found[f"statistics {arithmetic}"] = partial(run_statistics, torch.float32, arithmetic)
    for name, dtype in product(("gated_relu", "gated_silu"), (torch.float16, torch.bfloat16)):
        found[f"pairs {name} {dtype}"] = partial(run_pairs, name, dtype)
    found |= {f"norm {dtype}": partial(run_batch_norm, dtype) for dtype in TOLERANCE}
    for epilogue in EPILOGUES.values():
        for dtype in TOLERANCE:
            found[f"elementwise {epilogue.name} {dtype}"] = partial(run_elementwise, epilogue, dtype)
            found[f"derivative {epilogue.name} {dtype}"] = partial(run_derivative, epilogue, dtype)
        if epilogue.linear:
            found |= jobs_of_products(epilogue)
    for name, function in FUNCTIONS.items():
        epilogue = typed(
            function, [operand.name in ("multiplier", "offset") for operand in function.operands]
        )
        for dtype in TOLERANCE:
            found[f"alone {name} {dtype}"] = partial(run_alone, epilogue, dtype)
        found |= jobs_of_products(epilogue)
    return dict(sorted(found.items()))


def jobs_of_products(epilogue: Epilogue) -> sharded.Jobs:
    """Of an epilogue behind products."""
    dtypes = [dtype for dtype in TOLERANCE if dtype != torch.float64]
    fused = {f"fused {epilogue.name} {dtype}": partial(run_fused, epilogue, dtype) for dtype in dtypes}
    of_slices = {
        f"slices {epilogue.name} {arithmetic}": partial(run_on_slices, epilogue, arithmetic)
        for arithmetic in (SPLIT, SCALED)
    }
    return {**fused, **of_slices}


def main() -> None:
    """Run everything, or a shard of it, and say how much that was."""
    sharded.run(jobs(), "launches")


if __name__ == "__main__":
    main()
