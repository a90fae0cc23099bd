"""Scripts for compute-sanitizer, in parts: each job is in one part, and what the parts print can be merged."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.cases import REGISTRY
from tools import run_every_kernel, run_linked_kernels, sharded
from tools.merge_records import Sanitized, merge_sanitized

TREES = f"csrc={'a' * 40},python={'b' * 40}"
SCRIPTS = {"every": run_every_kernel.jobs, "linked": run_linked_kernels.jobs}


def printed(shard: str, jobs: sharded.Jobs, capsys: pytest.CaptureFixture[str]) -> str:
    """With what compute-sanitizer prints around it."""
    sharded.run(jobs, "launches", ["--shard", shard, "--trees", TREES])
    return f"========= COMPUTE-SANITIZER\n{capsys.readouterr().out}========= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_job_runs_in_one_shard(script: str, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    names, ran = list(SCRIPTS[script]()), list[str]()

    def job(name: str) -> Callable[[], int]:
        def run() -> int:
            ran.append(name)
            return 2

        return run

    jobs = {name: job(name) for name in names}
    texts = [printed(f"{index}/{count}", jobs, capsys) for index in range(1, count + 1)]
    assert sorted(ran) == sorted(names)
    assert Sanitized.parse(merge_sanitized(texts)).done == 2 * len(names)


def test_every_epilogue_has_its_jobs() -> None:
    names = run_every_kernel.jobs()
    for name, entry in REGISTRY.items():
        kinds = {kind: [job for job in names if job.startswith(f"{kind} {name} ")] for kind in KINDS}
        assert {kind: len(jobs) for kind, jobs in kinds.items()} == {
            "elementwise": 4,
            "derivative": 4,
            "fused": 3 * entry["linear"],
            "slices": 2 * entry["linear"],
        }


KINDS = ("elementwise", "derivative", "fused", "slices")
