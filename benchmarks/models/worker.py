"""One model in one mode, in a process of its own: compiles all its cases, waits for its turn, checks and measures.

It says what it has done, and listens: "stop" while it compiles: no further case; "go": measure.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

import epigemm
from benchmarks.harness.runner import describe_error
from benchmarks.models.registry import NETWORKS, PRECISIONS, WORST_ERROR, Inputs

INFERENCE, TRAINING = "inference", "training"
TURNS, LEAST_MS, LEAST_CALLS = 9, 8.0, 3
QUICK_TURNS = 2
# Float64's results are compared in fp32: an error below its roundoff says nothing.
_LEAST_ERROR = 1e-7
# A gradient that is zero in exact arithmetic (of BERT's key bias) is noise, and has no relative error.
_LEAST_GRADIENT = 1e-3


@dataclass(frozen=True)
class Case:
    """A model at one precision, mode and batch."""

    network: str
    precision: str
    mode: str
    batch: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.network}/{self.precision}/{self.mode}/{'x'.join(map(str, self.batch))}"

    @property
    def is_large(self) -> bool:
        """At the larger of the network's batches."""
        return self.batch == NETWORKS[self.network].batches[-1]


def cases(key: str, *, quick: bool) -> Iterator[Case]:
    """Of NETWORK/MODE, the most telling first. Training: no fp32_high, the large batch alone. Quick: batches of 2."""
    network, mode = key.split("/")
    batches = NETWORKS[network].batches
    for batch in batches[:0:-1] if quick or mode == TRAINING else batches[::-1]:
        for precision in PRECISIONS:
            if mode == INFERENCE or precision != "fp32_high":
                yield Case(network, precision, mode, (2, *batch[1:]) if quick else batch)


@dataclass
class Prepared:
    """A case with its calls, compiled, and float64's results."""

    case: Case
    calls: dict[str, Callable[[], list[Tensor]]]
    exact: list[Tensor]


def _set_precision(case: Case) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32" if case.precision == "fp32_high" else "ieee"


def _step(
    forward: Any, parameters: list[nn.Parameter], inputs: Inputs, upstream: Tensor | None
) -> Callable[[], list[Tensor]]:
    """A call: the output, and in training the parameters' gradients behind it."""

    def infer() -> list[Tensor]:
        with torch.no_grad():
            return [forward(*inputs)]

    def train() -> list[Tensor]:
        for parameter in parameters:
            parameter.grad = None
        output = forward(*inputs)
        output.backward(upstream)
        return [output.detach(), *(p.grad for p in parameters if p.grad is not None)]

    return infer if upstream is None else train


def _to(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)


def _upstream(model: nn.Module, inputs: Inputs) -> Tensor:
    """The output's gradient. Random: of a plain sum, the gradients ahead of a LayerNorm vanish."""
    with torch.no_grad():
        output: Tensor = model(*inputs)
    generator = torch.Generator(output.device).manual_seed(2)
    drawn = torch.randn(output.shape, generator=generator, device=output.device)
    return (drawn / math.sqrt(output.numel())).to(output.dtype)


