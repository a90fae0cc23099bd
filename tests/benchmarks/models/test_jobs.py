"""Which jobs there are, and in which order."""

from __future__ import annotations

from benchmarks.models.jobs import INFERENCE, Case, cases, jobs
from benchmarks.models.registry import NETWORKS, PRECISIONS


def test_every_network_at_every_precision_and_batch() -> None:
    found = [str(case) for case in cases(quick=False)]
    assert len(found) == len(set(found)) == len(NETWORKS) * (2 * len(PRECISIONS) + 2)
    for name, network in NETWORKS.items():
        for batch in network.batches:
            for precision in PRECISIONS:
                assert f"{name}/{precision}/{INFERENCE}/{'x'.join(map(str, batch))}" in found


def test_names_and_back() -> None:
    for case in cases(quick=False):
        assert Case.parse(str(case)) == case


def test_variants_one_after_another_without_training_in_graphs() -> None:
    found = jobs(["nerf"], ["overhead", "eager_options"], quick=False)
    assert [job.name for job in found] == ["eager_options"] * 8 + ["overhead"] * 6
    assert {job.case.mode for job in found if job.name == "overhead"} == {INFERENCE}
    assert str(found[0]) == "nerf/fp32_highest/inference/262144/eager_options"
