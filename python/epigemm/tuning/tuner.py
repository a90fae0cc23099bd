"""The choice between kernels by measurement: `tune`.

The results go into the planner's table and the cache on disk (`epigemm.planning.measured`). From the next call on they
decide for calls with the same M, N and K. For calls with another M the cost models decide.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from epigemm import progress
from epigemm.arguments import checks
from epigemm.arguments.calls import LinearCall
from epigemm.arguments.traced import is_traced
from epigemm.calls import elementwise_kernels
from epigemm.calls.considered import consider
from epigemm.explain import results
from epigemm.explain.recorder import dtype_name, record
from epigemm.packs import weight_packs
from epigemm.planning import measured, plans
from epigemm.planning.measured import Entry
from epigemm.tuning.candidates import TORCH, Candidate, Kind, families, on_random_x
from epigemm.tuning.timing import Effort, Run, Timer, make_timer

# Milliseconds of GPU time for a measurement: a quarter for a rough time of every candidate, the rest for the best ones.
_BUDGET_MS = 200.0
_ROUGH_ROUNDS, _CAREFUL_ROUNDS = (1, 3), (3, 25)  # at least and at most
_FINALISTS, _WITHIN = (
    6,
    1.15,
)  # measured with more rounds: at most so many, and none slower than this times the fastest
_LEAST_DIFFERENCE_US = 1e-3  # times are kept in nanoseconds
_NOISE = 0.01  # a plan replaces the one that runs now if it is faster by more than this
# From this time on the GPU's power limit matters, and under it other tiles are the fastest. So such a call is timed on
# a rested GPU and under sustained load.
_LONG_MS, _REST_S, _RESTED_ROUNDS = 0.2, 0.02, 3
_LOCK = threading.Lock()  # one measurement at a time


@dataclass(frozen=True)
class Timed:
    """One way to run a call.

    Attributes:
        arithmetic: of its products; "torch" for the fallback.
        text: the kernel.
        plan: family, tile, raster, swizzle, splits; empty for the fallback.
        measured_us: the median of its calls, in microseconds.
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
    if results.takes(fn_or_name):
        fn_or_name, args, kwargs = results.product_of(fn_or_name, *args, **kwargs)
    name, recorder = record(fn_or_name, *args, **kwargs)
    _, call = recorder.taken_apart()
    if not isinstance(call, LinearCall):
        raise ValueError(
            f"fn_or_name: got {name!r}, which has one kernel only; accepted are linear functions"
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


def entry_for(call: LinearCall, kind: Kind) -> Entry:
    """An entry for a measurement, without its results."""
    n, k = call.weight.shape
    return Entry(
        epilogue=call.epilogue.name,
        dtype=dtype_name(call.x.dtype),
        arithmetic=kind.arithmetic,
        packed=kind.packed,
        bias=call.bias is not None,
        tf32_allowed=kind.tf32_allowed,
        n=n,
        k=k,
        m=call.rows,
        plan=(0, 0, 0, 1, 1),
        fused_us=0.0,
        torch_us=0.0,
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
        _measure_families(call, result)
    return result


def _measure_families(call: LinearCall, result: Tuning) -> None:
    for family in families(on_random_x(call)):
        result.left_out.extend(each for each in family.left_out if each not in result.left_out)
        if not family.candidates:
            continue
        with family.setting():
            timings = _time([family.fallback, *family.candidates], call.x.device, family.now)
        _add(result, entry_for(call, family.kind), timings, family.now)


class _Timing(NamedTuple):
    rough: bool  # sorts behind what was timed with care
    us: float
    of: Candidate


def _add(result: Tuning, about: Entry, timings: Sequence[_Timing], now: tuple[int, ...]) -> None:
    """Add one arithmetic's times to the result, and its best plan to the entries; `now`: the present plan."""
    torch_us = next(timing.us for timing in timings if timing.of.plan == TORCH)
    ordered = sorted(timings, key=lambda timing: timing[:2])
    best = next(timing for timing in ordered if timing.of.plan != TORCH)
    for timing in ordered:
        if timing.of.plan == now != TORCH and not timing.rough and timing.us <= (1 + _NOISE) * best.us:
            best = timing
    fused_us = best.us
    if abs(fused_us - torch_us) <= _NOISE * torch_us:
        # The same except for noise: the present plan stays, so the times are set accordingly.
        fused_us, torch_us = max(fused_us, torch_us), min(fused_us, torch_us)
        if now != TORCH:
            fused_us, torch_us = torch_us, fused_us
        else:
            fused_us = max(
                fused_us, torch_us + _LEAST_DIFFERENCE_US
            )  # of equal times the fused one would run
    result.entries.append(replace(about, plan=best.of.plan, fused_us=fused_us, torch_us=torch_us))
    for _, us, of in ordered:
        arithmetic = "torch" if of.plan == TORCH else about.arithmetic
        result.candidates.append(Timed(arithmetic, of.text, of.plan, us, chosen=False))


def _time(candidates: Sequence[Candidate], device: torch.device, now: tuple[int, ...]) -> list[_Timing]:
    """Time all of them roughly; then the fastest ones, the first and the present plan with more rounds."""
    timer = make_timer(device)
    runs = [candidate.run for candidate in candidates]
    for run in runs:
        run()  # the first call loads the kernel
    host_us = max(timer.warm_up(run) for run in (runs[0], runs[-1]))
    times = timer.in_turn(runs, _effort(1), host_us)
    # More samples of each, within a quarter of the budget.
    if rounds := _rounds(_BUDGET_MS / 4, [samples[0] for samples in times], _ROUGH_ROUNDS) - 1:
        more = timer.in_turn(runs, _effort(rounds), host_us)
        times = [[*first, *others] for first, others in zip(times, more, strict=True)]
    medians = [statistics.median(samples) for samples in times]
    fast = sorted(range(1, len(runs)), key=medians.__getitem__)[:_FINALISTS]
    finalists = {0, *(i for i in fast if medians[i] <= _WITHIN * medians[fast[0]])}
    finalists |= {i for i, candidate in enumerate(candidates) if candidate.plan == now}
    chosen = sorted(finalists)
    careful = _time_with_care(timer, [runs[i] for i in chosen], host_us, [medians[i] for i in chosen])
    for index, median in zip(chosen, careful, strict=True):
        medians[index] = median
    return [
        _Timing(index not in finalists, 1e3 * medians[index], candidate)
        for index, candidate in enumerate(candidates)
    ]


def _effort(rounds: int) -> Effort:
    return Effort(rounds=rounds, min_ms=0.0, max_rounds=rounds)


def _rounds(budget_ms: float, typical_ms: Sequence[float], limits: tuple[int, int]) -> int:
    """The number of rounds for all of them, with the timer's own time for each call."""
    least, most = limits
    return min(max(int(budget_ms / sum(ms + _OVERHEAD_MS for ms in typical_ms)), least), most)


_OVERHEAD_MS = 0.1  # of a call: the spin and the flush of L2


def _time_with_care(
    timer: Timer, runs: Sequence[Run], host_us: float, typical_ms: Sequence[float]
) -> list[float]:
    """The median of each; for long calls the geometric mean of two medians, rested and under sustained load."""
    rounds = _rounds(_BUDGET_MS, typical_ms, _CAREFUL_ROUNDS)
    if min(typical_ms) < _LONG_MS:
        return [statistics.median(samples) for samples in timer.in_turn(runs, _effort(rounds), host_us)]
    rested = timer.in_turn(runs, _effort(_RESTED_ROUNDS), host_us, _REST_S)
    sustained = timer.in_turn(runs, _effort(rounds), host_us)
    return [
        # The first half of the load lowers the clocks, and is left out.
        math.sqrt(statistics.median(cool) * statistics.median(hot[len(hot) // 2 :]))
        for cool, hot in zip(rested, sustained, strict=True)
    ]


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
