"""What ``--mma`` found: the results of cases -> ratios, means, and what misses its bar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.records import CUTLASS, GELU, LOOP, MM, NO_FUNCTOR, RELU, CaseResult, geomean
from benchmarks.harness.report import Table, number
from benchmarks.kinds.bench import rounded
from benchmarks.kinds.points import size

OF_FUNCTOR, OF_LOOP, OF_CUTLASS, OF_THIRD = 0.97, 0.80, 0.99, 0.85
"""The least that is wanted of a kernel's rate with a functor: over that without, at each point; over that of the bare
loop, of the best tile at each shape. And of its rate without a functor over that of CUTLASS, in geomean; of fp16x3's
over a third of that of fp16, of the best tiles at each shape."""
FP16X3 = "fp16x3"
METHOD = (
    "Forced plans. Medians of calls in turn in one process, the L2 cache flushed before each call. bias_relu and "
    "bias_gelu: the time of the same kernel without a functor over that with it. of_loop: the rate over that of a bare "
    "loop of mma.sync (m16n8k16 of bf16, m16n8k8 of TF32) that runs in turn with the kernels and about as long; of "
    "fp16x3, which takes three products, over a third of it. of_third: the rate of fp16x3's best tile, the split of x "
    "and the fixup included, over a third of that of fp16's, without a functor. "
    "vs_mm, vs_cutlass: the time of torch.mm, and of CUTLASS 2.x's device GEMM of the same tile, over that of the "
    "kernel without a functor. Waves: the tiles over the CTAs that the GPU runs at once, by the driver's occupancy."
)
_EPILOGUES = (NO_FUNCTOR, RELU, GELU)
_FUNCTORS = (RELU, GELU)
_RATIOS = (*_FUNCTORS, *(f"{name}_of_loop" for name in _EPILOGUES), "vs_mm", "vs_cutlass")


@dataclass(frozen=True)
class Beside:
    """What is known of a case beside its times: waves of tiles, and what the loop computes."""

    waves: float
    loop_flops: int
    products: int = 1  # of the tensor cores, in one product


def point(result: CaseResult, beside: Beside) -> dict[str, Any]:
    """The ratios of a case, without those whose times are missing."""
    times, work = result.times(), beside.products * result.flops / beside.loop_flops
    ratios = {name: result.ratio((NO_FUNCTOR,), own=name) for name in _FUNCTORS}
    for name in _EPILOGUES:
        ratio = result.ratio((LOOP,), own=name)
        ratios[f"{name}_of_loop"] = None if ratio is None else round(ratio * work, 4)
    ratios["vs_mm"] = result.ratio((MM,), own=NO_FUNCTOR)
    ratios["vs_cutlass"] = result.ratio((CUTLASS,), own=NO_FUNCTOR)
    flops = {name: beside.loop_flops if name == LOOP else result.flops for name in times}
    return {
        "arithmetic": _arithmetic(result),
        "tile": result.problem.partition("/")[2],
        "shape": size(result),
        "waves": round(beside.waves, 2),
        "ms": rounded(times),
        "tflops": {name: round(flops[name] / ms / 1e9, 1) for name, ms in times.items()},
    } | {key: ratio for key, ratio in ratios.items() if ratio is not None}


def _arithmetic(result: CaseResult) -> str:
    if result.dtype != "fp32":
        return result.dtype
    return "tf32" if result.precision == "high" else FP16X3


def figures(results: Sequence[CaseResult], beside: Mapping[str, Beside]) -> dict[str, Any]:
    """What the summary says: every point, the tiles and the arithmetics with their means, and what misses its bar."""
    cases = {result.case: point(result, beside[result.case]) for result in results}
    points = list(cases.values())
    found: dict[str, Any] = {"cases": cases, "tiles": {}, "arithmetics": {}}
    for arithmetic in dict.fromkeys(each["arithmetic"] for each in points):
        of = [each for each in points if each["arithmetic"] == arithmetic]
        found["arithmetics"][arithmetic] = _means(of) | {"best_of_loop": _best_of_loop(of)}
        for tile in dict.fromkeys(each["tile"] for each in of):
            found["tiles"][f"{arithmetic} {tile}"] = _means([each for each in of if each["tile"] == tile])
    found["of_third"] = dict(_of_third(points))
    return found | {"missed": list(_missed(found))}


def _means(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each ratio the geometric mean, the worst, where that is, and of how many points."""
    found = {}
    for key in _RATIOS:
        known = [(each[key], f"{each['tile']} at {each['shape']}") for each in points if key in each]
        if known:
            mean, (worst, at) = geomean([ratio for ratio, _ in known]), min(known)
            found[key] = {"geomean": mean, "worst": worst, "worst_at": at, "points": len(known)}
    return found


