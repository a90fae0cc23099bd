"""`explain` of a function with several results: every launch of the call, which is several calls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epigemm import functional
from epigemm.arguments import invariance
from epigemm.arguments.calls import LinearCall
from epigemm.calls import beside, moments, reductions, stores, weight_slices
from epigemm.epilogues.kinds import SCALAR
from epigemm.epilogues.parts import Matrix
from epigemm.epilogues.registry import compute_dtype
from epigemm.epilogues.tracing.results import MEAN, VAR, Result
from epigemm.explain import explanation
from epigemm.explain.explained import ELEMENTWISE, FUSED, GEMM_ELEMENTWISE, REFERENCE, Explanation
from epigemm.explain.recorder import Recorder, dtype_name, record
from epigemm.explain.words import OF_BLOCKS, OF_COLUMNS, OF_ROWS, ROWS_WITHIN, WITHIN
from epigemm.packs.weight_packs import PackedWeight
from epigemm.planning import dry_runs
from epigemm.results_epilogue import ResultsEpilogue
from epigemm.user_epilogue import UserEpilogue

_SHARED = (
    "the results come from one matrix, which is stored in x's dtype: each other matrix is one kernel more, each "
    "reduction one of PyTorch's"
)
_BOTH = (
    "one kernel computes two matrices from the product and stores both; each other matrix is one kernel more, each "
    "reduction one of PyTorch's"
)
_BUT = ", but for those that follow from statistics of columns or rows"
_WITHIN = {0: f"column statistics: {WITHIN}", 1: f"row statistics: {ROWS_WITHIN}"}
_APART = "column statistics: a kernel reads the stored matrix for them"
_Source = tuple[int, int]  # of moments: the number of a matrix, and an axis
_OF_REDUCTIONS = "of reductions and casts PyTorch's own derivatives"


class _Call(NamedTuple):
    """A call, its operands in order: what computes the shared matrix, and of which shape and type that is."""

    form: ResultsEpilogue
    given: Sequence[Any]
    function: Callable[..., Any] | None  # None: it is there
    args: tuple[Any, ...]
    options: dict[str, Any]
    shape: tuple[int, ...]
    like: Tensor  # of its type, on its device; behind a product x, as autocast has it
    weight: Tensor | None = None  # the same of a product's weight


def takes(fn: object) -> bool:
    """Whether it is a function with several results, or its `elementwise`."""
    return isinstance(getattr(fn, "__self__", fn), ResultsEpilogue)


def product_of(fn: Any, *args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The call of one result that a call of several results begins with: a function and its arguments.

    Raises:
        ValueError: it begins with none, as `elementwise` of reductions alone.
        Exception: whatever the call itself raises for these arguments.
    """
    call = _taken(fn)(*args, **kwargs)
    if call.function is None:
        raise ValueError(f"fn_or_name: got {fn!r}, which has no kernel; accepted are linear functions")
    return call.function, call.args, call.options


def explain(fn: Any, *args: Any, **kwargs: Any) -> Explanation:
    """As `explanation.explain`, of a function with several results or its `elementwise`."""
    if isinstance(fn, ResultsEpilogue) and (promoted := _of_promoted(fn, *args, **kwargs)) is not None:
        return promoted
    call = _taken(fn)(*args, **kwargs)
    form, dtype = call.form, call.like.dtype
    both = _of_both(call)
    matrices, given = _of_matrices(call, both)
    at_hand = _at_hand(call, given)
    names = [f"r{number}" for number in range(len(form.results))]
    kernels = [
        *itertools.chain(*(each.kernels for each in matrices)),
        *_of_reductions(call, at_hand, given),
    ]
    why = (_SHARED if both is None else _BOTH) + (_BUT if at_hand else "")
    why_apart = [_APART] if any(OF_BLOCKS in each for each in kernels) else []
    if dtype is torch.float64:
        casts = zip(names, form.results, strict=True)
        kernels += [f"torch cast to float32: {name}" for name, result in casts if result.is_fp32]
    kernels += [f"torch copy: r{number}" for number in _repeated(form, dtype, at_hand)]
    needed = [each.backward for each in matrices if each.backward and not each.backward.startswith("not ")]
    first = both or next((each for each in matrices if each.op), matrices[0])
    return replace(
        first,
        op=f"{form.traced.name}: {form.named_results(names)}, of {first.op or 'z'}",
        reasons=[*first.reasons, *why_apart, why],
        kernels=kernels,
        backward="; ".join([*dict.fromkeys(needed), _OF_REDUCTIONS]) if needed else first.backward,
        results=[f"{name}: {each}" for name, each in zip(names, form.results, strict=True)],
    )


