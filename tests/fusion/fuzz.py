"""Random forwards, fused, against the plain model: values, gradients, what is written, layout, memory and errors.

    python -m tests.fusion.fuzz --models 3000 --seed 1 --backend eager

prints each forward that differs, and a summary. `--models 1 --seed N` runs one of them again. With `--backend inductor`
they are compared with what torch.compile makes of the plain model alone, from the same seed: bit for bit where nothing
is fused, and otherwise by their distances from float64. `--dtype bfloat16` and `--training` (with dropout) are for it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import epigemm
from epigemm.fusion import FusionReport
from tests.fusion.forwards import Program, program

SAME, OF_TORCH, DIFFERS = "same", "torch's own compiler differs as well", "differs"
EAGER, INDUCTOR = "eager", "inductor"
_CLOSE, _COARSE = 2e-5, 3e-2
_EPSILON = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}
_FORGET = 20  # models between two resets of Dynamo


@dataclass
class Outcome:
    """What the calls of a model gave and left behind.

    Attributes:
        values: results, inputs, buffers and gradients, in order.
        facts: about each, and errors.
    """

    values: list[Tensor | None] = field(default_factory=list)
    facts: list[tuple[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    """What came of one program: one of the three words above, what differs, and what was fused in each graph."""

    word: str
    text: str
    reports: list[FusionReport]

    @property
    def report(self) -> FusionReport:
        """Of all graphs."""
        whole = FusionReport()
        for each in self.reports:
            whole.add(each)
        return whole


def check(made: Program, backend: Any) -> Verdict:
    """Compare a program with its plain model, or through Inductor with that model compiled."""
    reports = list[FusionReport]()
    plain = outcome(made, lambda model: model)
    if backend != EAGER and ("backward", "error") in plain.facts:  # compilers raise it ahead of the call
        made = replace(made, learns=(False, False, False))
        plain = outcome(made, lambda model: model)
    if backend == INDUCTOR:
        # A compiler may leave out what would be an error.
        return Verdict(SAME, "", reports) if plain.facts[-1][0] == "error" else check_compiled(made)
    found = outcome(made, _fused(backend, reports))
    text = difference(found, plain, made, [])
    if text:  # only then is it worth to look how far rounding alone leads
        others = [outcome(made, lambda model: model, moves=moves) for moves in (1, 2, 3)]
        text = difference(found, plain, made, others)
    if not text:
        return Verdict(SAME, "", reports)
    torch._dynamo.reset()  # it would know already which sizes change, and compile less often
    alone = outcome(made, lambda model: torch.compile(model, backend=backend))
    return Verdict(DIFFERS if difference(found, alone, made, []) else OF_TORCH, text, reports)


def check_compiled(made: Program) -> Verdict:
    """Compare a program through Inductor with what Inductor makes of the plain model."""
    if made.dtype is torch.bfloat16 and ".amax(" in made.source:
        # Inductor's derivative of amax compares rounded numbers with others, finds none, and divides by 0.
        made = replace(made, learns=(False, False, False))
    reports = list[FusionReport]()
    found = outcome(made, _fused(INDUCTOR, reports))
    alone = outcome(made, _compiled)
    if not any(report.sites for report in reports):
        text = difference(found, alone, made, [], close=0.0)
        return Verdict(DIFFERS if text else SAME, text, reports)
    text = difference(found, alone, made, [])
    if text:
        # Inductor itself can be wrong (2.13 drops alpha in torch.add(x @ w, column, alpha=2)), but has its own dropout.
        exact = outcome(
            replace(made, dtype=torch.float64), _compiled if made.training else lambda model: model
        )
        others = [outcome(made, _compiled, moves=moves) for moves in (1, 2, 3)]
        text = further(found, alone, exact, made, others)
    return Verdict(DIFFERS if text else SAME, text, reports)


def _compiled(model: Any) -> Any:
    torch._dynamo.reset()  # it would know already which sizes change, and compile less often
    return torch.compile(model)


def further(found: Outcome, alone: Outcome, exact: Outcome, made: Program, others: list[Outcome]) -> str:
    """Whether a value of `found` is further from the exact one than that of `alone`, and other roundings, are."""
    if text := difference(found, alone, made, [], close=float("inf")):
        return text
    close = _EPSILON[made.dtype] if not made.is_coarse else _COARSE
    for place, (mine, other) in enumerate(zip(found.values, alone.values, strict=True)):
        right = exact.values[place] if place < len(exact.values) else None
        if mine is None or other is None or right is None:
            continue
        moved = [each.values[place] for each in others if place < len(each.values)]
        bound = 1.25 * _apart(other, right) + 2 * max(
            _apart(each, other) for each in moved if each is not None
        )
        bound += close * max(1.0, _apart(right, torch.zeros(())))
        if _apart(mine, right) > bound or not torch.equal(mine.isfinite(), other.isfinite()):
            off = f"off float64 by {_apart(mine, right):.3g}, alone by {_apart(other, right):.3g}"
            return f"value {place}: {off}, allowed {bound:.3g}"
    return ""


def _apart(value: Tensor, other: Tensor) -> float:
    """The largest finite distance."""
    return (
        float((value.double() - other.double()).nan_to_num(0.0, 0.0, 0.0).abs().max())
        if value.numel()
        else 0.0
    )


def _fused(backend: Any, reports: list[FusionReport]) -> Callable[[Any], Any]:
    options: Any = {"backend": backend, "report": reports.append}
    return lambda model: epigemm.fuse(model, inplace=True, strict=True, options=options)


# --- a run ------------------------------------------------------------------------------------------------------------


def outcome(made: Program, prepared: Callable[[Any], Any], *, moves: int = 0) -> Outcome:
    """Run a program. `moves`: with inputs and parameters that are other by a rounding, at random, by this seed."""
    model, seen = made.model(), Outcome()
    if moves:
        torch.manual_seed(moves)
        _move([*model.parameters(), *model.buffers()])
    call = prepared(model)
    for number in range(len(made.rows)):
        made.change(model, number)
        given = made.inputs(number)
        if moves:
            _move(given)
        with torch.set_grad_enabled(made.learns[0]):
            try:
                results = call(*given)
            except Exception as error:
                seen.facts.append(("error", type(error).__name__))
                return seen
            _note(seen, model, given, results)
            _learn(seen, model, given, results)
    return seen


def _move(tensors: Sequence[Tensor]) -> None:
    for tensor in filter(torch.is_floating_point, tensors):
        tensor.data.mul_(1 + 2 * torch.finfo(tensor.dtype).eps * torch.randn(tensor.shape))


def _note(seen: Outcome, model: nn.Module, given: list[Tensor], results: tuple[Tensor, ...]) -> None:
    buffers = [*model.buffers(), model.plain]
    for result in results:
        layout = [step for size, step in zip(result.shape, result.stride(), strict=True) if size > 1]
        about = tuple(result.shape), result.dtype, layout, result.requires_grad
        seen.facts.append(("result", (type(result).__name__, *about)))
    everything: list[Any] = [*results, *given, *buffers]
    places = [tensor.untyped_storage().data_ptr() for tensor in everything]
    seen.facts.append(("shares memory", [places.index(place) for place in places]))
    seen.facts.append(("is", [next(n for n, o in enumerate(everything) if o is each) for each in everything]))
    seen.values += [tensor.detach().clone() for tensor in everything]


def _learn(seen: Outcome, model: nn.Module, given: list[Tensor], results: tuple[Tensor, ...]) -> None:
    learning = [result for result in results if result.requires_grad]
    wanted = [each for each in (*given, *model.parameters()) if each.requires_grad and each.is_leaf]
    if not learning or not wanted:
        return
    total = torch.stack([result.sin().sum() for result in learning]).sum()
    try:
        seen.values += torch.autograd.grad(total, wanted, allow_unused=True)
    except RuntimeError:
        seen.facts.append(("backward", "error"))


# --- comparison -------------------------------------------------------------------------------------------------------


def difference(
    found: Outcome, expected: Outcome, made: Program, others: list[Outcome], *, close: float | None = None
) -> str:
    """What differs; `others`: of the plain model, moved by roundings: how far these go counts for nothing."""
    if close is None:
        close = _COARSE if made.is_coarse or made.dtype in (torch.bfloat16, torch.float16) else _CLOSE
    for (what, mine), (other_what, other) in zip(found.facts, expected.facts, strict=False):
        if (what, mine) != (other_what, other):
            # Where PyTorch has overwritten what it needs, a fused call may not have.
            return "" if other_what == "backward" else f"{what}: {mine}, expected {other_what}: {other}"
    if len(found.facts) != len(expected.facts) or len(found.values) != len(expected.values):
        last = expected.facts[-1]
        return "" if last[0] == "backward" else f"it ends with {found.facts[-1]}, expected {last}"
    for place, (value, wanted) in enumerate(zip(found.values, expected.values, strict=True)):
        moved = [other.values[place] if place < len(other.values) else None for other in others]
        if text := _distance(value, wanted, moved, close):
            return f"value {place}: {text}"
    return ""


def _distance(value: Tensor | None, wanted: Tensor | None, moved: list[Tensor | None], close: float) -> str:
    if value is None or wanted is None:
        return "" if value is wanted else f"{value}, expected {wanted}"
    finite = wanted[wanted.isfinite()]
    bound = close * max(1.0, float(finite.abs().max()) if finite.numel() else 0.0)
    for other in moved:
        if other is not None and other.shape == wanted.shape and other.numel():
            bound += 5 * float((other - wanted).abs().nan_to_num().max())
    if torch.allclose(value, wanted, rtol=0, atol=bound, equal_nan=True):
        return ""
    return f"off by {float((value - wanted).abs().max()):.3g}, allowed {bound:.3g}"


# --- the command ------------------------------------------------------------------------------------------------------


def run(seeds: Sequence[int], backend: Any, say: Callable[[str], None], **settings: Any) -> Counter[str]:
    """Check many; how many came to what, and how many have fused products and chains. `settings`: of `Program`."""
    seen: Counter[str] = Counter()
    for number, seed in enumerate(seeds):
        if number % _FORGET == 0:
            torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            verdict = check(made := replace(program(seed), **settings), backend)
        report = verdict.report
        seen[verdict.word] += 1
        seen["with a fused product"] += bool(report.sites)
        seen["with a fused chain"] += any(site.function != "linear" for site in report.sites)
        seen["not compiled"] += any("Dynamo could not compile" in note for note in report.notes)
        if verdict.word != SAME:
            say(f"--- {verdict.word}: {verdict.text}\n{made}{verdict.report}\n")
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="of the first one; the others follow it")
    parser.add_argument("--backend", choices=(EAGER, "aot_eager", INDUCTOR), default=EAGER)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--training", action="store_true")
    given = parser.parse_args()
    logging.disable(logging.ERROR)  # Dynamo's, of what it cannot compile: that is counted
    seeds = range(given.seed, given.seed + given.models)
    settings = {"dtype": getattr(torch, given.dtype), "training": given.training}
    seen = run(seeds, given.backend, lambda text: print(text, flush=True), **settings)
    print(f"{given.models} models through {given.backend}: {dict(seen)}")
    return 1 if seen[DIFFERS] else 0


if __name__ == "__main__":
    sys.exit(main())
