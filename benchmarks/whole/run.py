"""Whole models: eager against ``epigemm.fuse``, torch.compile against its backend "epigemm".

    python -m benchmarks.whole.run --output benchmarks/results/nvidia-h200/models --trees csrc=HASH,python=HASH

Compiling takes longer than measuring. So every model compiles in a process of its own, all of them at once; then the
processes measure one after another, alone on the GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import epigemm
from benchmarks.harness import environment
from benchmarks.harness.records import geomean
from benchmarks.harness.report import Record, Table
from benchmarks.whole.networks import NETWORKS, Inputs

INFERENCE, TRAINING = "inference", "training"
PRECISIONS = {"fp32_highest": torch.float32, "fp32_high": torch.float32, "bf16": torch.bfloat16}
ALTERNATIVES = ("eager", "fuse", "compile", "backend")
TURNS, LEAST_MS = 9, 8.0
RATIOS = ("fuse_vs_eager", "backend_vs_compile")
GO = "go"
# Shares of the time budget: no further case is compiled after the first, nothing is waited for after the second.
COMPILE_UNTIL, COMPILED_BY = 0.42, 0.66
SLOW_TO_COMPILE = ("mixer-b16", "dlrm", "vit-b16")
METHOD = (
    "Every model compiles in a process of its own; then they measure one after another, alone on the GPU. Calls back "
    "to back between CUDA events, the alternatives in turn, medians. Deep models have few of their identical layers "
    "(`layers`). Inference: without gradients; training: forward and backward. Output and gradients were compared with "
    "float64 first."
)
# Of the rms error against float64, as a multiple of eager's. Fused bf16 layers round less often than eager's; TF32
# and its stand-in round ties differently.
WORST_ERROR = 1.5


@dataclass
class Case:
    """A model at one precision, mode and batch, called in every way."""

    name: str
    inputs: Inputs
    calls: dict[str, Callable[[], list[Tensor]]]
    exact: list[Tensor]


def plan(name: str, mode: str) -> Iterator[tuple[str, int]]:
    """Precisions and batches (by index), the most telling first. Training: without fp32_high, the large batch alone."""
    for precision in PRECISIONS:
        for batch in (1, 0):
            if mode == INFERENCE or (batch and precision != "fp32_high"):
                yield precision, batch


def step(
    forward: Any, parameters: list[nn.Parameter], inputs: Inputs, mode: str
) -> Callable[[], list[Tensor]]:
    """A call: the output, and in training the parameters' gradients behind it."""

    def infer() -> list[Tensor]:
        with torch.no_grad():
            return [forward(*inputs)]

    upstream: list[Tensor] = []

    def train() -> list[Tensor]:
        for parameter in parameters:
            parameter.grad = None
        output = forward(*inputs)
        if not upstream:
            # Random signs: exact in every type. Behind a LayerNorm the gradient of a constant would be zero.
            generator = torch.Generator(output.device).manual_seed(2)
            signs = torch.randint(2, output.shape, generator=generator, device=output.device) * 2 - 1
            upstream.append(signs.to(output.dtype))
        output.backward(upstream[0])
        return [output.detach(), *(p.grad for p in parameters if p.grad is not None)]

    return infer if mode == INFERENCE else train


def set_precision(name: str) -> None:
    """torch's setting for fp32 products."""
    matmul: Any = torch.backends.cuda.matmul
    matmul.fp32_precision = "tf32" if name == "fp32_high" else "ieee"


