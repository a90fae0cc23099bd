"""Kernels' own source under g++ (tests/csrc/emulation): mma.sync, elementwise, and parts of those that TMA feeds.

The threads of a CTA are fibers, and the instructions are emulated: the indices, the ring of stages, the epilogue and
every edge are the kernel's own. The mma.sync kernels have run on Hopper alone.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gradings import bounds
from tests.support.functors import COMPILER, CSRC, compiled, needs_compiler, printed

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "emulation"
BY_VECTORS, BY_ELEMENTS = (0, 3, 5, 7), (8,)
WHOLE = [(16, 64, 64, 0, 0), (1, 8, 8, 0, 0), (37, 72, 40, 8, 16), (130, 264, 136, 0, 8)]
ODD = [(1, 1, 1, 3, 0), (37, 71, 41, 1, 3), (130, 133, 135, 0, 1), (70, 64, 64, 1, 0)]
CASES = [("bfloat16", tile, each, 1) for tile in BY_VECTORS for each in WHOLE]
CASES += [("bfloat16", tile, each, 1) for tile in BY_ELEMENTS for each in ODD]
CASES += [("tf32", 0, each, 1) for each in WHOLE[2:]]
CASES += [("tf32", 2, each, 1) for each in [*WHOLE[:3], (5, 12, 20, 4, 4)]]
# Slices are made of rows that lie anywhere. Of K: less than a stage, whole stages, more than a block of 512, and a part
# of a stage.
ON_SLICES = [
    (16, 64, 64, 0, 0),
    (1, 8, 31, 1, 3),
    (37, 72, 200, 3, 1),
    (130, 136, 96, 0, 0),
    (5, 9, 1100, 0, 0),
]
CASES += [("split", tile, each, 1) for tile in (0, 1) for each in ON_SLICES]
CASES += [("scaled", 2, each, 1) for each in ON_SLICES]
CASES += [("float16", 6, WHOLE[2], 1), ("float16", 9, ODD[1], 1)]
# Several CTAs to a tile: shares of one stage, of as many, and of one more than others. The last one ends within a
# stage.
DIVIDED = [(37, 72, 136, 8, 16), (20, 136, 328, 0, 8)]
CASES += [
    ("bfloat16", tile, each, splits)
    for tile in BY_VECTORS
    for each, splits in zip(DIVIDED, (2, 3), strict=True)
]
CASES += [("bfloat16", 7, (5, 72, 520, 0, 0), 8)]
CASES += [
    ("tf32", tile, each, splits) for tile in (0, 2) for each, splits in zip(DIVIDED, (2, 4), strict=True)
]
CASES += [("split", tile, (37, 72, 200, 3, 1), 4) for tile in (0, 1)] + [("split", 1, (5, 9, 1100, 0, 0), 2)]
CASES += [("scaled", 2, (37, 72, 200, 3, 1), splits) for splits in (2, 4)] + [("float16", 6, DIVIDED[1], 4)]
ALL = 1_000_000  # as many CTAs as tiles
# CTAs that compute several tiles, some of them one more than others: of K less than the ring has, and more.
FEW_CTAS = [
    ("bfloat16", 0, (200, 520, 136, 8, 16), 4),
    ("bfloat16", 5, (100, 136, 40, 0, 8), 1),
    ("bfloat16", 8, (130, 133, 71, 1, 3), 4),
    ("tf32", 0, (130, 264, 136, 0, 8), 3),
    ("split", 1, (70, 136, 200, 3, 1), 3),
]


def include_folders(*, with_cutlass: bool = True) -> list[Path]:
    """Of CUTLASS and CUDA; none where one of them is missing."""
    locate = [sys.executable, str(ROOT / "build_backend/locate.py")]
    done = subprocess.run(locate, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    places = [Path(found["nvjitlink"]["path"] or "/").parent, *sorted(Path("/usr/local").glob("cuda*"))]
    cuda = next((each / "include" for each in places if (each / "include/cuda_fp16.h").is_file()), None)
    cutlass = found["cutlass"]["path"]
    if cuda is None or (with_cutlass and not cutlass):
        return []
    return [*([Path(cutlass) / "include"] if with_cutlass else []), cuda, cuda / "cccl"]


def made(source: str, folder: Path, *options: str, with_cutlass: bool = False) -> Path:
    """The program of a source. It takes up to a minute, which ccache keeps where there is one, but for the linking."""
    if not CSRC.is_dir() or COMPILER is None:
        pytest.skip("there are no sources, or no C++ compiler")
    folders = include_folders(with_cutlass=with_cutlass)
    if not folders:
        pytest.skip("CUTLASS's or CUDA's headers are not at hand")
    program = folder / source
    command = [*filter(None, (shutil.which("ccache"), COMPILER))]
    # Optimised it is compiled in half the time, too: what CuTe computes of constant layouts is gone early.
    command += ["-std=c++17", "-O1", *options, "-w", f"-I{CSRC}", f"-I{FOLDER.parent}"]
    command += [part for each in folders for part in ("-isystem", str(each))]
    compiled = str(program.with_suffix(".o"))
    subprocess.run([*command, "-c", str(FOLDER / f"{source}.cpp"), "-o", compiled], check=True)
    subprocess.run([COMPILER, compiled, "-o", str(program)], check=True)
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = ["-fno-exceptions"]
    if COMPILER and Path(COMPILER).name == "g++":
        # It collects no garbage below 1 GB, and inlines less, which takes longer than it saves.
        options += ["--param=ggc-min-expand=1000", "--param=ggc-min-heapsize=1000000"]
        options += ["-fno-inline-functions-called-once"]
    return made("sm80_mma", tmp_path_factory.mktemp("emulation"), *options, with_cutlass=True)


def test_every_thread_of_an_elementwise_kernel_stores_what_the_functor_gives(tmp_path: Path) -> None:
    """With the host's half that launches them.

    Values, derivatives, sums of columns; whole vectors, tails, gaps, any address, any order of axes, a single number.
    """
    done = subprocess.run([made("elementwise", tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout) > 1000, "the problems that were run"


def check(program: Path, element: str, tile: int, sizes: tuple[int, ...], splits: int, ctas: int) -> None:
    """`sizes`: M, N, K, elements before each matrix, and elements behind each row."""
    command = [str(program), element, *map(str, (tile, *sizes, splits, ctas))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert 0 <= float(done.stdout.split()[0]) <= 1, "the largest error in units of its bound"


@pytest.mark.parametrize(("element", "tile", "sizes", "splits"), CASES)
def test_a_tile(program: Path, element: str, tile: int, sizes: tuple[int, ...], splits: int) -> None:
    check(program, element, tile, sizes, splits, ALL)


@pytest.mark.parametrize(("element", "tile", "sizes", "ctas"), FEW_CTAS)
def test_several_tiles_of_a_cta(
    program: Path, element: str, tile: int, sizes: tuple[int, ...], ctas: int
) -> None:
    check(program, element, tile, sizes, 1, ctas)


# --- the workspace of sums where CTAs share the K of a tile: csrc/gemm/sm80_mma/shares.h ------------------------------


WORKSPACE = r"""
#include "gemm/sm80_mma/shares.h"

