"""How right the cost models are at the points of a plans.json: error by kernel, and what the choice costs.

    python -m benchmarks --random 1 --count 1000 --plans --output DIR
    python -m tools.judge_costs DIR/plans.json

*Error* is the natural logarithm of predicted over measured time: its median (the bias) and the median of its distance
from there. *Regret* is the measured time of the plan with the least predicted time over that of the fastest plan.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_LEAST_US = 20.0  # calls below are judged apart


def errors(points: Iterable[dict[str, Any]]) -> dict[str, list[float]]:
    """log(predicted / measured) of every plan with a prediction, by kernel."""
    found: dict[str, list[float]] = defaultdict(list)
    for point in points:
        for plan in point["plans"]:
            if plan["predicted_us"] and plan["us"]:
                key = f"{point['arithmetic']}  {plan['name']}  K in {plan['plan'][4]}"
                found[key].append(math.log(plan["predicted_us"] / plan["us"]))
    return found


def regrets(points: Iterable[dict[str, Any]], *, short: bool) -> dict[str, list[float]]:
    """Chosen over fastest, by arithmetic; of calls under 20 us, or of the others."""
    found: dict[str, list[float]] = defaultdict(list)
    for point in points:
        plans = [plan for plan in point["plans"] if plan["us"]]
        predicted = [plan for plan in plans if plan["predicted_us"]]
        if not predicted:
            continue
        fastest = min(plan["us"] for plan in plans)
        chosen = min(predicted, key=lambda plan: float(plan["predicted_us"]))
        if (fastest < _LEAST_US) == short:
            found[point["arithmetic"]].append(chosen["us"] / fastest)
    return found


def _geomean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def report(points: Sequence[dict[str, Any]]) -> list[str]:
    """The lines to print."""
    lines = ["kernel: points, bias, median error"]
    for kernel, logs in sorted(errors(points).items()):
        bias = statistics.median(logs)
        spread = statistics.median(abs(log - bias) for log in logs)
        lines.append(f"  {kernel}: {len(logs)}, {bias:+.3f}, {spread:.3f}")
    for title, short in (
        (f"regret, calls of {_LEAST_US:g} us and more", False),
        ("regret, shorter calls", True),
    ):
        lines.append(f"{title}: points, geometric mean, worst")
        for arithmetic, ratios in sorted(regrets(points, short=short).items()):
            lines.append(f"  {arithmetic}: {len(ratios)}, {_geomean(ratios):.3f}, {max(ratios):.3f}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report of one file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plans", type=Path, help="plans.json")
    points = json.loads(parser.parse_args(arguments).plans.read_text())["plan_points"]
    print("\n".join(report(points)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
