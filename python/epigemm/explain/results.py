"""`explain` of a function with several results: every launch of the call, which is several calls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epigemm import functional
from epigemm.arguments import invariance
from epigemm.calls import beside, reductions, stores, weight_slices
from epigemm.epilogues.kinds import SCALAR
from epigemm.epilogues.parts import Matrix
from epigemm.epilogues.registry import compute_dtype
from epigemm.explain import explanation
from epigemm.explain.explained import ELEMENTWISE, FUSED, GEMM_ELEMENTWISE, REFERENCE, Explanation
from epigemm.explain.log import CallLog, explained
from epigemm.explain.log import explain as _explain
from epigemm.explain.words import dtype_name
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


def product_of(fn: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The call of one result that a call of several results begins with: a function and its arguments.

    Raises:
        ValueError: it begins with none, as `elementwise` of reductions alone.
        Exception: whatever the call itself raises for these arguments.
    """
    call = _taken(fn)(*args, **kwargs)
    if call.function is None:
        raise ValueError(f"fn_or_name: got {fn!r}, which has no kernel; accepted are linear functions")
    return call.function, call.args, call.options


def explain(fn: Any, /, *args: Any, **kwargs: Any) -> Explanation:
    """As `explanation.explain`, of a function with several results or its `elementwise`."""
    if isinstance(fn, ResultsEpilogue) and (promoted := _of_promoted(fn, *args, **kwargs)) is not None:
        return promoted
    call = _taken(fn)(*args, **kwargs)
    form, dtype = call.form, call.like.dtype
    both = _of_both(call)
    matrices = _of_matrices(call, both)
    names = [f"r{number}" for number in range(len(form.results))]
    kernels = [*itertools.chain(*(each.kernels for each in matrices)), *_of_reductions(call)]
    why = _SHARED if both is None else _BOTH
    if dtype is torch.float64:
        casts = zip(names, form.results, strict=True)
        kernels += [f"torch cast to float32: {name}" for name, result in casts if result.is_fp32]
    kernels += [f"torch copy: r{number}" for number in _repeated(form, dtype)]
    needed = [each.backward for each in matrices if each.backward and not each.backward.startswith("not ")]
    first = both or next((each for each in matrices if each.op), matrices[0])
    return replace(
        first,
        op=f"{form.traced.name}: {form.named_results(names)}, of {first.op or 'z'}",
        reasons=[*first.reasons, *_memory(call, is_pair=both is not None), why],
        kernels=kernels,
        backward="; ".join([*dict.fromkeys(needed), _OF_REDUCTIONS]) if needed else first.backward,
        results=[f"{name}: {each}" for name, each in zip(names, form.results, strict=True)],
    )