def _of_promoted(
    made: ResultsEpilogue,
    x: Tensor,
    weight: Tensor | PackedWeight,
    *operands: Any,
    out: None = None,
    precision: str | None = None,
    strict: bool = False,
    **named: Any,
) -> Explanation | None:
    """A call with a matrix that autocast makes fp32; None of another."""
    form, given = made.form(operands, named)
    promoted = form.promoted_results(x, given)
    if not any(promoted):
        return None
    with torch.no_grad(), Recorder() as recorded:
        z, wide = form.promoted(x, weight, given, precision, strict, None)
    wants = _wants_gradients(x, weight, *given)
    product = explanation.of_recorded("linear", recorded, wants, torch.is_grad_enabled())
    found = explain(form.elementwise, z.requires_grad_(wants), *wide, out=out)
    names = [f"r{number}" for number in range(len(form.results))]
    every = zip(names, form.results, promoted, strict=True)
    return replace(
        found,
        op=f"{form.traced.name}: {form.named_results(names)}, of {product.op}",
        path=GEMM_ELEMENTWISE if found.path == ELEMENTWISE else found.path,
        reasons=[explanation.PROMOTED, *product.reasons, *found.reasons],
        kernels=[*product.kernels, *found.kernels],
        results=[
            f"{name}: {replace(each, is_fp32=each.is_fp32 or is_fp32)}" for name, each, is_fp32 in every
        ],
    )


def _of_both(call: _Call) -> Explanation | None:
    """The kernel that stores two matrices; None where each is made by kernels of its own."""
    pair = call.form.pair(call.like.dtype)
    if call.weight is None or pair is None or _wants_gradients(*call.args, *call.given):
        return None
    options = {**call.options, "strict": False}
    made = pair.call(call.like, call.weight, call.given, **options)
    if stores.order_on(made, call.like.device.type) is None:
        return None
    found = explanation.explain_linear(made, wants_gradients=False)
    if found.path != FUSED or not beside.is_made(dry_runs.dry_run(made, weight_slices.number_for(made))):
        return None
    parts = pair.matrices
    readers = _readers(call.form, call.like.dtype, parts.result, parts.stored)
    return replace(
        found,
        op=f"epigemm::linear, epilogue {made.epilogue.name}: {made.epilogue.formula}",
        kernels=[*found.kernels[:-1], found.kernels[-1] + readers],
        backward="not needed: no argument requires grad (otherwise: each matrix by a kernel of its own)",
    )


def _of_matrices(call: _Call, both: Explanation | None) -> tuple[list[Explanation], set[_Source]]:
    """What makes each matrix, the shared one or `both` of x's dtype first.

    And the moments of the shared matrix that the first call also gives.
    """
    form, dtype = call.form, call.like.dtype
    shared = call.like.new_empty(call.shape).requires_grad_(_wants_gradients(*call.args))
    product, given = (None, set[_Source]()) if both is not None else _of_product_with_moments(call)
    found = [each for each in (both, product) if each is not None]
    for number, (matrix, epilogue) in enumerate(form.matrices(dtype)):
        if (both is not None and not matrix.is_wide) or (product is not None and number == 0):
            continue
        made = _of_matrix(matrix, epilogue, shared, call.given) if number else _of_shared(call)
        found.append(_read_by(made, _readers(form, dtype, number)))
    return found, given


def _read_by(made: Explanation, readers: str) -> Explanation:
    return replace(made, kernels=[*made.kernels[:-1], made.kernels[-1] + readers]) if made.kernels else made


