"""The bare loops of matrix instructions, as nvcc compiles it: nothing in them waits for anything. No GPU is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.check_wheel import cuda_tool

ROOT = Path(__file__).parents[2]


def nvdisasm() -> str | None:
    try:
        return cuda_tool("nvdisasm")
    except SystemExit:
        return None


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
@pytest.mark.skipif(nvdisasm() is None, reason="there is no nvdisasm")
@pytest.mark.parametrize("gpu", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_the_loop_is_of_matrix_instructions_alone(gpu: str, tmp_path: Path) -> None:
    cubin = tmp_path / "loop.cubin"
    source = ROOT / "csrc" / "device" / "tensor_rate.cu"
    options = ["-cubin", f"-arch={gpu}", "-std=c++17", "-O3", "-I", str(ROOT / "csrc")]
    command = ["nvcc", *options, str(source), "-o", str(cubin)]
    subprocess.run(command, check=True, capture_output=True)
    disassemble = [str(nvdisasm()), "-c", str(cubin)]
    text = subprocess.run(disassemble, check=True, capture_output=True, text=True).stdout
    codes = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text, re.MULTILINE)
    for instruction in ("HMMA.16816.F32.BF16", "HMMA.1688.F32.TF32"):
        multiply = [place for place, code in enumerate(codes) if code.startswith(instruction)]
        # The loop is unrolled by four and more. Beside them it counts, and fills in for the hardware.
        assert len(multiply) >= 40 and len(multiply) % 8 == 0, instruction
        unrolled = codes[multiply[0] : multiply[31] + 1]
        assert not [code for code in unrolled if re.match(r"LD[LGSC]?\b|ST[LGS]?\b|BAR|MEMBAR", code)]
        assert 0.5 * len(unrolled) <= 32
    assert not [code for code in codes if re.match(r"(LDL|STL)\b", code)], "spills"
