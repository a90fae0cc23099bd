"""`explain` of a function with several results: every launch of the call, and which result each of them is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from epigemm.arguments.calls import LinearCall
from epigemm.epilogues.tracer.results import structured
from epigemm.explain import explanation
from epigemm.explain.answer import ELEMENTWISE, GEMM_ELEMENTWISE, Explanation
from epigemm.explain.log import COPY, Launch, by_torch, explained, logged
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
    function, opened = logged(fn, *args, **kwargs)
    made, is_linear = getattr(fn, "__self__", fn), isinstance(fn, ResultsEpilogue)
    named = {name: value for name, value in kwargs.items() if name not in ("out", "precision", "strict")}
    form, given = made.form(args[1 + is_linear :], named)
    promoted = form.promoted_results(args[0], given) if is_linear else [False] * len(form.results)
    before, calls = opened.calls[: any(promoted)], opened.calls[any(promoted) :]
    launches = [*[launch for each in calls for launch in each.before], *opened.pending]
    told = _Told(structured(opened.returned)[0], launches)
    ahead = [*(calls[0].before if calls else opened.pending)]
    if before:  # a product in autocast's type, which is cast
        told.kernels += [*[each.text for each in before[0].before], *before[0].found.kernels]
        told.given = [each.results[0] for each in ahead if each.source is before[0].results[0]]
    elif not is_linear:
        told.given = [args[0]]
    for each in calls:
        told.add(each.before)
        *kernels, last = each.found.kernels
        told.kernels += kernels
        told.add([Launch(last, tuple(each.results))], are_matrices=True)
    told.add(opened.pending)
    first = by_torch(args[0])
    every = [explained(each.function, [each]) for each in calls]
    is_both = bool(calls) and len(calls[0].results) == 2
    if every:
        shared = form.parts(calls[0].call.x.dtype).matrices[0].traced
        name = (
            calls[0].function if shared is None or not isinstance(calls[0].call, LinearCall) else shared.name
        )
        first = explained(name, calls[:1])
        first = replace(first, op=first.op.partition(": ")[2]) if is_both else first
    needed = [each.backward for each in every if not each.backward.startswith("not ")]
    names = [f"r{number}" for number in range(len(form.results))]
    found = replace(
        first,
        op=f"{function}: {form.named_results(names)}, of {first.op}",
        reasons=[*first.reasons, *told.memory(), _BOTH if is_both else _SHARED],
        kernels=told.kernels,
        backward="; ".join([*dict.fromkeys(needed), _OF_REDUCTIONS]) if needed else first.backward,
        results=[
            f"{name}: {replace(each, is_fp32=each.is_fp32 or is_fp32)}"
            for name, each, is_fp32 in zip(names, form.results, promoted, strict=True)
        ],
    )
    if not before:
        return found
    product = explained("linear", before)
    return replace(
        found,
        op=f"{function}: {form.named_results(names)}, of {product.op}",
        path=GEMM_ELEMENTWISE if found.path == ELEMENTWISE else found.path,
        reasons=[explanation.PROMOTED, *product.reasons, *found.reasons],
    )


class _Told:
    """The launches of a call, with the names of the results that each of them gives.

    Attributes:
        kernels: their texts.
        given: what an elementwise call is of.
    """

    def __init__(self, results: Sequence[Tensor], launches: Iterable[Launch]) -> None:
        self.kernels: list[str] = []
        self.given: list[Tensor] = []
        self._results = [_memory_of(each) for each in results]
        self._copied = {  # whose copies results are
            _memory_of(made[0]): _memory_of(source)
            for text, made, source in launches
            if text == COPY and source is not None
        }
        self._matrices: dict[int, int] = {}  # the bytes of each

    def add(self, launches: Iterable[Launch], *, are_matrices: bool = False) -> None:
        """Add launches, in order; `are_matrices`: whether their results are, as casts and copies of one are."""
        given = [_memory_of(each) for each in self.given]
        for text, made, source in launches:
            read = None if source is None else _memory_of(source)
            places = [_memory_of(each) for each in made]
            is_matrix = are_matrices or read in given or read in self._matrices
            if is_matrix:
                self._matrices |= zip(places, (each.nbytes for each in made), strict=True)
            names = [
                f"r{number}"
                for number, place in enumerate(self._results)
                if place in places or self._copied.get(place) in places
            ]
            of_given = " of z" if text == COPY and read in given else ""
            others = ", which others read" if is_matrix else ""
            self.kernels.append(f"{text}{of_given}{': ' + ', '.join(names) if names else others}")

    def memory(self) -> list[str]:
        """What the matrices take that are no results."""
        left = [size for place, size in self._matrices.items() if place not in self._results]
        size = f"{sum(left) / 2**20:.1f} MiB"
        return (
            [f"matrices that are no results, kept until the call returns: {len(left)}, {size}"]
            if left
            else []
        )


def _memory_of(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place
