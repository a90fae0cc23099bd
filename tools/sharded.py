"""The command line of a script that runs many jobs under compute-sanitizer, in parts.

`--shard I/N` runs one part. What is printed at the end lets `tools/merge_records.py` merge the parts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

import torch

from benchmarks.harness import environment
from benchmarks.harness.shards import Selection, Shard

Jobs = Mapping[str, Callable[[], int]]
"""By name: what runs, and returns how much it has launched or called."""


def run(jobs: Jobs, unit: str, arguments: Sequence[str] | None = None) -> None:
    """Run the jobs of one shard, and print what a record needs; `unit`: what the jobs count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shard", type=Shard.parse, default="1/1", help="I/N: the I-th of N parts")
    parser.add_argument(
        "--trees", help="csrc=HASH,python=HASH: git trees of the source, where git is missing"
    )
    given = parser.parse_args(arguments)
    shard: Shard = given.shard
    chosen = shard.part(list(jobs))
    done = 0
    for name in chosen:
        torch.manual_seed(0)  # whatever ran before
        done += jobs[name]()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    trees = environment.parse_trees(given.trees) if given.trees else environment.source_trees()
    selection = Selection.of_names(jobs, shard, len(chosen))
    print(f"trees: {', '.join(f'{name} {tree}' for name, tree in trees.items()) or 'unknown'}")
    print(f"shard {shard}: {len(chosen)} of {len(jobs)} jobs ({selection.digest})")
    print(f"{done} {unit}, all within tolerance", flush=True)
