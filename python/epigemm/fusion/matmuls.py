"""The matrix products of a graph: which operand is the weight, and its layout."""

from __future__ import annotations

import inspect
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from epigemm._native import ops
from epigemm.arguments.calls import EIGHT_BITS
from epigemm.arguments.eight_bits import MULTIPLE, blocks
from epigemm.arguments.precision import FAST, PROMOTED
from epigemm.epilogues.library import BIAS
from epigemm.epilogues.tracer.program import words
from epigemm.fusion.values import is_contiguous, known, same_sizes, storage_of, tensor_of, value_at

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_scaled_mm: Any = torch._scaled_mm
# The arguments of products of 8 bits: PyTorch's, the same with lists of scales, and epigemm's operator.
_SCALED_MM = words("input mat2 scale_a scale_b bias scale_result out_dtype use_fast_accum")
_WITH_LISTS = words(
    "input mat2 scale_a recipe_a swizzle_a scale_b recipe_b swizzle_b bias out_dtype contraction_dim use_fast_accum"
)
_OWN = words(
    "epilogue input mat2 bias operands scalars accumulate uses_pack strict invariant scale_a scale_b out_dtype "
    "scale_result"
)
_OF_8_BITS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys((_scaled_mm, torch.ops.aten._scaled_mm, torch.ops.aten._scaled_mm.default), _SCALED_MM),
    getattr(torch, "_scaled_mm_v2", None): _WITH_LISTS,  # the torch of later versions
    **dict.fromkeys((ops.linear, ops.linear.default), _OWN),
}
_CALLS = ("call_function", "call_method")
_grouped_mm = torch.ops.aten._grouped_mm
# PyTorch's signatures, with the names of x, of the weight and of the summand first. A call that does not fit its own is
# of another overload, such as `addmm(beta, input, mat1, mat2)`, and is left alone.
_ADD = inspect.signature(lambda input, mat1, mat2, *, beta=1, alpha=1, out=None: None)
_GROUP = inspect.signature(lambda self, mat2, offs=None, bias=None, out_dtype=None: None)
_LINEAR = ("input", "weight", "bias"), inspect.signature(lambda input, weight, bias=None: None)
_MATMUL = ("input", "other", ""), inspect.signature(lambda input, other, *, out=None: None)
_MM = ("input", "mat2", ""), inspect.signature(lambda input, mat2, *, out=None: None)
_ADDMM, _GROUPED = (("mat1", "mat2", "input"), _ADD), (("self", "mat2", "bias"), _GROUP)
_FORMS: dict[Any, tuple[tuple[str, str, str], inspect.Signature]] = {
    F.linear: _LINEAR,
    **dict.fromkeys((torch.matmul, operator.matmul, operator.imatmul, "matmul", "__matmul__"), _MATMUL),
    **dict.fromkeys((torch.mm, torch.bmm, "mm", "bmm"), _MM),
    **dict.fromkeys((torch.addmm, "addmm"), _ADDMM),
    **dict.fromkeys((torch._grouped_mm, _grouped_mm, _grouped_mm.default), _GROUPED),
}
"""By the function that a node calls, or the name of the method."""


class Scales(NamedTuple):
    """What a product of 8-bit numbers has besides.

    Attributes:
        x, weight: fp32: one number, or one for each row, or those of blocks.
        accumulate: as of `epigemm.linear`.
        are_blocks: whether they are those of blocks.
        is_kn: whether the weight's are, as PyTorch's, `[blocks of K, blocks of N]`; there may be more of K, unused.
    """

    x: fx.Node
    weight: fx.Node
    accumulate: str
    are_blocks: bool = False
    is_kn: bool = False


@dataclass(frozen=True)
class Product:
    """D = alpha * (x @ weight.T) + beta * bias; or that of rows in groups, D[m] = x[m] @ weight[g].T.

    Attributes:
        node: the product in the graph.
        x: `[..., K]`.
        weight: `[N, K]`, or `[K, N]` where `is_kn`; where `is_batch` a batch of equal ones; of groups `[groups, K, N]`.
        bias: the summand, or None.
        is_kn: whether the weight is the right operand itself, `[K, N]`.
        is_batch: whether the weight is the first of a batch.
        alpha, beta: numbers; 1 for all functions but `addmm`.
        scales: of a product of 8-bit numbers; else None.
        ends: where the groups of rows end, int32 `[groups]`; None: there are none.
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    is_kn: bool
    is_batch: bool = False
    alpha: float = 1
    beta: float = 1
    scales: Scales | None = None
    ends: fx.Node | None = None

    @property
    def is_scaled(self) -> bool:
        """Whether it is more than a product and a sum."""
        return self.alpha != 1 or self.beta != 1

    @property
    def adds_columns(self) -> bool:
        """Whether the summand, if there is one, is a number for each column: `addmm` also takes matrices."""
        added, columns = tensor_of(self.bias), self.value.shape[-1]
        return self.bias is None or (added is not None and same_sizes(added.shape, (columns,)))

    @property
    def value(self) -> Tensor:
        """The fake tensor of the result."""
        return value_at(self.node)


def is_product(node: fx.Node) -> bool:
    """Whether a node calls one of PyTorch's matrix products."""
    return node.op in _CALLS and (node.target in _FORMS or node.target in _OF_8_BITS)