#include <cstdio>
#include <cstdlib>

// Arguments: 0 for bf16, else the arithmetic of fp32; tile, M, N, K, splits.
int main(int, char** given) {
  using namespace epigemm;
  const auto number = [&](int i) { return std::atoi(given[i]); };
  Problem p;
  p.x.element = number(1) == 0 ? ElementType::BFloat16 : ElementType::Float32;
  p.arithmetic = static_cast<Arithmetic>(number(1));
  p.m = number(3), p.n = number(4), p.k = number(5);
  const Plan plan{FamilyId::sm80_mma, number(2), Raster::AlongM, 1, number(6)};
  const auto& tile = sm80_mma::tile_of(p, plan.tile);
  std::printf("%lld %lld\n", static_cast<long long>(sm80_mma::units_of(p, tile)),
              static_cast<long long>(sm80_mma::split_workspace_bytes(p, plan)));
}
"""
BF16, TF32, SPLIT, SCALED = range(4)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(WORKSPACE, tmp_path_factory.mktemp("workspace"))


@needs_compiler
@pytest.mark.parametrize(
    ("given", "units", "counters", "sums"),
    [
        ((BF16, 6, 64, 4096, 4096, 4), 64, 256, 4 * 64 * 64 * 64),
        ((BF16, 6, 65, 4097, 4097, 4), 65, 768, 4 * 130 * 64 * 64),
        ((BF16, 7, 16, 4096, 8, 2), 1, 256, 2 * 64 * 16 * 64),
        ((BF16, 4, 1, 1, 33, 2), 2, 256, 2 * 128 * 128),
        ((TF32, 1, 128, 256, 40, 2), 3, 256, 2 * 2 * 128 * 128),
        # Two slices share a block of 64 columns, which is two stages.
        ((SPLIT, 1, 64, 128, 130, 2), 3, 256, 2 * 64 * 128),
        ((SCALED, 2, 64, 128, 130, 2), 3, 256, 2 * 2 * 64 * 64),
        ((BF16, 6, 64, 4096, 4096, 1), 64, 0, 0),
    ],
)
def test_its_bytes(workspace: Path, given: tuple[int, ...], units: int, counters: int, sums: int) -> None:
    """A counter of 4 bytes for each tile, in sections of 256, and the sums of each tile and part."""
    assert list(map(int, printed(workspace, *given))) == [units, counters + 4 * sums]


# --- an fp32 weight that is read as it lies: emulation/as_it_lies.cpp -------------------------------------------------


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("as_it_lies")
    program = compiled((FOLDER / "as_it_lies.cpp").read_text(), folder, "-O1")
    return subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()


@needs_compiler
def test_addresses_scales_and_counts(lines: list[str]) -> None:
    """Numbers that a thread reads, bank conflicts, both transposed, places of slices, verdicts, roots, counts."""
    assert lines[0].split() == ["0"] * 8


@needs_compiler
def test_what_the_range_check_lets_pass(lines: list[str]) -> None:
    assert float(lines[1]) <= 5 / 8


@needs_compiler
def test_results_are_within_their_bounds(lines: list[str]) -> None:
    bound = {"split": bounds.split, "scaled": bounds.scaled}
    failed = []
    for line in lines[2:]:
        arithmetic, kind, k, shift, ctas, error = line.split()
        if not float(error) * bounds.EPS <= bound[arithmetic](int(k)):
            failed.append((arithmetic, kind, k, shift, ctas, error))
    assert len(lines) == 2 + 4 * (7 * 5 + 2 + 2) * 3
    assert not failed
