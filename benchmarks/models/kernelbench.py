"""A checkout of KernelBench: each problem in its own harness, in four ways, which are timed in turn.

The harness's semantics are the suite's: seeds, fp32, no gradients, modules in training mode as they are made, and
`torch.allclose` of eager's result in five trials. Nothing here depends on which problem it is.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import epigemm
from benchmarks.harness.runner import describe_error
from benchmarks.models import measures
from benchmarks.models.jobs import Variant
from benchmarks.models.measures import Effort
from benchmarks.models.worker import EAGER, NotMeasured, alone_on, error, free, is_right

LEVELS = ("level1", "level2", "level3")
PAIRS = (Variant("fuse_vs_eager", EAGER, "fuse"), Variant("backend_vs_compile", "compile", "backend"))
SEED, TRIALS, TOLERANCE = 42, 5, 1e-4
"""The suite's own: of its scripts, and of fp32."""
_IN_EAGER = "fails its own harness in eager"


@dataclass(frozen=True)
class Problem:
    """A file of the suite."""

    path: Path

    def __str__(self) -> str:
        return f"{self.path.parent.name}/{self.path.stem}"


def problems(checkout: Path) -> list[Problem]:
    """All of the levels that are there.

    Raises:
        ValueError: there is none.
    """
    found = [
        Problem(path) for level in LEVELS for path in sorted((checkout / "KernelBench" / level).glob("*.py"))
    ]
    if not found:
        raise ValueError(
            f"--kernelbench: expected a checkout with KernelBench/level1 to level3, got {str(checkout)!r}"
        )
    return found


def tree_hashes(checkout: Path) -> dict[str, str]:
    """Each level's hash, of the files as they are: what `git rev-parse HEAD:KernelBench/level2` says of a clone."""
    folders = (checkout / "KernelBench" / level for level in LEVELS)
    return {folder.name: _tree_hash(folder) for folder in folders if folder.is_dir()}


def _tree_hash(folder: Path) -> str:
    def digest(kind: str, content: bytes) -> Any:
        return hashlib.sha1(f"{kind} {len(content)}\0".encode() + content, usedforsecurity=False)

    files = sorted(path for path in folder.iterdir() if path.is_file())
    entries = [
        f"100644 {path.name}\0".encode() + digest("blob", path.read_bytes()).digest() for path in files
    ]
    return str(digest("tree", b"".join(entries)).hexdigest())


