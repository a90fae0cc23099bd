"""Calls with reasons: csrc/call is asked again, with a remedy after each reason, until there is a result.

`call::linear` and `call::elementwise` give a result, or a `Reason` why there is none. A *remedy* is what is done about
a reason, such as copying the inputs or linking a kernel. The table `_REMEDIES` has one for each reason. Then the call
is made again. No remedy chooses the kernel.

Autograd, tracers and modes do not matter here: they have handled a call before. torch allocates the results, so that
running out of memory raises `torch.OutOfMemoryError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epigemm.arguments import checks
from epigemm.arguments import precision as _precision
from epigemm.arguments.calls import ElementwiseCall, LinearCall
from epigemm.calls import (
    by_reference,
    eight_bits,
    elementwise_kernels,
    entry,
    groups,
    invariant,
    weight_slices,
)
from epigemm.calls.forecast import require_fused
from epigemm.calls.layouts import flattens, readable
from epigemm.calls.log import current
from epigemm.calls.weight_slices import Choice
from epigemm.linker import loader
from epigemm.packs import weight_packs
from epigemm.planner import dry_runs, plans
from epigemm.planner.dry_runs import DryRun
from epigemm.planner.reasons import Reason

_any_autocast = torch._C._is_any_autocast_enabled
_is_profiling = torch._C._autograd._profiler_enabled
_MOST_REMEDIES = 24  # of one call. Each is needed a few times at most; this bound ends an endless loop
_STORED_BYTES = 16  # which the kernels on fp16 slices store at a time


class Beside(NamedTuple):
    """Memory for what a kernel gives beside a call's result; see csrc/call/linear.h.

    A call with some of it has another way: where one kernel does not give all, its caller makes several calls.
    """

    stored: Tensor | None = None  # of an epilogue that has second values: theirs
    moments: Tensor | None = None  # `[2, N]`: the mean and the biased variance of each column
    blocks: Tensor | None = None  # `[blocks, N, 2]`: the same of blocks of rows, unmerged


_NOTHING = Beside()


class _Attempt:
    """A call that is in progress: its arguments for the next attempt, and the reasons so far."""

    circumstances = dry_runs.ROUTED
    met: frozenset[Reason] = frozenset()
    has_other_way = False  # whether the caller makes other calls where no kernel runs
    call: Any
    out: Tensor | None  # as the kernels write it
    ask: Callable[[], Any]  # the entry's answer: a result, or a reason
    read: Callable[[Any], None]  # has the kernels read copies of the call's inputs
    by_torch: Callable[[], Tensor]
    link: Callable[[], Any]  # a result if that fails
    is_laid_out: Callable[[Tensor], bool]  # whether a new result has the strides that it should have

    def run(self) -> Any:
        """Ask the entry, and apply the remedy for its reason, until there is a result.

        If the caller has another way: until there is a reason that no preparation mends, and that reason.
        """
        for _ in range(_MOST_REMEDIES):
            found = self.ask()
            if not isinstance(found, int):
                return found if self.has_other_way else self.stored(found)
            reason = entry.REASONS[found]
            if self.has_other_way and (reason in self.met or reason not in _PREPARATIONS):
                return reason
            result = _REMEDIES[reason](self)
            self.met |= {reason}
            if result is not None:
                return result
        raise RuntimeError(
            f"epigemm: a call of {self.call.epilogue.name!r} has no result after {_MOST_REMEDIES} attempts; this is an "
            "error in epigemm"
        )

    def stored(self, result: Any) -> Any:
        """The result where the caller wants it."""
        out = self.call.out
        if result is out:
            return result
        if out is not None:
            return groups.write(self.call, result) if isinstance(self.call, LinearCall) else out.copy_(result)
        return result if self.is_laid_out(result) else self.call.new_out().copy_(result)


class _Elementwise(_Attempt):
    """An elementwise call, whose arguments are checked before the first attempt."""

    def __init__(self, call: ElementwiseCall) -> None:
        checks.arguments(call)
        self.call = self.inputs = call
        self.out = call.out
        if call.out is not None:
            if checks.output_overlap(call.out, call.x, call.others, in_place=True, first=call.epilogue.first):
                self.out = None
            self.circumstances |= dry_runs.OUT_APART
        plans.has_gpu_kernels(call.x)  # this makes the device known to C++

    def ask(self) -> Any:
        epilogue, x, operands, _ = self.inputs
        return entry.elementwise(epilogue, x, tuple(operands), None, self.out, self.circumstances)

    def is_laid_out(self, result: Tensor) -> bool:
        return self.inputs.x is self.call.x or tuple(result.stride()) == tuple(self.call.x.stride())

    def by_torch(self) -> Tensor:
        epilogue, x, operands, out = self.call
        return by_reference.elementwise_by_reference(epilogue, x, operands, None, out)

    def read(self, inputs: ElementwiseCall) -> None:
        self.inputs = inputs._replace(x=inputs.x.contiguous())
        self.out = None if self.out is None or not self.out.is_contiguous() else self.out

    def link(self) -> Tensor | None:
        epilogue, x = self.call.epilogue, self.call.x
        failed = loader.link(epilogue, elementwise_kernels.missing(epilogue, x), x.device)
        return self.by_torch() if failed else None


class _Linear(_Attempt):
    """A linear call."""

    call: LinearCall
    is_copied = False  # whether the call's tensors are copies that every kernel can read
    choices: Mapping[str, Choice] = MappingProxyType({})  # as the last dry run found them
    short = 0  # the arithmetics for which memory is short, as bits of the argument `slices`

    def __init__(
        self,
        call: LinearCall,
        plan: tuple[int, ...] | None = None,
        beside: Beside | None = None,
    ) -> None:
        self.call = call
        self.plan = plan
        self.beside = beside or _NOTHING
        self.order = call.order
        self.has_other_way = beside is not None
        self.may_split = self.order.slices > 0 and plans.has_gpu_kernels(call.x)
        self.out = call.out
        self.read(call)
        if self.out is None and _any_autocast():
            self.out = call.new_out()  # torch's GEMM with out= keeps the dtype
            self.circumstances |= dry_runs.OUT_APART

    @property
    def insists(self) -> bool:
        """Whether the call must not run on PyTorch's GEMM."""
        return self.call.strict or self.call.invariant

    def again(self) -> Tensor:
        """Make the call, perhaps not for the first time."""
        found: Any = self.ask()
        return self.run() if type(found) is int else found  # type: ignore[no-any-return]

    def read(self, inputs: LinearCall) -> None:
        self.inputs, self.x = inputs, inputs.x
        self.given: tuple[Any, ...] = () if inputs.fold else tuple(inputs.operands)

    def dry(self) -> DryRun:
        """A dry run of the call in its present state."""
        if self.may_split:
            self.choices = weight_slices.find_all(self.call, ignore_shortage=self.insists)
        slices = weight_slices.number_of(self.choices) | self.short
        call = self.inputs.described()._replace(out=self.out)
        return dry_runs.dry_run(call, slices, circumstances=self.circumstances, plan=self.plan or ())

    def ask(self) -> Any:
        call, packs, short, ran_short = self.call, None, self.short, None
        if self.may_split and call.uses_pack:
            packs = weight_packs.buffers(call.weight)
        if self.may_split and weight_slices.shortages:
            ran_short = self.dry()
            short |= weight_slices.number_of(self.choices) & ~dry_runs.ALL_KEPT
        more = dry_runs.OTHER_SETTING if self.order.overrides else 0
        more |= dry_runs.RAISES_SHORTAGE if not self.has_other_way and self.insists else 0
        about = (self.order.number, packs, short, call.strict, call.invariant)
        fold = None if call.fold is None else (*call.fold.vectors, call.fold.eps)
        tensors = (call.epilogue.number, self.x, call.weight, self.given, fold, self.out)
        found = entry.ask(
            *tensors,
            *about,
            self.circumstances | more,
            self.plan,
            call.weight2,
            *self.beside,
            None if call.eight_bits is None else entry.native(call.eight_bits),
            call.group_ends,
        )
        if ran_short and ran_short.on_slices and type(found) is not int:
            weight_slices.ran(call, ran_short.arithmetic, self.choices[ran_short.arithmetic].is_kept)
        return found

    def is_laid_out(self, result: Tensor) -> bool:
        return result.is_contiguous()

    def by_torch(self) -> Tensor:
        call = self.call.described()
        checks.arguments(call)
        if call.invariant and not call.is_empty:
            invariant.refuse(call)
        if call.strict:
            require_fused(call)
        if call.out is not None:
            _look_at_overlap(self)
        return _by_operators(self)

    def link(self) -> Any:
        call, found = self.call, self.dry()
        reason = loader.link(call.epilogue, ",".join(found.missing), call.x.device)
        if not reason:
            return None
        if self.has_other_way:
            return Reason.NOT_LINKED
        if call.invariant:
            invariant.refuse_because(call.x, reason)
        if self.plan is not None and found.fused:
            raise RuntimeError(f"{call.epilogue.name}: {reason}")
        if call.strict:
            require_fused(call.described())
        if not found.fused:
            return self.by_torch()
        self.plan = dry_runs.FALLBACK
        return None


