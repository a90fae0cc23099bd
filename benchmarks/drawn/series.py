"""What is measured at the drawn points: the cases, what each is held against, and its bar."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from benchmarks.cases import Problem, Setting, all_problems
from benchmarks.records import EAGER, OURS, PLAIN

ADDMM, COMPILE, BARE = "addmm_activation", "compile", "mm"
SMALL_US = 20.0
"""A point where we or the best baseline take less is judged apart: there launches count, not kernels."""

_SMALL_BAR = 0.92
_BF16, _FP16 = Setting("bf16", "highest"), Setting("fp16", "highest")
_HIGHEST, _HIGH = Setting("fp32", "highest"), Setting("fp32", "high")


@dataclass(frozen=True)
class Series:
    """One case: a problem in one arithmetic at all points, one way of ours to call it.

    Attributes:
        name: of the case, part of the records' format.
        epilogue: of the linear layer.
        bar: the least ratio, the best baseline's time over ours, that a point is to have.
        small_bar: the same of points under `SMALL_US`; None: no other.
        own: which call of ours.
        on_pieces: it makes no sense where nothing runs on fp16 pieces.
        between: at the points between powers of two.
    """

    name: str
    epilogue: str
    setting: Setting
    bar: float
    small_bar: float | None = None
    own: str = OURS
    on_pieces: bool = False
    between: bool = False

    @property
    def problem(self) -> Problem:
        """What is computed."""
        return next(p for p in all_problems() if p.name == f"linear/{self.epilogue}")

    @property
    def baselines(self) -> tuple[str, ...]:
        """What the ratio is to, the best of them."""
        return (EAGER, ADDMM) if self.epilogue == "bias_relu" else (EAGER, COMPILE)

    def best(self, us: Mapping[str, float]) -> str:
        """The fastest baseline of one turn-taking; empty without any."""
        return min((name for name in self.baselines if name in us), key=lambda name: us[name], default="")

    def small(self, us: Mapping[str, float]) -> bool:
        """Whether a point is judged with the small ones."""
        return min(us[name] for name in (self.own, *self.baselines) if name in us) < SMALL_US

    def ratio(self, us: Mapping[str, float], *others: str) -> float | None:
        """The time of another (by default of the best baseline) over ours; None where one is missing."""
        other = others[0] if others else self.best(us)
        return us[other] / us[self.own] if other in us and self.own in us else None

    def misses(self, us: Mapping[str, float]) -> bool:
        """Whether a point is below its bar."""
        ratio = self.ratio(us)
        if ratio is None:
            return False
        return ratio < (self.small_bar if self.small_bar is not None and self.small(us) else self.bar)


SERIES = (
    Series("bias_relu/bf16", "bias_relu", _BF16, 0.95, _SMALL_BAR),
    Series("bias_relu/fp16", "bias_relu", _FP16, 0.95, _SMALL_BAR),
    Series("sigmoid_scale_residual/bf16", "sigmoid_scale_residual", _BF16, 0.97),
    Series("bias_relu/fp32_highest_packed", "bias_relu", _HIGHEST, 0.97, on_pieces=True),
    Series("bias_relu/fp32_highest_plain", "bias_relu", _HIGHEST, 0.97, own=PLAIN),
    Series("bias_relu/fp32_high", "bias_relu", _HIGH, 0.93, on_pieces=True),
    Series("between/bias_relu/bf16", "bias_relu", _BF16, 0.95, _SMALL_BAR, between=True),
    Series(
        "between/sigmoid_scale_residual/bf16",
        "sigmoid_scale_residual",
        _BF16,
        0.95,
        _SMALL_BAR,
        between=True,
    ),
)


def select(patterns: Sequence[str], *, count: int, between: bool) -> list[Series]:
    """The cases of a run.

    Args:
        patterns: names, parts of names or shell patterns; none: all.
        count: of random points; without any, their cases are left out.
        between: with the points between powers of two.

    Raises:
        ValueError: a pattern matches no case, or nothing is left.
    """
    names = [series.name for series in SERIES]
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in names):
            raise ValueError(f"--cases: {pattern!r} matches nothing; with --random: {', '.join(names)}")
    chosen = [
        series
        for series in SERIES
        if (between if series.between else count > 0)
        and (not patterns or any(_matches(series.name, pattern) for pattern in patterns))
    ]
    if not chosen:
        raise ValueError("--random: no case is left")
    return chosen


def _matches(name: str, pattern: str) -> bool:
    """A name in full means that case alone, though it is a part of another's."""
    if any(series.name == pattern for series in SERIES):
        return name == pattern
    return pattern in name or fnmatch.fnmatch(name, pattern)


def why_skipped(series: Series, device: torch.device) -> str:
    """Why a case makes no sense on a device; empty where it does."""
    if series.on_pieces and device.type != "cuda":
        return "needs a GPU: nothing runs on fp16 pieces elsewhere"
    return ""


def groups(chosen: Sequence[Series]) -> list[list[Series]]:
    """Cases that are measured in turn with each other: they share their baselines."""
    return [
        list(group) for _, group in groupby(chosen, key=lambda s: (s.between, s.epilogue, str(s.setting)))
    ]
