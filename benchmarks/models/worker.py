"""One job in a process of its own: it builds and compiles, waits for its turn, checks and measures.

It says "up" once it has loaded its libraries, and listens: "prepare", then it says "ready"; "measure", then it says
what came out. At any time it may say that it failed, or why there is nothing to measure.
"""

from __future__ import annotations

import copy
import fcntl
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import epigemm
from benchmarks.harness.runner import describe_error
from benchmarks.models import measures
from benchmarks.models.jobs import TRAINING, Case, Job
from benchmarks.models.measures import QUICK, Effort
from benchmarks.models.registry import NETWORKS, PRECISIONS, WORST_ERROR, Inputs

# Float64's results are compared in fp32: an error below its roundoff says nothing.
_LEAST_ERROR = 1e-7
# A gradient that is zero in exact arithmetic (of BERT's key bias) is noise, and has no relative error.
_LEAST_GRADIENT = 1e-3
EAGER = "eager"


class NotMeasured(Exception):
    """There is nothing to measure; its text says why."""


class Measurable(Protocol):
    """A job that is ready to be measured."""

    def measure(self, device: torch.device, effort: Effort) -> dict[str, Any]:
        """What the record is told of it."""


Prepare = Callable[..., Measurable]
"""Takes a job, its device and `quick`; may raise `NotMeasured`."""


@dataclass
class Prepared:
    """A job with its calls, compiled, eager's among them, and float64's results."""

    job: Job
    calls: dict[str, Callable[[], list[Tensor]]]
    exact: list[Tensor]
    about: dict[str, Any] = field(default_factory=dict)  # what the record says besides

    def measure(self, device: torch.device, effort: Effort) -> dict[str, Any]:
        """Errors first, and once more at the end; times between them, of what is right alone."""
        variant = self.job.variant
        _set_precision(self.job.case)
        timed = {name: self.calls[name] for name in (variant.other, variant.own)}
        typical = {name: measures.warm_up(call, device, effort) for name, call in timed.items()}
        result: dict[str, Any] = dict(self.about)
        self._check(result)
        if not result["right"]:
            return result
        result["turns_ms"] = measures.in_turn(timed, typical, device, effort)
        counts = {name: measures.singles(typical[name], effort) for name in timed}
        hosts = {name: measures.host_ms(call, counts[name], device) for name, call in timed.items()}
        result["host_ms"], result["device_ms"] = hosts, measures.device_ms(timed, hosts, counts, device)
        self._check(result)
        return result

    def _check(self, result: dict[str, Any]) -> None:
        """Every call against float64: what a call computes may change from one to the next."""
        job, before = self.job, result.get("errors", {})
        errors = {name: error(call(), self.exact) for name, call in self.calls.items()}
        result["errors"] = {name: max(found, before.get(name, 0.0)) for name, found in errors.items()}
        is_fine = is_right(errors, job.variant.own, NETWORKS[job.case.network].worst_error)
        result["right"] = is_fine and result.get("right", True)


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


def _exact(model: nn.Module, inputs: Inputs, upstream: Tensor | None) -> list[Tensor]:
    """What a call computes in float64, from the same, rounded parameters."""
    wide = copy.deepcopy(model).double()
    wide_upstream = None if upstream is None else upstream.double()
    found = _step(wide, list(wide.parameters()), _to(inputs, torch.float64), wide_upstream)()
    return [t.float() for t in found]


@contextmanager
def alone_on(device: torch.device) -> Iterator[None]:
    """In the block, no other job of this user is in such a block on this device: its memory holds one of them.

    Memory that the block no longer uses is free behind it. The system opens the lock of a process that is killed.
    """
    path = (
        Path(tempfile.gettempdir()) / f"epigemm-benchmarks-{os.getuid()}-{str(device).replace(':', '-')}.lock"
    )
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        free(device)
        yield
        free(device)
    finally:
        os.close(descriptor)


def _to(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)


def _upstream(model: nn.Module, inputs: Inputs) -> Tensor:
    """The output's gradient. Random: of a plain sum, the gradients ahead of a LayerNorm vanish."""
    with torch.no_grad():
        output: Tensor = model(*inputs)
    generator = torch.Generator(output.device).manual_seed(2)
    drawn = torch.randn(output.shape, generator=generator, device=output.device)
    return (drawn / math.sqrt(output.numel())).to(output.dtype)


