"""Epilogues with the element types of their operands, as the C++ module knows them.

Those of `csrc/epilogue/registry.def` are there from the start. Each other one is registered under a name that contains
a digest of its functor. The planner, the calls and their derivatives treat all alike. One difference is left: of the
first the package has elementwise kernels, those of the others are linked (`epigemm.linker.loader`).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from epigemm._native import ops
from epigemm.compilers import at_trace_time, is_traced, untraced
from epigemm.epilogues import formulas
from epigemm.epilogues.declaration import TRACED, Traced
from epigemm.epilogues.kinds import KINDS, SCALAR, Operand
from epigemm.epilogues.tracer import source
from epigemm.epilogues.tracer.accuracy import ROUNDED_TO, short_number
from epigemm.epilogues.tracer.program import REAL, Program, Ref, Step
from epigemm.epilogues.tracer.reference import constant

_ELEMENT_TYPE, _COMPUTE_TYPE = 1, 2  # what `epigemm_operand` says: csrc/open/contract.h

Operands = Sequence[Tensor | float | None]
"""The operands of a call, one for each of the epilogue's, in its order; None: the bias is absent."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of the epilogue's arithmetic for tensors of `dtype`: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dtype_of(operand: Operand, x_dtype: torch.dtype) -> torch.dtype:
    """The element type of an epilogue's operand in a call with an x of `x_dtype`."""
    return compute_dtype(x_dtype) if operand.folded else x_dtype


