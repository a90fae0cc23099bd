"""tune() and measuring first calls: on a CPU with scripted times and kernels in PyTorch, on a GPU as they are."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import epigemm
from epigemm import candidates, execution, packs, plans, tables, tuning, tuning_cli
from epigemm._native import ops
from epigemm.bench.timing import Effort, Run
from epigemm.epilogues import BIAS_RELU, EPILOGUES, RELU_DIV
from epigemm.tables import Entry
from tests.python.pieces import HOPPER, stand_in
from tests.support.untyped import backends

DEVICE = 42
TORCH_US = 100.0
PIECES = 2
"""The family of kernels on fp16 pieces."""


@dataclass
class Stage:
    """A pretended Hopper GPU: times are what `us` says of a plan, and every plan that runs is noted."""

    us: Callable[[tuple[int, ...]], float] = lambda plan: (
        (40.0 if plan[0] == PIECES else 50.0) + plan[1] + plan[2] / 2 + plan[3] / 10 + plan[4] / 100
    )
    ran: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    capturing: bool = False
    torch_us: float = TORCH_US
    under_load: Callable[[tuple[int, ...]], float] = lambda plan: 1.0

    def make_timer(self, device: torch.device) -> Stage:
        return self

    def warm_up(self, run: Run) -> float:
        return 1.0

    def in_turn(
        self, runs: Sequence[Run], effort: Effort, host_us: float, rest_s: float = 0.0
    ) -> list[list[float]]:
        """A load lasts from the third of six rounds on; a rest ends it."""
        return [
            [self.time_of(run) / 1e3 * (self.load_of(run) if i > 2 and not rest_s else 1.0) for i in range(6)]
            for run in runs
        ]

    def load_of(self, run: Any) -> float:
        plan = self.plan_of(run)
        return 1.0 if plan is None else self.under_load(plan)

    def time_of(self, run: Any) -> float:
        plan = self.plan_of(run)
        return self.torch_us if plan is None else self.us(plan)

    @staticmethod
    def plan_of(run: Any) -> tuple[int, ...] | None:
        return tuple(run.args[-1]) if isinstance(run.args[-1], list) else None


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    stage = Stage()

    def fused_plan(
        epilogue: Any,
        x: Tensor,
        weight: Tensor,
        bias: Any,
        operands: Any,
        scalars: Any,
        arithmetic: str,
        out: Any,
    ) -> dict[str, Any]:
        (n, k), dtype = weight.shape, str(x.dtype).removeprefix("torch.")
        sizes = (epilogue.name, x.numel() // k, n, k, dtype, arithmetic)
        return plans.ask(*sizes, has_bias=bias is not None, gpu=HOPPER, device=DEVICE)

    def fused(
        name: str,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        operands: Any,
        scalars: Any,
        arithmetic: str,
        plan: list[int],
        out: Tensor,
    ) -> bool:
        if (
            not plan
            and not fused_plan(EPILOGUES[name], x, weight, bias, operands, scalars, arithmetic, out)["fused"]
        ):
            return False
        product = torch.nn.functional.linear(x, weight)
        out.copy_(EPILOGUES[name].reference(product, bias, operands or (), scalars or ()))
        stage.ran.append((arithmetic, tuple(plan or ())))
        return True

    def split(name: str, *call: Any) -> None:
        stage.ran.append((call[-3], tuple(call[-2] or ())))
        stand_in(name, *call)

    patches: list[tuple[Any, str, Any]] = [
        (plans, "has_gpu_kernels", lambda tensor: tensor.is_cpu),
        (plans, "gpu_numbers", lambda device: HOPPER),
        (plans, "no_gemm_kernels", lambda: ""),
        (packs, "capturing", lambda device: stage.capturing),
        (execution, "fused_plan", fused_plan),
        (execution, "_fused_linear_out", fused),
        (candidates, "_fused_linear_out", fused),
        (candidates, "_split_linear_out", split),
        (tuning, "make_timer", stage.make_timer),
        (tuning, "_seen", set()),
        (torch.cuda, "device", lambda device: contextlib.nullcontext()),
        (torch.cuda, "get_device_name", lambda device: "NVIDIA H200"),
        (torch.Tensor, "get_device", lambda tensor: DEVICE),
        (execution, "on_first_call", None),
    ]
    for where, name, value in patches:
        monkeypatch.setattr(where, name, value)
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path))
    plans.forget()
    yield stage
    ops._clear_measured(DEVICE)
    plans.forget()


def draw(m: int = 40, n: int = 256, k: int = 128, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)]


# --- tune() -----------------------------------------------------------------------------------------------------------


def asked(epilogue: str = "relu_div", m: int = 40) -> dict[str, Any]:
    """What the planner says of `draw`'s call."""
    return plans.ask(epilogue, m, 256, 128, "bfloat16", "ieee", gpu=HOPPER, device=DEVICE)


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
    plan = execution.fused_plan(RELU_DIV, x, weight, bias, [], [2.0], "ieee", x)
    assert plan["fused"] and plan["source"] == "cache" and plan["plan"] == list(entry.plan)
    explanation = epigemm.explain("linear_relu_div", x, weight, bias, 2.0)
    assert explanation.path == "fused"
    (reason,) = explanation.reasons
    assert reason.startswith("fastest as measured of ")
    assert reason.endswith(" fused kernels: 50.2 us, against 100.0 us for " + RIVAL + ": " + MEASURED)
    text = str(explanation)
    assert "50.2 us measured" in text and "us predicted" in text
    epigemm.linear_relu_div(x, weight, bias, 2.0, strict=True)
    assert tables.read(tables.cache_path("NVIDIA H200"), "NVIDIA H200") == {entry.key: entry}


