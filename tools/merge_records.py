"""Merge all shards' records: of the tests, compute-sanitizer or KernelBench; or of several runs of whole models.

    python -m pytest tests -m gpu -n 16 --shard 1/2 --summary-json tests-1.json   # and 2/2
    python -m tools.merge_records tests.json tests-1.json tests-2.json

    compute-sanitizer --tool memcheck python -m tools.run_every_kernel --shard 1/2 > memcheck-1.txt   # and 2/2
    python -m tools.merge_records compute-sanitizer-memcheck.txt memcheck-1.txt memcheck-2.txt

    python -m benchmarks --models --shard 1/2 --output models-1   # and 2/2; other variants, or the same once more
    python -m tools.merge_records models/summary.json models-1/summary.json models-2/summary.json

    python -m benchmarks --kernelbench PATH --shard 1/2 --output kernelbench-1   # and 2/2
    python -m tools.merge_records kernelbench/summary.json kernelbench-1/summary.json kernelbench-2/summary.json

Shards of other trees, of another GPU, or not all of them, are refused. Of whole models and KernelBench there may be
any part, and tables.md is written beside the summary; times of the same case of models come together.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import environment, report
from benchmarks.harness.shards import Selection, complete
from benchmarks.kinds import kernelbench, models

# --- tests ------------------------------------------------------------------------------------------------------------


def merge_tests(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One record of the same form, and beside it what each shard was.

    Raises:
        ValueError: they are not all shards of one run.
    """
    complete([Selection(**record["selection"]) for record in records])
    records = sorted(records, key=lambda record: int(record["selection"]["shard"].split("/")[0]))
    _one_source([_source(record["environment"]) for record in records])
    first = records[0]
    outcomes, skipped, seconds = Counter[str](), Counter[str](), Counter[str]()
    for record in records:
        outcomes.update(record["outcomes"])
        skipped.update(record["skipped"])
        seconds.update(record["seconds"])
    return {
        "environment": first["environment"],
        "selection": {**first["selection"], "shard": "1/1", "chosen": first["selection"]["of"]},
        "shards": [
            {**record["selection"], "command": record["environment"]["command"]} for record in records
        ],
        "outcomes": dict(outcomes),
        "failed": [name for record in records for name in record["failed"]],
        "skipped": dict(skipped.most_common()),
        "seconds": {name: round(spent, 1) for name, spent in seconds.most_common()},
    }


def _source(about: Mapping[str, Any]) -> dict[str, Any]:
    """What shards have in common: the source, the GPU and torch; drivers of several machines differ."""
    found = environment.identity(about)
    if not (found["csrc"] and found["python"]) or found["modified"]:
        raise ValueError("a shard of a tree that is not known, or that was modified; give --trees")
    return {name: found[name] for name in ("csrc", "python", "gpu", "cuda", "torch", "epigemm")}


def _one_source(sources: Sequence[Mapping[str, Any]]) -> None:
    for each in sources[1:]:
        differ = [name for name, value in each.items() if value != sources[0][name]]
        if differ:
            texts = [str({name: source[name] for name in differ}) for source in (sources[0], each)]
            raise ValueError(f"shards of different sources: {texts[0]} and {texts[1]}")


# --- compute-sanitizer ------------------------------------------------------------------------------------------------

_TREES = re.compile(r"^trees: (csrc [0-9a-f]{40}, python [0-9a-f]{40})$", re.M)
_SHARD = re.compile(r"^shard (\d+/\d+): (\d+) of (\d+) jobs \(([0-9a-f]+)\)$", re.M)
_DONE = re.compile(r"^(\d+) (launches|calls), all within tolerance$", re.M)
_VERDICT = re.compile(
    r"^========= (?P<tool>ERROR|RACECHECK) SUMMARY: (?P<numbers>\d+ errors?"
    r"|\d+ hazards? displayed \(\d+ errors?, \d+ warnings?\))$",
    re.M,
)
_HEADER = "========= COMPUTE-SANITIZER"


