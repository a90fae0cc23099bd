"""The choice between kernels by measurement: `tune`.

The results go into the planner's table and the cache on disk (`epigemm.planning.measured`). From the next call on they
decide for calls with the same M, N and K. For calls with another M the cost models decide.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from epigemm import progress
from epigemm.arguments import checks
from epigemm.arguments.calls import LinearCall
from epigemm.calls import elementwise_kernels
from epigemm.calls.considered import consider
from epigemm.compilers import is_traced
from epigemm.explain import results
from epigemm.explain.recorder import dtype_name, record
from epigemm.packs import weight_packs
from epigemm.planning import measured, plans
from epigemm.planning.measured import Entry
from epigemm.tuning.candidates import TORCH, Family, families, on_random_x
from epigemm.tuning.timing import Effort, make_timer

_BUDGET_MS, _ROUNDS = 200.0, (3, 25)  # of the best candidates: GPU time, and rounds at least and at most
_OVERHEAD_MS = 0.1  # of a call: the spin and the flush of L2
_ROUGH_ROUNDS = 2  # of every candidate
_FINALISTS, _WITHIN = 6, 1.15  # the best ones: at most so many, and none slower than this times the fastest
_LEAST_DIFFERENCE_US = 1e-3  # times are kept in nanoseconds
_NOISE = 0.01  # a plan replaces the one that runs now if it is faster by more than this
_LOCK = threading.Lock()  # one measurement at a time


@dataclass(frozen=True)
class Timed:
    """One way to run a call.

    Attributes:
        arithmetic: of its products; "torch" for the fallback.
        text: the kernel.
        plan: family, tile, raster, swizzle, splits; empty for the fallback.
        measured_us: the time of a call, in microseconds; a median for the fastest ones.
        chosen: whether it runs from now on.
    """

    arithmetic: str
    text: str
    plan: tuple[int, ...]
    measured_us: float
    chosen: bool


@dataclass(frozen=True)
class Tuning:
    """What `tune` found; print it to read it.

    Attributes:
        problem: what was measured: epilogue, dtype, M, N and K.
        candidates: every way to run the call, for each arithmetic the fastest first.
        entries: what dispatch and the cache remember; empty where no fused kernel covers the call.
        left_out: why some plans were not measured: an epilogue that is made at run time was not linked into them.
    """

    problem: str
    candidates: list[Timed] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """A table: the time of each candidate, and which one runs."""
        lines = [self.problem]
        for each in self.candidates:
            mark = "<- chosen" if each.chosen else ""
            lines.append(f"  {each.measured_us:9.1f} us  {each.arithmetic:<6}  {each.text} {mark}".rstrip())
        lines += [f"  left out: {reason}" for reason in self.left_out]
        if not self.entries and not self.left_out:
            lines.append("  no fused kernel covers this call: there is nothing to choose")
        return "\n".join(lines)


def tune(fn_or_name: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Tuning:
    """Measure every way to run `fn(*args, **kwargs)` on its GPU, and choose the fastest from now on.

    Measured are the fused kernels that may be the fastest, in both raster orders and up to three swizzles, and the
    fallback (torch's GEMM, and one elementwise kernel where that does not do everything), on random `x` with as many
    rows as the call has. The choice holds for calls with the same epilogue, dtype, arithmetic, M, N and K, in this
    process and, by way of the cache on disk, in later ones; calls of another M are left to the
    cost models. A plan that is no faster than the one that runs now, but for noise, does not replace it. The results
    of calls are as accurate as before. It takes less than half a second for most calls. An epilogue that was made by
    `epigemm.epilogue` is linked into all candidates first, which takes seconds, once; where that fails a candidate is
    left out. Of `linear_glu` both products are measured, one after the other; of a function with several results the
    one kernel that multiplies.

    Args:
        fn_or_name: a public linear function of epigemm, or its name; or what `epigemm.epilogue` made.
        args: the function's arguments; `x` on a CUDA device.
        kwargs: its keyword arguments, `precision=` included.

    Returns:
        A `Tuning` with the time of every candidate.

    Raises:
        ValueError: `fn_or_name` is neither.
        RuntimeError: `x` is not on a CUDA device that epigemm's kernels run on; or the current stream is being
            captured into a CUDA graph, or torch.compile is tracing.
        Exception: whatever the call itself raises for these arguments.

    Example:
        >>> print(epigemm.tune("linear_relu", x, weight, bias))  # doctest: +SKIP
    """
    asked = fn_or_name
    if results.takes(fn_or_name):
        fn_or_name, args, kwargs = results.product_of(fn_or_name, *args, **kwargs)
    _, recorder = record(fn_or_name, *args, **kwargs)
    _, call = recorder.taken_apart()
    if not isinstance(call, LinearCall):
        raise ValueError(
            f"fn_or_name: got {asked!r}, which has one kernel only; accepted are linear functions"
        )
    return _joined([_tune(each) for each in (*recorder.earlier, call)])


def _tune(call: LinearCall) -> Tuning:
    """`tune` of one product."""
    call = call._replace(invariant=False)  # batch-invariant calls have nothing to choose
    x = call.x
    checks.linear(call)
    if not plans.has_gpu_kernels(x):
        why = elementwise_kernels.why_none(x) or "it is on the CPU"
        raise RuntimeError(
            f"x: got device {x.device}; accepted is a CUDA device that epigemm's kernels run on ({why})"
        )
    if not _may_measure(x):
        raise RuntimeError(
            "tune: got a call during CUDA graph capture or under tracing; accepted is a plain call"
        )
    with _LOCK:
        found = measure(call)
        measured.remember(x.get_device(), found.entries)
    return _with_choice(call, found)


def _joined(found: Sequence[Tuning]) -> Tuning:
    """The results for the products of one call, joined."""
    return Tuning(
        "; ".join(each.problem for each in found),
        [timed for each in found for timed in each.candidates],
        [entry for each in found for entry in each.entries],
        list(dict.fromkeys(reason for each in found for reason in each.left_out)),
    )


def measure(call: LinearCall) -> Tuning:
    """Time all candidates of a call. Nothing is kept, so no candidate is marked as chosen."""
    device = call.x.device
    n, k = call.weight.shape
    gpu = torch.cuda.get_device_name(device)
    result = Tuning(
        f"{call.epilogue.name}, {dtype_name(call.x.dtype)}, M = {call.rows}, N = {n}, K = {k}, on {gpu}"
    )
    with torch.no_grad(), torch.cuda.device(device), progress.doing(f"tuning {result.problem}"):
        for family in families(on_random_x(call)):
            result.left_out.extend(each for each in family.left_out if each not in result.left_out)
            if family.candidates:
                with family.setting():
                    times = _times(family, device)
                _add(result, call, family, times)
    return result


def _times(family: Family, device: torch.device) -> list[tuple[bool, float]]:
    """Of the fallback and each candidate: whether it is none of the best, and microseconds.

    Of all of them rough times; of the fastest, the fallback and the present plan medians of more rounds, without the
    first half, in which the load lowers the clocks.
    """
    timer = make_timer(device)
    every = [family.fallback, *family.candidates]
    for each in every:
        each.run()  # the first call loads the kernel
    host_us = max(timer.warm_up(each.run) for each in (every[0], every[-1]))
    rough = timer.in_turn([each.run for each in every], _effort(_ROUGH_ROUNDS), host_us)
    times = [min(samples) for samples in rough]
    fast = sorted(range(1, len(every)), key=times.__getitem__)[:_FINALISTS]
    best = [
        index
        for index, each in enumerate(every)
        if each.plan in (TORCH, family.now) or (index in fast and times[index] <= _WITHIN * times[fast[0]])
    ]
    rounds = int(_BUDGET_MS / sum(times[index] + _OVERHEAD_MS for index in best))
    effort = _effort(min(max(rounds, _ROUNDS[0]), _ROUNDS[1]))
    careful = timer.in_turn([every[index].run for index in best], effort, host_us)
    for index, samples in zip(best, careful, strict=True):
        times[index] = statistics.median(samples[len(samples) // 2 :])
    return [(index not in best, 1e3 * ms) for index, ms in enumerate(times)]


def _effort(rounds: int) -> Effort:
    return Effort(rounds=rounds, min_ms=0.0, max_rounds=rounds)


def _add(result: Tuning, call: LinearCall, family: Family, times: Sequence[tuple[bool, float]]) -> None:
    """Add one arithmetic's times to the result, and its best plan to the entries."""
    (_, torch_us), *of_plans = times
    (_, fused_us), best = min(zip(of_plans, family.candidates, strict=True), key=lambda pair: pair[0])
    for (_, us), each in zip(of_plans, family.candidates, strict=True):
        if each.plan == family.now and us <= (1 + _NOISE) * fused_us:
            fused_us, best = us, each
    least, most = sorted((fused_us, torch_us))
    kept_us, kept_torch_us = fused_us, torch_us
    if (
        most - least <= _NOISE * torch_us
    ):  # the same but for noise: what runs now goes on, by times that say so
        kept_us, kept_torch_us = least, most
        if family.now == TORCH:  # of equal times the fused one would run
            kept_us, kept_torch_us = max(most, least + _LEAST_DIFFERENCE_US), least
    n, k = call.weight.shape
    result.entries.append(
        Entry(
            epilogue=call.epilogue.name,
            dtype=dtype_name(call.x.dtype),
            arithmetic=family.arithmetic,
            packed=family.packed,
            bias=call.bias is not None,
            tf32_allowed=family.tf32_allowed,
            m=call.rows,
            n=n,
            k=k,
            plan=best.plan,
            fused_us=kept_us,
            torch_us=kept_torch_us,
        )
    )
    ordered = sorted(zip(times, (family.fallback, *family.candidates), strict=True), key=lambda pair: pair[0])
    for (_, us), of in ordered:
        arithmetic = "torch" if of.plan == TORCH else family.arithmetic
        result.candidates.append(Timed(arithmetic, of.text, of.plan, us, chosen=False))


def _with_choice(call: LinearCall, found: Tuning) -> Tuning:
    """The candidates, the one that this very call now takes marked."""
    taken = consider(call._replace(out=None)).taken
    arithmetic = "torch" if taken is None else taken.arithmetic
    best = {entry.arithmetic: entry.plan for entry in found.entries}
    wanted = (arithmetic, best.get(arithmetic, TORCH))
    marked, seen = [], False
    for each in found.candidates:
        chosen = not seen and (each.arithmetic, each.plan) == wanted
        seen = seen or chosen
        marked.append(replace(each, chosen=chosen))
    return replace(found, candidates=marked)


def _may_measure(x: Tensor) -> bool:
    """Whether x is a plain tensor that is not traced, and no CUDA graph is being captured."""
    return (
        type(x) in (Tensor, Parameter)
        and not is_traced()
        and not torch._C._len_torch_dispatch_stack()
        and not weight_packs.capturing(x.device)
    )
