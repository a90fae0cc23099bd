"""How much of the models `epigemm.fuse` takes: `python -m tests.models.coverage FILE`.

A product is a matrix product of the model's graphs with one matrix as its weight. Chains, and which of them are taken,
are what `FusionReport.chains` says: arithmetic that follows a product, and that the fused call computes. Each chain
that is not taken is in the record with its reason. A name given beside FILE leaves the other models out.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

import epigemm
from tests.models.example import Example, package
from tests.models.zoo_others import EVERY

NAMES = ("products", "products_taken", "chains", "chains_taken")


def covered(example: Example) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The figures of one model, for inference; of each chain that is not taken the product and the reason."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = example.make().eval()
    with torch.no_grad():
        report = epigemm.fuse(model, dry_run=True, example_inputs=example.inputs())
    chains, taken = report.chains
    found = len(report.sites) + len(report.skipped), len(report.sites), chains, taken
    return dict(zip(NAMES, found, strict=True)), [(each.name, each.reason) for each in report.not_taken]


def folded(not_taken: list[tuple[str, str]]) -> dict[str, str]:
    """The reasons by product; products that differ by their numbers alone in one entry, with how many they are."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, reason in not_taken:
        key = re.sub(r"\d+", "*", name), re.sub(r"\d+\b", "*", reason)
        groups.setdefault(key, []).append((name, reason))
    entries: dict[str, str] = {}
    for (pattern, _), members in groups.items():
        name = members[0][0] if len(members) == 1 else f"{pattern} ({len(members)})"
        entries[name] = f"{entries[name]}; {members[0][1]}" if name in entries else members[0][1]
    return entries


def written(record: dict[str, Any]) -> str:
    """JSON with a line for each model and for each reason."""
    lines = []
    for name, value in record.items():
        if isinstance(value, dict):
            inner = [
                f"  {json.dumps(key)}: "
                + (
                    "{\n"
                    + ",\n".join(f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in part.items())
                    + "\n  }"
                    if name == "not_taken"
                    else json.dumps(part)
                )
                for key, part in value.items()
            ]
            lines.append(f' "{name}": {{' + ("\n" + ",\n".join(inner) + "\n }" if inner else "}"))
        else:
            lines.append(f' "{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> int:
    """Write the sums and each model's figures; 1 where a model is left out, which the record says, too."""
    by_model: dict[str, dict[str, int]] = {}
    not_taken: dict[str, dict[str, str]] = {}
    left_out: dict[str, str] = {}
    for example in EVERY:
        if len(sys.argv) > 2 and sys.argv[2] not in example.name:
            continue
        try:
            package(example.package)
            by_model[example.name], missed = covered(example)
        except Exception as error:  # not installed, or in a version that has another interface
            left_out[example.name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            print(f"{example}: {left_out[example.name]}", flush=True)
            continue
        if missed:
            not_taken[example.name] = folded(missed)
        print(f"{example}: {by_model[example.name]}", flush=True)
    sums = {name: sum(found[name] for found in by_model.values()) for name in NAMES}
    record = {
        "models": len(by_model),
        **sums,
        "left_out": left_out,
        "not_taken": not_taken,
        "by_model": by_model,
    }
    print({"models": len(by_model), **sums, "left_out": len(left_out)})
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(written(record))
    return bool(left_out)


if __name__ == "__main__":
    sys.exit(main())
