"""How much of the models `epigemm.fuse` takes: `python -m tests.models.coverage FILE`.

A product is a matrix product of the model's graphs with one matrix as its weight; a chain is a product that something
pointwise follows, by PyTorch's own mark; it is taken where the fused call computes that, too.
"""

from __future__ import annotations

import importlib
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


def main() -> int:
    """Write the sums and each model's figures; 1 where a model is left out, which the record says, too."""
    by_model: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for example in EXAMPLES:
        try:
            importlib.import_module(example.package)
            by_model[example.name] = covered(example)
        except Exception as error:  # not installed, or in a version that has another interface
            left_out[example.name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            print(f"{example}: {left_out[example.name]}")
            continue
        print(f"{example}: {by_model[example.name]}", flush=True)
    names = ("products", "products_taken", "chains", "chains_taken")
    sums = {name: sum(found[name] for found in by_model.values()) for name in names}
    record = {"models": len(by_model), **sums, "left_out": left_out, "by_model": by_model}
    print({"models": len(by_model), **sums, "left_out": len(left_out)})
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n")
    return bool(left_out)


if __name__ == "__main__":
    sys.exit(main())