class Epilogue:
    """One epilogue: its name and formula, its operands, its functor, and a differentiable reference.

    Attributes:
        operands: what a call gives.
        bias_place: the place among the operands, counted from 1, of the vector that is added to the accumulator before
            all else; a call may leave it out. 0: there is none.
        number: its number in the C++ module.
        is_compiled: whether the package has its elementwise kernels and its derivative's.
        is_choice: whether it is one of a function's, for operands of these types; else the function has no other.
        is_bias: whether it adds a bias, and does no more: PyTorch's GEMM may do that.
        is_bias_relu: the same of the ReLU of such a sum.
        unread: `Program.unread`.
        prelinked: the name under which the package may have its GEMM kernels.
        linear: whether it may follow a product.
        has_scalar: whether it has numbers among its operands.
    """

    def __init__(
        self,
        name: str,
        formula: str,
        traced: Traced,
        operands: Sequence[Operand],
        number: int,
        functor: str = "",
        *,
        linear: bool = True,
    ) -> None:
        self.name, self.formula, self.number = name, formula, number
        self.traced = traced
        self.operands = tuple(operands)
        self.bias_place = bias_of(traced, self.operands)
        self.linear = linear
        self.has_scalar = any(each.kind == SCALAR for each in operands)
        self.functor = functor  # the struct in csrc/epilogue/NAME.h; empty: that of `traced`
        self.is_compiled = bool(functor)
        self.is_choice = not (functor and traced.is_own)
        is_sum = self.bias_place > 0 and traced.is_compiled
        self.is_bias = is_sum and traced.program.is_bias
        self.is_bias_relu = is_sum and traced.program.is_bias_relu
        self.unread = functools.cache(traced.program.unread)
        # The package's kernels read operands that have x's type.
        is_usual = all(each.folded == (each.kind == SCALAR) and not each.shared for each in operands)
        self.prelinked = name if functor else formulas.prelinked_name(traced.digest) if is_usual else ""

    @property
    def first(self) -> str:
        """The name of the elementwise function's first argument."""
        return "z" if self.is_choice else "x"

    def __repr__(self) -> str:
        return f"Epilogue({self.name}: {self.formula})"

    def source(self, symbol: str) -> str:
        """The text for NVRTC that goes into an open kernel (csrc/open/contract.h)."""
        # For results of 16 bits shorter instructions are used.
        is_derivative, is_narrow = "_derivative_" in symbol, "float16" in symbol
        half = "bfloat16" if "bfloat16" in symbol else "float16"
        function = "slope" if is_derivative else f"apply_{half}" if is_narrow else "apply"
        function += "_double" if "float64" in symbol else ""
        elements = [_COMPUTE_TYPE if operand.folded else _ELEMENT_TYPE for operand in self.operands]
        slots = zip(self.operands, self.traced.slots, strict=True)
        shared = [slot for operand, slot in slots if operand.shared]
        own = (self.name, self.functor) if self.functor else None
        return self.traced.kernel_source(elements, ("operand", function), shared, own)

    def named(self, operands: Operands) -> list[tuple[str, Tensor]]:
        """The tensors of a call and their names, which may also be those of other arguments."""
        every = zip(self.operands, operands, strict=True)
        return [(operand.name, value) for operand, value in every if isinstance(value, Tensor)]

    def bias_among(self, operands: Operands) -> Tensor | None:
        """The bias of a call."""
        return operands[self.bias_place - 1] if self.bias_place else None  # type: ignore[return-value]

    def without_bias(self, operands: Operands) -> Operands:
        """A call's operands, for a product to which its bias was added."""
        place = self.bias_place
        return (*operands[: place - 1], None, *operands[place:]) if place else operands

    def in_order(
        self, bias: Tensor | None, tensors: Sequence[Tensor], scalars: Sequence[float]
    ) -> Operands | None:
        """A call's operands from what its operator takes; None if their number does not fit.

        Numbers are for the first scalars, tensors for all others.
        """
        values, numbers = iter(tensors), iter(scalars)
        given: list[Tensor | float | None] = []
        for place, operand in enumerate(self.operands, 1):
            if place == self.bias_place:
                given.append(bias)
                continue
            value: Tensor | float | None = next(numbers, None) if operand.kind == SCALAR else None
            given.append(next(values, None) if value is None else value)
            if given[-1] is None:
                return None
        fits = next(values, None) is None and next(numbers, None) is None
        return tuple(given) if fits and (bias is None or self.bias_place) else None

    def apart(self, operands: Operands) -> tuple[Tensor | None, list[Tensor], list[float]]:
        """What the call's operator takes: its bias, tensors and numbers; all scalars are tensors, or none is."""
        bias: Any = None
        tensors: list[Tensor] = []
        numbers: list[float] = []
        for place, value in enumerate(operands, 1):
            if place == self.bias_place:
                bias = value
            elif isinstance(value, Tensor):
                tensors.append(value)
            elif value is not None:
                numbers.append(value)
        return bias, tensors, numbers

    def reference(self, acc: Tensor, operands: Operands) -> Tensor:
        """The epilogue in plain differentiable PyTorch, rounded once to the dtype of `acc`: a new tensor."""
        wide = compute_dtype(acc.dtype)
        z = acc.to(wide)
        values: list[Tensor | None] = []
        for value in operands:
            if value is not None:
                value = value.to(wide) if isinstance(value, Tensor) else constant(z, value)
            values.append(value)
        if is_traced():
            _make_modules(self.traced.key)
        is_absent = self.bias_place > 0 and operands[self.bias_place - 1] is None
        module = self.traced.behind_bias if is_absent else self.traced.graph
        # `forward`, because the module's call takes as long as two operators on a small tensor.
        result: Tensor = module.forward(z, *values).to(acc.dtype)
        # A function that does not read the product may have fewer rows: those of a matrix that several of them share.
        if result.shape == acc.shape:
            return result
        return result.expand(acc.shape).clone(memory_format=torch.contiguous_format)

    @functools.cached_property
    def with_product(self) -> Epilogue:
        """The epilogue with what its derivative reads as its second value: the product and its bias.

        A GEMM may store it beside the result (`epigemm.calls.one_kernel`).
        """
        bias, count = self.bias_place, self.traced.program.operands
        steps = (Step("add", (Ref(0), Ref(bias)), REAL, ""),) if bias else ()
        product = Program(count, steps, Ref(count + 1) if steps else Ref(0))
        name = f"{self.traced.name}_with_product"
        traced = Traced(name, self.traced.operands, self.traced.program, stored=product)
        return typed(
            traced,
            [operand.folded for operand in self.operands],
            [operand.shared for operand in self.operands],
        )


@at_trace_time
def _make_modules(key: str) -> None:
    """Make what a function's reference runs, not traced by Dynamo, which then finds it."""
    traced = TRACED[key]
    _ = traced.graph, traced.behind_bias


def bias_of(traced: Traced, operands: Sequence[Operand]) -> int:
    """The place of the operand that is added to the accumulator before all else; 0: there is none."""
    place = traced.bias_place
    return 0 if place and operands[place - 1].folded else place


EPILOGUES: dict[str, Epilogue] = {}
"""Those of `registry.def`, by name."""

LINKED: dict[str, Epilogue] = {}
"""Those that were registered since."""