MEASURED = "measured on this GPU (cache)"
RIVAL = "torch's own path"


@pytest.mark.parametrize("m", [39, 41, 64, 1])
def test_a_choice_is_one_for_its_very_m(m: int, stage: Stage) -> None:
    before = asked(m=m)
    epigemm.tune("linear_relu_div", *draw(), 2.0)
    assert asked()["source"] == "cache" and asked(m=m) == before and before["source"] == "model"
    explanation = epigemm.explain("linear_relu_div", *draw(m=m), 2.0)
    assert MEASURED not in str(explanation) and "us measured" not in str(explanation)


@pytest.mark.parametrize(
    ("slower_under_load", "chosen"), [(1.05, 1), (1.2, 0)], ids=["a little", "more than it is faster rested"]
)
def test_long_calls_must_do_well_under_load_too(stage: Stage, slower_under_load: float, chosen: int) -> None:
    kernels = [kernel_of(plan) for plan in worth_measuring("bias_relu")]
    times = {kernels[1]: 300.0, kernels[0]: 315.0}
    stage.torch_us = 400.0
    stage.us = lambda plan: times.get(kernel_of(plan), 330.0)
    stage.under_load = lambda plan: slower_under_load if kernel_of(plan) == kernels[1] else 1.0
    found = epigemm.tune("linear_relu", *draw())
    assert kernel_of(found.entries[0].plan) == kernels[chosen]
    assert found.entries[0].fused_us == pytest.approx(
        300.0 * slower_under_load**0.5 if chosen == 1 else 315.0
    )