def understand(node: fx.Node) -> Product | str | None:
    """A node as a product, or why it cannot be fused; None if it is no product, or multiplies two batches."""
    if node.op == "call_function" and node.target in _OF_8_BITS:
        return _of_8_bits(node)
    form = _FORMS.get(node.target) if node.op in _CALLS else None
    if form is None:
        return None
    roles, signature = form
    try:
        given = signature.bind(*node.args, **node.kwargs).arguments
    except TypeError:
        return "it is called by another overload"
    x, weight, added = (given.get(role) for role in roles)
    left, right, result = tensor_of(x), tensor_of(weight), tensor_of(node)
    if left is None or right is None:
        return "an operand is no plain tensor"
    if result is None:
        return "its result is no plain tensor"
    if form is _GROUPED:
        return _understand_groups(node, given, result)
    is_batch = right.dim() == 3 and known(right.stride(0) == 0) and known(right.shape[0] != 0)
    if left.dim() < 2 or (right.dim() != 2 and not is_batch):
        return None
    if not same_sizes(result.shape[:-1], left.shape[:-1]):
        return None  # x is broadcast to the weight's batch
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    alpha, beta = (given.get(factor, 1) for factor in ("alpha", "beta"))
    if not all(isinstance(factor, (int, float)) and factor != 0 for factor in (alpha, beta)):
        return "its alpha or beta is 0, or no number"
    if given.get("out") is not None:
        return "it is written to out="
    if reason := _why_not(result, left, right):
        return reason
    bias = added if isinstance(added, fx.Node) else None
    if form is _LINEAR:
        return Product(node, x, weight, bias, is_kn=False)
    origin = None if is_batch else _transposed(weight, right, node)
    return Product(node, x, origin or weight, bias, origin is None, is_batch, alpha, beta)


def _understand_groups(node: fx.Node, given: dict[str, Any], result: Tensor) -> Product | str:
    """A product of rows in groups, or why it cannot be fused."""
    x, weight, ends = given["self"], given["mat2"], given.get("offs")
    left, right, rows = value_at(x), value_at(weight), tensor_of(ends)
    if left.dim() != 2 or right.dim() != 3 or rows is None:
        return "its groups are not of rows"
    if given.get("bias") is not None or not left.dtype == right.dtype == result.dtype:
        return "its bias or its types are others than a product's"
    if reason := _why_not(result, left, right):
        return reason
    is_read = rows.dtype == torch.int32 and is_contiguous(rows) and same_sizes(rows.shape, right.shape[:1])
    if not is_read or not known(right.shape[0] != 0):
        return "its ends of groups are of another form"
    return Product(node, x, weight, None, is_kn=True, ends=ends)


def _why_not(result: Tensor, left: Tensor, right: Tensor) -> str:
    if result.device.type not in ("cpu", "cuda"):
        return f"it is on {result.device}"
    if result.dtype not in DTYPES:
        return f"it is in {str(result.dtype).removeprefix('torch.')}"
    if result.dtype != left.dtype and result.dtype == torch.float32:
        return "its operands are of other types"  # autocast, which is on here, would cast them to 16 bits
    if left.dtype == torch.float64 or right.dtype == torch.float64:
        return "fp64 under autocast"
    if not is_contiguous(result):
        return "its result does not lie in rows"
    return ""


def _transposed(weight: fx.Node, value: Tensor, product: fx.Node) -> fx.Node | None:
    """The matrix of which the right operand is the transpose, if there is one and gradients still reach it."""
    between = weight
    while between is not product:
        # Nodes that change a mode have no value. If gradients are off, they do not flow through the transpose.
        if between.op.startswith("call") and "example_value" not in between.meta:
            return None
        between = between.next
    origin = weight.args[0] if weight.args else None
    matrix = tensor_of(origin)
    if matrix is None or matrix.dim() != 2 or storage_of(matrix) != storage_of(value):
        return None
    turned = same_sizes(matrix.shape, value.shape[::-1]) and same_sizes(matrix.stride(), value.stride()[::-1])
    same = turned and known(matrix.storage_offset() == value.storage_offset())
    learns = matrix.requires_grad == value.requires_grad and matrix.dtype == value.dtype
    return origin if same and learns and isinstance(origin, fx.Node) else None


