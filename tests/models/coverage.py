"""How much of the models `epigemm.fuse` takes: `python -m tests.models.coverage FILE`.

A product is a matrix product of the model's graphs with one matrix as its weight; a chain is a product that something
pointwise follows, by PyTorch's own mark; it is taken where the fused call computes that, too.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch

import epigemm
from tests.models.zoo import EXAMPLES, Example


def covered(example: Example) -> dict[str, Any]:
    """The figures of one model, for inference."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = example.make().eval()
    with torch.no_grad():
        report = epigemm.fuse(model, dry_run=True, example_inputs=example.inputs())
    chains, taken = report.chains
    return {
        "products": len(report.sites) + len(report.skipped),
        "products_taken": len(report.sites),
        "chains": chains,
        "chains_taken": taken,
    }


def main() -> None:
    """Write the sums and each model's figures."""
    by_model: dict[str, Any] = {}
    for example in EXAMPLES:
        if importlib.util.find_spec(example.package) is None:
            print(f"{example}: {example.package} is not installed")
            continue
        try:
            by_model[example.name] = covered(example)
        except Exception as error:  # a version of the package that has another interface
            print(f"{example}: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        print(f"{example}: {by_model[example.name]}", flush=True)
    names = ("products", "products_taken", "chains", "chains_taken")
    sums = {name: sum(found[name] for found in by_model.values()) for name in names}
    record = {"models": len(by_model), **sums, "by_model": by_model}
    print({"models": len(by_model), **sums})
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