def test_short_calls_are_not_loaded(stage: Stage) -> None:
    """Where one of the ways is short the call is: the power limit does not come into it."""
    kernels = [kernel_of(plan) for plan in worth_measuring("bias_relu")]
    stage.us = lambda plan: {kernels[1]: 150.0, kernels[0]: 155.0}.get(kernel_of(plan), 170.0)
    efforts: list[float] = []
    in_turn = stage.in_turn

    def watching(
        runs: Sequence[Run], effort: Effort, host_us: float, rest_s: float = 0.0
    ) -> list[list[float]]:
        efforts.append(rest_s)
        return in_turn(runs, effort, host_us, rest_s)

    stage.in_turn = watching  # type: ignore[method-assign]
    found = epigemm.tune("linear_relu", *draw())
    assert kernel_of(found.entries[0].plan) == kernels[1] and found.entries[0].fused_us == 150.0
    assert set(efforts) == {0.0}


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
    tables.install(DEVICE, [at_present(epilogue, now)])
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
    [(99.2, 100.0), (100.8, 100.0), (99.01, 100.0), (100.99, 100.0), (98.8, 100.0), (101.2, 100.0)],
)
def test_between_fused_and_torch_noise_decides_nothing(
    stage: Stage, fused_us: float, torch_us: float, fused_runs: bool
) -> None:
    """Within 1% what runs now goes on, by times that say so; beyond it the faster one runs."""
    plan = worth_measuring()[-1]
    tables.install(DEVICE, [replace(at_present("relu_div", plan), torch_us=99.0 if fused_runs else 0.5)])
    assert asked()["fused"] == fused_runs
    stage.us, stage.torch_us = (lambda tried: fused_us if tried == plan else 190.0), torch_us
    found = epigemm.tune("linear_relu_div", *draw(), 2.0)
    is_noise = abs(fused_us - torch_us) <= 0.01 * torch_us
    expected = fused_runs if is_noise else fused_us < torch_us
    assert asked()["fused"] == expected and asked()["source"] == "cache"
    (entry,) = found.entries
    assert entry.plan == plan and (entry.fused_us <= entry.torch_us) == expected
    assert sorted((entry.fused_us, entry.torch_us)) == pytest.approx(sorted((fused_us, torch_us)))
    assert [each.plan for each in found.candidates if each.chosen] == [plan if expected else candidates.TORCH]
    shown = {each.plan: each.measured_us for each in found.candidates}
    assert shown[plan] == pytest.approx(fused_us) and shown[candidates.TORCH] == pytest.approx(torch_us)


@pytest.mark.parametrize("fused_runs", [True, False])
def test_of_equal_times_what_runs_now_goes_on(stage: Stage, fused_runs: bool) -> None:
    plan = worth_measuring()[-1]
    tables.install(DEVICE, [replace(at_present("relu_div", plan), torch_us=99.0 if fused_runs else 0.5)])
    stage.us = lambda tried: stage.torch_us if tried == plan else 190.0
    (entry,) = epigemm.tune("linear_relu_div", *draw(), 2.0).entries
    assert asked()["fused"] == fused_runs and entry.plan == plan
    assert entry.torch_us == stage.torch_us and entry.fused_us == pytest.approx(stage.torch_us, abs=2e-3)
    known = tables.read(tables.cache_path("NVIDIA H200"), "NVIDIA H200")
    assert known == {entry.key: entry}
    tables.install(DEVICE, known.values())
    assert asked()["fused"] == fused_runs, "as the next process reads it"


def at_present(epilogue: str, plan: tuple[int, ...]) -> Entry:
    """A measured choice, so that the plan is the one that runs."""
    numbers = (plan[0], plan[1], plan[2], plan[3], plan[4])
    return Entry(epilogue, "bfloat16", "ieee", False, True, False, 40, 256, 128, numbers, 1.0, 99.0)


def test_the_plan_that_runs_now_is_measured_though_it_is_slow(stage: Stage) -> None:
    """It is one of those that are measured with care, so that its time is one to compare with."""
    now = worth_measuring()[-1]
    tables.install(DEVICE, [at_present("relu_div", now)])
    stage.us = lambda plan: 95.0 if plan == now else 20.0
    found = epigemm.tune("linear_relu_div", *draw(), 2.0)
    assert found.entries[0].plan != now and found.entries[0].fused_us == 20.0
    assert [each.measured_us for each in found.candidates if each.plan == now] == [95.0]


def test_the_plan_that_runs_now_is_tried_though_it_is_predicted_to_be_slow(stage: Stage) -> None:
    """The other kernels whose predictions are that far behind are not."""
    m, n, k = 40, 256, 1024
    found = plans.ask("relu_div", m, n, k, "bfloat16", "ieee", gpu=HOPPER)["candidates"]
    hopeless = [
        tuple(each["plan"]) for each in found if each["predicted_us"] > 1.7 * found[0]["predicted_us"]
    ]
    now = hopeless[-1]
    x, weight, bias = draw(m, n, k)
    call = candidates.Call(RELU_DIV, x, weight, bias, (), (2.0,), "default", packs.NONE)
    (family,) = candidates.families(call)
    assert family.candidates and not {each.plan for each in family.candidates} & set(hopeless)
    tables.install(DEVICE, [replace(at_present("relu_div", now), k=k)])
    (family,) = candidates.families(call)
    tried = {each.plan for each in family.candidates}
    assert family.now == now and now in tried
    assert {kernel_of(plan) for plan in tried & set(hopeless)} == {kernel_of(now)}
    stage.us = lambda plan: 10.0 if plan == now else 20.0
    assert epigemm.tune("linear_relu_div", x, weight, bias, 2.0).entries[0].plan == now


