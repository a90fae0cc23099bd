"""A grid's record -> ratios to the best peer, the summary, Markdown.

All from JSON, so that the files can be written again later without the GPU. A peer computes the same result;
the bare product computes less and is told apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.records import EAGER, NOT_PEERS, OURS
from benchmarks.tables import IN_TURN, Table, timed, times_faster

WHAT_IT_IS = "A sweep over powers of two, at which choices used to be tuned: not a test of the choice."
BARE = "mm"
NEAR, LEVEL = 0.95, 1.0
BARE_ALLOWANCE = 1.02
SMALL_M = 64


@dataclass(frozen=True)
class Point:
    """Our time at one size beside everybody else's. Ratios are their time over ours: above 1, ours is faster.

    Attributes:
        spread: the interquartile range over the median.
        ratios: alternative -> ratio, the bare product among them.
        best: the fastest peer.
        slower_beyond_noise: our lower quartile lies above the best peer's upper one.
        bandwidth_share: time to move every matrix once at the bandwidth of a measured copy, over ours.
        road: the tile plan of the fused kernel that ran, or PyTorch's product.
    """

    m: int
    n: int
    k: int
    us: float
    spread: float
    tflops: float
    ratios: dict[str, float]
    best: str
    slower_beyond_noise: bool
    bandwidth_share: float | None
    road: str

    @property
    def to_best(self) -> float:
        """The best peer's time over ours; NaN without a peer."""
        return self.ratios.get(self.best, math.nan)

    @property
    def size(self) -> str:
        """MxNxK: ``16x4096x4096``."""
        return f"{self.m}x{self.n}x{self.k}"


def points(record: Mapping[str, Any]) -> list[Point]:
    """Every case that has a time of ours."""
    copy = next((c["value"] for c in record["ceilings"] if c["name"] == "copy"), None)
    return [_point(case, copy) for case in record["cases"] if timed(case, OURS)]


def _point(case: Mapping[str, Any], copy_gb_per_s: float | None) -> Point:
    ours = timed(case, OURS)
    assert ours is not None
    timing = ours[IN_TURN]
    ms = timing["median_ms"]
    names = dict.fromkeys(m["alternative"] for g in case["groups"] for m in g["measurements"])
    found = {
        name: times_faster(case, name, IN_TURN) for name in names if name == BARE or name not in NOT_PEERS
    }
    ratios = {name: value for name, value in found.items() if value is not None}
    best = min((name for name in ratios if name != BARE), key=lambda name: ratios[name], default="")
    m, n, k = case["shape"]
    return Point(
        m=m,
        n=n,
        k=k,
        us=ms * 1e3,
        spread=(timing["q3_ms"] - timing["q1_ms"]) / ms,
        tflops=case["flops"] / ms / 1e9,
        ratios=ratios,
        best=best,
        slower_beyond_noise=bool(best) and _slower_beyond_noise(case, best),
        bandwidth_share=None if copy_gb_per_s is None else case["bytes"] / copy_gb_per_s / 1e6 / ms,
        road=road(case["plan"]),
    )


def _slower_beyond_noise(case: Mapping[str, Any], peer: str) -> bool:
    for group in case["groups"]:
        times = {m["alternative"]: m[IN_TURN] for m in group["measurements"]}
        if times.get(OURS) and times.get(peer):
            return bool(times[OURS]["q1_ms"] > times[peer]["q3_ms"])
    return False


FALLBACK = "torch"
"""The road of what PyTorch's GEMM computes."""


def road(plan: Mapping[str, Any]) -> str:
    """Which of our kernels ran, with its plan, or that it was PyTorch's product."""
    if not plan.get("fused"):
        return FALLBACK
    words = [str(plan[key]) for key in ("arithmetic", "tile", "cluster", "schedule") if plan.get(key)]
    words += [f"{plan['raster']}/{plan['swizzle']}"] if plan.get("raster") else []
    words += [f"splits {plan['splits']}"] if plan.get("splits", 1) > 1 else []
    return " ".join(words)


@dataclass(frozen=True)
class Summary:
    """A grid in numbers; ``..._at`` is the size, MxNxK.

    Attributes:
        geomean, worst: of the ratio to the best peer.
        below_near, below_level: points below 0.95, and below 1.00 of the best peer.
        slower_beyond_noise: points below 1.00 where the quartiles do not overlap.
        bare_geomean, bare_worst: of the ratio to the bare product.
        slower_than_bare: points that take more than 1.02 of the bare product's time.
        small_m_share: the least share of the bandwidth bound at M <= 64.
        geomeans: the ratio to each alternative, over the points where it ran.
    """

    problem: str
    arithmetic: str
    points: int
    geomean: float | None
    worst: float | None
    worst_at: str
    below_near: int
    below_level: int
    slower_beyond_noise: int
    bare_geomean: float | None
    bare_worst: float | None
    bare_worst_at: str
    slower_than_bare: int
    small_m_share: float | None
    small_m_share_at: str
    geomeans: dict[str, float]
    left_out: int


def geomean(values: Sequence[float]) -> float | None:
    """The geometric mean; None of nothing."""
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else None


