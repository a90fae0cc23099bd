"""tune() and measuring first calls: on a CPU with scripted times and kernels in PyTorch, on a GPU as they are."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
from tests.python.pieces import HOPPER, stand_in
from tests.support.untyped import backends

DEVICE = 42
TORCH_US = 100.0


@dataclass
class Stage:
    """A pretended Hopper GPU: times are what `us` says of a plan, and every plan that runs is noted."""

    us: Callable[[tuple[int, ...]], float] = lambda plan: 50.0 + plan[0] + plan[1] / 2 + plan[2] / 10
    ran: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    capturing: bool = False
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
        return TORCH_US if plan is None else self.us(plan)

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
        numbers = (x.numel() // k, n, k, k, k, n, 256)
        text = ops._plan_linear(epilogue.name, *numbers, dtype, arithmetic, *HOPPER, bias is not None, DEVICE)
        answer: dict[str, Any] = json.loads(text)
        return answer

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
        (plans, "device_numbers", lambda device: HOPPER),
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
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "tuned")
    plans.forget()
    yield stage
    ops._clear_tuned(DEVICE)
    plans.forget()


def draw(m: int = 40, n: int = 256, k: int = 128, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)]


# --- tune() -----------------------------------------------------------------------------------------------------------


def test_the_fastest_is_chosen_remembered_and_used(stage: Stage, tmp_path: Path) -> None:
    x, weight, bias = draw()
    found = epigemm.tune("linear_relu_div", x, weight, bias, 2.0)
    (entry,) = found.entries
    assert entry.plan == (0, 0, 1, 1) and (entry.fused_us, entry.torch_us) == (50.1, TORCH_US)
    assert (entry.epilogue, entry.dtype, entry.m, entry.n, entry.k) == ("relu_div", "bfloat16", 64, 256, 128)
    (chosen,) = [each for each in found.candidates if each.chosen]
    assert chosen.plan == entry.plan
    plan = execution.fused_plan(RELU_DIV, x, weight, bias, [], [2.0], "ieee", x)
    assert plan["fused"] and plan["source"] == "cache" and plan["plan"] == list(entry.plan)
    explanation = epigemm.explain("linear_relu_div", x, weight, bias, 2.0)
    assert explanation.path == "fused"
    (reason,) = explanation.reasons
    assert "50.1 us, against 100.0 us" in reason and reason.endswith("measured on this GPU (cache)")
    text = str(explanation)
    assert "50.1 us measured" in text and "us predicted" in text
    assert tables.read(tables.cache_path("NVIDIA H200")) == {entry.key: entry}


@pytest.mark.parametrize(
    ("slower_under_load", "chosen"), [(1.05, 1), (1.2, 2)], ids=["a little", "more than it is faster rested"]
)
def test_long_calls_must_do_well_under_load_too(stage: Stage, slower_under_load: float, chosen: int) -> None:
    stage.us = lambda plan: {1: 300.0, 2: 315.0}.get(plan[0], 330.0)
    stage.under_load = lambda plan: slower_under_load if plan[0] == 1 else 1.0
    found = epigemm.tune("linear_relu", *draw())
    assert found.entries[0].plan[0] == chosen
    assert found.entries[0].fused_us == pytest.approx(
        300.0 * slower_under_load**0.5 if chosen == 1 else 315.0
    )


def test_every_candidate_is_measured_and_shown(stage: Stage) -> None:
    x, weight, bias = draw()
    found = epigemm.tune(epigemm.linear_relu_div, x, weight, bias, 2.0)
    tiles = {each.plan[0] for each in found.candidates if each.plan}
    numbers = [each.plan for each in found.candidates]
    assert len(numbers) == len(set(numbers)) > len(tiles) + 1, "every tile, some in several orders, and torch"
    assert {plan for _, plan in stage.ran} == set(numbers) - {()}
    lines = str(found).splitlines()
    assert "M = 40 measured as 64, N = 256, K = 128, on NVIDIA H200" in lines[0]
    assert len(lines) == 1 + len(numbers) and sum("<- chosen" in line for line in lines) == 1
    assert any("100.0 us  torch " in line for line in lines)


def test_torchs_own_path_may_win(stage: Stage) -> None:
    stage.us = lambda plan: 200.0
    x, weight, bias = draw()
    found = epigemm.tune("linear_relu_div", x, weight, bias, 2.0)
    assert [each.arithmetic for each in found.candidates if each.chosen] == ["torch"]
    explanation = epigemm.explain("linear_relu_div", x, weight, bias, 2.0)
    assert explanation.path == "gemm+elementwise"
    (reason,) = explanation.reasons
    assert "measured to be faster (100 us against 200 us fused)" in reason
    assert reason.endswith("measured on this GPU (cache)")
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
    for m in (40, 33, 64):  # of one bucket
        epigemm.linear_relu(*draw(m=m))
        assert plans_tried(stage) == 0
    epigemm.linear_relu(*draw(m=65))
    assert plans_tried(stage) > 8
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


def test_buckets_of_a_grid() -> None:
    assert tuning_cli.buckets((1, 200)) == [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256]
    assert tuning_cli.buckets((100, 100)) == [128]
    assert tuning_cli.buckets((1, 65536))[-2:] == [49152, 65536]


def test_a_grid() -> None:
    chosen = options("--weights", "64x32,32x64", "--dtypes", "bf16,fp32", "--epilogues", "bias,bias_relu")
    setups = list(tuning_cli.setups(chosen))
    assert len(setups) == len(set(setups)) == 2 * 2 * (1 + 2 * 2)
    assert setups[0].n == 64 and setups[-1].n == 32
    for wrong in (["--sizes", "0:4"], ["--weights", "64"], ["--dtypes", "fp8"], ["--epilogues", "sigmoid"]):
        with pytest.raises(SystemExit):
            options(*wrong)


def test_a_grid_is_measured_once(stage: Stage) -> None:
    known: tables.Entries = {}
    setup = tuning_cli.Setup(BIAS_RELU, torch.bfloat16, 64, 32, "ieee", packs.NONE)
    for _ in range(2):
        tuning_cli._measure(setup, 64, torch.device("cpu"), known, again=False)
    (entry,) = known.values()
    assert entry.m == 64 and entry.bias and plans_tried(stage) > 8
    tuning_cli._measure(setup, 64, torch.device("cpu"), known, again=False)
    assert plans_tried(stage) == 0 and len(known) == 1
    stage.us = lambda plan: 20.0
    tuning_cli._measure(setup, 64, torch.device("cpu"), known, again=True)
    assert [each.fused_us for each in known.values()] == [20.0]


def test_the_command_says_why_it_does_nothing() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = subprocess.run([sys.executable, "-m", "epigemm.tune"], capture_output=True, text=True)
    assert done.returncode == 1 and "torch sees no CUDA device" in done.stdout
    assert "Warning" not in done.stderr


def test_importing_the_commands_module_leaves_the_function() -> None:
    code = "import epigemm; f = epigemm.tune; import epigemm.tune; assert epigemm.tune is f"
    subprocess.run([sys.executable, "-c", code], check=True)