# --- the remedies: one returns a result, or None, and then the call is made again ------------------------------


def _make_ready(attempt: _Attempt) -> Tensor | None:
    if Reason.NOT_READY not in attempt.met and plans.has_gpu_kernels(attempt.call.x):
        return None  # this has loaded what was measured on the device
    return attempt.by_torch()


def _by_operators(attempt: _Attempt) -> Tensor:
    """Without the checks, which the entry has made."""
    call = attempt.call
    if not isinstance(call, LinearCall):
        return attempt.by_torch()
    if call.weight.dim() == 3:
        return groups.of_call(call)
    return by_reference.of_call(call) if call.eight_bits is None else eight_bits.of_call(call, elementwise)


def _refuse_or_copy(attempt: _Attempt) -> Tensor | None:
    """The checks raise the error. If they accept the call, copy its inputs: no kernel can read their layout."""
    checks.arguments(attempt.call.described() if isinstance(attempt, _Linear) else attempt.call)
    return attempt.by_torch() if Reason.DOES_NOT_FIT in attempt.met else _copy_inputs(attempt)


def _look_at_overlap(attempt: _Linear) -> None:
    call = attempt.call
    assert call.out is not None
    if checks.output_overlap(call.out, call.x, call.others, in_place=False):
        attempt.out = call.new_out()
    attempt.circumstances |= dry_runs.OUT_APART


