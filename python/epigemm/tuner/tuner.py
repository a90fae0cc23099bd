"""The choice between kernels by measurement: `tune`.

The results go into the planner's table and the cache on disk (`epigemm.planner.times`). From the next call on
they decide for calls with the same M, N and K. For calls with another M the cost models decide.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from epigemm import progress
from epigemm.arguments import checks
from epigemm.arguments import precision as _precision
from epigemm.arguments.calls import LinearCall
from epigemm.calls import elementwise_kernels, resolve
from epigemm.calls.forecast import consider
from epigemm.compilers import is_traced
from epigemm.epilogues.kinds import KINDS
from epigemm.explain.explanation import dtype_name
from epigemm.explain.log import logged
from epigemm.linker import loader
from epigemm.packs import weight_packs
from epigemm.planner import dry_runs, plans, times
from epigemm.planner.times import Entry
from epigemm.tuner.timing import Timer

_BUDGET_MS, _ROUNDS = 200.0, (3, 25)  # of the best candidates: GPU time, and rounds at least and at most
_OVERHEAD_MS = 0.1  # of a call: the spin and the flush of L2
_ROUGH_ROUNDS = 2  # of every candidate
_FINALISTS, _WITHIN = 6, 1.15  # the best ones: at most so many, and none slower than this times the fastest
_LEAST_DIFFERENCE_US = 1e-3  # the planner counts nanoseconds
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


def tune(fn_or_name: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> Tuning:
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
    with torch.no_grad():
        _, opened = logged(fn_or_name, *args, is_single=True, **kwargs)
    calls = [each.call for each in opened.calls if isinstance(each.call, LinearCall)]
    if not calls:
        count = "one kernel only" if opened.calls else "no kernel"
        raise ValueError(f"fn_or_name: got {fn_or_name!r}, which has {count}; accepted are linear functions")
    # Batch-invariant calls have nothing to choose.
    calls = [call._replace(invariant=False) for call in calls]
    for call in calls:
        _check(call)
    found = Tuning("; ".join(map(_problem, calls)))
    for call in calls:
        device, doing = call.x.device, progress.doing(f"tuning {_problem(call)}")
        with _LOCK, torch.no_grad(), torch.cuda.device(device), doing:
            _measure(call, found)
    return found


def _problem(call: LinearCall) -> str:
    n, k = call.weight.shape
    gpu = torch.cuda.get_device_name(call.x.device)
    return f"{call.epilogue.name}, {dtype_name(call.x.dtype)}, M = {call.rows}, N = {n}, K = {k}, on {gpu}"


def _check(call: LinearCall) -> None:
    """The errors of the call itself; RuntimeError where nothing can be measured."""
    x = call.x
    checks.arguments(call)
    if not plans.has_gpu_kernels(x):
        why = elementwise_kernels.why_none(x) or "it is on the CPU"
        raise RuntimeError(
            f"x: got device {x.device}; accepted is a CUDA device that epigemm's kernels run on ({why})"
        )
    if type(x) not in (Tensor, Parameter) or is_traced() or weight_packs.capturing(x.device):
        raise RuntimeError(
            "tune: got a call during CUDA graph capture or under tracing; accepted is a plain call"
        )


def _measure(call: LinearCall, found: Tuning) -> None:
    """Time all candidates of a call, add them to what was found, and have the planner know the best."""
    entries, timed = [], []
    for family in families(on_random_x(call)):
        found.left_out.extend(each for each in family.left_out if each not in found.left_out)
        if not family.candidates:
            continue
        with family.setting():
            measured = _times(family, call.x.device)
        entries.append(
            _entry(call, family, {plan: us for (is_rough, us), _, plan in measured if not is_rough})
        )
        for (_, us), text, plan in sorted(measured, key=lambda each: each[0]):
            timed.append(Timed(family.arithmetic if plan else "torch", text, plan, us, chosen=False))
    times.remember(call.x.get_device(), entries)
    taken = consider(call._replace(out=None)).taken
    arithmetic = "torch" if taken is None else taken.arithmetic
    plan = next((entry.plan for entry in entries if entry.arithmetic == arithmetic), TORCH)
    place = next(
        (i for i, each in enumerate(timed) if (each.arithmetic, each.plan) == (arithmetic, plan)), -1
    )
    found.candidates.extend(replace(each, chosen=i == place) for i, each in enumerate(timed))
    found.entries.extend(entries)


def _times(family: Family, device: torch.device) -> list[tuple[tuple[bool, float], str, tuple[int, ...]]]:
    """Of the fallback and each candidate: whether it is none of the best, and microseconds; its text and plan.

    Of all of them rough times; of the fastest, the fallback and the present plan medians of more rounds, without the
    first half, in which the load lowers the clocks.
    """
    timer = Timer(device)
    every = [family.fallback, *family.candidates]
    for each in every:
        each.run()  # the first call loads the kernel
    host_us = max(timer.host_us(each.run) for each in (every[0], every[-1]))
    rough = timer.in_turn([each.run for each in every], _ROUGH_ROUNDS, host_us)
    times = [min(samples) for samples in rough]
    fast = sorted(range(1, len(every)), key=times.__getitem__)[:_FINALISTS]
    best = [
        index
        for index, each in enumerate(every)
        if each.plan in (TORCH, family.now) or (index in fast and times[index] <= _WITHIN * times[fast[0]])
    ]
    rounds = int(_BUDGET_MS / sum(times[index] + _OVERHEAD_MS for index in best))
    rounds = min(max(rounds, _ROUNDS[0]), _ROUNDS[1])
    careful = timer.in_turn([every[index].run for index in best], rounds, host_us)
    for index, samples in zip(best, careful, strict=True):
        times[index] = statistics.median(samples[len(samples) // 2 :])
    return [
        ((index not in best, 1e3 * ms), every[index].text, every[index].plan)
        for index, ms in enumerate(times)
    ]


def _entry(call: LinearCall, family: Family, us: dict[tuple[int, ...], float]) -> Entry:
    """What is to be remembered of one arithmetic: its best plan, beside the fallback.

    What runs now goes on unless something is faster beyond noise. Then the times say so: of equal ones the fused plan
    runs.
    """

    def judged(plan: tuple[int, ...]) -> float:
        return us[plan] / (1 + _NOISE) if plan == family.now else us[plan]

    best = min(us.keys() - {TORCH}, key=lambda plan: (judged(plan), plan))
    fused_us, torch_us = us[best], us[TORCH]
    if judged(best) <= judged(TORCH):
        torch_us = max(torch_us, fused_us)
    else:
        fused_us = max(fused_us, torch_us + _LEAST_DIFFERENCE_US)
    n, k = call.weight.shape
    about = (call.epilogue.name, dtype_name(call.x.dtype), family.arithmetic)
    flags = (family.packed, call.bias is not None, family.tf32_allowed)
    return Entry(*about, *flags, call.rows, n, k, best, fused_us, torch_us)


# --- all candidates for a call ----------------------------------------------------------------------------------------


TORCH: tuple[int, ...] = ()
"""In place of a plan: the fallback, torch's GEMM and one elementwise kernel where that does not do everything."""

