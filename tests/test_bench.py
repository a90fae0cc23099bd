"""`python -m epigemm.bench` says where the benchmarks are, and the files that it names exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_what_it_names_is_there() -> None:
    command = [sys.executable, "-m", "epigemm.bench"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    targets, modules = re.findall(r"^    make (\w+)", text, re.M), re.findall(r"-m (\w+)", text)
    assert targets == ["bench"] and modules == ["benchmarks"]
    if not (ROOT / "Makefile").is_file():
        pytest.skip("sources are not at hand")
    assert re.search(rf"^{targets[0]}:", (ROOT / "Makefile").read_text(), re.M)
    assert (ROOT / modules[0] / "__main__.py").is_file()
