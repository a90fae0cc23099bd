"""tune(): on a CPU with scripted times and kernels in PyTorch, on a GPU as they are."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import epigemm
from epigemm.arguments.calls import LinearCall
from epigemm.calls.forecast import consider
from epigemm.epilogues.library import FUNCTIONS, RELU_DIV
from epigemm.epilogues.registry import typed
from epigemm.planner import times
from epigemm.planner.times import Entry
from epigemm.tuner import tuner
from tests.support.choices import forget
from tests.support.pretended import HOPPER
from tests.support.stage import DEVICE, TORCH_US, Stage, draw, plans_tried
from tests.support.untyped import backends
from tools.planner import ask_planner

# --- tune() -----------------------------------------------------------------------------------------------------------


def asked(epilogue: str = "relu_div", m: int = 40) -> dict[str, Any]:
    """What the planner says of `draw`'s call."""
    return ask_planner(epilogue, m, 256, 128, "bfloat16", "ieee", gpu=HOPPER, device=DEVICE)


def worth_measuring(epilogue: str = "relu_div") -> list[tuple[int, ...]]:
    """The plans whose predicted time is near the best, fastest first."""
    found = asked(epilogue)["candidates"]
    return [tuple(each["plan"]) for each in found if each["predicted_us"] <= 1.7 * found[0]["predicted_us"]]


def kernel_of(plan: tuple[int, ...]) -> tuple[int, ...]:
    """A plan but for its order of tiles: family, tile and splits."""
    return (*plan[:2], plan[4])


def test_the_fastest_is_chosen_remembered_and_used(stage: Stage, tmp_path: Path) -> None:
    wanted = worth_measuring()[-1]
    stage.us = lambda plan: 50.25 if plan == wanted else 60.0
    x, weight, bias = draw()
    found = epigemm.tune("linear_relu_div", x, weight, bias, 2.0)
    (entry,) = found.entries
    assert entry.plan == wanted and (entry.fused_us, entry.torch_us) == (50.25, TORCH_US)
    assert (entry.epilogue, entry.dtype, entry.m, entry.n, entry.k) == ("relu_div", "bfloat16", 40, 256, 128)
    (chosen,) = [each for each in found.candidates if each.chosen]
    assert chosen.plan == entry.plan
    (considered,) = consider(LinearCall(RELU_DIV, x, weight, (bias, 2.0))).found.tried
    plan = considered.plan
    assert plan["fused"] and plan["source"] == "cache" and plan["plan"] == list(entry.plan)
    explanation = epigemm.explain("linear_relu_div", x, weight, bias, 2.0)
    assert explanation.path == "fused"
    (reason,) = explanation.reasons
    assert reason.startswith("fastest as measured of ")
    assert reason.endswith(" fused kernels: 50.2 us, against 100.0 us for " + RIVAL + ": " + MEASURED)
    text = str(explanation)
    assert "50.2 us measured" in text and "us predicted" in text
    epigemm.linear_relu_div(x, weight, bias, 2.0, strict=True)
    assert times.in_table(times.read(), "NVIDIA H200") == {entry.key: entry}


MEASURED = "measured on this GPU (cache)"
RIVAL = "the fallback"


def test_every_candidate_is_measured_and_shown(stage: Stage) -> None:
    expected = {kernel_of(plan) for plan in worth_measuring()}
    x, weight, bias = draw()
    found = epigemm.tune(epigemm.linear_relu_div, x, weight, bias, 2.0)
    numbers = [each.plan for each in found.candidates]
    assert len(numbers) == len(set(numbers)) > len(expected), (
        "every kernel, some in several orders, and torch"
    )
    assert {kernel_of(plan) for plan in numbers if plan} == expected
    assert {plan for _, plan in stage.ran} == set(numbers) - {()}
    lines = str(found).splitlines()
    assert lines[0] == "relu_div, bfloat16, M = 40, N = 256, K = 128, on NVIDIA H200"
    assert len(lines) == 1 + len(numbers) and sum("<- chosen" in line for line in lines) == 1
    assert any("100.0 us  torch " in line for line in lines)


@pytest.mark.parametrize(("slower", "is_kept"), [(1.0, True), (1.009, True), (1.012, False), (1.5, False)])
def test_what_runs_now_is_replaced_by_what_is_faster_beyond_noise(
    stage: Stage, slower: float, is_kept: bool
) -> None:
    epilogue, name = "sigmoid_scale_residual", "linear_sigmoid_scale_residual"
    now, other = worth_measuring(epilogue)[0], worth_measuring(epilogue)[1]
    times.install(DEVICE, [at_present(epilogue, now)])
    stage.us = lambda plan: {now: 20.0 * slower, other: 20.0}.get(plan, 90.0)
    found = epigemm.tune(name, *draw(), 2.0)
    (entry,) = found.entries
    assert entry.plan == (now if is_kept else other)
    assert entry.fused_us == pytest.approx(20.0 * slower if is_kept else 20.0)
    assert asked(epilogue)["plan"] == list(entry.plan)
    assert [each.plan for each in found.candidates if each.chosen] == [entry.plan]