def _of_product_with_moments(call: _Call) -> tuple[Explanation | None, set[_Source]]:
    """The call that gives the shared matrix and moments of it, and which; None where it is made without any."""
    none = None, set[_Source]()
    followed = _followed(call)
    wanted = call.form.parts(call.like.dtype).of_product(math.prod(call.shape[:-1]), call.shape[-1])
    if call.weight is None or wanted is None or 0 not in {number for number, _ in followed.values()}:
        return none
    assert call.function is not None
    number = moments.number_of(wanted)
    options = {**call.options, "strict": False}  # without moments it may be another kernel that runs
    plain = explanation.explain(call.function, *call.args, **options)
    _, recorded = record(call.function, *call.args, **options)
    _, product = recorded.taken_apart()
    assert isinstance(product, LinearCall)
    dry = dry_runs.dry_run(product, weight_slices.number_for(product), moments=number)
    found = explanation.explain_linear(product, wants_gradients=False, moments=number)
    is_fused = found.path == FUSED
    if not beside.is_made(dry) or dry.fused != is_fused or (call.options["strict"] and not is_fused):
        return none  # the entry would not make it, or nothing links the kernel
    given: set[_Source] = {(0, axis) for axis in (0, 1) if wanted[axis] and dry.reduces}
    if wanted.needs_columns:
        given.add((0, 0))
    found = _read_by(found, _readers(call.form, call.like.dtype, 0))
    behind = [each for source in sorted(given) for each in _moments_launches(call, source, dry.reduces)]
    within = [_WITHIN[axis] for _, axis in sorted(given)] if dry.reduces else []
    found = replace(
        found,
        op=plain.op,
        reasons=[*within, *found.reasons],
        kernels=[*recorded.casts, *found.kernels, *behind],
        backward=plain.backward,
    )
    return found, given


def _taken(fn: Any) -> Callable[..., _Call]:
    made = getattr(fn, "__self__", fn)
    assert isinstance(made, ResultsEpilogue)

    def linear(
        x: Tensor,
        weight: Tensor | PackedWeight,
        *operands: Any,
        out: None = None,
        precision: str | None = None,
        strict: bool = False,
        **named: Any,
    ) -> _Call:
        form, given = made.form(operands, named)
        plain = weight.weight if isinstance(weight, PackedWeight) else weight
        with torch.no_grad(), Recorder():  # which makes no copies where autocast casts
            cast, plain = form.checked(x, plain, given, out)
        matrix, epilogue = form.matrices(cast.dtype)[0]
        options = {"precision": precision, "strict": strict}
        shape = (*x.shape[:-1], plain.shape[0])
        reads = matrix.operands(given)
        function = functional.linear if epilogue is None else epilogue
        return _Call(form, given, function, (x, weight, *reads), options, shape, cast, plain)

    def elementwise(z: Tensor, *operands: Any, out: None = None, **named: Any) -> _Call:
        form, given = made.form(operands, named)
        form.checked_elementwise(z, given, out)
        matrix, epilogue = form.matrices(z.dtype)[0]
        function = None if epilogue is None else epilogue.elementwise
        return _Call(form, given, function, (z, *matrix.operands(given)), {}, tuple(z.shape), z)

    return linear if fn is made else elementwise


def _of_shared(call: _Call) -> Explanation:
    if call.function is not None:
        return explanation.explain(call.function, *call.args, **call.options)
    z, form = call.like, call.form
    launches = ["torch copy of z"] if form.parts(z.dtype).stores_shared(form.results) else []
    return _by_torch(launches, dtype_name(compute_dtype(z.dtype)))


def _of_matrix(
    matrix: Matrix, epilogue: UserEpilogue | None, shared: Tensor, given: Sequence[Any]
) -> Explanation:
    """What makes one more matrix of the shared one."""
    wide = compute_dtype(shared.dtype)
    z = torch.empty_like(shared, dtype=wide) if matrix.is_wide else shared
    if epilogue is None:
        return _by_torch([_cast(shared, wide)], dtype_name(wide))
    casts, operands = [], []
    for kind, each in zip(epilogue.traced.kinds, matrix.operands(given), strict=True):
        is_cast = matrix.is_wide and kind != SCALAR and each.dtype != wide
        casts += [_cast(each, wide)] if is_cast else []
        operands.append(torch.empty_like(each, dtype=wide) if is_cast else each)
    found = explanation.explain(epilogue.elementwise, z, *operands)
    return replace(found, kernels=[*casts, *found.kernels])


def _by_torch(launches: list[str], arithmetic: str) -> Explanation:
    return Explanation("", REFERENCE, "PyTorch's operators", arithmetic, [], kernels=launches)


def _cast(source: Tensor, dtype: torch.dtype) -> str:
    return f"torch cast of {list(source.shape)} to {dtype_name(dtype)}"