def _best_of_loop(points: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By shape and functor, the tile that reaches most of the loop's rate."""
    found: dict[str, dict[str, Any]] = {}
    for each in points:
        for name in _FUNCTORS:
            share = each.get(f"{name}_of_loop")
            best = found.setdefault(each["shape"], {}).get(name)
            if share is not None and (best is None or share > best["share"]):
                found[each["shape"]][name] = {"tile": each["tile"], "share": share}
    return found


def _of_third(points: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """By shape, what fp16x3 reaches of a third of fp16's rate."""

    def least_ms(arithmetic: str, shape: str) -> float | None:
        of = [each["ms"] for each in points if (each["arithmetic"], each["shape"]) == (arithmetic, shape)]
        return min((ms[NO_FUNCTOR] for ms in of if NO_FUNCTOR in ms), default=None)

    for shape in dict.fromkeys(each["shape"] for each in points):
        split_ms, fp16_ms = least_ms(FP16X3, shape), least_ms("fp16", shape)
        if split_ms and fp16_ms:
            yield shape, round(3 * fp16_ms / split_ms, 4)


def _missed(found: Mapping[str, Any]) -> Iterator[str]:
    for tile in found["tiles"]:
        of = [each for each in found["cases"].values() if f"{each['arithmetic']} {each['tile']}" == tile]
        for name in _FUNCTORS:
            known = [(each[name], each["shape"]) for each in of if name in each]
            below = [each for each in known if each[0] < OF_FUNCTOR]
            if below:
                worst, at = min(below)
                yield (
                    f"{tile}: {name} is below {OF_FUNCTOR:g} of the kernel without a functor at {len(below)} of "
                    f"{len(known)} shapes, {worst:.3f} at {at}"
                )
    for arithmetic, means in found["arithmetics"].items():
        for shape, functors in means["best_of_loop"].items():
            for name, best in functors.items():
                if best["share"] < OF_LOOP:
                    yield (
                        f"{arithmetic} {shape}: {name} reaches {best['share']:.3f} of the bare loop with the best "
                        f"tile, {best['tile']}, wanted {OF_LOOP:g}"
                    )
        for shape, share in found["of_third"].items() if arithmetic == FP16X3 else ():
            if share < OF_THIRD:
                yield f"{FP16X3} {shape}: {share:.3f} of a third of fp16's rate, wanted {OF_THIRD:g}"
        of_cutlass = means.get("vs_cutlass", {"geomean": OF_CUTLASS})["geomean"]
        if of_cutlass < OF_CUTLASS:
            yield f"{arithmetic}: vs_cutlass is {of_cutlass:.3f} in geomean, wanted {OF_CUTLASS:g}"


def tables(summary: Mapping[str, Any]) -> list[Table]:
    """One row for each point, and for each tile."""
    points = []
    for name, each in summary["cases"].items():
        rates = [number(each["tflops"].get(key), ".0f") for key in (NO_FUNCTOR, LOOP)]
        points.append([name, f"{each['waves']:.1f}", *rates, *(number(each.get(key)) for key in _RATIOS)])
    means = [
        [name, *(_mean(found.get(key)) for key in _RATIOS)]
        for name, found in [*summary["tiles"].items(), *summary["arithmetics"].items()]
    ]
    first = ("case", "waves", "TFLOPS", "the loop's")
    return [
        Table("Each tile at each shape", (*first, *_RATIOS), points),
        Table("Geometric means (and the worst)", ("tile", *_RATIOS), means),
    ]


def _mean(found: Mapping[str, Any] | None) -> str:
    return f"{found['geomean']:.3f} ({found['worst']:.3f})" if found else ""
