"""Epilogues that are made at run time.

An epilogue of the user's (`epigemm.user_epilogue`) is registered with the native module under a name that its source
decides. From then on the planner, the calls and their derivatives treat it like a built-in one. What differs is here:
the kernel of the epilogue alone is linked as well (`epigemm.linker`). Where it cannot be, and on devices without
kernels, the epilogue's PyTorch reference stands in.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from epigemm import linker, precision, programs, tables
from epigemm._native import ops
from epigemm.epilogues import LINKED, Epilogue, Operand, compute_dtype, named
from epigemm.operand_kinds import KINDS, MATRIX, PER_COLUMN, SCALAR

if TYPE_CHECKING:
    from epigemm.calls import ElementwiseCall
    from epigemm.custom import Traced

_ELEMENT_TYPE, _COMPUTE_TYPE = 1, 2  # what `epigemm_operand` says: csrc/open/contract.h
_torch_linear = torch.nn.functional.linear
_FP32, _FP64 = torch.float32, torch.float64


class LinkedEpilogue(Epilogue):
    """A traced function with the element types of its operands: of a `folded` one that of the arithmetic, not x's."""

    is_linked = True

    def __init__(self, traced: Traced, folded: Sequence[bool]) -> None:
        specs = zip(traced.operands, folded, strict=True)
        operands = [Operand(spec.kind, spec.name, is_folded) for spec, is_folded in specs]
        names = [operand.name for operand in operands]
        about = "\n".join([traced.digest, *names, *(str(operand.folded) for operand in operands)])
        version = hashlib.sha256(about.encode()).hexdigest()[:16]
        if traced.is_own:  # of a name that stays, for exported programs: `epilogues.named` knows it
            version = "".join(str(int(operand.folded)) for operand in operands)
        name = f"{traced.name}.{version}"
        # Where no operand may be a number there is nothing to do before the steps.
        compute = traced.reference if SCALAR in traced.kinds else traced.graph.forward
        super().__init__(name, f"D = {traced.name}({', '.join(['acc', *names])})", compute, *operands)
        self.takes_bias = False
        bias = traced.program.bias()
        if bias is not None and operands[bias - 1] == Operand(PER_COLUMN, names[bias - 1]):
            self.bias_place = bias
        self.traced = traced
        kinds = [KINDS[operand.kind].code for operand in operands]
        of_compute = [int(operand.folded) for operand in operands]
        self.number = ops._register_epilogue(
            name,
            ",".join(names),
            kinds or None,
            of_compute or None,
            self.bias_place or 0,
            traced.special_functions,
        )
        # The package's kernels read operands of x's type.
        is_usual = all(operand.folded == (operand.kind == SCALAR) for operand in operands)
        self.prelinked = programs.prelinked_name(traced.digest) if is_usual else ""
        LINKED[name] = self
        tables.made(name)

    @property
    def after_bias(self) -> Epilogue | None:
        """As `Epilogue.after_bias`: of epigemm's own."""
        if not self.traced.is_own or self.bias_place != 1:
            return None
        name, _, folded = self.name.removeprefix("bias_").partition(".")
        return named(f"{name}.{folded[1:]}")

    def in_order(
        self, bias: Tensor | None, operands: Sequence[Tensor], scalars: Sequence[float]
    ) -> tuple[Tensor | float | None, ...] | None:
        """As `Epilogue.in_order`; numbers are for the first scalars, tensors stand for the others."""
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
            return self.compute(acc, *given)
        values = [value.float() if isinstance(value, Tensor) else value for value in given]
        return self.compute(acc.float(), *values).to(dtype)

    def check_unchanged(self) -> None:
        """As `Epilogue.check_unchanged`."""
        self.traced.check_unchanged()

    def source(self, symbol: str) -> str:
        """The text for NVRTC that goes into an open kernel."""
        wide, half = "float64" in symbol, re.search("float16", symbol) is not None
        if "_derivative_" in symbol:
            function = "slope_double" if wide else "slope"
        else:
            function = "apply_double" if wide else "apply_16" if half else "apply"
        elements = [_COMPUTE_TYPE if operand.folded else _ELEMENT_TYPE for operand in self.operands[1:]]
        return self.traced.kernel_source(elements, ("operand", function))

    def describe_error(self, source: str, log: str) -> str:
        """As `Epilogue.describe_error`: with the line of the user's function that an error comes from."""
        from epigemm.functor_source import describe_compile_error

        return describe_compile_error(self.traced.program, source, log)