@pytest.mark.parametrize("fused_runs", [True, False])
@pytest.mark.parametrize(
    ("fused_us", "torch_us"),
    [
        (100.0, 100.0),
        (99.2, 100.0),
        (100.8, 100.0),
        (99.01, 100.0),
        (100.99, 100.0),
        (98.8, 100.0),
        (101.2, 100.0),
    ],
)
def test_between_fused_and_torch_noise_decides_nothing(
    stage: Stage, fused_us: float, torch_us: float, fused_runs: bool
) -> None:
    """Within 1% what runs now goes on, by times that say so; beyond it the faster one runs."""
    plan = worth_measuring()[-1]
    times.install(DEVICE, [replace(at_present("relu_div", plan), torch_us=99.0 if fused_runs else 0.5)])
    assert asked()["fused"] == fused_runs
    stage.us, stage.torch_us = (lambda tried: fused_us if tried == plan else 190.0), torch_us
    found = epigemm.tune("linear_relu_div", *draw(), 2.0)
    is_noise = abs(fused_us - torch_us) <= 0.01 * torch_us
    expected = fused_runs if is_noise else fused_us < torch_us
    assert asked()["fused"] == expected and asked()["source"] == "cache"
    (entry,) = found.entries
    assert entry.plan == plan and (entry.fused_us <= entry.torch_us) == expected
    # What is remembered is never less than what was measured.
    most = max(fused_us, torch_us) + 2e-3 if is_noise else 0.0
    assert entry.fused_us == pytest.approx(fused_us, abs=max(most - fused_us, 2e-3))
    assert entry.torch_us == pytest.approx(torch_us, abs=max(most - torch_us, 2e-3))
    assert [each.plan for each in found.candidates if each.chosen] == [plan if expected else tuner.TORCH]
    shown = {each.plan: each.measured_us for each in found.candidates}
    assert shown[plan] == pytest.approx(fused_us) and shown[tuner.TORCH] == pytest.approx(torch_us)
    forget(DEVICE)
    times.load(DEVICE)
    assert asked()["fused"] == expected, "as the next process reads it"


def at_present(epilogue: str, plan: tuple[int, ...]) -> Entry:
    """A measured choice, so that the plan is the one that runs."""
    numbers = (plan[0], plan[1], plan[2], plan[3], plan[4])
    return Entry(epilogue, "bfloat16", "ieee", False, True, False, 40, 256, 128, numbers, 1.0, 99.0)


def test_the_plan_that_runs_now_is_tried_though_it_is_predicted_to_be_slow(stage: Stage) -> None:
    """The other kernels whose predictions are that far behind are not."""
    m, n, k = 40, 256, 1024
    found = ask_planner("relu_div", m, n, k, "bfloat16", "ieee", gpu=HOPPER)["candidates"]
    hopeless = [
        tuple(each["plan"]) for each in found if each["predicted_us"] > 1.7 * found[0]["predicted_us"]
    ]
    now = hopeless[-1]
    x, weight, bias = draw(m, n, k)
    call = LinearCall(RELU_DIV, x, weight, (bias, 2.0), uses_pack=False)
    (family,) = tuner.families(call)
    assert family.candidates and not {each.plan for each in family.candidates} & set(hopeless)
    times.install(DEVICE, [replace(at_present("relu_div", now), k=k)])
    (family,) = tuner.families(call)
    tried = {each.plan for each in family.candidates}
    assert family.now == now and now in tried
    assert {kernel_of(plan) for plan in tried & set(hopeless)} == {kernel_of(now)}
    stage.us = lambda plan: 10.0 if plan == now else 20.0
    assert epigemm.tune("linear_relu_div", x, weight, bias, 2.0).entries[0].plan == now


def test_a_call_is_measured_on_random_x_of_its_own_rows() -> None:
    x, weight, bias = torch.full((3, 5, 128), math.nan), torch.randn(256, 128), torch.randn(256)
    nan = torch.full((256,), math.nan)
    epilogue = typed(FUNCTIONS["gated_relu_bias2"], [False] * 3)
    call = LinearCall(epilogue, x, weight, (bias, nan, torch.ones(3, 5, 256)), uses_pack=False)
    first, second = tuner.on_random_x(call), tuner.on_random_x(call)
    assert first.x.shape == (15, 128) and first.rows == call.rows == 15
    assert torch.equal(first.x, second.x) and bool(first.x.isfinite().all())
    assert first.weight is weight and first.bias is bias
    *_, vector, matrix = first.inputs
    assert torch.equal(vector, torch.ones(256)) and matrix.shape == (15, 256)


