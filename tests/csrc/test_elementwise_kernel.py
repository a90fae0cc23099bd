"""The elementwise kernels' own source under g++ (tests/csrc/emulation), with the host's half that launches them.

Values, derivatives, sums of columns; whole vectors, tails, gaps, any address, any order of axes, a single number.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.csrc.test_mma_kernel import FOLDER, include_folders
from tests.support.functors import COMPILER, CSRC


def test_every_thread_stores_what_the_functor_gives(tmp_path: Path) -> None:
    if not CSRC.is_dir() or COMPILER is None:
        pytest.skip("there are no sources, or no C++ compiler")
    folders = include_folders(with_cutlass=False)
    if not folders:
        pytest.skip("CUDA's headers are not at hand")
    made = str(tmp_path / "elementwise")
    command = [COMPILER, "-std=c++17", "-O1", "-w", f"-I{CSRC}", f"-I{FOLDER.parent}"]
    command += [part for each in folders for part in ("-isystem", str(each))]
    subprocess.run([*command, str(FOLDER / "elementwise.cpp"), "-o", made], check=True)
    done = subprocess.run([made], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout) > 1000, "the problems that were run"
