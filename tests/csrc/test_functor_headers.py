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
from tests.support.functors import COMPILER, CSRC

pytestmark = [
    pytest.mark.skipif(not CSRC.is_dir(), reason="sources are not at hand"),
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
]

NUMBERS = [-750.0, -104.5, -88.8, -20.0, -1.5, -0.25, -1e-6, 0.0, 1e-6, 0.3, 1.0, 7.5, 40.0, 88.7, 300.0, 1e4]


def functors() -> dict[str, str]:
    text = (CSRC / "epilogue/registry.def").read_text()
    return dict(re.findall(r"^EPIGEMM_EPILOGUE\((\w+), (\w+), \w+\)$", text, re.M))


def compile_command(source: Path, *options: str) -> list[str]:
    assert COMPILER is not None
    return [COMPILER, "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", *options, str(source)]


def test_headers_need_nothing_but_the_standard_library(tmp_path: Path) -> None:
    """Neither torch nor CUTLASS nor CUDA headers are on the include path, nor reached."""
    source = tmp_path / "functors.cpp"
    source.write_text("".join(f'#include "epilogue/{name}.h"\n' for name in functors()))
    run = subprocess.run(compile_command(source, "-M"), check=True, capture_output=True, text=True)
    for path in run.stdout.replace("\\\n", " ").split():
        assert not re.search(r"cutlass|cute/|cuda|/torch/|ATen", path), path


def test_each_header_stands_alone(tmp_path: Path) -> None:
    for name in functors():
        single = tmp_path / f"{name}.cpp"
        single.write_text(f'#include "epilogue/{name}.h"\n')
        subprocess.run(compile_command(single, "-fsyntax-only"), check=True, capture_output=True)


def test_the_functor_of_the_page(tmp_path: Path) -> None:
    """docs/contributing.md shows how one is written: its header compiles as it stands, and computes the formula."""
    text = (CSRC.parent / "docs" / "contributing.md").read_text(encoding="utf-8")
    (header,) = (fence.text for fence in pages.fences(text) if "struct BiasLeakyReLU" in fence.text)
    (tmp_path / "bias_leaky_relu.h").write_text(header)
    numbers = [*NUMBERS, math.nan]
    given = ", ".join("double(NAN)" if math.isnan(number) else repr(number) for number in numbers)
    value = "epigemm::BiasLeakyReLU::apply(acc, 0.5, 0.25)"
    lines = [
        "#include <cmath>",
        "#include <cstdio>",
        "#include <initializer_list>",
        '#include "bias_leaky_relu.h"',
    ]
    lines += [f'int main() {{ for (double acc : {{{given}}}) std::printf("%.17g\\n", {value}); }}']
    source, binary = tmp_path / "page.cpp", tmp_path / "page"
    source.write_text("\n".join(lines))
    subprocess.run(compile_command(source, "-o", str(binary)), check=True, capture_output=True)
    run = subprocess.run([str(binary)], check=True, capture_output=True, text=True)
    found = torch.tensor([float(line) for line in run.stdout.split()], dtype=torch.float64)
    z = torch.tensor(numbers, dtype=torch.float64) + 0.5
    torch.testing.assert_close(found, torch.where(z < 0, 0.25 * z, z), equal_nan=True)


@pytest.mark.parametrize("symbol", ["epigemm_open_fp32", "epigemm_open_sm90_tma_float16_0"])
@pytest.mark.parametrize("name", REGISTRY)
def test_the_text_for_nvrtc_includes_no_file(name: str, symbol: str) -> None:
    text = EPILOGUES[name].source(symbol)
    assert not re.search(r'#\s*include\s*"', text)
    assert "epigemm_apply" in text and f"struct {functors()[name]} " in text
