"""What a call would run in, and why: for `explain`, `tune`, and the errors of calls that require a fused kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch

from epigemm.arguments.calls import LinearCall
from epigemm.calls import elementwise_kernels, weight_slices
from epigemm.linker import loader
from epigemm.planner import dry_runs, plans
from epigemm.planner.dry_runs import DryRun, Tried


class Considered(NamedTuple):
    """A dry run of a call, and the sources of the weight's slices."""

    found: DryRun  # of the fallback where the kernel that is chosen cannot run
    choices: dict[str, weight_slices.Choice]  # by arithmetic; empty where no kernel multiplies slices
    why_not_linked: str  # why the kernel that is chosen cannot run; empty where it can

    @property
    def taken(self) -> Tried | None:
        """The arithmetic that runs on a fused kernel."""
        return next((each for each in self.found.tried if not self.why_not(each)), None)

    def why_not(self, tried: Tried) -> str:
        """Why no fused kernel runs in this arithmetic; empty where one does."""
        return tried.why_not or self.why_not_linked


def consider(call: LinearCall, *, insists: bool = False) -> Considered:
    """A dry run of what `resolve.linear` would try, in the same order. It launches nothing.

    `insists`: earlier shortages of memory are ignored.
    """
    has_kernels = plans.has_gpu_kernels(call.x)  # the first call of this loads what was measured on the GPU
    choices, slices = {}, 0
    if has_kernels and call.x.dtype == torch.float32:
        choices = weight_slices.find_all(call, ignore_shortage=insists)
        slices = weight_slices.number_of(choices)
    found = dry_runs.dry_run(call, slices, tried=True)
    reason = ""
    if has_kernels and any(not each.why_not for each in found.tried):
        reason = loader.would_link(call.epilogue, ",".join(found.missing), call.x.device)
    if reason:
        found = dry_runs.dry_run(call, slices, plan=dry_runs.FALLBACK)._replace(tried=found.tried)
    return Considered(found, choices, reason)


def require_fused(call: LinearCall) -> None:
    """RuntimeError unless a fused kernel would run. The message says why none does."""
    reasons = [elementwise_kernels.why_none(call.x)]
    if not reasons[0]:
        considered = consider(call, insists=True)
        reasons = [considered.why_not(each) for each in considered.found.tried]
        if "" in reasons:
            return
    raise RuntimeError(
        "strict: got True for a call that no fused kernel would run "
        f"({'; '.join(dict.fromkeys(reasons))}); accepted there is False"
    )
