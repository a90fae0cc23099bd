"""What a log says: the explanation of a function's call, or the products of a module's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from torch import Tensor

from epigemm.arguments.calls import ElementwiseCall, LinearCall
from epigemm.autograd import gradients
from epigemm.epilogues.registry import compute_dtype
from epigemm.epilogues.tracer.results import structured, written
from epigemm.explain import explanation, log, norms
from epigemm.explain.answer import ELEMENTWISE, GEMM_ELEMENTWISE, REFERENCE, Explanation, Product
from epigemm.explain.explanation import BACKWARD_BY_TORCH, dtype_name
from epigemm.explain.log import Call, Launch, Log, kernels_of
from epigemm.results_epilogue import ResultsEpilogue


def of_function(fn_or_name: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> Explanation:
    """`epigemm.explain` of a function."""
    name, opened = log.logged(fn_or_name, *args, **kwargs)
    made = getattr(fn_or_name, "__self__", fn_or_name)
    if isinstance(made, ResultsEpilogue):
        return _of_results(name, opened, made, args, kwargs, is_linear=fn_or_name is made)
    if opened.calls:
        return explained(name, opened.told)
    launches = kernels_of(opened.told)
    return replace(_by_torch(opened.returned), op=f"{name}: PyTorch's operators", kernels=launches)


def _by_torch(result: Tensor) -> Explanation:
    """What no kernel of epigemm's computes, and no product is in."""
    arithmetic, backward = dtype_name(compute_dtype(result.dtype)), BACKWARD_BY_TORCH
    return Explanation("z", REFERENCE, "PyTorch's operators", arithmetic, [], backward=backward)


def _behind_product(path: str) -> str:
    return GEMM_ELEMENTWISE if path == ELEMENTWISE else path


def explained(function: str, told: Sequence[Launch]) -> Explanation:
    """The explanation of a function's calls, of which the last gives the result, and of what is beside them."""
    *earlier, last = [each for each in told if isinstance(each, Call)]
    call, found = last.call, last.found
    op = "linear" if isinstance(call, LinearCall) else "elementwise"
    op = f"epigemm::{op if call.out is None else f'{op}_out'}, epilogue {call.epilogue.name}"
    if earlier and isinstance(call, ElementwiseCall):  # a product in autocast's type
        found = replace(found, path=_behind_product(found.path), reasons=[explanation.PROMOTED])
    op = f"{function}: {found.op or f'{op}: {call.epilogue.formula}'}"
    found = replace(found, op=op, backward=_backward(last, earlier), kernels=kernels_of(told))
    for each in earlier:
        reasons = [*found.reasons, f"it reads another product: {'; '.join(each.found.kernels)}"]
        us = None if each.found.us is None or found.us is None else each.found.us + found.us
        is_measured = each.found.is_measured and found.is_measured
        found = replace(found, reasons=reasons, us=us, is_measured=is_measured)
    return found if last.norm is None else norms.behind(found, call.epilogue, *last.norm)


def _backward(last: Call, earlier: Sequence[Call] = ()) -> str:
    """What the first derivative of these calls runs."""
    call = last.call
    if call.out is not None:
        return "none: a call with out= has no derivative"
    if last.found.backward:
        backward = last.found.backward
    elif isinstance(call, LinearCall) and not (last.is_apart and not gradients.keeps_product(call)):
        backward = explanation.backward_linear(call)
    else:
        what = f"product; {explanation.PRODUCTS}" if earlier or isinstance(call, LinearCall) else "x"
        backward = f"{explanation.derivative(call)} on the saved {what}"
    if True in [each.differentiates for each in (*earlier, last)]:
        return backward
    return f"not needed: no argument requires grad (otherwise: {backward})"


def products_of(opened: Log) -> list[Product]:
    """The products of a module's call, with unique names: the second product of a layer `fc` is `fc#2`."""
    found, before, counts = list[Product](), list[Launch](), Counter[str]()
    for each in opened.told:
        before.append(each)
        product = each.product
        if isinstance(each, Call):
            product, before = _product(each, before), []
        if product is not None:
            counts[product.name] += 1
            count = counts[product.name]
            found.append(product if count == 1 else replace(product, name=f"{product.name}#{count}"))
    return found