ONE_ORDER = ("sm90_swap_ab", "sm90_few_rows")
"""The families of kernels with one order of the tiles only."""
_RASTERS = ("along_m", "along_n")
_HOPELESS = 1.7  # times the best predicted time


def on_random_x(call: LinearCall) -> LinearCall:
    """The same call on one matrix of random x, and with ones for the epilogue's further vectors and scalars.

    Matrices stay as they are, because their layout decides how kernels read them. x keeps its leading axes beside a
    matrix that shares rows.
    """
    device, dtype = call.x.device, call.x.dtype
    generator = torch.Generator(device).manual_seed(0)
    is_shared = any(operand.shared for operand in call.epilogue.operands)
    lead = call.x.shape[:-1] if is_shared else (call.rows,)
    x = torch.randn((*lead, call.weight.shape[1]), generator=generator, device=device, dtype=dtype)
    operands = []
    for place, (about, value) in enumerate(zip(call.epilogue.operands, call.operands, strict=True), 1):
        if isinstance(value, Tensor) and KINDS[about.kind].by_row:
            value = value if is_shared or value.dim() == 2 else value.reshape(call.rows, value.shape[-1])
        elif isinstance(value, Tensor) and place != call.epilogue.bias_place:
            value = torch.ones_like(value)
        operands.append(value)
    return call._replace(x=x, operands=operands, out=None)


