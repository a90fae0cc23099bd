"""`explain` of a function with several results: every launch of the call, and which result each of them is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from epigemm.arguments.calls import LinearCall
from epigemm.epilogues.tracer.results import structured, written
from epigemm.explain import explanation, log
from epigemm.explain.answer import ELEMENTWISE, GEMM_ELEMENTWISE, Explanation, Product
from epigemm.explain.log import Call, CallLog, Launch, explained
from epigemm.results_epilogue import ResultsEpilogue

_SHARED = (
    "the results come from one matrix, which is stored in x's dtype: each other matrix is one kernel more, each "
    "reduction one of PyTorch's"
)
_BOTH = (
    "one kernel computes two matrices from the product and stores both; each other matrix is one kernel more, each "
    "reduction one of PyTorch's"
)
_OF_REDUCTIONS = "of reductions and casts PyTorch's own derivatives"


def takes(fn: object) -> bool:
    """Whether it is a function with several results, or its `elementwise`."""
    return isinstance(getattr(fn, "__self__", fn), ResultsEpilogue)


def explain(fn: Any, /, *args: Any, **kwargs: Any) -> Explanation:
    """`epigemm.explain` of a function with several results, or of its `elementwise`."""
    function, opened = log.logged(fn, *args, **kwargs)
    made, is_linear = getattr(fn, "__self__", fn), isinstance(fn, ResultsEpilogue)
    options = {name: value for name, value in kwargs.items() if name not in ("out", "precision", "strict")}
    form, given = made.form(args[1 + is_linear :], options)
    promoted = form.promoted_results(args[0], given) if is_linear else [False] * len(form.results)
    # Where results are promoted, the first call is the product in autocast's type, which is cast then.
    product, calls = (opened.calls[0], opened.calls[1:]) if any(promoted) else (None, opened.calls)
    kernels, memory = _named(opened, product, () if is_linear else args[:1])
    first, is_both = log.by_torch(args[0]), bool(calls) and len(calls[0].results) == 2
    if calls:
        shared = form.parts(calls[0].call.x.dtype).matrices[0].traced
        is_shared = shared is not None and isinstance(calls[0].call, LinearCall)
        first = explained(shared.name if is_shared else calls[0].function, calls[:1])
        first = replace(first, op=first.op.partition(": ")[2]) if is_both else first
    needed = [each for each in map(log.backward_of, calls) if not each.startswith("not ")]
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
        path = GEMM_ELEMENTWISE if found.path == ELEMENTWISE else found.path
        reasons = [explanation.PROMOTED, *of_product.reasons, *found.reasons]
        found = replace(found, op=of_product.op, path=path, reasons=reasons)
    return replace(found, op=f"{function}: {written(form.traced.results.structure, names)}, of {found.op}")


def _named(opened: CallLog, product: Call | None, z: Sequence[Tensor]) -> tuple[list[str], list[str]]:
    """All launches, with the names of the results that each of them gives; and what matrices take that are none.

    `product`: what is cast before all else; `z`: what an elementwise call is of.
    """
    results = [_memory_of(each) for each in structured(opened.returned)[0]]
    copies = {  # whose copies results are
        _memory_of(each.results[0]): _memory_of(each.source)
        for each in opened.told
        if isinstance(each, Launch) and each.source is not None and each.kernels == [log.COPY]
    }
    given = [_memory_of(each) for each in z]
    matrices = dict[int, int]()  # the bytes of each
    kernels = list[str]()
    for each in opened.told:
        assert not isinstance(each, Product)
        *before, kernel = log.texts_of([each])
        read = None if isinstance(each, Call) or each.source is None else _memory_of(each.source)
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
