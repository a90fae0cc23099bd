"""Measured choices on a GPU: what tune() finds is used, right and kept, and not looked for in a capture."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn
from epigemm.arguments.calls import LinearCall
from epigemm.calls import resolve
from epigemm.calls.forecast import consider
from epigemm.epilogues.library import BIAS_RELU, RELU_DIV
from epigemm.epilogues.registry import typed
from epigemm.packs import weight_packs
from epigemm.planner import dry_runs, plans, times
from epigemm.tuner import candidates
from tests.support import reference
from tests.support.arithmetic import BF16, SCALED, SPLIT, TF32, Arithmetic
from tests.support.cases import Operands, fused_unavailable
from tests.support.choices import forget

pytestmark = pytest.mark.gpu

N, K = 512, 1024


@pytest.fixture(autouse=True)
def empty_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No measured choice to begin with; what was there is loaded again afterwards."""
    if reason := fused_unavailable():
        pytest.skip(f"gpu: {reason}")
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path))
    plans.usable(0)
    forget(0)
    yield
    monkeypatch.undo()
    forget(0)
    times.load(0)


def draw(m: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = torch.randn(m, K), torch.randn(N, K) / K**0.5, torch.randn(N)
    return x.to("cuda", dtype), weight.to("cuda", dtype), bias.to("cuda", dtype)


def what_is_said(x: Tensor, weight: Tensor, bias: Tensor) -> dict[str, Any]:
    """Dispatch's answer about a call in 16 bits."""
    (found,) = consider(LinearCall(BIAS_RELU, x, weight, (bias,))).found.tried
    return found.plan


def source(x: Tensor, weight: Tensor, bias: Tensor) -> str:
    plan = what_is_said(x, weight, bias)
    return str(plan["source"])


@pytest.mark.parametrize("m", [1, 100])
def test_what_tune_finds_is_used(m: int) -> None:
    x, weight, bias = draw(m)
    found = epigemm.tune("linear_relu", x, weight, bias)
    (entry,) = found.entries
    (chosen,) = [each for each in found.candidates if each.chosen]
    assert (chosen.arithmetic == "torch") == (entry.torch_us < entry.fused_us)
    explanation = epigemm.explain("linear_relu", x, weight, bias)
    assert (explanation.path == "fused") == (chosen.arithmetic != "torch")
    assert any("measured on this GPU (cache)" in reason for reason in explanation.reasons)
    if chosen.arithmetic != "torch":
        assert explanation.candidates[0]["plan"] == list(chosen.plan)
    actual = epigemm.linear_relu(x, weight, bias)
    bounded = reference.linear("bias_relu", x, weight, Operands(bias=bias), BF16, second_path=True)
    reference.assert_within(actual, bounded)


@pytest.mark.parametrize(
    ("arithmetic", "precision", "setting"),
    [
        (BF16, "default", "ieee"),
        (SPLIT, "highest", "ieee"),
        (SCALED, "high", "tf32"),
        (TF32, "high", "tf32"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.parametrize("m", [16, 128])
def test_every_candidate_is_right(m: int, arithmetic: Arithmetic, precision: str, setting: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = setting
    x, weight, bias = draw(m, arithmetic.dtype)
    for pack_use in (weight_packs.KEEP, weight_packs.NONE):
        call = candidates.on_random_x(LinearCall(RELU_DIV, x, weight, (bias, 2.0), precision, pack_use))
        name = "ieee" if arithmetic is BF16 else arithmetic.name
        (family,) = (each for each in candidates.families(call) if each.arithmetic == name)
        operands = Operands(bias=bias, scalars=[2.0])
        bounded = reference.linear("relu_div", call.x, weight, operands, arithmetic, second_path=False)
        assert len({candidate.plan for candidate in family.candidates}) == len(family.candidates) > 2
        for candidate in family.candidates:
            reference.assert_within(candidate.run()[:, :N], bounded)


def fused_out(x: Tensor, weight: Tensor, bias: Tensor, plan: tuple[int, ...] = ()) -> Tensor | None:
    """The fused kernel alone, by the planner's plan or another; None where it is not to run."""
    out = x.new_full((x.shape[0], N), float("nan"))
    call = LinearCall(BIAS_RELU, x, weight, (bias,), out=out)
    if plan:
        return resolve.linear(call, (dry_runs.ARITHMETICS.index("ieee"), *plan))
    return resolve.linear(call) if dry_runs.dry_run(call).fused else None


def test_calls_follow_what_is_measured_at_once() -> None:
    """The planner remembers its plans: new choices, and none any more, are seen by the very next call."""
    x, weight, bias = draw(100)
    other = draw(101)[0]
    before, beside = fused_out(x, weight, bias), fused_out(other, weight, bias)
    entry = times.Entry(
        "bias_relu", "bfloat16", "ieee", False, True, False, 100, N, K, (0, 0, 0, 1, 1), 1.0, 9.0
    )
    in_parts = (1, 3, 0, 1, 4)  # adds in another order, so that other bits show which one ran
    expected = {plan: fused_out(x, weight, bias, plan) for plan in (entry.plan, in_parts)}
    for _ in range(3):
        for plan, runs in ((entry.plan, True), (in_parts, True), (entry.plan, False)):
            times.install(0, [replace(entry, plan=plan, torch_us=9.0 if runs else 0.5)])
            for _ in range(2):
                actual = fused_out(x, weight, bias)
                assert (actual is not None) is runs
                assert actual is None or torch.equal(actual, not_none(expected[plan]))
            assert_same(fused_out(other, weight, bias), beside)
        forget(0)
        assert_same(fused_out(x, weight, bias), before)


def not_none(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def assert_same(actual: Tensor | None, expected: Tensor | None) -> None:
    assert (actual is None) is (expected is None)
    assert actual is None or torch.equal(actual, not_none(expected))


def test_a_choice_is_one_for_its_very_m() -> None:
    x, weight, bias = draw(100)
    epigemm.tune("linear_relu", x, weight, bias)
    assert source(x, weight, bias) == "cache"
    for m in (99, 101, 128, 200):
        assert source(draw(m)[0], weight, bias) == "model"


def test_the_device_tells_its_speed() -> None:
    """What the planner reads from the GPU is what is known of this kind of GPU."""
    x, weight, bias = draw(100)
    plan = what_is_said(x, weight, bias)
    assert plan["is_speed_assumed"] is False
    if torch.cuda.get_device_name(0) == "NVIDIA H200":
        sizes = ("bias_relu", 100, N, K, "bfloat16", "ieee")
        described = plans.ask(*sizes, gpu=(90, 132, 1980, 4285000))
        assert plan["fallback_us"] == pytest.approx(described["fallback_us"], rel=0.03)
        fastest, expected = plan["candidates"][0], described["candidates"][0]
        assert fastest["predicted_us"] == pytest.approx(expected["predicted_us"], rel=0.03)


CHILD = """
import torch, epigemm
x, weight = (torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in ((32, 1024), (512, 1024)))
print(" ".join(epigemm.explain("linear_relu", x, weight, weight[:, 0].contiguous()).reasons))
"""


def test_a_second_process_finds_the_cache() -> None:
    x, weight, bias = draw(32)

    def ask() -> str:
        command = [sys.executable, "-c", CHILD]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return done.stdout

    epigemm.tune("linear_relu", x, weight, bias)
    assert "measured on this GPU (cache)" in ask()


# --- epilogues that are made at run time ------------------------------------------------------------------------------


@epigemm.epilogue
def gated(acc: Tensor, bias: PerColumn, other: Matrix) -> Tensor:
    return torch.sigmoid(acc + bias) * other


def draw_gated(m: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *draw(m, dtype), torch.randn(m, N, device="cuda", dtype=dtype)


def made_call(m: int, dtype: torch.dtype, precision: str, pack_use: str) -> LinearCall:
    x, weight, *operands = draw_gated(m, dtype)
    return LinearCall(typed(gated.traced, [False, False]), x, weight, operands, precision, pack_use)


@pytest.mark.parametrize("m", [1, 100, 2000])
def test_a_made_epilogue_is_measured(m: int) -> None:
    """All candidates are linked, and what is chosen runs; with or without gaps between the matrix's rows."""
    x, weight, bias, other = draw_gated(m)
    found = epigemm.tune(gated, x, weight, bias, other)
    assert len({each.plan for each in found.candidates}) > 4 and not found.left_out
    (entry,) = found.entries
    assert entry.epilogue == typed(gated.traced, [False, False]).name
    assert sum(each.chosen for each in found.candidates) == 1
    explanation = epigemm.explain(gated, x, weight, bias, other)
    assert any("measured on this GPU (cache)" in reason for reason in explanation.reasons)
    assert (explanation.path == "fused") == (entry.fused_us <= entry.torch_us)
    wide = torch.randn(m, N + 3, device="cuda", dtype=x.dtype)[:, :N]
    for matrix in (other, wide):
        exact = torch.sigmoid(x.double() @ weight.double().t() + bias.double()) * matrix.double()
        torch.testing.assert_close(gated(x, weight, bias, matrix).double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("dtype", "precision", "setting", "relative"),
    [
        (torch.bfloat16, "default", "ieee", 2.0**-7),
        (torch.float32, "highest", "ieee", 2.0**-18),
        (torch.float32, "high", "tf32", 2.0**-8),
    ],
    ids=["bf16", "split", "scaled and TF32"],
)
@pytest.mark.parametrize("m", [16, 300])
def test_every_candidate_of_a_made_epilogue_is_right(
    m: int, dtype: torch.dtype, precision: str, setting: str, relative: float
) -> None:
    torch.backends.cuda.matmul.fp32_precision = setting
    for pack_use in (weight_packs.KEEP, weight_packs.NONE):
        call = candidates.on_random_x(made_call(m, dtype, precision, pack_use))
        bias, other = (each.double() for each in call.inputs[2:])
        exact = torch.sigmoid(call.x.double() @ call.weight.double().t() + bias) * other
        # A sigmoid's slope is at most 1/4, and a sum of K products of these sizes is about 1.
        bound = relative * (exact.abs() + 2 * other.abs() + 1e-3)
        every = list(candidates.families(call))
        assert every
        for family in every:
            assert not family.left_out and len(family.candidates) > 2
            for candidate in family.candidates:
                off = (candidate.run()[:, :N].double() - exact).abs()
                assert bool((off <= bound).all()), candidate.text


def test_the_choice_is_there_when_the_epilogue_is_made_later() -> None:
    x, weight, bias, other = draw_gated(32)
    (entry,) = epigemm.tune(gated, x, weight, bias, other).entries
    script = textwrap.dedent("""
        import torch, epigemm
        from epigemm import Matrix, PerColumn
        from epigemm.epilogues.registry import typed
        draw = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16)
        x, weight, bias = draw(32, 1024), draw(512, 1024), draw(512)
        epigemm.linear_relu(x, weight, bias)

        @epigemm.epilogue
        def gated(acc, bias: PerColumn, other: Matrix):
            return torch.sigmoid(acc + bias) * other

        print(typed(gated.traced, [False, False]).name)
        print(" ".join(epigemm.explain(gated, x, weight, bias, draw(32, 512)).reasons))
    """)
    folder = (
        Path(os.environ["EPIGEMM_CACHE_DIR"]) / "child.py"
    )  # the source of an epilogue is read from a file
    folder.write_text(script)
    command = [sys.executable, str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    name, reasons = done.stdout.splitlines()
    assert name == entry.epilogue and "measured on this GPU (cache)" in reasons