def _store_elsewhere(attempt: _Linear) -> None:
    """Write the result to a tensor whose rows are whole 16 bytes, as kernels of fp32 and 8 bits need, and copy it."""
    call = attempt.call
    if call.out is not None:
        _look_at_overlap(attempt)
    n = call.columns
    stores_padding = call.x.dtype is torch.float32 or call.eight_bits is not None
    step = _STORED_BYTES // call.dtype.itemsize if stores_padding else 1
    attempt.out = call.x.new_empty((*call.x.shape[:-1], n + -n % step), dtype=call.dtype)[..., :n]
    attempt.circumstances |= dry_runs.OUT_APART | dry_runs.OUT_PADDED


def _copy_inputs(attempt: _Attempt) -> Tensor | None:
    """For kernels to read copies. What they cannot read then PyTorch computes."""
    if Reason.NOT_READABLE in attempt.met:
        return attempt.by_torch()
    call = attempt.call
    operands = tuple(readable(each) if isinstance(each, Tensor) else each for each in call.operands)
    attempt.read(call._replace(x=call.x if flattens(call.x) else call.x.contiguous(), operands=operands))
    return None


def _do_with_less_memory(attempt: _Linear) -> None:
    found = attempt.dry()
    if found.on_slices:
        is_kept = attempt.choices[found.arithmetic].is_kept
        weight_slices.ran_out_of_memory(attempt.call, found.arithmetic, is_kept, found.reads_weight)
        attempt.short |= dry_runs.SHORT << dry_runs.SHIFTS[found.arithmetic]
    elif "copy" in found.launches and attempt.plan is None and not attempt.insists:
        attempt.plan = dry_runs.FALLBACK
    else:  # no other way needs less memory
        attempt.circumstances |= dry_runs.RAISES_SHORTAGE


