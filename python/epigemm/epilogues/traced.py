"""Epilogues that are made at run time.

A user's epilogue (`epigemm.user_epilogue`) is registered with the C++ module under a name that contains a digest of its
source. From then on the planner, the calls and their derivatives treat it like a built-in one. One difference is in
this module: the elementwise kernel is linked, too (`epigemm.linking.loading`). If it cannot be linked, and on
devices without kernels, the epilogue's PyTorch reference is used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from epigemm._native import ops
from epigemm.epilogues import formulas
from epigemm.epilogues.kinds import KINDS, PER_COLUMN, SCALAR
from epigemm.epilogues.registry import LINKED, Epilogue, Operand, named
from epigemm.epilogues.tracing import cost
from epigemm.epilogues.tracing.short import ROUNDED_TO, short_number

if TYPE_CHECKING:
    from epigemm.epilogues.declaring import Traced

_ELEMENT_TYPE, _COMPUTE_TYPE = 1, 2  # what `epigemm_operand` says: csrc/open/contract.h
_FP32, _FP64 = torch.float32, torch.float64


class LinkedEpilogue(Epilogue):
    """A traced function with the element types of its operands: `folded` operands have the arithmetic's, others x's.

    `shared`: which matrices share rows; none if it is empty.
    """

    first = "z"
    takes_0d = False
    chooses_dtypes = True  # each choice is an epilogue of its own
    order_of_operands = ""
    has_cpu_loop = False
    derives_operands = True

    def __init__(self, traced: Traced, folded: Sequence[bool], shared: Sequence[bool] = ()) -> None:
        specs = zip(traced.operands, folded, shared or [False] * len(folded), strict=True)
        operands = [Operand(spec.kind, spec.name, *form) for spec, *form in specs]
        names = [operand.name for operand in operands]
        forms = [operand.folded + 2 * operand.shared for operand in operands]
        about = "\n".join([traced.digest, *names, *map(str, forms)])
        version = hashlib.sha256(about.encode()).hexdigest()[:16]
        if traced.is_own:  # a fixed name, by which exported programs find it (`registry.named`)
            version = "".join(map(str, forms))
        name = f"{traced.name}.{version}"
        # If no operand may be a number, nothing has to be converted before the steps.
        compute = traced.reference if SCALAR in traced.kinds else traced.graph.forward
        super().__init__(name, f"D = {traced.name}({', '.join(['acc', *names])})", compute, *operands)
        self.takes_bias = False
        bias = traced.program.bias()
        if bias is not None and operands[bias - 1] == Operand(PER_COLUMN, names[bias - 1]):
            self.bias_place = bias
        self.traced = traced
        self.unread = frozenset(range(len(self.operands))) - traced.program.read_by_derivative()
        kinds = [KINDS[operand.kind].code for operand in operands]
        # Both values are computed from the start.
        primitives = [cost.primitives(each, traced.kinds) for each in (traced.program, traced.stored) if each]
        self.number = ops._register_epilogue(
            name,
            ",".join(names),
            kinds or None,
            forms or None,
            self.bias_place or 0,
            ",".join(filter(None, primitives)),
            short_number(traced.program, ROUNDED_TO["bfloat16"]) is not None,
            traced.stored is not None,
        )
        # The package's kernels read operands that have x's type.
        is_usual = all(
            form == (operand.kind == SCALAR) for form, operand in zip(forms, operands, strict=True)
        )
        self.prelinked = formulas.prelinked_name(traced.digest) if is_usual else ""
        LINKED[name] = self

    @property
    def after_bias(self) -> Epilogue | None:
        """As `Epilogue.after_bias`; only epigemm's own programs have one."""
        if not self.traced.is_own or self.bias_place != 1:
            return None
        name, _, forms = self.name.removeprefix("bias_").partition(".")
        return named(f"{name}.{forms[1:]}")

    def in_order(
        self, bias: Tensor | None, operands: Sequence[Tensor], scalars: Sequence[float]
    ) -> tuple[Tensor | float | None, ...] | None:
        """As `Epilogue.in_order`. Numbers are for the first scalars, tensors for the others."""
        tensors, numbers = iter(operands), iter(scalars)
        given: list[Tensor | float | None] = []
        for operand in self.operands[1:]:
            value: Tensor | float | None = next(numbers, None) if operand.kind == SCALAR else None
            value = next(tensors, None) if value is None else value
            if value is None:
                return None
            given.append(value)
        fits = next(tensors, None) is None and next(numbers, None) is None
        return tuple(given) if fits and bias is None else None

    def reference(
        self, acc: Tensor, bias: Tensor | None, operands: Sequence[Tensor], scalars: Sequence[float]
    ) -> Tensor:
        """As `Epilogue.reference`; a new tensor."""
        given = self.in_order(bias, operands, scalars)
        assert given is not None
        return self.evaluate(acc, given)

    def evaluate(self, acc: Tensor, given: Sequence[Any]) -> Tensor:
        """`reference`, with all operands in order."""
        dtype = acc.dtype
        if dtype is _FP32 or dtype is _FP64:
            result = self.compute(acc, *given)
        else:
            values = [value.float() if isinstance(value, Tensor) else value for value in given]
            result = self.compute(acc.float(), *values).to(dtype)
        # A function that does not read the product may have fewer rows: those of a matrix that several of them share.
        if result.shape == acc.shape:
            return result
        return result.expand(acc.shape).clone(memory_format=torch.contiguous_format)

    def source(self, symbol: str) -> str:
        """The text for NVRTC that goes into an open kernel."""
        wide = "float64" in symbol
        if "_derivative_" in symbol:
            function = "slope_double" if wide else "slope"
        else:
            half = "_bfloat16" if "bfloat16" in symbol else "_float16" if "float16" in symbol else ""
            function = "apply_double" if wide else f"apply{half}"
        elements = [_COMPUTE_TYPE if operand.folded else _ELEMENT_TYPE for operand in self.operands[1:]]
        slots = zip(self.operands[1:], self.traced.slots, strict=True)
        shared = [slot for operand, slot in slots if operand.shared]
        return self.traced.kernel_source(elements, ("operand", function), shared)

    def describe_error(self, source: str, log: str) -> str:
        """As `Epilogue.describe_error`: with the line of the user's function that an error comes from."""
        from epigemm.epilogues.tracing.source import describe_compile_error

        return describe_compile_error(self.traced.program, source, log)