def prepare(name: str, mode: str, device: torch.device, small: bool) -> Iterator[Case]:
    """Cases, compiled and called twice."""
    network = NETWORKS[name]
    for precision, index in plan(name, mode):
        set_precision(precision)
        torch.manual_seed(0)
        with device:
            model = network.build(1 if small else network.layers)
        model = model.to(PRECISIONS[precision]).train(mode == TRAINING)
        shape = (2, *network.batches[index][1:]) if small else network.batches[index]
        inputs = network.draw(torch.Generator(device).manual_seed(1), *shape)
        inputs = tuple(x.to(PRECISIONS[precision]) if x.is_floating_point() else x for x in inputs)
        torch._dynamo.config.recompile_limit = 64
        compiler = "aot_eager" if small else "inductor"
        forwards: dict[str, Any] = {
            "eager": model,
            "fuse": epigemm.fuse(model),
            "compile": torch.compile(model, dynamic=False, backend=compiler),
            "backend": torch.compile(model, dynamic=False, backend="epigemm", options={"backend": compiler}),
        }
        parameters = list(model.parameters())
        calls = {key: step(forward, parameters, inputs, mode) for key, forward in forwards.items()}
        wide = copy.deepcopy(model).double()
        wide_inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
        exact = [t.float() for t in step(wide, list(wide.parameters()), wide_inputs, mode)()]
        del wide
        for call in calls.values():
            call()
            call()
        batch = "x".join(map(str, shape))
        yield Case(f"{name}/{precision}/{mode}/{batch}", inputs, calls, exact)


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    """The largest relative rms error of the output and of the gradients."""
    if [each.shape for each in found] != [each.shape for each in exact]:
        return math.inf
    worst, largest = 0.0, max(float(t.square().mean().sqrt()) for t in exact[-max(1, len(exact) - 1) :])
    for place, (ours, right) in enumerate(zip(found, exact, strict=True)):
        # A gradient that is zero in exact arithmetic (BERT's key bias) is judged beside the others.
        scale = max(float(right.square().mean().sqrt()), 1e-3 * largest if place else 0.0)
        lost = float((ours.float() - right).square().mean().sqrt())
        if not math.isfinite(lost):
            return math.inf
        worst = max(worst, lost / scale if scale else lost)
    return worst


def timed(call: Callable[[], object], count: int, device: torch.device) -> float:
    """Milliseconds a call, of `count` calls in a row."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - begin) * 1e3 / count
    make_event: Any = torch.cuda.Event
    first, last = make_event(enable_timing=True), make_event(enable_timing=True)
    first.record()
    for _ in range(count):
        call()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / count


def measure(case: Case, device: torch.device) -> dict[str, Any]:
    """Errors first; then the alternatives in turn, medians of their times."""
    errors = {key: error(call(), case.exact) for key, call in case.calls.items()}
    case.exact = []
    counts = {key: max(3, int(LEAST_MS / timed(call, 3, device)) + 1) for key, call in case.calls.items()}
    times: dict[str, list[float]] = {key: [] for key in case.calls}
    for turn in range(TURNS):
        order = list(case.calls) if turn % 2 else list(case.calls)[::-1]
        for key in order:
            times[key].append(timed(case.calls[key], counts[key], device))
    ms = {key: statistics.median(list_) for key, list_ in times.items()}
    limits = {"fuse": errors["eager"], "backend": max(errors["eager"], errors["compile"])}
    return {
        "fuse_vs_eager": round(ms["eager"] / ms["fuse"], 4),
        "backend_vs_compile": round(ms["compile"] / ms["backend"], 4),
        "ms": {key: round(value, 4) for key, value in ms.items()},
        "errors": errors,
        "right": all(math.isfinite(each) for each in errors.values())
        and all(errors[key] <= WORST_ERROR * max(limit, 1e-7) for key, limit in limits.items()),
    }


def work(name: str, mode: str, device: torch.device, small: bool, budget: float) -> None:
    """Compile; print "ready"; wait for a line; measure; print one line a case."""
    begin = time.perf_counter()
    cases: list[Case] = []
    failed = ""
    try:
        for case in prepare(name, mode, device, small):
            cases.append(case)
            if time.perf_counter() - begin > budget:
                break
    except Exception as e:  # the parent reports it
        failed = f"{type(e).__name__}: {e}"[:500]
    print(json.dumps({"ready": len(cases), "failed": failed}), flush=True)
    if sys.stdin.readline().strip() != GO:
        return
    for case in cases:
        set_precision(case.name.split("/")[1])
        print(json.dumps({case.name: measure(case, device)}), flush=True)
    print(json.dumps({}), flush=True)


@dataclass
class Worker:
    """A process that compiles one model for one mode, and measures it when it is told to."""

    name: str
    mode: str
    process: subprocess.Popen[str]
    answer: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, name: str, mode: str, small: bool, budget: float) -> Worker:
        """Start the process. One thread of its own each: there are as many processes as cores."""
        command = [sys.executable, "-m", "benchmarks.whole.run", "--worker", "--cases", name, "--modes", mode]
        command += [f"--time-budget={budget}", *(["--small"] if small else [])]
        one_thread = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return cls(name, mode, subprocess.Popen(command, env=os.environ | one_thread, **pipes))

    def wait(self) -> None:
        """Until it has compiled."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.answer = json.loads(line) if line else {"ready": 0, "failed": "the process ended"}

    def cases(self) -> Iterator[dict[str, Any]]:
        """What it measures."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{GO}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if not (found := json.loads(line)):
                return
            yield found


def run(workers: list[Worker], budget: float, record: Record) -> None:
    """Wait for all to compile, or for their time to end; then let them measure one after another."""
    begin = time.perf_counter()
    threads = [threading.Thread(target=worker.wait, daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, COMPILED_BY * budget - (time.perf_counter() - begin)))
    print(f"compiled after {time.perf_counter() - begin:.0f} s", flush=True)
    for worker in workers:
        late = time.perf_counter() - begin > budget
        reason = worker.answer.get("failed", "not compiled in time") or (
            "not measured in time" if late else ""
        )
        if reason:
            record.figures["not_reached"][f"{worker.name}/{worker.mode}"] = reason
        if worker.answer.get("ready") and not late:
            for found in worker.cases():
                record.figures["cases"] |= found
                print("\n".join(f"{name}: {case}" for name, case in found.items()), flush=True)
        worker.process.kill()


def missed(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The bars that were missed, in words."""
    found = []
    for name, case in cases.items():
        model, precision, mode, batch = name.split("/")
        network = NETWORKS[model]
        is_large = batch == "x".join(map(str, network.batches[-1])) and mode == INFERENCE
        fuse, backend = 0.99, 0.98
        if is_large and network.is_transformer:
            fuse = {"fp32_highest": 2.0, "bf16": 1.03}.get(precision, fuse)
            backend = {"fp32_highest": 2.0}.get(precision, backend)
        for key, least in (("fuse_vs_eager", fuse), ("backend_vs_compile", backend)):
            if case[key] < least:
                found.append(f"{name}: {key} is {case[key]:.3f}, wanted {least:g}")
    return found


