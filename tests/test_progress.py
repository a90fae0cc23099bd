"""Steps that take long report it to the logger `epigemm`, and in a terminal; nothing is printed elsewhere."""

from __future__ import annotations

import io
import logging
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
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes a hundredth of a second takes long."""
    monkeypatch.setattr(progress, "AFTER", 0.01)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, soon: None) -> Terminal:
    """A terminal, to be put in stderr's place by the test: pytest puts its own there after fixtures."""
    found = Terminal()
    logger = logging.getLogger("epigemm")
    monkeypatch.setattr(logger, "level", logging.WARNING)
    monkeypatch.setattr(logger, "_cache", {})  # of what is enabled
    monkeypatch.delenv("EPIGEMM_PROGRESS", raising=False)
    return found


def take_long(told: threading.Event) -> None:
    """Wait until it was told, as a thread does after `AFTER`."""
    assert told.wait(20)


@pytest.fixture
def notes_all(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What was told, of the shortest things too."""
    monkeypatch.setattr(progress, "NOTED", 0.0)
    caplog.set_level("DEBUG", "epigemm")
    return caplog


def test_what_is_shorter_than_a_second_is_told_at_debug_alone(notes_all: pytest.LogCaptureFixture) -> None:
    caplog = notes_all
    for level, told in (("INFO", 0), ("DEBUG", 1)):
        caplog.set_level(level, "epigemm")
        with doing("counting"):
            pass
        assert len(caplog.messages) == told
    assert caplog.messages == ["counting: 0.0 s"]


@pytest.mark.usefixtures("soon")
def test_what_takes_long_is_told_when_it_does_and_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "epigemm")
    with doing("counting") as task:
        take_long(task)
        assert caplog.messages == ["counting ..."]
    assert len(caplog.messages) == 2 and caplog.messages[1].startswith("counting: ")


def test_a_line_in_a_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """One, also where something long is done within it; the next one has its own."""
    monkeypatch.setattr(sys, "stderr", terminal)
    with doing("counting") as task:
        take_long(task)
        with doing("reckoning") as inner:
            take_long(inner)
    assert terminal.getvalue() == "epigemm: counting ...\n"
    with doing("reckoning") as task:
        take_long(task)
    assert terminal.getvalue() == "epigemm: counting ...\nepigemm: reckoning ...\n"


def test_no_line_where_it_is_logged_refused_or_short(
    terminal: Terminal, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    with caplog.at_level("INFO", "epigemm"), doing("logged") as task:
        take_long(task)
    monkeypatch.setenv("EPIGEMM_PROGRESS", "0")
    with doing("refused") as task:
        take_long(task)
    monkeypatch.delenv("EPIGEMM_PROGRESS")
    monkeypatch.setattr(progress, "AFTER", 60.0)
    with doing("short"):
        time.sleep(0.05)
    assert terminal.getvalue() == ""


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("stderr", [io.StringIO(), None], ids=["a file", "none"])
def test_no_line_where_there_is_no_terminal(stderr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    with doing("counting") as task:
        take_long(task)
    assert stderr is None or stderr.getvalue() == ""


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was told, without the seconds."""
    return [text.rpartition(": ")[0] for text in caplog.messages]


def test_tuning_says_so(stage: Stage, notes_all: pytest.LogCaptureFixture) -> None:
    x, weight = torch.randn(40, 128).bfloat16(), torch.randn(256, 128).bfloat16()
    epigemm.tune("linear_relu_div", x, weight, None, 2.0)
    wanted = "tuning relu_div, bfloat16, M = 40, N = 256, K = 128, on NVIDIA H200"
    assert [text for text in told(notes_all) if text.startswith("tuning")] == [wanted]


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
