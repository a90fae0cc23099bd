"""A record as tables of text: the same for the console and for Markdown.

They are made from the JSON record, so that they can be made again later without the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records import BAR_EFFICIENCY, EAGER, MAX_AUTOTUNE, NOT_PEERS, OURS, PLAIN, TRITON

IN_TURN, ALONE = "in_turn", "alone"
_WHEN = {IN_TURN: "in turn, all alternatives interleaved", ALONE: "each alone after a pause"}
_LEAST_SWEEP = 3


@dataclass(frozen=True)
class Table:
    """Title, column heads, and rows of as many cells."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]

    def markdown(self) -> str:
        """As Markdown, the title as a heading."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        cells = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines)
        return "\n".join([f"## {self.title}", "", *(f"| {line} |" for line in cells), ""])


def arithmetic(case: Mapping[str, Any]) -> str:
    """``fp32 highest``, ``bf16``, ..."""
    return f"fp32 {case['precision']}" if case["dtype"] == "fp32" else str(case["dtype"])


def timed(case: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """The first measurement of an alternative that has a time."""
    return next(
        (m for g in case["groups"] for m in g["measurements"] if m["alternative"] == name and m[IN_TURN]),
        None,
    )


def sweeps_over_m(cases: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Linear cases that differ in M alone, where there are at least three, M rising."""
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for case in cases:
        if len(case["shape"]) == 3:
            found.setdefault((case["problem"], arithmetic(case), *case["shape"][1:]), []).append(case)
    return [sorted(s, key=lambda case: case["shape"][0]) for s in found.values() if len(s) >= _LEAST_SWEEP]


def _ms(record: Mapping[str, Any] | None, key: str) -> float | None:
    timing = record[key] if record else None
    return timing["median_ms"] if timing else None


