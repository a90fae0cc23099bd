"""How much device memory a call takes besides its inputs and its result, and what it keeps for the next one."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case, Data
from benchmarks.peers import Peer
from benchmarks.pieces import kept_bytes, workspace_bytes
from benchmarks.records import OURS, OWN, Memory


def measure_memory(case: Case, data: Data, out: Tensor, peer: Peer, plan: Mapping[str, object]) -> Memory:
    """Prepare the alternative afresh, so that its first call shows what it keeps, and look at its second call.

    Everything that a process allocates once (a library's workspace) must have been allocated before.
    """
    device = data.x.device
    _settle(device)
    before = _asked(device, "current")
    alternative = peer.prepare(case, data, out)
    try:
        alternative.run()
        _settle(device)
        torch.cuda.reset_peak_memory_stats(device)
        start, asked_at_start = torch.cuda.memory_allocated(device), _asked(device, "current")
        result = alternative.run()
        torch.cuda.synchronize(device)
        own = 0 if result is out else result.nbytes
        peak = torch.cuda.max_memory_allocated(device) - start - own
        asked = _asked(device, "peak") - asked_at_start - own
    finally:
        alternative.close()
    return Memory(peak, asked, asked_at_start - before, *_predicted(case, peer, plan))


def _settle(device: torch.device) -> None:
    gc.collect()
    torch.cuda.synchronize(device)
    # Free blocks that are larger than a request would be handed out, and counted, whole.
    torch.cuda.empty_cache()


def _asked(device: torch.device, when: str) -> int:
    statistics: dict[str, Any] = torch.cuda.memory_stats(device)
    return int(statistics[f"requested_bytes.all.{when}"])


def _predicted(case: Case, peer: Peer, plan: Mapping[str, object]) -> tuple[int | None, int | None]:
    """The workspace of the kernels on pieces, and the pack; BatchNorm in training mode has needs of its own."""
    if peer.name not in OWN or plan.get("arithmetic") != case.setting.pieces:
        return None, None
    kept = peer.name == OURS
    workspace = None if case.problem.training else workspace_bytes(case, packed=kept)
    return workspace, kept_bytes(case) if kept else 0