def why_not(name: str, device: torch.device, *, quick: bool) -> str:
    """Why a variant cannot be measured here; empty where it can."""
    if name == "overhead" and device.type != "cuda":
        return "CUDA graphs need a GPU"
    if name == "overhead" and quick:
        return "a quick run has no Inductor"
    return ""


def forwards(job: Job, model: nn.Module, *, quick: bool) -> dict[str, Any]:
    """Both ways of a variant to call the model, by name."""
    compiler = "aot_eager" if quick else "inductor"
    own = {"eager_options": "eager", "whole": compiler}.get(job.name)
    if own is not None:  # a failure of epigemm's pass is one of the job
        return {
            EAGER: model,
            job.name: epigemm.fuse(model, options={"backend": own}, strict=True, dynamic=False),
        }
    if job.name == "backend":
        options: dict[str, Any] = {"backend": compiler}
        return {
            "compile": torch.compile(model, dynamic=False, backend=compiler),
            "backend": torch.compile(model, dynamic=False, backend="epigemm", options=options),
        }
    mode = "reduce-overhead"
    return {
        "compile_overhead": torch.compile(model, dynamic=False, mode=mode),
        "backend_overhead": torch.compile(model, dynamic=False, backend="epigemm", mode=mode),
    }


def prepare(job: Job, device: torch.device, *, quick: bool) -> Prepared:
    """Build, fuse or compile; call each twice.

    Raises:
        NotMeasured: the variant is not there, or nothing to be measured.
    """
    if reason := why_not(job.name, device, quick=quick):
        raise NotMeasured(reason)
    case = job.case
    _set_precision(case)
    network, dtype = NETWORKS[case.network], PRECISIONS[case.precision]
    torch.manual_seed(0)
    with device:
        model = network.build(network.layers)
    model = model.to(dtype).train(case.mode == TRAINING)
    inputs = _to(network.draw(torch.Generator(device).manual_seed(1), *case.batch), dtype)
    upstream = _upstream(model, inputs) if case.mode == TRAINING else None
    parameters, found = list(model.parameters()), forwards(job, model, quick=quick)
    calls = {name: _step(forward, parameters, inputs, upstream) for name, forward in found.items()}
    calls.setdefault(EAGER, _step(model, parameters, inputs, upstream))
    for call in (*calls.values(), *calls.values()):
        call()
    with alone_on(device):
        exact = _exact(model, inputs, upstream)
    prepared = Prepared(job, calls, exact)
    report = getattr(found[job.variant.own], "fusion_report", None)
    if report is not None:
        products = len(report.sites) + len(report.skipped)
        prepared.about["chains"] = dict(zip(("followed", "taken"), report.chains, strict=True))
        prepared.about["products"] = {"all": products, "fused": len(report.sites)}
    return prepared


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


def is_right(errors: dict[str, float], own: str, worst: float = WORST_ERROR) -> bool:
    """Ours against the same without fusion; Inductor's own error may be larger than eager's (ViT's convolution)."""
    limit = max(_LEAST_ERROR, *(error for name, error in errors.items() if name != own))
    # An infinite error, also of the same without fusion, proves nothing right.
    return math.isfinite(limit) and errors[own] <= worst * limit


def work(line: Connection, prepare: Prepare, job: Any, device: torch.device, quick: bool) -> None:
    """The process."""
    config: Any = torch._dynamo.config
    config.cache_size_limit = 64
    line.send({"up": True})
    try:
        line.recv()
        begin = time.monotonic()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        prepared = prepare(job, device, quick=quick)
        free(device)
        line.send({"ready": time.monotonic() - begin})
        line.recv()
        result = prepared.measure(device, QUICK if quick else Effort())
        free(device)
        line.send({"result": result})
        line.recv()  # its end would disturb the next one's measurement
    except NotMeasured as reason:
        line.send({"skipped": str(reason)})
    except EOFError:  # the parent process has closed the connection
        pass
    except Exception as e:
        line.send({"failed": describe_error(e)})


def free(device: torch.device) -> None:
    """Give memory that is not in use to the others on the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