class Candidate(NamedTuple):
    """A candidate. `plan` is `TORCH`, or family, tile, raster, swizzle and splits."""

    plan: tuple[int, ...]
    text: str
    run: Callable[[], Tensor]


class Family(NamedTuple):
    """The kernels of one arithmetic, and the fallback that they are compared with."""

    arithmetic: str
    packed: bool  # on fp16 slices: whether the split of the weight is not counted
    tf32_allowed: bool  # fp32: whether torch's GEMM may use TF32
    candidates: list[Candidate]  # every plan whose kernels could be linked
    fallback: Candidate  # torch's GEMM, and one elementwise kernel where it is needed
    # torch's fp32 setting under which the fallback is to be timed
    setting: Callable[[], AbstractContextManager[None]]
    now: tuple[int, ...] = TORCH  # the plan that runs at present; `TORCH` where that is the fallback
    left_out: tuple[str, ...] = ()  # why other plans are no candidates: their kernels could not be linked


def families(call: LinearCall, *, within: float = _HOPELESS) -> Iterator[Family]:
    """Each arithmetic that the call may run in and whose kernels cover it, in the order in which they are tried.

    The epilogue is linked into the kernels of all of them, in parallel, before the first is given. Plans that are
    predicted to take more than `within` times the best are no candidates.
    """
    if plans.no_gemm_kernels():
        return
    call = call._replace(out=call.new_out())
    wanted = [
        (found, dry_runs.ARITHMETICS.index(found.arithmetic), _every_plan(found.plan, within))
        for found in consider(call).found.tried
        if found.tunable and found.plan["candidates"]
    ]
    forced = [(number, *plan) for _, number, texts in wanted for plan in texts]
    if not forced:
        return
    # Where the fallback's kernel cannot be linked, PyTorch's operators are the fallback.
    dry = (dry_runs.dry_run(call, dry_runs.ALL_KEPT, plan=plan) for plan in (*forced, dry_runs.FALLBACK))
    linked = loader.link_each(call.epilogue, [",".join(each.missing) for each in dry], call.x.device)
    why_not = dict(zip(forced, linked, strict=False))
    for found, number, texts in wanted:
        # The planner compares the fused TF32 kernel with a TF32 GEMM, whatever torch's setting is.
        allowed = call.order.tf32_allowed
        is_switched = not allowed and found.arithmetic == _precision.TF32
        now = tuple(found.plan.get("plan", TORCH))
        why = {plan: why_not.get((number, *plan), "") for plan in texts}
        linked_to = [plan for plan in texts if not why[plan]]
        yield Family(
            found.arithmetic,
            found.is_on_slices and found.packed,
            call.x.dtype == torch.float32 and (allowed or is_switched),
            [Candidate(plan, texts[plan], resolve.forced(call, (number, *plan))) for plan in linked_to],
            Candidate(TORCH, "the fallback", resolve.forced(call, dry_runs.FALLBACK)),
            partial(_precision.switched, call.x.device.type, _precision.TF32) if is_switched else nullcontext,
            TORCH if why.get(now) else now,
            tuple(dict.fromkeys(filter(None, why.values()))),
        )


def _every_plan(found: dict[str, Any], within: float) -> dict[tuple[int, ...], str]:
    """The planner's candidates and the plan that runs at present, with every order of the tiles."""
    answers, now = found["candidates"], found.get("plan")
    best = min(float(answer["predicted_us"]) for answer in answers)
    every: dict[tuple[int, ...], str] = {}
    for answer in answers:
        if answer["predicted_us"] > within * best and answer["plan"] != now:
            continue
        family, tile, raster, swizzle, splits = answer["plan"]
        orders = [(raster, swizzle)]
        if answer["family"] not in ONE_ORDER:  # nearly all of its tiles are computed at once
            orders = list(product(range(len(_RASTERS)), sorted({1, max(1, swizzle // 2), swizzle})))
        for raster, swizzle in orders:
            walked = {**answer, "raster": _RASTERS[raster], "swizzle": swizzle, "splits": splits}
            every.setdefault((family, tile, raster, swizzle, splits), plans.tile_text(walked))
    return every