def test_families_say_what_runs_now(stage: Stage) -> None:
    x, weight, bias = draw()
    call = candidates.Call(RELU_DIV, x, weight, bias, (), (2.0,), "default", packs.NONE)
    (family,) = candidates.families(call)
    assert family.now == (tuple(asked()["plan"]) if asked()["fused"] else candidates.TORCH)
    now = worth_measuring()[-1]
    tables.install(DEVICE, [at_present("relu_div", now)])
    (family,) = candidates.families(call)
    assert family.now == now and family.kind.source == "cache"
    tables.install(DEVICE, [replace(at_present("relu_div", now), torch_us=0.5)])
    (family,) = candidates.families(call)
    assert family.now == candidates.TORCH and family.kind.source == "cache"


def test_a_call_is_measured_on_random_x_of_its_own_rows() -> None:
    x, weight, bias = torch.full((3, 5, 128), math.nan), torch.randn(256, 128), torch.randn(256)
    call = candidates.Call(BIAS_RELU, x, weight, bias, (torch.full((256,), math.nan),), (), "default", "none")
    first, second = call.on_random_x(), call.on_random_x()
    assert first.x.shape == (15, 128) and first.rows == call.rows == 15
    assert torch.equal(first.x, second.x) and bool(first.x.isfinite().all())
    assert first.weight is weight and first.bias is bias
    assert all(torch.equal(each, torch.ones(256)) for each in first.operands)


def test_torchs_own_path_may_win(stage: Stage) -> None:
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
    with pytest.raises(RuntimeError, match=r"strict: got True .*own path was measured to be faster"):
        epigemm.linear_relu_div(x, weight, bias, 2.0, strict=True)


@pytest.mark.parametrize("setting", ["ieee", "tf32"])
@pytest.mark.parametrize("packed", [False, True])
def test_fp32_is_measured_on_every_road(stage: Stage, setting: str, packed: bool) -> None:
    backends.cuda.matmul.fp32_precision = setting
    backends.mkldnn.matmul.fp32_precision = "bf16" if setting == "tf32" else "ieee"
    x, weight, bias = draw(m=16, n=64, dtype=torch.float32)
    given: Any = epigemm.pack(weight) if packed else weight
    found = epigemm.tune("linear_relu_div", x, given, bias, 2.0)
    roads = {entry.arithmetic: entry for entry in found.entries}
    assert set(roads) == ({"scaled", "tf32"} if setting == "tf32" else {"split"})
    for name, entry in roads.items():
        assert entry.dtype == "float32" and entry.m == 16
        assert entry.packed == (packed and name != "tf32")
        assert entry.tf32_allowed == (setting == "tf32")
    assert {arithmetic for arithmetic, _ in stage.ran} == set(roads)
    first = "scaled" if setting == "tf32" else "split"
    assert [each.arithmetic for each in found.candidates if each.chosen] == [first]
    pieces = (RELU_DIV.name, 16, 64, 128, packed, first, setting == "tf32", DEVICE, True)
    plan = plans.split_plan(*pieces)
    assert plan.source == "cache" and not plan.why_not and plan.numbers == roads[first].plan


def test_folded_and_scalar_operands(stage: Stage) -> None:
    x, weight, bias = draw()
    vectors = [torch.rand(256).to(x.dtype) + 0.5 for _ in range(3)]
    found = epigemm.tune("linear_scale_batch_norm", x, weight, bias, *vectors)
    assert found.entries[0].epilogue == "scale_batch_norm" and not found.entries[0].bias
    divisor = torch.tensor(2.0)
    assert epigemm.tune("linear_relu_div", x, weight, bias, divisor).entries