def _of_reductions(call: _Call, at_hand: Mapping[_Source, list[int]], given: set[_Source]) -> list[str]:
    """The launches of the reductions, but for those of moments that are `given` and told already."""
    form, dtype = call.form, call.like.dtype
    found = [
        each
        for source in at_hand
        if source not in given
        for each in _moments_launches(call, source, is_within=False)
    ]
    follow = {place for places in at_hand.values() for place in places}
    for place, reduction in enumerate(form.parts(dtype).reductions):
        of_it = ", ".join(_results_of(form, dtype, [place]))
        if place in follow:
            line = "row" if reduction.axis else "column"
            if reduction.correction != 0.0:
                found.append(f"torch mul, for the correction of each {line}'s variance: {of_it}")
            continue
        is_wide = form.matrices(dtype)[reduction.matrix].matrix.is_wide
        invariant = invariance.enabled() and reduction.axis == 1
        of = compute_dtype(dtype) if is_wide else dtype
        names = [f"torch {each}" for each in reductions.launches(reduction.kind, of, invariant=invariant)]
        names[-1] += f" of each {'row' if reduction.axis else 'column'}: {of_it}"
        found += names
    return found


def _followed(call: _Call) -> dict[int, _Source]:
    """The places of the reductions that follow from moments, if these are at hand."""
    parts = call.form.parts(call.like.dtype)
    if not moments.is_served(call.like) or invariance.enabled():
        return {}
    return {
        place: source
        for place, source in parts.of_moments(math.prod(call.shape[:-1]), call.shape[-1]).items()
        if not _wants_gradients(*call.args, *parts.matrices[source[0]].operands(call.given))
    }


def _at_hand(call: _Call, given: set[_Source]) -> dict[_Source, list[int]]:
    """The moments that are `given`, and those for which a kernel is launched: which reductions follow from them."""
    reductions_of, found = call.form.parts(call.like.dtype).reductions, dict[_Source, list[int]]()
    followed = _followed(call)
    needed = {source for place, source in followed.items() if reductions_of[place].needs_moments}
    for place, source in followed.items():
        if source in needed or source in given:
            found.setdefault(source, []).append(place)
    return found


def _moments_launches(call: _Call, source: _Source, is_within: bool) -> list[str]:
    """What gives moments of a stored matrix, and which results they are: of blocks of rows, and of all."""
    form, dtype = call.form, call.like.dtype
    places = [place for place, each in _followed(call).items() if each == source]
    direct = _results_of(form, dtype, places, lambda each: each.kind != VAR or each.correction == 0.0)
    merged = (OF_ROWS if source[1] else OF_COLUMNS) + (
        f": {', '.join(direct)}" if direct else ", which others read"
    )
    return [merged] if is_within else [OF_BLOCKS, merged]


def _results_of(
    form: ResultsEpilogue,
    dtype: torch.dtype,
    places: Sequence[int],
    takes: Callable[[Result], bool] = lambda each: True,
) -> list[str]:
    """The names of the results that some reductions give."""
    every = zip(itertools.count(), form.results, form.parts(dtype).sources)
    return [
        f"r{place}"
        for place, each, source in every
        if not each.is_stored and source in places and takes(each)
    ]


def _repeated(form: ResultsEpilogue, dtype: torch.dtype, at_hand: Mapping[_Source, list[int]]) -> list[int]:
    """The numbers of the results that are what an earlier one is: each is a tensor of its own."""
    source_of = {place: source for source, places in at_hand.items() for place in places}
    seen, found = set[Any](), []
    for number, (each, source) in enumerate(zip(form.results, form.parts(dtype).sources, strict=True)):
        is_mean_at_hand = each.kind == MEAN and source in source_of
        key = (each.kind, source_of[source] if is_mean_at_hand else source)
        is_cast = each.is_fp32 and dtype is torch.float64
        found += [number] if key in seen and not is_cast else []
        seen |= set() if is_cast else {key}
    return found


def _readers(form: ResultsEpilogue, dtype: torch.dtype, *matrices: int) -> str:
    """Which results some matrices are."""
    every = zip(itertools.count(), form.results, form.parts(dtype).sources)
    stored = [f"r{place}" for place, each, source in every if each.is_stored and source in matrices]
    return f": {', '.join(stored)}" if stored else ", which others read"


def _wants_gradients(*tensors: Any) -> bool:
    plain = [each.weight if isinstance(each, PackedWeight) else each for each in tensors]
    return torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in plain)
