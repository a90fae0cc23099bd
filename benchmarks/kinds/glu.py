"""``--glu``: gated pairs of products, ours beside one product of twice the columns and what follows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import epigemm
from benchmarks.baselines import BASELINES, Alternative, Baseline
from benchmarks.cases import Case, Data
from benchmarks.cases.glu import GLU, select
from benchmarks.harness.pairs import PairReference
from benchmarks.harness.records import COMPILE, EAGER, MAX_AUTOTUNE, MM, OURS, CaseResult, geomean
from benchmarks.harness.report import Table, number
from benchmarks.harness.runner import Bench
from benchmarks.kinds import Run
from benchmarks.kinds.bench import failures, rounded

METHOD = (
    "Times of others over ours; above 1 ours is faster. Medians of calls in turn in one process, the L2 cache flushed "
    "before each call. fp32 is at torch's default precision, our weights packed. Ours is linear_glu of one weight with "
    "the rows of both products. torch.compile runs torch's product of all rows and one kernel behind it. The bare "
    "product is torch.mm of all rows alone."
)
VERSUS = {"compile": (COMPILE,), "eager": (EAGER,), "bare": (MM,), "best": ()}
LEAST = 1.10
"""Of torch.compile's time over ours, in geomean."""


class PairBench(Bench):
    """Whose results have half of the product's columns."""

    def new_out(self, case: Case) -> Tensor:
        """For every alternative to write to."""
        shape, dtype = case.shape, case.setting.dtype
        return torch.empty(shape.m, shape.n // 2, dtype=dtype, device=self.device)

    def reference(self, case: Case, data: Data) -> PairReference:
        """What results are held against."""
        return PairReference(case, data, self.seed)


def ours(case: Case, data: Data, out: Tensor) -> Alternative:
    """Our function, of halves of one weight; of fp32 both are packed. The second product is rounded."""
    assert data.weight is not None
    halves = data.weight.chunk(2)
    given: list[Any] = [epigemm.pack(each) for each in halves] if case.is_fp32_product else [*halves]
    weight, weight2 = given
    named = {"weight2": weight2, "activation": case.problem.epilogue}
    kernel = epigemm.explain(epigemm.linear_glu, data.x, weight, **named)

    def run() -> Tensor:
        return epigemm.linear_glu(data.x, weight, out=out, **named)

    # Where no kernel of ours runs, cuBLAS may round each part of a sum, and the second product is rounded.
    is_fused = kernel.path == "fused"
    return Alternative(run, 1 if is_fused else 3, kernel=kernel.kernel if is_fused else "torch")


def _bare(case: Case, data: Data, out: Tensor) -> Alternative:
    assert data.weight is not None
    both, transposed = out.new_empty(case.shape.m, case.shape.n), data.weight.t()
    return Alternative(lambda: torch.mm(data.x, transposed, out=both), checked=False)


def every_baseline() -> list[Baseline]:
    """Ours first."""
    others = [BASELINES[name] for name in (EAGER, COMPILE, MAX_AUTOTUNE)]
    return [Baseline(OURS, "epigemm.linear_glu", ours), Baseline(MM, "torch.mm of all rows", _bare), *others]


def main(run: Run) -> int:
    """Measure all layers; 1 if a result of ours is wrong."""
    options, device = run.options, run.device
    cases = select(options.cases, run.shapes(), options.dtypes, device)
    slow = [COMPILE] if options.quick and device.type == "cpu" else []
    available, absent = run.baselines(every_baseline(), slow)
    bench = run.bench(of=PairBench, pause_s=None)
    record = run.record(GLU, METHOD, dataclasses.asdict(bench.effort))
    record.absent = absent
    wrong = run.measure(record, bench, cases, available, figures, may_stop=True)
    summary = record.summary()
    record.finish(tables(summary), [*failures(record), *(missed(summary) if summary["gpu"] else [])])
    return wrong


def figures(results: Sequence[CaseResult]) -> dict[str, Any]:
    """Of every layer the ratios, by dtype their geomeans."""
    cases: dict[str, dict[str, Any]] = {}
    for result in results:
        ratios = {f"vs_{name}": result.ratio(others) for name, others in VERSUS.items()}
        known = {key: ratio for key, ratio in ratios.items() if ratio is not None}
        about = {"layer": result.models, "ms": rounded(result.times()), "best": result.best()}
        cases[result.case] = {"dtype": result.dtype, **about, **known}
    means: dict[str, dict[str, float]] = {}
    for dtype in dict.fromkeys(result.dtype for result in results):
        for key in (f"vs_{name}" for name in VERSUS):
            mean = geomean([case[key] for case in cases.values() if case["dtype"] == dtype and key in case])
            if mean is not None:
                means.setdefault(dtype, {})[key] = round(mean, 4)
    return {"cases": cases, "geomeans": means}


def tables(summary: Mapping[str, Any]) -> list[Table]:
    """One line per case, and the geomeans."""
    keys = [f"vs_{name}" for name in VERSUS]
    rows = [
        [name, ", ".join(found["layer"]), *(number(found.get(key)) for key in keys), found["best"]]
        for name, found in summary["cases"].items()
    ]
    rows += [
        [f"geomean, {dtype}", "", *(number(found.get(key)) for key in keys), ""]
        for dtype, found in summary["geomeans"].items()
    ]
    title = "Times of others over ours (above 1: ours is faster)"
    return [Table(title, ("case", "layer", *keys, "best"), rows)]


def missed(summary: Mapping[str, Any]) -> list[str]:
    """Geomeans that miss what is wanted of them."""
    return [
        f"missed: {dtype}: vs_compile is {found['vs_compile']:.3f} in geomean, wanted {LEAST:g}"
        for dtype, found in summary["geomeans"].items()
        if found.get("vs_compile", LEAST) < LEAST
    ]