def test_nothing_to_choose(stage: Stage) -> None:
    x, weight, bias = draw(n=7, dtype=torch.float64)
    found = epigemm.tune("linear_relu", x, weight, bias)
    assert not found.entries and "no fused kernel covers this call" in str(found)


def test_what_cannot_be_tuned(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = draw()
    with pytest.raises(ValueError, match="fn_or_name: got 'sigmoid', which has one kernel only"):
        epigemm.tune("sigmoid", x)
    with pytest.raises(ValueError, match="fn_or_name: got 'no_such'"):
        epigemm.tune("no_such", x)
    with pytest.raises(RuntimeError, match="weight"):
        epigemm.tune("linear_relu", x, weight[:, 1:], bias)
    stage.capturing = True
    with pytest.raises(RuntimeError, match="graph capture"):
        epigemm.tune("linear_relu", x, weight, bias)
    monkeypatch.setattr(plans, "has_gpu_kernels", lambda tensor: False)
    with pytest.raises(RuntimeError, match="x: got device cpu; accepted is a CUDA device"):
        epigemm.tune("linear_relu", x, weight, bias)
    assert not stage.ran


def test_a_random_generator_is_left_alone(stage: Stage) -> None:
    before = torch.get_rng_state()
    x, weight, bias = draw()
    torch.set_rng_state(before)
    epigemm.tune("linear_relu", x, weight, bias)
    assert torch.equal(torch.get_rng_state(), before)


# --- first calls ------------------------------------------------------------------------------------------------------


def plans_tried(stage: Stage) -> int:
    """How many plans were run by a measurement since the last time; calls themselves pass none."""
    tried = sum(plan != () for _, plan in stage.ran)
    stage.ran.clear()
    return tried


def test_a_first_call_is_measured_once(stage: Stage) -> None:
    tuning.enable()
    assert tuning.is_enabled()
    x, weight, bias = draw()
    expected = torch.relu(torch.nn.functional.linear(x, weight, bias))
    actual = epigemm.linear_relu(x, weight, bias)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=1e-1)
    assert plans_tried(stage) > 8
    epigemm.linear_relu(*draw(m=40))
    assert plans_tried(stage) == 0
    for m in (41, 64):
        epigemm.linear_relu(*draw(m=m))
        assert plans_tried(stage) > 8
        epigemm.linear_relu(*draw(m=m))
        assert plans_tried(stage) == 0
    tuning.disable()
    assert not tuning.is_enabled()
    epigemm.linear_relu(*draw(m=200))
    assert plans_tried(stage) == 0


def test_what_the_cache_knows_is_not_measured(stage: Stage) -> None:
    epigemm.tune("linear_relu", *draw())
    stage.ran.clear()
    tuning.enable()
    epigemm.linear_relu(*draw())
    assert plans_tried(stage) == 0


def test_never_in_a_capture_or_under_tracing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.enable()
    x, weight, bias = draw()
    stage.capturing = True
    epigemm.linear_relu(x, weight, bias)
    assert plans_tried(stage) == 0
    stage.capturing = False
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(each) for each in (x, weight, bias)]
        epigemm.linear_relu(*fakes)
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert not tuning._may_measure(x)
    assert plans_tried(stage) == 0
    epigemm.linear_relu(x, weight, bias)
    assert plans_tried(stage) > 8, "what was not measured in the capture is measured after it"