def _product(told: Call, launches: Sequence[Launch]) -> Product:
    """A call; `launches`: those ahead of it, and its own."""
    x, place = told.call.x, told.product or Product("")
    size = (prod(x.shape[:-1]), x.shape[-1])
    if isinstance(told.call, LinearCall):
        size = (told.call.rows, *told.call.weight.shape)
    about: Any = {"function": place.function or told.function, "size": size, "dtype": dtype_name(x.dtype)}
    return replace(place, **about, why="", explanation=explained(place.name, launches))


# --- several results: every launch of the call, and which result each of them is --------------------------------------

_SHARED = (
    "the results come from one matrix, which is stored in x's dtype: each other matrix is one kernel more, each "
    "reduction one of PyTorch's"
)
_BOTH = (
    "one kernel computes two matrices from the product and stores both; each other matrix is one kernel more, each "
    "reduction one of PyTorch's"
)
_OF_REDUCTIONS = "of reductions and casts PyTorch's own derivatives"


def _of_results(
    function: str,
    opened: Log,
    made: ResultsEpilogue,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_linear: bool,
) -> Explanation:
    options = {name: value for name, value in kwargs.items() if name not in ("out", "precision", "strict")}
    form, given = made.form(args[1 + is_linear :], options)
    promoted = form.promoted_results(args[0], given) if is_linear else [False] * len(form.results)
    # Where results are promoted, the first call is the product in autocast's type, which is cast then.
    product, calls = (opened.calls[0], opened.calls[1:]) if any(promoted) else (None, opened.calls)
    kernels, memory = _named(opened, product, () if is_linear else args[:1])
    first, is_both = _by_torch(args[0]), bool(calls) and len(calls[0].results) == 2
    if calls:
        shared = form.parts(calls[0].call.x.dtype).matrices[0].traced
        is_shared = shared is not None and isinstance(calls[0].call, LinearCall)
        first = explained(shared.name if is_shared else calls[0].function, calls[:1])
        first = replace(first, op=first.op.partition(": ")[2]) if is_both else first
    needed = [each for each in map(_backward, calls) if not each.startswith("not ")]
    names = [f"r{number}" for number in range(len(form.results))]
    found = replace(
        first,
        reasons=[*first.reasons, *memory, _BOTH if is_both else _SHARED],
        kernels=kernels,
        backward="; ".join([*dict.fromkeys(needed), _OF_REDUCTIONS]) if needed else first.backward,
        results=[
            f"{name}: {replace(each, is_fp32=each.is_fp32 or is_fp32)}"
            for name, each, is_fp32 in zip(names, form.results, promoted, strict=True)
        ],
    )
    if product is not None:
        of_product = explained("linear", [product])
        reasons = [explanation.PROMOTED, *of_product.reasons, *found.reasons]
        found = replace(found, op=of_product.op, path=_behind_product(found.path), reasons=reasons)
    return replace(found, op=f"{function}: {written(form.traced.results.structure, names)}, of {found.op}")


def _named(opened: Log, product: Call | None, z: Sequence[Tensor]) -> tuple[list[str], list[str]]:
    """All launches, with the names of the results that each of them gives; and what matrices take that are none.

    `product`: what is cast before all else; `z`: what an elementwise call is of.
    """
    results = [_memory_of(each) for each in structured(opened.returned)[0]]
    copies = {  # whose copies results are
        _memory_of(each.results[0]): _memory_of(each.source)
        for each in opened.told
        if each.source is not None and each.kernels == [log.COPY]
    }
    given = [_memory_of(each) for each in z]
    matrices = dict[int, int]()  # the bytes of each
    kernels = list[str]()
    for each in opened.told:
        *before, kernel = each.kernels
        read = None if each.source is None else _memory_of(each.source)
        made = {_memory_of(result): result.nbytes for result in each.results}
        if product is not None and read == _memory_of(product.results[0]):
            given += made
        is_matrix = (isinstance(each, Call) and each is not product) or read in given or read in matrices
        if is_matrix:
            matrices |= made
        names = [
            f"r{number}" for number, place in enumerate(results) if made.keys() & {place, copies.get(place)}
        ]
        of_z = " of z" if kernel == log.COPY and read in given else ""
        others = ", which others read" if is_matrix else ""
        kernels += [*before, f"{kernel}{of_z}{': ' + ', '.join(names) if names else others}"]
    left = [size for place, size in matrices.items() if place not in results]
    size = f"{len(left)}, {sum(left) / 2**20:.1f} MiB"
    return kernels, [f"matrices that are no results, kept until the call returns: {size}"] if left else []


def _memory_of(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place
