"""A Python function becomes an epilogue: what it declares, and what is known of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from epigemm.epilogues.declaring import OperandSpec, trace
from epigemm.epilogues.kinds import MATRIX, PER_COLUMN, PER_ROW, SCALAR, PerColumn
from tests.epilogues.tracing.functions import swish_clamp


def test_declaration() -> None:
    traced = trace(swish_clamp)
    assert traced.name == "swish_clamp"
    assert traced.operands == (
        OperandSpec(PER_COLUMN, "bias"),
        OperandSpec(MATRIX, "residual"),
        OperandSpec(PER_ROW, "gain"),
        OperandSpec(SCALAR, "limit", 6.0),
    )
    assert traced.slots == (0, 10, 8, 4)
    assert traced.reads == (True, True, True, True)


def test_digest_is_of_what_is_computed() -> None:
    def other_name(acc: Tensor, b: PerColumn) -> Tensor:
        return torch.relu(acc + b)

    first = trace(lambda_with_bias())
    assert first.digest == trace(other_name).digest
    assert first.digest != trace(lambda acc: torch.relu(acc)).digest
    code = (
        "from epigemm.epilogues.declaring import trace\nimport sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[3])!r})\n"
        "from tests.epilogues.tracing.test_trace import lambda_with_bias\nprint(trace(lambda_with_bias()).digest)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == first.digest


def lambda_with_bias() -> Callable[..., Tensor]:
    def biased(acc: Tensor, bias: PerColumn) -> Tensor:
        return torch.relu(acc + bias)

    return biased


def test_importing_the_package_does_not_import_the_tracer() -> None:
    asked = "print('torch.fx.experimental.proxy_tensor' in sys.modules)"
    code = f"import sys, epigemm, epigemm.epilogues.declaring; {asked}"
    before = f"import sys, torch; {asked}"
    answers = [
        subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
        for text in (code, before)
    ]
    assert answers[0] == answers[1]


def test_unread_operands_are_seen() -> None:
    def unread(acc: Tensor, bias: PerColumn, other: PerColumn) -> Tensor:
        return acc + other + 0.0 * 2.0

    traced = trace(unread)
    assert traced.reads == (False, True)
    text = traced.kernel_source((1, 2))
    assert "if (slot == 0)" not in text and "if (slot == 1) return 2;" in text
