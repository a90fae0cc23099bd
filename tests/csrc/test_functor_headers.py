"""The functor headers under plain g++: no torch, no CUTLASS, no CUDA. `test_functors` has their values."""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path

import pytest
import torch

from epigemm.epilogues.registry import EPILOGUES
from tests.support import pages
from tests.support.cases import REGISTRY
from tests.support.functors import COMPILER, CSRC, compiled, needs_compiler, printed

pytestmark = needs_compiler

NUMBERS = [-750.0, -104.5, -88.8, -20.0, -1.5, -0.25, -1e-6, 0.0, 1e-6, 0.3, 1.0, 7.5, 40.0, 88.7, 300.0, 1e4]


def functors() -> dict[str, str]:
    text = (CSRC / "epilogue/registry.def").read_text()
    return dict(re.findall(r"^EPIGEMM_EPILOGUE\((\w+), (\w+), \w+\)$", text, re.M))


def test_headers_stand_alone_on_the_standard_library(tmp_path: Path) -> None:
    """Neither torch nor CUTLASS nor CUDA headers are on the include path, nor reached."""
    sources = []
    for name in functors():
        sources.append(tmp_path / f"{name}.cpp")
        sources[-1].write_text(f'#include "epilogue/{name}.h"\n')
    command = [str(COMPILER), "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", *map(str, sources)]
    subprocess.run([*command, "-fsyntax-only"], check=True, capture_output=True)
    run = subprocess.run([*command, "-M"], check=True, capture_output=True, text=True)
    for path in run.stdout.replace("\\\n", " ").split():
        assert not re.search(r"cutlass|cute/|cuda|/torch/|ATen", path), path


def test_the_functor_of_the_page(tmp_path: Path) -> None:
    """docs/contributing.md shows how one is written: its header compiles as it stands, and computes the formula."""
    text = (CSRC.parent / "docs" / "contributing.md").read_text(encoding="utf-8")
    (header,) = (fence.text for fence in pages.fences(text) if "struct BiasLeakyReLU" in fence.text)
    numbers = [*NUMBERS, math.nan]
    given = ", ".join("double(NAN)" if math.isnan(number) else repr(number) for number in numbers)
    value = "epigemm::BiasLeakyReLU::apply(acc, 0.5, 0.25)"
    main = f'int main() {{ for (double acc : {{{given}}}) std::printf("%.17g\\n", {value}); }}'
    includes = "#include <cmath>\n#include <cstdio>\n#include <initializer_list>\n"
    program = compiled(includes + header.replace("#pragma once", "") + main, tmp_path)
    found = torch.tensor([float(word) for word in printed(program)], dtype=torch.float64)
    z = torch.tensor(numbers, dtype=torch.float64) + 0.5
    torch.testing.assert_close(found, torch.where(z < 0, 0.25 * z, z), equal_nan=True)


@pytest.mark.parametrize("symbol", ["epigemm_open_fp32", "epigemm_open_sm90_tma_float16_0"])
@pytest.mark.parametrize("name", REGISTRY)
def test_the_text_for_nvrtc_includes_no_file(name: str, symbol: str) -> None:
    text = EPILOGUES[name].source(symbol)
    assert not re.search(r'#\s*include\s*"', text)
    assert "epigemm_apply" in text and f"struct {functors()[name]} " in text