def prepare(case: Case, device: torch.device, *, quick: bool) -> Prepared:
    """Build, fuse, compile; call each twice."""
    _set_precision(case)
    network = NETWORKS[case.network]
    torch.manual_seed(0)
    with device:
        model = network.build(network.layers)
    model = model.to(PRECISIONS[case.precision]).train(case.mode == TRAINING)
    inputs = _to(
        network.draw(torch.Generator(device).manual_seed(1), *case.batch), PRECISIONS[case.precision]
    )
    upstream = _upstream(model, inputs) if case.mode == TRAINING else None
    compiler = "aot_eager" if quick else "inductor"
    options: dict[str, Any] = {"backend": compiler}
    forwards = {
        "eager": model,
        "fuse": epigemm.fuse(model),
        "compile": torch.compile(model, dynamic=False, backend=compiler),
        "backend": torch.compile(model, dynamic=False, backend="epigemm", options=options),
    }
    parameters = list(model.parameters())
    calls = {name: _step(forward, parameters, inputs, upstream) for name, forward in forwards.items()}
    for call in calls.values():
        call()
        call()
    # The copy has the same, rounded parameters.
    wide = copy.deepcopy(model).double()
    wide_upstream = None if upstream is None else upstream.double()
    exact = _step(wide, list(wide.parameters()), _to(inputs, torch.float64), wide_upstream)()
    return Prepared(case, calls, [t.float() for t in exact])


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    """The largest relative rms error of the output and of the gradients behind it; infinite where one is not finite."""
    if [t.shape for t in found] != [t.shape for t in exact]:
        return math.inf
    scales = [_rms(t) for t in exact]
    least = _LEAST_GRADIENT * max(scales[1:], default=0.0)
    scales[1:] = [max(scale, least) for scale in scales[1:]]
    lost = [_rms(ours.float() - right) for ours, right in zip(found, exact, strict=True)]
    relative = [error / (scale or 1.0) for error, scale in zip(lost, scales, strict=True)]
    return max(relative) if all(map(math.isfinite, relative)) else math.inf


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def is_right(errors: dict[str, float]) -> bool:
    """Ours against the same without fusion; Inductor's own error may be larger than eager's (ViT's convolution)."""
    eager = max(errors["eager"], _LEAST_ERROR)
    limits = {"fuse": eager, "backend": max(eager, errors["compile"])}
    # An infinite error, also of the same without fusion, proves nothing right.
    return all(math.isfinite(limit) and errors[name] <= WORST_ERROR * limit for name, limit in limits.items())


def _timed(call: Callable[[], object], count: int, device: torch.device) -> float:
    """Milliseconds of one of so many calls in a row."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - begin) * 1e3 / count
    event: Any = torch.cuda.Event
    first, last = event(enable_timing=True), event(enable_timing=True)
    first.record()
    for _ in range(count):
        call()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / count


def measure(prepared: Prepared, device: torch.device, *, quick: bool) -> dict[str, Any]:
    """Errors first; then the alternatives in turn, medians of their times."""
    _set_precision(prepared.case)
    calls = prepared.calls
    errors = {name: error(call(), prepared.exact) for name, call in calls.items()}
    prepared.exact = []
    counts = dict.fromkeys(calls, 1)
    if not quick:
        for name, call in calls.items():
            counts[name] = max(LEAST_CALLS, math.ceil(LEAST_MS / _timed(call, LEAST_CALLS, device)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(QUICK_TURNS if quick else TURNS):
        for name in list(calls) if turn % 2 else reversed(calls):
            times[name].append(_timed(calls[name], counts[name], device))
    ms = {name: statistics.median(each) for name, each in times.items()}
    return {
        "fuse_vs_eager": ms["eager"] / ms["fuse"],
        "backend_vs_compile": ms["compile"] / ms["backend"],
        "ms": ms,
        "errors": errors,
        "right": is_right(errors),
    }


def work(line: Connection, key: str, device: torch.device, quick: bool) -> None:
    """Compile; say "ready"; wait for "go"; measure; a message for each case."""
    config: Any = torch._dynamo.config
    config.cache_size_limit = 64
    ready: list[Prepared] = []
    for case in cases(key, quick=quick):
        # Any word says that time is up; so does the end of the process that listens.
        if line.poll():
            break
        try:
            ready.append(prepare(case, device, quick=quick))
        except Exception as e:
            line.send({"failed": str(case), "why": describe_error(e)})
    line.send({"ready": len(ready)})
    while line.recv() != "go":
        pass
    while ready:
        prepared = ready.pop(0)
        try:
            result = measure(prepared, device, quick=quick)
            line.send({"case": str(prepared.case), "result": result})
        except Exception as e:
            line.send({"failed": str(prepared.case), "why": describe_error(e)})
    line.send({"done": True})