@dataclass
class Prepared:
    """A problem's model, and ways to call copies of it, which share its parameters.

    Attributes:
        draw: the suite's `get_inputs`.
        reference: what every way is compared with; "eager" among the ways is a second instance.
        trials: how many there have been.
        failed: by way, why it did not pass each of the others.
        raised: the ways that have raised an error.
        errors: by way, the largest error against float64 in the trials that one of ours has not passed.
    """

    draw: Callable[[], Iterable[Any]]
    reference: nn.Module
    ways: dict[str, Any]
    device: torch.device
    trials: int = 0
    failed: dict[str, list[str]] = field(default_factory=dict)
    raised: set[str] = field(default_factory=set)
    errors: dict[str, float] = field(default_factory=dict)

    def inputs(self, seed: int) -> list[Any]:
        """As the harness draws them; the generators start anew behind them."""
        with _of_the_suite():
            torch.manual_seed(seed)
            found = _placed(self.draw(), self.device)
            torch.manual_seed(seed)
            return found

    def trial(self, inputs: list[Any]) -> None:
        """Every way against the reference; each draws what a second call after the reference's would draw.

        Raises:
            NotMeasured: the reference raises an error, or its result cannot be compared.
        """
        with _of_the_suite():
            expected = self.reference(*inputs)
        reasons = {name: why for name in self.ways if (why := self._why_failed(name, inputs, expected))}
        if EAGER in self.raised:
            raise NotMeasured(f"{_IN_EAGER}: {reasons[EAGER]}")
        if EAGER not in reasons and any(pair.own in reasons for pair in PAIRS):
            for name, found in self._against_float64(inputs).items():
                self.errors[name] = max(found, self.errors.get(name, 0.0))
        self.trials += 1
        for name, why in reasons.items():
            self.failed.setdefault(name, []).append(why)

    def _call(self, name: str, inputs: list[Any]) -> Any:
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            return self.ways[name](*inputs)

    def _why_failed(self, name: str, inputs: list[Any], expected: Any) -> str:
        try:
            found = self._call(name, inputs)
            if found.shape != expected.shape:
                return f"shape {tuple(found.shape)} in place of {tuple(expected.shape)}"
            if torch.allclose(expected, found, atol=TOLERANCE, rtol=TOLERANCE):
                return ""
            return f"differs by up to {float((found - expected).abs().max()):.2g}"
        except torch.OutOfMemoryError:
            raise
        except Exception as e:
            self.raised.add(name)
            return describe_error(e)

    def _against_float64(self, inputs: list[Any]) -> dict[str, float]:
        wide = copy.deepcopy(self.reference).double()
        exact = [wide(*_placed(inputs, self.device, torch.float64)).float()]
        return {
            name: error([self._call(name, inputs)], exact) for name in self.ways if name not in self.raised
        }

    def wrong(self) -> list[str]:
        """Our ways that do not pass, and err more against float64 than those without epigemm (see `is_right`)."""
        found = []
        for pair in PAIRS:
            names = (EAGER, pair.other, pair.own)
            errors = {name: self.errors[name] for name in names if name in self.errors}
            # Without errors there was no trial that eager itself passed.
            differs = pair.own in self.failed and pair.own in errors and not is_right(errors, pair.own)
            found += [pair.own] * (pair.own in self.raised or differs)
        return found

    @torch.no_grad()
    def measure(self, device: torch.device, effort: Effort) -> dict[str, Any]:
        """Times of all ways in turn, of what is right alone, and once more a trial."""
        left_out = {*self.raised, *self.wrong()}
        inputs = self.inputs(SEED)
        calls = {
            name: functools.partial(way, *inputs) for name, way in self.ways.items() if name not in left_out
        }
        typical = {name: measures.warm_up(call, device, effort) for name, call in calls.items()}
        turns = measures.in_turn(calls, typical, device, effort)
        self.trial(inputs)
        wrong = self.wrong()
        report = self.ways["fuse"].fusion_report
        return {
            "products": len(report.sites),
            "products_found": len(report.sites) + len(report.skipped),
            # What differs from itself in eager (dropout) can be held against nothing.
            "right": False if wrong else None if EAGER in self.failed else True,
            "not_passed": {
                name: f"{len(whys)} of {self.trials} trials, the first: {whys[0]}"
                for name, whys in self.failed.items()
            },
            "errors": self.errors,
            "turns_ms": {name: times for name, times in turns.items() if name not in wrong},
        }


@contextlib.contextmanager
def _of_the_suite() -> Iterator[None]:
    """What goes wrong in the block is the problem's own."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as e:
        raise NotMeasured(f"{_IN_EAGER}: {describe_error(e)}") from e


def _placed(values: Iterable[Any], device: torch.device, dtype: torch.dtype = torch.float32) -> list[Any]:
    """As the harness places arguments: every tensor in one type, whatever it was."""
    return [x.to(dtype).to(device) if isinstance(x, Tensor) else x for x in values]


def _load(path: Path) -> ModuleType:
    """A module that Dynamo finds by its name; nothing is written beside the file."""
    module = sys.modules[path.stem] = ModuleType(path.stem)
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module


def ways_to_call(model: nn.Module, *, quick: bool) -> dict[str, Any]:
    """Each with a state of its own."""

    def twin() -> nn.Module:
        return copy.deepcopy(model, {id(p): p for p in model.parameters()})

    compiler = "aot_eager" if quick else "inductor"
    options: dict[str, Any] = {"backend": compiler, "strict": True}
    return {
        EAGER: twin(),
        "compile": torch.compile(twin(), backend=compiler),
        "fuse": epigemm.fuse(twin(), options={"backend": "eager"}, strict=True),
        "backend": torch.compile(twin(), backend="epigemm", options=options),
    }


@torch.no_grad()
def prepare(problem: Problem, device: torch.device, *, quick: bool) -> Prepared:
    """Build the model, and run the harness's trials, in which everything is compiled.

    Raises:
        NotMeasured: eager itself raises an error.
    """
    with _of_the_suite():
        module: Any = _load(problem.path)
        torch.manual_seed(SEED)
        arguments = _placed(module.get_init_inputs(), device)
        torch.manual_seed(SEED)
        model = module.Model(*arguments).to(device, torch.float32)
    prepared = Prepared(module.get_inputs, model, ways_to_call(model, quick=quick), device)
    torch.manual_seed(SEED)
    for seed in torch.randint(0, 2**32 - 1, (TRIALS,)).tolist():
        with contextlib.suppress(torch.OutOfMemoryError):  # others prepare beside it
            prepared.trial(prepared.inputs(seed))
            free(device)
            continue
        with alone_on(device):
            prepared.trial(prepared.inputs(seed))
    return prepared
