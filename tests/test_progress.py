"""Steps that take long report it to the logger `epigemm`, and in a terminal; nothing is printed elsewhere."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch

import epigemm
from epigemm import progress
from epigemm.progress import doing
from tests.support.stage import Stage


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Terminal:
    """A terminal, to be put in stderr's place by the test: pytest puts its own there after fixtures."""
    caplog.set_level("WARNING", "epigemm")
    monkeypatch.delenv("EPIGEMM_PROGRESS", raising=False)
    return Terminal()


def take_long(told: threading.Event) -> None:
    """Wait until it was told, as a thread does after `AFTER`."""
    assert told.wait(20)


def test_what_is_shorter_than_a_second_is_told_at_debug_alone(caplog: pytest.LogCaptureFixture) -> None:
    for level in ("INFO", "DEBUG"):
        caplog.set_level(level, "epigemm")
        with doing(f"at {level}"):
            time.sleep(progress.NOTED)
    assert [text.rpartition(": ")[0] for text in caplog.messages] == ["at DEBUG"]


def test_what_takes_long_is_told_when_it_does_and_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "epigemm")
    with doing("counting") as task:
        take_long(task)
        assert caplog.messages == ["counting ..."]
    assert len(caplog.messages) == 2 and caplog.messages[1].startswith("counting: ")


def test_a_line_in_a_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """One, also where something long is done within it; the next one has its own; none of what is short."""
    monkeypatch.setattr(sys, "stderr", terminal)
    with doing("counting") as task:
        take_long(task)
        with doing("reckoning") as inner:
            take_long(inner)
    assert terminal.getvalue() == "epigemm: counting ...\n"
    with doing("short"):
        pass
    with doing("reckoning") as task:
        take_long(task)
    assert terminal.getvalue() == "epigemm: counting ...\nepigemm: reckoning ...\n"


@pytest.mark.parametrize("why", ["logged", "refused", "a file", "none"])
def test_no_line(
    why: str, terminal: Terminal, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is logged or refused, or stderr is no terminal."""
    if why == "refused":
        monkeypatch.setenv("EPIGEMM_PROGRESS", "0")
    stderr: Any = {"a file": io.StringIO(), "none": None}.get(why, terminal)
    monkeypatch.setattr(sys, "stderr", stderr)
    with caplog.at_level("INFO" if why == "logged" else "WARNING", "epigemm"), doing("counting") as task:
        take_long(task)
    assert stderr is None or stderr.getvalue() == ""


def slowly(plan: tuple[int, ...]) -> float:
    time.sleep(1e-3)
    return 50.0


def test_tuning_says_so(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "epigemm")
    stage.us = slowly
    x, weight = torch.randn(40, 128).bfloat16(), torch.randn(256, 128).bfloat16()
    epigemm.tune("linear_relu_div", x, weight, None, 2.0)
    wanted = "tuning relu_div, bfloat16, M = 40, N = 256, K = 128, on NVIDIA H200: "
    assert [text.startswith(wanted) for text in caplog.messages if text.startswith("tuning")] == [True]


@pytest.mark.parametrize("how", ["", "TORCH_LOGS"])
def test_in_a_process_of_its_own(how: str) -> None:
    """Nothing on stderr, unless torch's setting asks for it; the first decoration imports what torch has not."""
    code = (
        "import torch, epigemm\n"
        "from epigemm import progress\n"
        "def shifted(acc, bias: epigemm.PerColumn): return torch.tanh(acc + bias)\n"
        "epigemm.epilogue(shifted)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_LOGS"}
    environment |= {how: "+epigemm"} if how else {}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout == ""
    assert ("tracing the epilogue shifted: " in done.stderr) is bool(how)
    assert how or "epigemm" not in done.stderr