def test_the_fallback_may_win(stage: Stage) -> None:
    stage.us = lambda plan: 200.0
    x, weight, bias = draw()
    found = epigemm.tune("linear_relu_div", x, weight, bias, 2.0)
    assert [each.arithmetic for each in found.candidates if each.chosen] == ["torch"]
    explanation = epigemm.explain("linear_relu_div", x, weight, bias, 2.0)
    assert explanation.path == "gemm+elementwise"
    (reason,) = explanation.reasons
    assert "measured to be faster (100 us against 200 us fused)" in reason
    assert reason.endswith(MEASURED)
    assert "200.0 us measured" in str(explanation)
    with pytest.raises(RuntimeError, match=r"strict: got True .*the fallback was measured to be faster"):
        epigemm.linear_relu_div(x, weight, bias, 2.0, strict=True)


@pytest.mark.parametrize("setting", ["ieee", "tf32"])
@pytest.mark.parametrize("packed", [False, True])
def test_fp32_is_measured_on_every_road(stage: Stage, setting: str, packed: bool) -> None:
    backends.cuda.matmul.fp32_precision = setting
    backends.mkldnn.matmul.fp32_precision = "bf16" if setting == "tf32" else "ieee"
    size = 2048 if packed else 512  # packs are for large weights; others the stand-in splits at every call
    x, weight, bias = draw(m=24, n=size, k=size, dtype=torch.float32)
    given: Any = epigemm.pack(weight) if packed else weight
    found = epigemm.tune("linear_relu_div", x, given, bias, 2.0)
    roads = {entry.arithmetic: entry for entry in found.entries}
    assert set(roads) == ({"scaled", "tf32"} if setting == "tf32" else {"split"})
    for name, entry in roads.items():
        assert entry.dtype == "float32" and entry.m == 24
        assert entry.packed == (packed and name != "tf32")
        assert entry.tf32_allowed == (setting == "tf32")
    assert {arithmetic for arithmetic, _ in stage.ran} == set(roads)
    first = "scaled" if setting == "tf32" else "split"
    assert [each.arithmetic for each in found.candidates if each.chosen] == [first]
    taken = consider(LinearCall(RELU_DIV, x, weight, (bias, 2.0))).found.tried[0]
    assert taken.arithmetic == first and not taken.why_not and taken.packed == packed
    assert taken.plan["source"] == "cache" and tuple(taken.plan["plan"]) == roads[first].plan


def test_few_rows_are_measured_beside_sgemm(stage: Stage) -> None:
    """In fp32, with TF32 allowed to nobody."""
    x, weight, bias = draw(m=4, n=4096, k=4096, dtype=torch.float32)
    found = epigemm.tune("linear_relu_div", x, weight, bias, 2.0)
    assert [(each.arithmetic, each.tf32_allowed) for each in found.entries] == [("ieee", False)]
    taken = consider(LinearCall(RELU_DIV, x, weight, (bias, 2.0))).found.tried[-1]
    assert taken.plan["source"] == "cache" and tuple(taken.plan["plan"]) == found.entries[0].plan
    assert len(found.candidates) == 5, "one order of the tiles, and SGEMM"


def test_a_gated_call(stage: Stage) -> None:
    """The product that the other one reads, and that one."""
    x, weight, _ = draw()
    found = epigemm.tune("linear_glu", x, weight, weight2=weight.flip(0))
    assert [entry.epilogue for entry in found.entries[:1]] == ["bias"] and len(found.entries) == 2
    assert "; gated_silu" in found.problem and sum(each.chosen for each in found.candidates) == 2


def test_what_does_not_fit_is_not_run(stage: Stage) -> None:
    """Other errors: tests/net/errors.txt."""
    x, weight, bias = draw()
    with pytest.raises(RuntimeError, match="weight"):
        epigemm.tune("linear_relu", x, weight[:, 1:], bias)
    assert not stage.ran


def test_never_in_a_capture(stage: Stage) -> None:
    x, weight, bias = draw()
    stage.capturing = True
    with pytest.raises(RuntimeError, match="tune: got a call during CUDA graph capture"):
        epigemm.tune("linear_relu", x, weight, bias)
    stage.capturing = False
    before = torch.get_rng_state()
    assert not stage.ran and epigemm.tune("linear_relu", x, weight, bias).entries
    assert torch.equal(torch.get_rng_state(), before), "a random generator is left alone"


def test_no_memory_to_measure(stage: Stage) -> None:
    """The error is the caller's; nothing is remembered, and the call runs as before, without a measurement."""

    def fail(plan: tuple[int, ...]) -> float:
        raise torch.OutOfMemoryError("no memory left")

    stage.us = fail
    x, weight, bias = draw()
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        epigemm.tune("linear_relu", x, weight, bias)
    assert asked("bias_relu")["source"] == "model"
    stage.ran.clear()
    expected = torch.relu(torch.nn.functional.linear(x, weight, bias))
    torch.testing.assert_close(epigemm.linear_relu(x, weight, bias), expected, rtol=2e-2, atol=1e-1)
    assert plans_tried(stage) == 0