def summarise(record: Mapping[str, Any]) -> Summary:
    """All points of a record in one line."""
    found = points(record)
    to_best = [(p.to_best, p.size) for p in found if p.best]
    bare = [(p.ratios[BARE], p.size) for p in found if BARE in p.ratios]
    shares = [(p.bandwidth_share, p.size) for p in found if p.m <= SMALL_M and p.bandwidth_share is not None]
    worst, bare_worst, share = (min(values, default=(None, "")) for values in (to_best, bare, shares))
    names = dict.fromkeys(name for p in found for name in p.ratios)
    means = {name: geomean([p.ratios[name] for p in found if name in p.ratios]) for name in names}
    problem, arithmetic = record["grid"]["of"]
    return Summary(
        problem=problem,
        arithmetic=arithmetic,
        points=len(found),
        geomean=geomean([value for value, _ in to_best]),
        worst=worst[0],
        worst_at=worst[1],
        below_near=sum(value < NEAR for value, _ in to_best),
        below_level=sum(value < LEVEL for value, _ in to_best),
        slower_beyond_noise=sum(p.slower_beyond_noise for p in found),
        bare_geomean=geomean([value for value, _ in bare]),
        bare_worst=bare_worst[0],
        bare_worst_at=bare_worst[1],
        slower_than_bare=sum(value < 1 / BARE_ALLOWANCE for value, _ in bare),
        small_m_share=share[0],
        small_m_share_at=share[1],
        geomeans={name: value for name, value in means.items() if value is not None},
        left_out=len(record["grid"]["left_out"]),
    )


def with_summary(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with its summary inside."""
    return {**record, "grid": {**record["grid"], "summary": asdict(summarise(record))}}


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.3f}"


def _at(value: float | None, size: str) -> str:
    return f"{_number(value)} ({size})" if value is not None else ""


def summary_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """One row for each problem and arithmetic."""
    columns = (
        "problem",
        "points",
        "vs best peer: geomean",
        "worst",
        f"below {NEAR}",
        f"below {LEVEL:.2f}",
        "of these beyond the noise",
        "vs torch.mm: geomean",
        "worst",
        f"time above {BARE_ALLOWANCE} of it",
        f"M <= {SMALL_M}: least of bandwidth bound",
        "left out",
    )
    rows = []
    for s in map(summarise, records):
        rows.append(
            [
                f"{s.problem}, {s.arithmetic}",
                str(s.points),
                _number(s.geomean),
                _at(s.worst, s.worst_at),
                str(s.below_near),
                str(s.below_level),
                str(s.slower_beyond_noise),
                _number(s.bare_geomean),
                _at(s.bare_worst, s.bare_worst_at),
                str(s.slower_than_bare),
                _at(s.small_m_share, s.small_m_share_at),
                str(s.left_out),
            ]
        )
    return Table("Summary: times faster than (above 1: epigemm is faster)", columns, rows)


def point_table(record: Mapping[str, Any]) -> Table:
    """One row for each point, the best peer named, and the ratio to everybody who was measured there."""
    found = points(record)
    others = [BARE, EAGER]
    names = dict.fromkeys(name for p in found for name in p.ratios)
    others = [name for name in others if name in names] + [name for name in names if name not in others]
    columns = (
        "N, K",
        "M",
        "us",
        "IQR",
        "TFLOP/s",
        "best peer",
        "vs best peer",
        *(f"vs {name}" for name in others),
        "of bandwidth bound",
        "road",
    )
    rows = [
        [
            f"{p.n}, {p.k}",
            str(p.m),
            f"{p.us:.4g}",
            f"{100 * p.spread:.1f}%",
            f"{p.tflops:.4g}",
            p.best,
            _number(p.to_best),
            *(_number(p.ratios.get(name)) for name in others),
            _number(p.bandwidth_share),
            p.road,
        ]
        for p in found
    ]
    s = summarise(record)
    return Table(f"{s.problem}, {s.arithmetic}", columns, rows)


def header(record: Mapping[str, Any], where: str) -> str:
    """What the tables were measured on and with: the machine, the ceilings, what the timer shows for nothing."""
    floors = ", ".join(
        f"{name} {1e3 * timing['median_ms']:.2f} us" for name, timing in record["grid"]["floor"].items()
    )
    ceilings = ", ".join(f"{c['name']} {c['value']:.4g} {c['unit']}" for c in record["ceilings"])
    lines = [
        f"# {where}",
        "",
        WHAT_IT_IS,
        "",
        f"Ceilings measured in the same run: {ceilings}. The timer shows, for calls that do nothing: {floors}.",
        "Medians of calls in turn, the L2 cache flushed before each. Ratios are their time over ours. The best",
        "peer is the fastest that computes the same result; torch.mm computes the product alone. The road is the",
        "fused kernel's tile plan, or \"torch\": the library's product, then one kernel of ours where needed.",
        "",
    ]
    return "\n".join(lines)


def write_markdown(records: Sequence[Mapping[str, Any]], where: str, target: Path) -> None:
    """The summary; with a single record, its points below, and what was left out."""
    parts = [header(records[0], where), summary_table(records).markdown()]
    if len(records) == 1:
        parts.append(point_table(records[0]).markdown())
    left_out = {case: why for record in records for case, why in record["grid"]["left_out"].items()}
    if left_out:
        parts += ["## Left out", "", *(f"- {case}: {why}" for case, why in left_out.items()), ""]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n".join(parts))