def test_never_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain CPU calls are not looked at."""
    seen: list[Any] = []
    monkeypatch.setattr(execution, "on_first_call", lambda *call: seen.append(call))
    epigemm.linear_relu(*draw(dtype=torch.float32))
    assert not seen


def test_no_memory_to_measure(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory left\nat all")

    monkeypatch.setattr(tuning, "measure", fail)
    tuning.enable()
    with pytest.warns(RuntimeWarning, match="not measured: no memory left$"):
        actual = epigemm.linear_relu(*draw())
    assert actual.shape == (40, 256)


@pytest.mark.parametrize(("value", "enabled"), [("1", True), ("0", False), ("", False), (None, False)])
def test_the_environment_variable(value: str | None, enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPIGEMM_TUNE", raising=False)
    if value is not None:
        monkeypatch.setenv("EPIGEMM_TUNE", value)
    code = "import epigemm; print(epigemm.tuning.is_enabled())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == str(enabled)


# --- the command ------------------------------------------------------------------------------------------------------


def options(*arguments: str) -> Any:
    return tuning_cli._parser().parse_args(arguments)


def test_rows_of_a_grid() -> None:
    assert options("--rows", "1,200,33").rows == [1, 200, 33]
    assert options().rows == [1, 16, 64, 256, 1024, 4096]
    assert options().output is None, "the user's cache"
    for wrong in ("", "0", "1,0", "-1", "1:4", "1,", "many"):
        with pytest.raises(SystemExit):
            options("--rows", wrong)


def test_a_grid() -> None:
    chosen = options("--weights", "64x32,32x64", "--dtypes", "bf16,fp32", "--epilogues", "bias,bias_relu")
    setups = list(tuning_cli.setups(chosen))
    assert len(setups) == len(set(setups)) == 2 * 2 * (1 + 2 * 2)
    assert setups[0].n == 64 and setups[-1].n == 32
    for wrong in (["--sizes", "1:4"], ["--weights", "64"], ["--dtypes", "fp8"], ["--epilogues", "sigmoid"]):
        with pytest.raises(SystemExit):
            options(*wrong)


SETUP = tuning_cli.Setup(BIAS_RELU, torch.bfloat16, 64, 32, "ieee", packs.NONE)


def test_a_grid_is_measured_once(stage: Stage) -> None:
    """What is known is not measured again, nor handed back as new."""
    cpu = torch.device("cpu")
    found = tuning_cli._measure(SETUP, 64, cpu, {})
    (entry,) = found.values()
    assert found == {entry.key: entry} and entry.m == 64 and entry.bias and plans_tried(stage) > 8
    known = dict(found)
    assert tuning_cli._measure(SETUP, 64, cpu, known) == {} and plans_tried(stage) == 0 and known == found
    (other,) = tuning_cli._measure(SETUP, 16, cpu, known).values()
    assert other.m == 16 and plans_tried(stage) > 8 and known == found
    stage.us = lambda plan: 20.0
    (again,) = tuning_cli._measure(SETUP, 64, cpu, {}).values()
    assert again.key == entry.key and again.fused_us == 20.0


def test_no_memory_for_a_point_of_the_grid(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory left\nat all")

    monkeypatch.setattr(tuning_cli, "measure", fail)
    before = backends.cuda.matmul.fp32_precision
    assert tuning_cli._measure(SETUP._replace(setting="tf32"), 64, torch.device("cpu"), {}) == {}
    assert capsys.readouterr().out == "bias_relu, M = 64, N = 64, K = 32: no memory left\n"
    assert backends.cuda.matmul.fp32_precision == before


class OnCpu:
    """torch with a CPU in place of its CUDA device."""

    cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda device: "NVIDIA H200")

    def device(self, *_: Any) -> torch.device:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def command(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tables.Entries]:
    """Runs the command on the stage; what its file then holds."""
    monkeypatch.setattr(tuning_cli, "torch", OnCpu())
    monkeypatch.setattr(tuning_cli, "no_kernels", lambda tensor: "")
    path = tmp_path / "table.json"

    def run(*arguments: str) -> tables.Entries:
        small = ["--weights", "64x32", "--dtypes", "bf16", "--epilogues", "bias_relu", "--output", str(path)]
        assert tuning_cli.main([*small, *arguments]) == 0
        return tables.read(path, "NVIDIA H200")

    return run


def test_the_command_adds_to_a_table(
    stage: Stage, command: Callable[..., tables.Entries], capsys: pytest.CaptureFixture[str]
) -> None:
    first = command("--rows", "16,64")
    assert {entry.m for entry in first.values()} == {16, 64} and plans_tried(stage) > 8
    assert "2 new choices in " in capsys.readouterr().out
    stage.us = lambda plan: 20.0
    second = command("--rows", "64,256")
    assert sorted(entry.m for entry in second.values()) == [16, 64, 256] and first.items() <= second.items()
    shown = capsys.readouterr().out
    assert "1 new choices in " in shown and ", 2 were there\n" in shown
    third = command("--rows", "64,256", "--again")
    fresh = [entry for entry in third.values() if entry.m != 16]
    assert len(third) == 3 and [entry.fused_us for entry in fresh] == [20.0, 20.0]
    assert next(entry for entry in third.values() if entry.m == 16) in first.values()
    plans_tried(stage)
    assert command("--rows", "512", "--time-budget", "-1") == third and plans_tried(stage) == 0
    assert "the time was up before the end" in capsys.readouterr().out


@pytest.mark.parametrize("again", [[], ["--again"]], ids=["", "again"])
def test_the_command_keeps_what_another_process_adds_meanwhile(
    again: list[str],
    stage: Stage,
    command: Callable[..., tables.Entries],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = tuning_cli._measure
    (entry,) = original(SETUP, 8, torch.device("cpu"), {}).values()

    def measure_beside_another(*given: Any) -> tables.Entries:
        tables.merge(tmp_path / "table.json", "NVIDIA H200", [entry])
        return original(*given)

    monkeypatch.setattr(tuning_cli, "_measure", measure_beside_another)
    found = command("--rows", "16", *again)
    assert found[entry.key] == entry and sorted(each.m for each in found.values()) == [8, 16]


def test_what_was_measured_is_kept_though_the_command_ends_early(
    stage: Stage, command: Callable[..., tables.Entries], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tuning_cli._measure

    def interrupted(setup: tuning_cli.Setup, m: int, *given: Any) -> tables.Entries:
        if m == 64:
            raise KeyboardInterrupt
        return original(setup, m, *given)

    monkeypatch.setattr(tuning_cli, "_measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command("--rows", "16,64")
    assert [entry.m for entry in tables.read(tmp_path / "table.json", "NVIDIA H200").values()] == [16]


@pytest.mark.parametrize("again", [[], ["--again"]], ids=["", "again"])
def test_what_two_setups_share_is_measured_once(
    again: list[str], command: Callable[..., tables.Entries], capsys: pytest.CaptureFixture[str]
) -> None:
    """The TF32 kernels read a weight as it is, with its pack kept or not."""
    backends.mkldnn.matmul.fp32_precision = "bf16"  # what "tf32" is to a GPU, to the stage's CPU
    grid = ["--rows", "64", "--dtypes", "fp32", "--settings", "tf32"]
    for measured in (1, len(again)):
        found = command(*grid, *again)
        lines = [line for line in capsys.readouterr().out.splitlines() if ": tf32: plan" in line]
        assert len(lines) == measured
    kinds = sorted((entry.arithmetic, entry.packed) for entry in found.values())
    assert kinds == [("scaled", False), ("scaled", True), ("tf32", False)]


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize("again", [[], ["--again"]], ids=["", "again"])
def test_a_table_that_cannot_be_read_ends_the_command(
    again: list[str], stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is measured: it could not be added to either."""
    output = tmp_path / "a folder"
    output.mkdir()
    small = ["--rows", "16", "--weights", "64x32", "--dtypes", "bf16", "--epilogues", "bias_relu"]
    assert tuning_cli.main([*small, "--output", str(output), *again]) == 1
    assert capsys.readouterr().out.startswith(f"{output} cannot be read: ")
    assert not stage.ran and not list(output.iterdir())


@pytest.mark.parametrize("text", ["", "{}", "[1", '{"format": 0}'])
def test_a_damaged_table_is_begun_anew(
    text: str, command: Callable[..., tables.Entries], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "table.json").write_text(text)
    assert [entry.m for entry in command("--rows", "16").values()] == [16]
    shown = capsys.readouterr().out
    assert "table.json is begun anew: " in shown and ", 0 were there\n" in shown


def test_the_command_says_why_it_does_nothing() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = subprocess.run([sys.executable, "-m", "epigemm.tune"], capture_output=True, text=True)
    assert done.returncode == 1 and "torch sees no CUDA device" in done.stdout
    assert "Warning" not in done.stderr


def test_importing_the_commands_module_leaves_the_function() -> None:
    code = "import epigemm; f = epigemm.tune; import epigemm.tune; assert epigemm.tune is f"
    subprocess.run([sys.executable, "-c", code], check=True)