def times_faster(case: Mapping[str, Any], other: str, when: str, name: str = OURS) -> float | None:
    """How many times faster ``name`` is than ``other``, both from one group; None where none has both."""
    for group in case["groups"]:
        by_name = {m["alternative"]: _ms(m, when) for m in group["measurements"]}
        ours, theirs = by_name.get(name), by_name.get(other)
        if ours and theirs:
            return theirs / ours
    return None


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _significant(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _both(value: Callable[[str], str]) -> str:
    in_turn, alone = value(IN_TURN), value(ALONE)
    return f"{in_turn} ({alone})" if alone else in_turn


def path(case: Mapping[str, Any], plan: str = "plan") -> str:
    """Which of our kernels runs: the arithmetic of a fused one with its tile, or the second path."""
    found = case.get(plan) or {}
    if not found:
        return ""
    if not found.get("fused"):
        return "second path"
    return " ".join(str(found[key]) for key in ("arithmetic", "tile", "cluster") if found.get(key))


def _on_pieces(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [c for c in record["cases"] if c.get("fp16_products") and timed(c, OURS)]


def fp32_speed(record: Mapping[str, Any], when: str) -> Table | None:
    """fp32 products against eager, max-autotune, a Triton kernel, and the bar of the same run."""
    rows = []
    for case in _on_pieces(record):
        ours = timed(case, OURS)
        assert ours is not None
        if not ours[when]:
            continue
        bar = ours[when].get("times_bar")
        rows.append(
            [
                case["case"],
                _significant(_ms(ours, when)),
                *(_number(times_faster(case, other, when)) for other in (EAGER, MAX_AUTOTUNE, TRITON)),
                _number(bar, 3),
                "" if bar is None else f"{100 * BAR_EFFICIENCY / bar:.1f}%",
                _significant(_ms(timed(case, PLAIN), when)),
                _number(times_faster(case, EAGER, when, PLAIN)),
                path(case),
            ]
        )
    columns = (
        "case",
        "ms",
        "vs eager",
        "vs max-autotune",
        "vs Triton tf32x3",
        "time / bar",
        "of ceiling",
        "weight split per call: ms",
        "vs eager",
        "path",
    )
    return Table(f"fp32, {_WHEN[when]}", columns, rows) if rows else None


def _mb(value: int | None) -> str:
    return "" if value is None else f"{value / 1e6:.3f}"


def memory(record: Mapping[str, Any]) -> Table | None:
    """Device memory of fp32 calls besides inputs and result, beside what the layout of the pieces predicts."""
    rows = [
        [case["case"], m["title"], *(_mb(m["memory"][key]) for key in _MEMORY_KEYS)]
        for case in record["cases"]
        for group in case["groups"]
        for m in group["measurements"]
        if m.get("memory")
    ]
    columns = ("case", "alternative", "peak MB", "asked for MB", "predicted MB", "kept MB", "predicted MB")
    return Table("Memory of a call besides inputs and result", columns, rows) if rows else None


_MEMORY_KEYS = ("peak", "asked", "predicted", "kept", "predicted_kept")


def over_m(record: Mapping[str, Any]) -> list[Table]:
    """One table for each sweep over M: ours against eager, and where it is least ahead."""
    tables = []
    for cases in sweeps_over_m(record["cases"]):
        ratios = [
            (ratio, c["shape"][0]) for c in cases if (ratio := times_faster(c, EAGER, IN_TURN)) is not None
        ]
        if not ratios:
            continue
        least, m = min(ratios)
        _, n, k = cases[0]["shape"]
        what = f"{cases[0]['problem']}, {arithmetic(cases[0])}, N = {n}, K = {k}"
        title = f"{what}: at least {least:.3f} x eager (M = {m})"
        rows = [_over_m_row(case) for case in cases]
        columns = (
            "M",
            "ms",
            "eager ms",
            "vs eager, in turn (alone)",
            "weight split per call: vs eager",
            "path",
        )
        tables.append(Table(title, columns, rows))
    return tables


def _over_m_row(case: Mapping[str, Any]) -> list[str]:
    return [
        str(case["shape"][0]),
        _significant(_ms(timed(case, OURS), IN_TURN)),
        _significant(_ms(timed(case, EAGER), IN_TURN)),
        _both(lambda when: _number(times_faster(case, EAGER, when), 3)),
        _both(lambda when: _number(times_faster(case, EAGER, when, PLAIN), 3)),
        path(case),
    ]


def layers(record: Mapping[str, Any], kind: str) -> Table | None:
    """All cases of a kind, ours against eager, the bare product or copy, and the best of the others."""
    base = "mm" if kind == "linear" else "copy"
    rows = [
        [
            case["case"],
            _both(lambda when, c=case: _significant(_ms(timed(c, OURS), when))),  # type: ignore[misc]
            _both(lambda when, c=case: _number(times_faster(c, EAGER, when))),  # type: ignore[misc]
            _both(lambda when, c=case: _number(times_faster(c, base, when), 3)),  # type: ignore[misc]
            _number(times_faster(case, base, IN_TURN, EAGER), 3),
            _best_peer(case),
        ]
        for case in record["cases"]
        if case["problem"].startswith(f"{kind}/") and timed(case, OURS)
    ]
    bare = "bare product" if kind == "linear" else "copy"
    columns = (
        "case",
        "epigemm ms, in turn (alone)",
        "vs eager, in turn (alone)",
        f"vs {bare}, in turn (alone)",
        f"eager vs {bare}",
        "best other peer (ratio)",
    )
    return Table(f"{kind} cases", columns, rows) if rows else None


def _best_peer(case: Mapping[str, Any]) -> str:
    names = {m["alternative"] for g in case["groups"] for m in g["measurements"]} - set(NOT_PEERS) - {EAGER}
    ratios = [
        (ratio, name) for name in sorted(names) if (ratio := times_faster(case, name, IN_TURN)) is not None
    ]
    if not ratios:
        return ""
    ratio, name = min(ratios)
    return f"{name} {ratio:.2f}"


def plans(record: Mapping[str, Any]) -> Table | None:
    """The best plan of each sweep over plans, and what dispatch got."""
    rows = []
    for sweep in record.get("plans", []):
        right = [p for p in sweep["plans"] if p["accuracy"]["ok"]]
        if not right:
            continue
        best = right[0]
        fastest = best["timing"]["median_ms"]
        dispatched, split_x = (_ms(sweep, key) for key in ("dispatched", "split_x"))
        rows.append(
            [
                sweep["case"],
                sweep["arithmetic"],
                " ".join(str(best[key]) for key in ("tile", "cluster", "schedule", "raster", "swizzle"))
                + (f" splits {best['splits']}" if best.get("splits", 1) > 1 else ""),
                _significant(fastest),
                _significant(split_x),
                _number(best["times_faster_than_mm"], 3),
                "" if dispatched is None else f"{fastest / dispatched:.3f}",
            ]
        )
    columns = ("case", "arithmetic", "best plan", "ms", "of it x's split", "vs torch.mm", "dispatch of best")
    return Table("Plans", columns, rows) if rows else None


def fp32_tables(record: Mapping[str, Any]) -> list[Table]:
    """What is reported of fp32 products besides the general tables."""
    found = [fp32_speed(record, ALONE), fp32_speed(record, IN_TURN), memory(record), *over_m(record)]
    return [table for table in found if table is not None]


def write_markdown(record: Mapping[str, Any], where: str, target: Path) -> None:
    """Every table that a record has data for, in one file; ``where`` names the machine."""
    found = [*fp32_tables(record), layers(record, "linear"), layers(record, "elementwise"), plans(record)]
    ceilings = ", ".join(f"{c['name']} {c['value']:.4g} {c['unit']}" for c in record["ceilings"])
    head = [f"# {where}", ""] + ([f"Ceilings measured in the same run: {ceilings}.", ""] if ceilings else [])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n".join(head + [table.markdown() for table in found if table is not None]))