def _refuse_or_rearrange(attempt: _Linear) -> Tensor:
    """An error, as no fused kernel runs; but a batch-invariant call may run on copies, or row by row."""
    call = attempt.call.described()
    by_rows = invariant.runs_by_rows(call)
    if by_rows or not call.invariant or attempt.is_copied:
        if call.strict:
            require_fused(call)
    else:
        invariant.refuse(call)
    if (fold := attempt.call.fold) is not None:
        call = call._replace(operands=elementwise_kernels.fold_batch_norm(fold).unbind(0))
    if by_rows:
        return invariant.row_by_row(call, linear)
    on_copies = _Linear(invariant.on_zeros(call))
    on_copies.is_copied = True
    result = on_copies.run()[..., : call.weight.shape[0]]
    out = call.new_out() if call.out is None else call.out
    return out.copy_(result.reshape(out.shape))


def _run_at_full_fp32(attempt: _Linear) -> Any:
    attempt.order = attempt.order._replace(overrides=False)
    with _precision.switched(attempt.call.x.device.type, _precision.IEEE):
        return attempt.run()


_REMEDIES: dict[Reason, Callable[[Any], Any]] = {
    Reason.NOT_PLAIN: lambda attempt: attempt.by_torch(),
    Reason.DOES_NOT_FIT: _refuse_or_copy,
    Reason.IS_EMPTY: lambda attempt: attempt.by_torch(),
    Reason.NOT_READY: _make_ready,
    Reason.MAY_OVERLAP: _look_at_overlap,
    Reason.NOT_STORABLE: _store_elsewhere,
    Reason.NOT_READABLE: _copy_inputs,
    Reason.NO_MEMORY: _do_with_less_memory,
    Reason.NOT_FUSED: _refuse_or_rearrange,
    Reason.OTHER_SETTING: _run_at_full_fp32,
    Reason.NOT_LINKED: lambda attempt: attempt.link(),
    Reason.BY_REFERENCE: _by_operators,
}
_PREPARATIONS = (Reason.NOT_LINKED,)
"""Those that make what the call's own kernel lacks."""


def run(call: LinearCall | ElementwiseCall) -> Tensor:
    """The operator `epigemm::linear` or `elementwise`, if nothing traces or differentiates it."""
    found = entry.made(call)
    return found if isinstance(found, Tensor) else made(call)


def made(call: LinearCall | ElementwiseCall) -> Tensor:
    """The same of a call that the entry has not made."""
    return linear(call) if isinstance(call, LinearCall) else elementwise(call)


def linear(call: LinearCall, plan: Sequence[int] | None = None) -> Tensor:
    """D = epilogue(x @ weight.T), with all remedies that it needs.

    `plan`: a plan to run in place of the planner's choice, as in csrc/call/forced.h.

    Raises:
        RuntimeError: arguments that do not fit; `strict`, and no fused kernel would run; a plan that cannot run.
        torch.OutOfMemoryError: no memory for the result; or `strict`, and none for the fused kernel.
    """
    if current.log is not None:
        return current.log.made(linear, call, plan)  # type: ignore[no-any-return]
    return _named(_Linear(call, None if plan is None else tuple(plan)))  # type: ignore[no-any-return]


def elementwise(call: ElementwiseCall) -> Tensor:
    """D = epilogue(x), with all remedies that it needs; RuntimeError for arguments that do not fit."""
    if current.log is not None:
        return current.log.made(elementwise, call)  # type: ignore[no-any-return]
    return _named(_Elementwise(call))  # type: ignore[no-any-return]


def _named(attempt: _Attempt) -> Any:
    """What an attempt gives; a profiler sees it under the epilogue's name."""
    if not _is_profiling():
        return attempt.run()
    with torch.profiler.record_function(f"epigemm::{attempt.call.epilogue.name}"):
        return attempt.run()


def one_kernel(call: LinearCall, beside: Beside) -> Any:
    """What one kernel gives of a call, or the `Reason` why none runs.

    The result; with `moments` also the rows of a block, if the blocks' moments were left unmerged, else 0.
    """
    if current.log is not None:
        return current.log.made(one_kernel, call, beside)
    plans.has_gpu_kernels(call.x)  # this makes the device known to C++
    return _named(_Linear(call, beside=beside))


def forced(call: LinearCall, plan: tuple[int, ...]) -> Callable[[], Tensor]:
    """A call with a forced plan that is made many times; RuntimeError if the plan cannot run.

    The remedies are applied the first time. A result whose rows were padded to whole 16 bytes is not copied to a tensor
    without padding.
    """
    return _Linear(call, plan).again