@dataclass(frozen=True)
class Sanitized:
    """What compute-sanitizer and `tools/sharded.py` have printed of a shard."""

    trees: str
    selection: Selection
    done: int
    unit: str  # what is counted
    tool: str  # "ERROR" or "RACECHECK"
    numbers: tuple[int, ...]  # of the verdict
    lines: tuple[str, ...]  # everything else

    @classmethod
    def parse(cls, text: str) -> Sanitized:
        """Of a file.

        Raises:
            ValueError: the run did not come to its end.
        """
        found = [pattern.findall(text) for pattern in (_TREES, _SHARD, _DONE, _VERDICT)]
        if any(len(each) != 1 for each in found):
            names = ("trees", "shard", "all within tolerance", "SUMMARY")
            lacking = [name for name, each in zip(names, found, strict=True) if len(each) != 1]
            raise ValueError(f"expected one line each of: {', '.join(lacking)}")
        (trees,), ((shard, chosen, of, digest),), ((done, unit),), ((tool, numbers),) = found
        rest = [
            line
            for line in text.splitlines()
            if line != _HEADER and not any(p.match(line) for p in (_TREES, _SHARD, _DONE, _VERDICT))
        ]
        selection = Selection(shard, int(chosen), int(of), digest)
        counts = tuple(map(int, re.findall(r"\d+", numbers)))
        return cls(trees, selection, int(done), unit, tool, counts, tuple(rest))

    def text(self) -> str:
        """As `parse` takes it."""
        if self.tool == "ERROR":
            verdict = f"{self.numbers[0]} errors"
        else:
            hazards, errors, warnings = self.numbers
            verdict = f"{hazards} hazards displayed ({errors} errors, {warnings} warnings)"
        where = self.selection
        return "\n".join(
            [
                _HEADER,
                *self.lines,
                f"trees: {self.trees}",
                f"shard {where.shard}: {where.chosen} of {where.of} jobs ({where.digest})",
                f"{self.done} {self.unit}, all within tolerance",
                f"========= {self.tool} SUMMARY: {verdict}",
                "",
            ]
        )


def merge_sanitized(texts: Sequence[str]) -> str:
    """One text of the same form.

    Raises:
        ValueError: they are not all shards of one run, or one did not come to its end.
    """
    shards = [Sanitized.parse(text) for text in texts]
    complete([each.selection for each in shards])
    shards.sort(key=lambda each: int(each.selection.shard.split("/")[0]))
    first = shards[0]
    _one_source([{"trees": each.trees, "tool": each.tool, "unit": each.unit} for each in shards])
    whole = Selection("1/1", first.selection.of, first.selection.of, first.selection.digest)
    numbers = tuple(map(sum, zip(*(each.numbers for each in shards), strict=True)))
    lines = tuple(line for each in shards for line in each.lines)
    done = sum(each.done for each in shards)
    return Sanitized(first.trees, whole, done, first.unit, first.tool, numbers, lines).text()


# --- whole models -----------------------------------------------------------------------------------------------------


_SUITES = {suite.kind: suite for suite in (models.SUITE, kernelbench.SUITE)}


def write_models(suite: models.Suite, merged: Mapping[str, Any], path: Path) -> None:
    """A merged summary, and its tables beside it."""
    report.write_json(merged, path)
    gpu, version = merged["gpu"] or "CPU", merged["epigemm"].get("version", "")
    head = [f"{gpu}; torch {merged['torch']}; epigemm {version}"]
    head += [f"`{run['command']}`" for run in merged["runs"]] + [merged["method"]]
    report.write_page(path.with_name("tables.md"), head, suite.tables(merged), suite.remarks(merged))


def main(arguments: Sequence[str] | None = None) -> None:
    """Merge files of one kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("merged", type=Path, help="the file to write")
    parser.add_argument("shards", type=Path, nargs="+", help="the files of all shards")
    given = parser.parse_args(arguments)
    texts = [path.read_text() for path in given.shards]
    try:
        if given.merged.suffix != ".json":
            given.merged.write_text(merge_sanitized(texts))
            return
        records = [json.loads(text) for text in texts]
        if suite := _SUITES.get(records[0].get("kind")):
            write_models(suite, suite.merge(records), given.merged)
        else:
            given.merged.write_text(json.dumps(merge_tests(records), indent=2) + "\n")
    except (ValueError, KeyError) as error:
        sys.exit(f"merge_records: {error}")


if __name__ == "__main__":
    main()