def table(cases: Mapping[str, Mapping[str, Any]]) -> Table:
    """Times and ratios."""
    rows = [
        [name, *(f"{case['ms'][key]:.3f}" for key in ALTERNATIVES), *(f"{case[key]:.3f}" for key in RATIOS)]
        for name, case in cases.items()
    ]
    return Table("Whole models, ms", ("case", *ALTERNATIVES, *RATIOS), rows)


def main() -> int:
    """All models; exit status 1 on a wrong result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole.run", description=__doc__)
    parser.add_argument("--output", type=Path, help="folder of summary.json and tables.md")
    parser.add_argument("--cases", nargs="*", default=list(NETWORKS), choices=list(NETWORKS), metavar="NAME")
    parser.add_argument("--modes", nargs="*", default=[INFERENCE, TRAINING], choices=[INFERENCE, TRAINING])
    parser.add_argument(
        "--small", action="store_true", help="one layer, batches of two, without Inductor: a smoke test"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--time-budget", type=float, default=200, metavar="S")
    parser.add_argument("--trees", metavar="csrc=HASH,python=HASH")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.worker:
        work(options.cases[0], options.modes[0], device, options.small, COMPILE_UNTIL * options.time_budget)
        return 0
    about = environment.describe(device, options.trees)
    layers = {name: NETWORKS[name].layers for name in options.cases}
    figures: dict[str, Any] = {"layers": layers, "cases": {}, "not_reached": {}}
    effort = {"turns": TURNS, "turn_ms": LEAST_MS}
    record = Record("models", about, METHOD, effort, {}, [], figures)
    order = sorted(options.cases, key=lambda name: name not in SLOW_TO_COMPILE)
    budget = options.time_budget
    workers = [Worker.start(name, mode, options.small, budget) for mode in options.modes for name in order]
    run(workers, budget, record)
    cases = figures["cases"]
    figures["geomeans"] = {key: geomean([case[key] for case in cases.values()]) for key in RATIOS}
    figures["missed"] = missed(cases)
    record.complete = not figures["not_reached"]
    if options.output:
        record.write(options.output, [table(cases)], figures["missed"])
    print("\n".join(figures["missed"]))
    return int(not cases or not all(case["right"] for case in cases.values()))


if __name__ == "__main__":
    sys.exit(main())
