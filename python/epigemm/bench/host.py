"""What a call costs the host, from Python to the launch: ``python -m epigemm.bench --host``.

Small GEMMs are shorter on the device than their calls are on the host, which is then what a model waits for. The
variants of a case take turns; in each turn one of them is called a hundred times without waiting for the device in
between, few enough that its queue of launches does not fill up and block the host. On a CPU, where a call
returns when it is done, these are the times of whole calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import epigemm
from epigemm import execution, packs, precision
from epigemm.bench import environment, report
from epigemm.bench.cases import Shape
from epigemm.bench.gradings.products import matmul_setting
from epigemm.bench.records import Timing
from epigemm.bench.tables import Table
from epigemm.bench.timing import Run, Timer, make_timer
from epigemm.epilogues import BIAS_RELU, SIGMOID
from epigemm.plans import has_gpu_kernels

_GPU_SHAPE, _CPU_SHAPE = Shape(256, 1024, 1024), Shape(8, 64, 64)

TORCH, CHAIN, FUNCTION, MODULE, NATIVE, WITH_OUT = "torch", "chain", "function", "module", "native", "out="
VARIANTS = {
    TORCH: "one operator of torch: F.linear with a bias, or torch.sigmoid",
    CHAIN: "eager PyTorch: every operator of the formula",
    FUNCTION: "epigemm's function; fp32: on a packed weight where the case says so",
    WITH_OUT: "the same into `out=`",
    MODULE: "epigemm's module",
    NATIVE: "the native operator alone, into memory that is there already",
}


@dataclass(frozen=True)
class HostEffort:
    """How much to measure: turns of each variant, and calls in a turn."""

    turns: int = 40
    calls: int = 100


@dataclass(frozen=True)
class HostCase:
    """One formula in one arithmetic, and the ways to call it.

    Attributes:
        name: for tables.
        path: what our call runs on, as `epigemm.explain` calls it.
        runs: by variant; all compute the same, but for TORCH, which leaves the epilogue out.
        setting: torch's fp32 setting for the case; None leaves it alone.
    """

    name: str
    path: str
    runs: dict[str, Run]
    setting: str | None = None


def _linear_cases(shape: Shape, device: torch.device) -> Iterator[HostCase]:
    assert shape.k is not None
    x = torch.randn(shape.m, shape.k, device=device)
    layer = nn.Linear(shape.k, shape.n, device=device)
    yield _linear_case("bf16", x.bfloat16(), _copy(layer).bfloat16(), None, "ieee")
    for name, setting in (("highest", "ieee"), ("high", "tf32")):
        yield _linear_case(f"fp32 {name}, plain weight", x, _copy(layer), name, setting, plain=True)
        yield _linear_case(f"fp32 {name}, packed weight", x, _copy(layer), name, setting)


def _copy(layer: nn.Linear) -> nn.Linear:
    """A layer with a weight of its own, and so with no pack yet."""
    copied = nn.Linear(layer.in_features, layer.out_features, device=layer.weight.device)
    copied.load_state_dict(layer.state_dict())
    return copied.requires_grad_(False)


def _linear_case(
    name: str, x: Tensor, layer: nn.Linear, wish: str | None, setting: str, *, plain: bool = False
) -> HostCase:
    """``linear_relu``; `plain`: with nothing kept of the weight."""
    weight, bias = layer.weight.data, layer.bias.data
    given: Any = weight if plain or wish is None else epigemm.pack(weight, precision=wish)
    module = epigemm.nn.LinearReLU.from_linear(layer, precision=wish)
    linear, out = torch.nn.functional.linear, torch.empty_like(x @ weight.t())
    runs: dict[str, Run] = {
        TORCH: lambda: linear(x, weight, bias),
        CHAIN: lambda: torch.relu(linear(x, weight, bias)),
        FUNCTION: lambda: epigemm.linear_relu(x, given, bias, precision=wish),
        WITH_OUT: lambda: epigemm.linear_relu(x, given, bias, out=out, precision=wish),
    }
    if not plain:
        runs[MODULE] = lambda: module(x)
    with _torch_setting(setting):
        path = epigemm.explain(epigemm.linear_relu, x, given, bias, precision=wish).path
        native = _native_linear(x, weight, bias, out, wish)
    if native is not None and not plain:
        runs[NATIVE] = native
    return HostCase(f"linear_relu, {name}", path, runs, setting)


def _native_linear(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, wish: str | None) -> Run | None:
    """The operator underneath, where it runs: it exists on GPUs alone."""
    if not has_gpu_kernels(x):
        return None
    if x.dtype != torch.float32:
        call = (BIAS_RELU, x, weight, bias, (), (), precision.IEEE, out)
        ran = execution.fused_once(*call)
        return (lambda: _after(execution.fused_once(*call), out)) if ran else None
    arithmetic = precision.ARITHMETIC[wish or "highest"]
    pack = packs.find(weight, packs.PIECES[arithmetic])
    if pack is None:
        return None
    buffer = pack.read()
    size = packs.pack_bytes(x.shape[0], x.shape[1], packs.PIECES[arithmetic])
    workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
    operator = torch.ops.epigemm._split_linear_out.default
    arguments = ("bias_relu", x, weight, buffer, workspace, bias, None, None, arithmetic, None, out)
    return lambda: _after(operator(*arguments), out)


def _after(done: object, out: Tensor) -> Tensor:
    return out


def _elementwise_cases(shape: Shape, device: torch.device) -> Iterator[HostCase]:
    x = torch.randn(shape.m, shape.n, device=device).bfloat16()
    bias, out = x[0].clone(), torch.empty_like(x)
    module = epigemm.nn.Sigmoid()
    yield HostCase(
        "sigmoid, bf16",
        epigemm.explain(epigemm.sigmoid, x).path,
        {
            TORCH: lambda: torch.sigmoid(x),
            CHAIN: lambda: torch.sigmoid(x),
            FUNCTION: lambda: epigemm.sigmoid(x),
            WITH_OUT: lambda: epigemm.sigmoid(x, out=out),
            MODULE: lambda: module(x),
            NATIVE: lambda: execution.elementwise_forward(SIGMOID, x, None, (), (), out),
        },
    )
    yield HostCase(
        "bias_relu, bf16",
        epigemm.explain(epigemm.bias_relu, x, bias).path,
        {
            TORCH: lambda: torch.relu(x),
            CHAIN: lambda: torch.relu(x + bias),
            FUNCTION: lambda: epigemm.bias_relu(x, bias),
            WITH_OUT: lambda: epigemm.bias_relu(x, bias, out=out),
            NATIVE: lambda: execution.elementwise_forward(BIAS_RELU, x, bias, (), (), out),
        },
    )


@contextlib.contextmanager
def _torch_setting(setting: str | None) -> Iterator[None]:
    with matmul_setting(setting) if setting else contextlib.nullcontext():
        yield


def _turn(run: Run, calls: int, timer: Timer) -> float:
    """Milliseconds that one call keeps the host."""
    timer.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    elapsed = time.perf_counter() - start
    timer.synchronize()
    return 1e3 * elapsed / calls


def measure(case: HostCase, effort: HostEffort, timer: Timer) -> dict[str, Timing]:
    """The cost of a call of each variant, all variants in turn."""
    samples: dict[str, list[float]] = {name: [] for name in case.runs}
    with torch.no_grad(), _torch_setting(case.setting):
        for run in case.runs.values():
            _turn(run, effort.calls, timer)
        for _ in range(effort.turns):
            for name, run in case.runs.items():
                samples[name].append(_turn(run, effort.calls, timer))
    return {name: Timing.of(times) for name, times in samples.items()}


def _case_record(case: HostCase, timings: Mapping[str, Timing]) -> dict[str, Any]:
    def over(name: str, base: str) -> float:
        return timings[name].median_ms / timings[base].median_ms

    return {
        "case": case.name,
        "path": case.path,
        "host": {name: dataclasses.asdict(timing) for name, timing in timings.items()},
        "times_torch": {name: over(name, TORCH) for name in timings},
        "times_chain": {name: over(name, CHAIN) for name in timings},
    }


def run(shape: Shape | None, device: torch.device, effort: HostEffort, trees: str | None) -> dict[str, Any]:
    """Measure every case; the record.

    Args:
        shape: M x N x K; None: 256x1024x1024, on a CPU a tiny one.
        device: where the tensors are.
        effort: how much to measure.
        trees: the source's git trees, where git is missing (see `epigemm.bench.environment`).
    """
    timer = make_timer(device)
    if shape is None:
        shape = _GPU_SHAPE if device.type == "cuda" else _CPU_SHAPE
    makers: Sequence[Callable[[Shape, torch.device], Iterator[HostCase]]] = (
        _linear_cases,
        _elementwise_cases,
    )
    return {
        "schema": report.SCHEMA,
        "kind": "host",
        "environment": environment.describe(device, trees),
        "effort": dataclasses.asdict(effort),
        "shape": [shape.m, shape.n, shape.k],
        "variants": VARIANTS,
        "cases": [
            _case_record(case, measure(case, effort, timer))
            for make in makers
            for case in make(shape, device)
        ],
    }


def table(record: Mapping[str, Any]) -> Table:
    """Microseconds of each variant, and our calls as multiples of torch's."""
    columns = ["case", "path", *(f"{name} us" for name in VARIANTS)]
    columns += ["function / torch", "function / chain", "module / torch"]

    def number(case: Mapping[str, Any], kind: str, name: str) -> str:
        value = case[kind].get(name)
        if value is None:
            return "-"
        return f"{1e3 * value['median_ms']:.1f}" if kind == "host" else f"{value:.2f}"

    rows = [
        [
            case["case"],
            case["path"],
            *(number(case, "host", name) for name in VARIANTS),
            number(case, "times_torch", FUNCTION),
            number(case, "times_chain", FUNCTION),
            number(case, "times_torch", MODULE),
        ]
        for case in record["cases"]
    ]
    size = "x".join(map(str, record["shape"]))
    return Table(f"Host microseconds of one call, {size}, median", tuple(columns), rows)


def markdown(record: Mapping[str, Any]) -> str:
    """The record for people."""
    legend = [f"- {name}: {what}" for name, what in record["variants"].items()]
    return "\n".join(
        [f"# {environment.headline(record['environment'])}", "", table(record).markdown(), *legend, ""]
    )


def write(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """``host.json`` and ``host.md`` in a folder."""
    target = folder / "host.md"
    report.write_json(record, folder / "host.json")
    target.write_text(markdown(record))
    return [folder / "host.json", target]