def typed(traced: Traced, folded: Sequence[bool], shared: Sequence[bool] = ()) -> Epilogue:
    """The epilogue of a function, with the element types of its operands: `folded` ones have the arithmetic's.

    `shared`: which matrices share rows; none if it is empty.
    """
    key = (*folded, *shared)
    found = traced.forms.get(key)
    if found is None:
        specs = zip(traced.operands, folded, shared or [False] * len(folded), strict=True)
        operands = [replace(spec, folded=wide, shared=shares) for spec, wide, shares in specs]
        found = traced.forms[key] = _register(traced, operands)
    return found


def _register(traced: Traced, operands: Sequence[Operand]) -> Epilogue:
    bias = bias_of(traced, operands)
    if bias and traced.is_compiled:  # whoever wrote it: the package has its kernels
        found = EPILOGUES["bias" if traced.program.is_bias else "bias_relu"]
        return Epilogue(found.name, found.formula, traced, operands, found.number, found.functor)
    names = [operand.name for operand in operands]
    forms = [operand.folded + 2 * operand.shared for operand in operands]
    about = "\n".join([traced.digest, *names, *map(str, forms)])
    version = hashlib.sha256(about.encode()).hexdigest()[:16]
    if traced.is_own:  # a fixed name, by which exported programs find it (`library.named`)
        version = "".join(map(str, forms))
    name = f"{traced.name}.{version}"
    # Both values are computed from the start.
    primitives = [source.primitives(each, traced.kinds) for each in (traced.program, traced.stored) if each]
    with untraced():  # else a program that is exported meanwhile would hold this operator
        number = ops._register_epilogue(
            name,
            ",".join(names),
            [KINDS[operand.kind].code for operand in operands] or None,
            forms or None,
            bias,
            ",".join(filter(None, primitives)),
            short_number(traced.program, ROUNDED_TO["bfloat16"]) is not None,
            traced.stored is not None,
        )
    formula = f"D = {traced.name}({', '.join(['acc', *names])})"
    found = LINKED[name] = Epilogue(name, formula, traced, operands, number)
    return found


FOLDED = ("bias", "scale", "running_mean", "running_var", "bn_weight", "bn_bias")
"""The vectors that fold into scale_batch_norm's multiplier and offset, in the operator's order."""


def fold_batch_norm_reference(like: Tensor, vectors: Sequence[Tensor | None], eps: float) -> Tensor:
    """`folded_by_reference` as one tensor `[2, N]`."""
    return torch.stack(folded_by_reference(like, vectors, eps))


def folded_by_reference(like: Tensor, vectors: Sequence[Tensor | None], eps: float) -> tuple[Tensor, Tensor]:
    """The fold of scale and inference BatchNorm into `multiplier` and `offset`, in differentiable PyTorch.

        multiplier = scale * g,  offset = (bias * scale - mean) * g + bn_bias,  g = bn_weight / sqrt(var + eps)

    An absent vector counts as neutral: 0 for bias, mean and bn_bias, 1 for scale and bn_weight. Without `running_var`
    there is no normalisation (g = bn_weight). Both are `[N]`, in the epilogue's arithmetic type.
    """
    bias, scale, running_mean, running_var, bn_weight, bn_bias = vectors
    # The offset is a difference of products, which may cancel. fp64 keeps all bits that fp32 can hold. MPS has no fp64.
    wide = torch.float32 if like.device.type == "mps" else torch.float64

    def read(vector: Tensor | None, absent: float) -> Tensor:
        return like.new_full((), absent, dtype=wide) if vector is None else vector.to(wide)

    gain = read(bn_weight, 1.0)
    if running_var is not None:
        gain = gain / torch.sqrt(running_var.to(wide) + eps)
    scaled = read(scale, 1.0)
    multiplier = scaled * gain
    # Absent vectors are left out: an infinity would make NaN of a product with their zeros.
    offset = read(bn_bias, 0.0)
    if bias is not None or running_mean is not None:
        shifted = read(bias, 0.0) * scaled if bias is not None else read(bias, 0.0)
        offset = (shifted - read(running_mean, 0.0)) * gain + offset
    offset = offset if offset.dim() else offset.expand_as(multiplier)
    # Both have the full shape; apart, each has the gradients of its own.
    dtype = compute_dtype(like.dtype)
    return multiplier.expand_as(offset).to(dtype), offset.to(dtype)