def linear(
    epilogue: Any,
    x: Tensor,
    weight: Tensor,
    # one for each of the epilogue's, of as many dimensions as the result where they have its rows
    operands: Sequence[Any],
    out: Tensor | None,  # where the result goes; None: a new tensor
    full_fp32: int,  # whether torch's own setting is less accurate than the call
) -> Tensor:
    """D = epilogue(x @ weight.T) by PyTorch's operators, of arguments that are known to fit."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    bias, place = None, epilogue.bias_place
    if place is not None:  # rounded with the product, as PyTorch's operators do
        bias = operands[place - 1]
        operands = [*operands[: place - 1], bias.new_full((), -0.0), *operands[place:]]
    with precision.full_fp32(x.device.type) if full_fp32 else nullcontext():
        product = _torch_linear(rows, weight, bias)
    if rows is not x:
        product = product.reshape(*x.shape[:-1], weight.shape[0])
    result: Tensor = epilogue.evaluate(product, operands)
    return result if out is None else out.copy_(result)


def elementwise_by_reference(epilogue: Any, x: Tensor, operands: Sequence[Any], out: Tensor | None) -> Tensor:
    """D = epilogue(x), as `linear`."""
    result: Tensor = epilogue.evaluate(x, operands)
    if out is None and x.is_contiguous():
        return result
    return (torch.empty_like(x) if out is None else out).copy_(result)


def elementwise(epilogue: LinkedEpilogue, call: ElementwiseCall) -> Tensor:
    """D = epilogue(x), for a matrix, into `call.out` or a new tensor."""
    x = call.x
    out = torch.empty_like(x) if call.out is None else call.out
    if not x.is_cuda or x.numel() == 0 or linker.link(epilogue, missing_elementwise(epilogue, x), x.device):
        return out.copy_(epilogue.reference(x, call.bias, call.operands, call.scalars))
    target = out if _has_rows(out) else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    operands = [readable(operand) for operand in call.operands]
    ops._linked_elementwise_out(
        epilogue.name, readable(x), operands or None, list(call.scalars) or None, target
    )
    return target if target is out else out.copy_(target)


def gradients(
    epilogue: LinkedEpilogue, call: ElementwiseCall, grad: Tensor, needs: Sequence[bool]
) -> list[Tensor | None] | None:
    """Gradients with respect to (x, bias, *operands), in one kernel and sums; None where no kernel runs."""
    x = call.x
    if not x.is_cuda or x.dim() != 2 or x.numel() == 0 or grad.dtype != x.dtype:
        return None
    given = epilogue.in_order(None, call.operands, call.scalars) or ()
    every = zip(epilogue.operands[1:], epilogue.traced.slots, epilogue.traced.reads, given, strict=True)
    tensors = [each for each in every if isinstance(each[3], Tensor)]
    for operand, *_, value in tensors:
        if not operand.folded and isinstance(value, Tensor):
            # Of a product that was made again in fp32, the gradient is a 16-bit one in fp32.
            grad = grad.to(value.dtype)
    if linker.link(epilogue, missing_elementwise(epilogue, grad, derivative=True), x.device):
        return None
    wide = compute_dtype(x.dtype)
    found: list[Tensor | None] = [None] * (2 + len(call.operands))
    slots, outs = [], []
    places = {0: (MATRIX, -1, True, x.dtype)}
    for place, (operand, slot, is_read, _) in enumerate(tensors, 2):
        places[place] = operand.kind, slot, is_read, call.operands[place - 2].dtype
    wanted = {place: about for place, about in places.items() if needs[place]}
    for place, (kind, slot, is_read, dtype) in wanted.items():
        like: Any = {"dtype": dtype if kind == MATRIX else wide, "device": x.device}
        found[place] = torch.empty(x.shape, **like) if is_read else torch.zeros(x.shape, **like)
        if is_read:
            slots.append(slot)
            outs.append(found[place])
    operands = [readable(operand) for operand in call.operands] or None
    scalars = list(call.scalars) or None
    ops._linked_derivative_out(epilogue.name, readable(grad), readable(x), operands, scalars, slots, outs)
    for place, (kind, _, _, dtype) in wanted.items():
        of_elements = found[place]
        assert of_elements is not None
        found[place] = KINDS[kind].summed(of_elements).to(dtype)
    return found


def missing_elementwise(epilogue: Epilogue, x: Tensor, *, derivative: bool = False) -> str:
    """The elementwise kernel of such an x, or that of the derivative, unless it is linked already."""
    names: str = ops._missing_elementwise(epilogue.name, x, derivative)
    return names


def _has_rows(tensor: Tensor) -> bool:
    """Whether a matrix's rows have no gaps, which is how kernels read and write."""
    return tensor.stride(1) == 1 or tensor.shape[1] == 1


def readable(tensor: Tensor) -> Tensor:
    """A tensor as the kernels read it: matrices by rows, vectors without gaps."""
    if tensor.dim() == 2 and tensor.shape[1] > 1:
        return tensor if _has_rows(tensor) else tensor.contiguous()
    if tensor.dim() == 0 or tensor.stride(0) == 1:
        return tensor
    # A single element is contiguous to torch whatever its stride says.
    return tensor.contiguous().as_strided(tensor.shape, (1,) * tensor.dim())