# --- 8 bits -----------------------------------------------------------------------------------------------------------

_NO_RECIPE = "its scales are not those of tensors, rows or blocks of 128 and of 128 x 128 numbers in fp32"
_TENSORS, _ROWS, _BLOCKS = (0, 0), (1, 1), (4, 5)
"""Of x and of the weight, by the numbers of `torch.nn.functional.ScalingType`."""


def _of_8_bits(node: fx.Node) -> Product | str | None:
    """A product of 8-bit numbers, as of `understand`."""
    given: dict[str, Any] = {**dict(zip(_OF_8_BITS[node.target], node.args, strict=False)), **node.kwargs}
    is_own = "epilogue" in given
    if is_own and (given["epilogue"] != BIAS.name or given.get("scale_a") is None):
        return None  # a fused call already, or of other types
    scales: list[Any] = [given.get("scale_a"), given.get("scale_b")]
    if "recipe_a" in given:
        if any(len(each) != 1 for each in scales):
            return _NO_RECIPE
        scales = [each for (each,) in scales]
    operands: list[Any] = [given.get("input"), given.get("mat2"), *scales]
    result, read = tensor_of(node), [tensor_of(each) for each in operands]
    if result is None or any(each is None for each in read):
        return "an operand is no plain tensor"
    recipe: Any = ""
    if not (reason := _why_not_in_8_bits(result, read, given)) and not is_own:
        recipe = _recipe(result, read, given)
        reason = recipe if isinstance(recipe, str) else ""
    if reason:
        return reason
    x, weight, x_scale, weight_scale = operands
    origin = weight if is_own else _transposed(weight, value_at(weight), node)
    of_torch = FAST if given.get("use_fast_accum") else PROMOTED
    # Of epigemm's operator only those of blocks are matrices.
    are_blocks = value_at(x_scale).dim() == 2 if is_own else recipe == _BLOCKS
    found = Scales(x_scale, weight_scale, given.get("accumulate", of_torch), are_blocks, not is_own)
    return Product(node, x, origin or weight, given.get("bias"), origin is None, scales=found)


def _why_not_in_8_bits(result: Tensor, read: list[Any], given: dict[str, Any]) -> str:
    left, right, *_ = read
    if result.device.type not in ("cpu", "cuda"):
        return f"it is on {result.device}"
    if given.get("scale_result") is not None:
        return "it has a scale_result"
    if result.dtype not in DTYPES:
        return f"its result is in {str(result.dtype).removeprefix('torch.')}"
    if not {left.dtype, right.dtype} <= {*EIGHT_BITS} or left.dtype == right.dtype == EIGHT_BITS[1]:
        return "epigemm multiplies no such types"
    if result.requires_grad:
        return "its bias requires a gradient, which products of 8 bits do not have"
    return "it is strict, or batch-invariant" if given.get("strict") or given.get("invariant") else ""


def _recipe(result: Tensor, read: list[Any], given: dict[str, Any]) -> tuple[int, int] | str:
    """The scales of a product of PyTorch's, or why epigemm does not accept its arguments."""
    left, right, *scales = read
    m, n, k = *result.shape, right.shape[0]
    if not known(k % MULTIPLE == 0) or not is_contiguous(right.t()):
        return f"its weight is no [N, K] without gaps, or its K not of whole {MULTIPLE}"
    if any(each.dtype != torch.float32 for each in scales):
        return _NO_RECIPE
    by_torch = given.get("recipe_a"), given.get("recipe_b")
    shape, (down, *of_n) = scales[0].shape, scales[1].shape or (1,)
    # Lists may have scales for more blocks of K than there are.
    has_all = same_sizes((down,), (blocks(k),)) or (by_torch[0] and known(down >= blocks(k)))
    are_e4m3 = left.dtype == right.dtype == EIGHT_BITS[0] and not given.get("use_fast_accum")
    are_blocks = same_sizes(shape, (m, blocks(k))) and same_sizes(of_n, (blocks(n),))
    fits = {
        _TENSORS: all(known(each.numel() == 1) for each in scales),
        _ROWS: same_sizes(shape, (m, 1)) and same_sizes(scales[1].shape, (1, n)),
        _BLOCKS: are_blocks and has_all and are_e4m3,
    }
    found = [recipe for recipe, fit in fits.items() if fit]
    if by_torch[0]:
        options = (given.get(name) or () for name in ("swizzle_a", "swizzle_b", "contraction_dim"))
        asked = *map(int, by_torch[0]), *map(int, by_torch[1] or ())
        found = [each for each in found if each == asked and not any(map(any, options))]
    return found[0] if found else _NO_RECIPE