def _of_promoted(
    made: ResultsEpilogue,
    x: Tensor,
    weight: Tensor | PackedWeight,
    /,
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
    recorded = CallLog()
    with torch.no_grad(), recorded:
        z, wide = form.promoted(x, weight, given, precision, strict, None)
    wants = _wants_gradients(x, weight, *given)
    product = explained("linear", recorded.calls, recorded.pending)
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


def _of_matrices(call: _Call, both: Explanation | None) -> list[Explanation]:
    """What makes each matrix, the shared one or `both` of x's dtype first."""
    form, dtype = call.form, call.like.dtype
    shared = call.like.new_empty(call.shape).requires_grad_(_wants_gradients(*call.args))
    found = [] if both is None else [both]
    for number, (matrix, epilogue) in enumerate(form.matrices(dtype)):
        if both is not None and not matrix.is_wide:
            continue
        made = _of_matrix(matrix, epilogue, shared, call.given) if number else _of_shared(call)
        found.append(_read_by(made, _readers(form, dtype, number)))
    return found


def _memory(call: _Call, *, is_pair: bool) -> list[str]:
    """What the matrices take that are no results."""
    form, dtype = call.form, call.like.dtype
    parts, pair = form.parts(dtype), form.pair(dtype) if is_pair else None
    there = {at for each, at in zip(form.results, parts.sources, strict=True) if each.is_stored}
    there |= {0} if call.function is None else set()
    left = [
        (compute_dtype(dtype) if matrix.is_wide else dtype).itemsize * math.prod(call.shape)
        for number, matrix in enumerate(parts.matrices)
        if number not in there
        and (pair is None or matrix.is_wide or number in (pair.matrices.result, pair.matrices.stored))
    ]
    size = f"{sum(left) / 2**20:.1f} MiB"
    return [f"matrices that are no results, kept until the call returns: {len(left)}, {size}"] if left else []


def _read_by(made: Explanation, readers: str) -> Explanation:
    return replace(made, kernels=[*made.kernels[:-1], made.kernels[-1] + readers]) if made.kernels else made


def _taken(fn: Any) -> Callable[..., _Call]:
    made = getattr(fn, "__self__", fn)
    assert isinstance(made, ResultsEpilogue)

    def linear(
        x: Tensor,
        weight: Tensor | PackedWeight,
        /,
        *operands: Any,
        out: None = None,
        precision: str | None = None,
        strict: bool = False,
        **named: Any,
    ) -> _Call:
        form, given = made.form(operands, named)
        plain = weight.weight if isinstance(weight, PackedWeight) else weight
        with torch.no_grad(), CallLog():  # which makes no copies where autocast casts
            cast, plain = form.checked(x, plain, given, out)
        matrix, epilogue = form.matrices(cast.dtype)[0]
        options = {"precision": precision, "strict": strict}
        shape = (*x.shape[:-1], plain.shape[0])
        reads = matrix.operands(given)
        function = functional.linear if epilogue is None else epilogue
        return _Call(form, given, function, (x, weight, *reads), options, shape, cast, plain)

    def elementwise(z: Tensor, /, *operands: Any, out: None = None, **named: Any) -> _Call:
        form, given = made.form(operands, named)
        form.checked_elementwise(z, given, out)
        matrix, epilogue = form.matrices(z.dtype)[0]
        function = None if epilogue is None else epilogue.elementwise
        return _Call(form, given, function, (z, *matrix.operands(given)), {}, tuple(z.shape), z)

    return linear if fn is made else elementwise


def _of_shared(call: _Call) -> Explanation:
    if call.function is not None:
        return _explain(call.function, *call.args, **call.options)
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
    found = _explain(epilogue.elementwise, z, *operands)
    return replace(found, kernels=[*casts, *found.kernels])


def _by_torch(launches: list[str], arithmetic: str) -> Explanation:
    return Explanation("", REFERENCE, "PyTorch's operators", arithmetic, [], kernels=launches)


def _cast(source: Tensor, dtype: torch.dtype) -> str:
    return f"torch cast of {list(source.shape)} to {dtype_name(dtype)}"


def _of_reductions(call: _Call) -> list[str]:
    form, dtype = call.form, call.like.dtype
    parts, found = form.parts(dtype), list[str]()
    for place, reduction in enumerate(parts.reductions):
        of = compute_dtype(dtype) if parts.matrices[reduction.matrix].is_wide else dtype
        invariant = invariance.enabled() and reduction.axis == 1
        names = [f"torch {each}" for each in reductions.launches(reduction.kind, of, invariant=invariant)]
        every = zip(itertools.count(), form.results, parts.sources)
        of_it = ", ".join(f"r{number}" for number, each, at in every if not each.is_stored and at == place)
        names[-1] += f" of each {'row' if reduction.axis else 'column'}: {of_it}"
        found += names
    return found


def _repeated(form: ResultsEpilogue, dtype: torch.dtype) -> list[int]:
    """The numbers of the results that are what an earlier one is: each is a tensor of its own."""
    seen, found = set[Any](), []
    for number, (each, source) in enumerate(zip(form.results, form.parts(dtype).sources, strict=True)):
        if each.is_fp32 and dtype is torch.float64:
            continue  # cast, into a tensor of its own
        found += [number] if (each.kind, source) in seen else []
        seen.add((each.kind, source))
    return found


def _readers(form: ResultsEpilogue, dtype: torch.dtype, *matrices: int) -> str:
    """Which results some matrices are."""
    every = zip(itertools.count(), form.results, form.parts(dtype).sources)
    stored = [f"r{place}" for place, each, source in every if each.is_stored and source in matrices]
    return f": {', '.join(stored)}" if stored else ", which others read"


def _wants_gradients(*tensors: Any) -> bool:
    plain = [each.weight if isinstance(each, PackedWeight) else each for each in tensors]
    return torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in plain)
