"""One job in its process: checked before it is timed, and what it reports."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks.models import worker
from benchmarks.models.jobs import INFERENCE, TRAINING, Case, Job
from benchmarks.models.measures import QUICK
from benchmarks.models.worker import error, is_right

CPU = torch.device("cpu")


def job(name: str = "eager_options", mode: str = INFERENCE) -> Job:
    return Job(Case("nerf", "fp32_highest", mode, (4,)), name)


@pytest.mark.parametrize("mode", [INFERENCE, TRAINING])
@pytest.mark.parametrize("name", ["eager_options", "backend"])
def test_a_job(name: str, mode: str) -> None:
    prepared = worker.prepare(job(name, mode), CPU, quick=True)
    found = prepared.measure(CPU, QUICK)
    variant = prepared.job.variant
    assert found["right"] and set(found["errors"]) == {"eager", variant.other, variant.own}
    for which in ("turns_ms", "host_ms", "device_ms"):
        assert set(found[which]) == {variant.other, variant.own}
    assert ("chains" in found) == (name == "eager_options")


def test_what_is_wrong_is_not_timed() -> None:
    prepared = worker.prepare(job(), CPU, quick=True)
    right = prepared.calls["eager_options"]
    prepared.calls["eager_options"] = lambda: [1.1 * each for each in right()]
    found = prepared.measure(CPU, QUICK)
    assert not found["right"] and "turns_ms" not in found


def test_what_becomes_wrong_while_it_is_timed_is_wrong() -> None:
    prepared = worker.prepare(job(), CPU, quick=True)
    right, calls = prepared.calls["eager_options"], []

    def later() -> list[Tensor]:
        calls.append(1)
        return [each if len(calls) < 4 else 1.1 * each for each in right()]

    prepared.calls["eager_options"] = later
    assert not prepared.measure(CPU, QUICK)["right"]


def test_the_error_is_the_worst_tensors() -> None:
    exact = [torch.ones(8), 2 * torch.ones(4)]
    assert error([t.clone() for t in exact], exact) == 0
    assert error([exact[0], 3 * torch.ones(4)], exact) == pytest.approx(0.5)
    for wrong in (
        exact[:1],
        [exact[0], 2 * torch.ones(1)],
        [torch.full((8,), math.nan), exact[1]],
        [exact[0], torch.full((4,), math.inf)],
    ):
        assert error(wrong, exact) == math.inf


@pytest.mark.parametrize(
    ("errors", "own", "right"),
    [
        ({"eager": 1e-6, "eager_options": 1.4e-6}, "eager_options", True),
        ({"eager": 1e-6, "eager_options": 1.6e-6}, "eager_options", False),
        ({"eager": 1e-9, "eager_options": 1.4e-7}, "eager_options", True),
        ({"eager": math.inf, "eager_options": math.inf}, "eager_options", False),
        ({"eager": 1e-6, "compile": 1e-4, "backend": 1.4e-4}, "backend", True),
        ({"eager": 1e-6, "compile": 1e-9, "backend": 1.4e-6}, "backend", True),
        ({"eager": 1e-6, "compile": 1e-4, "backend": 1.6e-4}, "backend", False),
        ({"eager": 1e-6, "compile": math.inf, "backend": 1e-6}, "backend", False),
    ],
)
def test_what_is_right(errors: dict[str, float], own: str, right: bool) -> None:
    assert is_right(errors, own) == right


def test_gradients_behind_a_norm_are_more_than_noise() -> None:
    """A last LayerNorm makes the gradients of a plain sum vanish: nothing would be compared."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16))
    inputs = (torch.randn(8, 16),)
    upstream = worker._upstream(model, inputs)
    _, weight, *_, last = worker._step(model, list(model.parameters()), inputs, upstream)()
    assert float(weight.norm()) > 0.01 * float(last.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [INFERENCE, TRAINING])
def test_a_job_on_a_gpu(mode: str) -> None:
    gpu = torch.device("cuda")
    monitored = Job(Case("resmlp", "fp32_highest", mode, (256,)), "eager_options")
    found = worker.prepare(monitored, gpu, quick=False).measure(gpu, QUICK)
    assert found["right"] and found["products"]["all"] == 16
    assert found["device_ms"]["eager"] > 0.05 and found["host_ms"]["eager"] > 0.05
