"""Measured choices on a GPU: what tune() finds is used, right and kept, of epilogues of the registry and of users."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm import Matrix, PerColumn
from epigemm.arguments.calls import LinearCall
from epigemm.calls.forecast import consider
from epigemm.epilogues.library import BIAS_RELU, RELU_DIV
from epigemm.epilogues.registry import typed
from epigemm.planner import plans, times
from epigemm.tuner import tuner
from tests.support import reference
from tests.support.arithmetic import BF16, SCALED, SPLIT, TF32, Arithmetic
from tests.support.cases import Operands
from tests.support.choices import forget
from tests.support.problems import formula_of
from tools.planner import ask_planner

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused_kernels", "empty_table")]

N, K = 512, 1024


@pytest.fixture
def empty_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No measured choice to begin with; what was there is loaded again afterwards."""
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path))
    plans.usable(0)
    forget(0)
    yield
    monkeypatch.undo()
    forget(0)
    times.load(0)


@epigemm.epilogue
def gated(acc: Tensor, bias: PerColumn, other: Matrix) -> Tensor:
    return (acc + bias) * other


def draw(m: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = torch.randn(m, K), torch.randn(N, K) / K**0.5, torch.randn(N)
    return x.to("cuda", dtype), weight.to("cuda", dtype), bias.to("cuda", dtype)


def what_is_said(x: Tensor, weight: Tensor, bias: Tensor) -> dict[str, Any]:
    """Dispatch's answer about a call in 16 bits."""
    (found,) = consider(LinearCall(BIAS_RELU, x, weight, (bias,))).found.tried
    return found.plan


def matrix(m: int, gap: int = 0) -> Tensor:
    return torch.randn(m, N + gap, device="cuda", dtype=torch.bfloat16)[:, :N]


@pytest.mark.parametrize("m", [1, 100, 2000])
@pytest.mark.parametrize("is_made", [False, True], ids=["of the registry", "of a user"])
def test_what_tune_finds_is_used(m: int, is_made: bool) -> None:
    """All candidates of a user's are linked; with or without gaps between the rows of its matrix."""
    given: list[Any] = [*draw(m), *([matrix(m)] if is_made else [])]
    function = gated if is_made else epigemm.linear_relu
    name = typed(gated.traced, [False, False]).name if is_made else "bias_relu"
    found = epigemm.tune(function, *given)
    (entry,) = found.entries
    assert entry.epilogue == name and not found.left_out
    (chosen,) = [each for each in found.candidates if each.chosen]
    assert len({each.plan for each in found.candidates}) > 4
    assert (chosen.arithmetic == "torch") == (entry.torch_us < entry.fused_us)
    explanation = epigemm.explain(function, *given)
    assert (explanation.path == "fused") == (chosen.arithmetic != "torch")
    assert any("measured on this GPU (cache)" in reason for reason in explanation.reasons)
    if chosen.arithmetic != "torch":
        assert explanation.candidates[0]["plan"] == list(chosen.plan)
    x, weight, bias, *_ = given
    for gap in (0, 3) if is_made else (0,):
        others = [matrix(m, gap)] if is_made else []
        formula = formula_of(gated) if is_made else "bias_relu"
        operands = Operands(None, [bias, *others]) if is_made else Operands(bias)
        apart = bias if is_made else None  # PyTorch's product may be rounded before it or behind it
        bounded = reference.linear(formula, x, weight, operands, BF16, second_path=True, apart=apart)
        reference.assert_within(function(x, weight, bias, *others), bounded)


@pytest.mark.parametrize(
    ("arithmetic", "precision", "setting"),
    [(BF16, "default", "ieee"), (SPLIT, "highest", "ieee"), (SCALED, "high", "tf32"), (TF32, "high", "tf32")],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.parametrize("m", [16, 128, 300])
@pytest.mark.parametrize("is_made", [False, True], ids=["of the registry", "of a user"])
def test_every_candidate_is_right(
    m: int, arithmetic: Arithmetic, precision: str, setting: str, is_made: bool
) -> None:
    torch.backends.cuda.matmul.fp32_precision = setting
    x, weight, bias = draw(m, arithmetic.dtype)
    other = torch.randn(m, N, device="cuda", dtype=arithmetic.dtype)
    epilogue = typed(gated.traced, [False, False]) if is_made else RELU_DIV
    operands = Operands(None, [bias, other]) if is_made else Operands(bias, [], [2.0])
    formula = formula_of(gated) if is_made else "relu_div"
    if arithmetic is not BF16:
        epigemm.pack(weight, precision=precision)
    for uses_pack in (True, False):
        given = (bias, other) if is_made else (bias, 2.0)
        call = tuner.on_random_x(LinearCall(epilogue, x, weight, given, precision, uses_pack))
        name = "ieee" if arithmetic is BF16 else arithmetic.name
        (family,) = (each for each in tuner.families(call) if each.arithmetic == name)
        bounded = reference.linear(formula, call.x, weight, operands, arithmetic)
        assert not family.left_out
        assert len({candidate.plan for candidate in family.candidates}) == len(family.candidates) > 2
        for candidate in family.candidates:
            reference.assert_within(candidate.run()[:, :N], bounded)


def test_the_device_tells_its_speed() -> None:
    """What the planner reads from the GPU is what is known of this kind of GPU."""
    plan = what_is_said(*draw(100))
    assert plan["is_speed_assumed"] is False
    if torch.cuda.get_device_name(0) == "NVIDIA H200":
        sizes = ("bias_relu", 100, N, K, "bfloat16", "ieee")
        described = ask_planner(*sizes, gpu=(90, 132, 1980, 4285000))
        assert plan["fallback_us"] == pytest.approx(described["fallback_us"], rel=0.03)
        fastest, expected = plan["candidates"][0], described["candidates"][0]
        assert fastest["predicted_us"] == pytest.approx(expected["predicted_us"], rel=0.03)


def test_a_second_process_finds_the_cache(tmp_path: Path) -> None:
    """Also where an epilogue is made later."""
    x, weight, bias = draw(32)
    epigemm.tune("linear_relu", x, weight, bias)
    (entry,) = epigemm.tune(gated, x, weight, bias, matrix(32)).entries
    script = """
        import torch, epigemm
        from epigemm import Matrix, PerColumn
        from epigemm.epilogues.registry import typed
        draw = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16)
        x, weight, bias = draw(32, 1024), draw(512, 1024), draw(512)
        print(" ".join(epigemm.explain("linear_relu", x, weight, bias).reasons))

        @epigemm.epilogue
        def gated(acc, bias: PerColumn, other: Matrix):
            return (acc + bias) * other

        print(typed(gated.traced, [False, False]).name)
        print(" ".join(epigemm.explain(gated, x, weight, bias, draw(32, 512)).reasons))
    """
    file = Path(os.environ["EPIGEMM_CACHE_DIR"]) / "child.py"  # the source of an epilogue is read from a file
    file.write_text(textwrap.dedent(script))
    done = subprocess.run([sys.executable, str(file)], check=True, capture_output=True, text=True)
    plain, name, made = done.stdout.splitlines()
    assert name == entry.epilogue
    assert all("measured on this GPU (cache)" in reasons for reasons in (plain, made))
