"""Times of two ways to call a model: in turn; of the host without the device, and of the device without the host."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness.timing import wall_ms

Call = Callable[[], object]

# A spin kernel's unit is the SM clock, 2 GHz at most on today's GPUs.
_CYCLES_PER_MS = 2_000_000
_MOST_SPIN_MS = 50.0


@dataclass(frozen=True)
class Effort:
    """How much to measure.

    Attributes:
        turns: of each way, where they are short; fewer in `most_ms`, but not less than `least_turns`.
        turn_ms: a turn's calls take at least so long.
        warm_calls: before anything is timed, where these are done within `warm_ms`.
        singles: calls that are timed one by one, of the host and of the device.
    """

    turns: int = 21
    least_turns: int = 7
    most_ms: float = 1500.0
    turn_ms: float = 8.0
    warm_calls: int = 40
    warm_ms: float = 400.0
    singles: int = 9
    singles_ms: float = 150.0


LEAST_WARM_CALLS = 16
"""In the first 15 calls of a kind `fuse` may take turns with the model's own forward."""
QUICK = Effort(turns=2, least_turns=2, turn_ms=0.0, warm_calls=1, singles=1)


def warm_up(call: Call, device: torch.device, effort: Effort) -> float:
    """Call until nothing new happens: caches, clocks, decisions of the first calls. Milliseconds of the last calls."""
    _synchronize(device)
    begin = time.perf_counter()
    done, ms = 0, math.inf
    least = min(LEAST_WARM_CALLS, effort.warm_calls)
    while done < least or (done < effort.warm_calls and 1e3 * (time.perf_counter() - begin) < effort.warm_ms):
        ms = row_ms(call, 1, device)
        done += 1
    return ms


def row_ms(call: Call, count: int, device: torch.device) -> float:
    """Milliseconds of one of so many calls in a row."""
    if device.type != "cuda":
        return wall_ms(call, count)
    event: Any = torch.cuda.Event
    first, last = event(enable_timing=True), event(enable_timing=True)
    first.record()
    for _ in range(count):
        call()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / count


def in_turn(
    calls: Mapping[str, Call], typical_ms: Mapping[str, float], device: torch.device, effort: Effort
) -> dict[str, list[float]]:
    """Milliseconds of a call in each turn; every other turn begins with the last of the calls."""
    counts = {name: max(1, math.ceil(effort.turn_ms / typical_ms[name])) for name in calls}
    turn_ms = sum(counts[name] * typical_ms[name] for name in calls)
    turns = max(effort.least_turns, min(effort.turns, int(effort.most_ms / turn_ms)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns):
        for name in list(calls)[:: -1 if turn % 2 else 1]:
            times[name].append(row_ms(calls[name], counts[name], device))
    return times


def singles(typical_ms: float, effort: Effort) -> int:
    """How many calls are timed one by one."""
    return max(min(3, effort.singles), min(effort.singles, int(effort.singles_ms / typical_ms)))


def host_ms(call: Call, count: int, device: torch.device) -> float:
    """What the host takes until a call returns, with nothing on the device to wait for. A CPU's is the whole call."""
    times = []
    for _ in range(count):
        _synchronize(device)
        times.append(wall_ms(call))
    _synchronize(device)
    return statistics.median(times)


def device_ms(
    calls: Mapping[str, Call], hosts: Mapping[str, float], counts: Mapping[str, int], device: torch.device
) -> dict[str, float]:
    """What the device takes for each call; empty where one of them cannot be queued as a whole."""
    if device.type != "cuda":
        return {
            name: statistics.median(wall_ms(call) for _ in range(counts[name]))
            for name, call in calls.items()
        }
    queued = {name: queued_ms(call, hosts[name], counts[name]) for name, call in calls.items()}
    found = {name: ms for name, ms in queued.items() if ms is not None}
    return found if len(found) == len(calls) else {}


def queued_ms(call: Call, host: float, count: int) -> float | None:
    """What the device takes for a call that is queued as a whole before it begins.

    A long kernel goes first, and the host has to be done before its end. None: no kernel is long enough. The host waits
    for the device within the call, or the call is longer than the queue.
    """
    cuda: Any = torch.cuda
    spin_ms = 1.5 * host + 1.0
    times: list[float] = []
    while len(times) < count:
        if spin_ms > _MOST_SPIN_MS:
            return None
        first, last = (cuda.Event(enable_timing=True) for _ in range(2))
        cuda._sleep(int(spin_ms * _CYCLES_PER_MS))
        first.record()
        call()
        last.record()
        is_hidden = not first.query()
        cuda.synchronize()
        if is_hidden:
            times.append(float(first.elapsed_time(last)))
        else:
            spin_ms *= 2
    return statistics.median(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
