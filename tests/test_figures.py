"""The figures of README and of the pages about performance, fusion and numerics are those of the records."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.models.registry import NETWORKS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PERFORMANCE, MODELS, NUMERICS = (
    ROOT / "docs" / f"{name}.md" for name in ("performance", "models", "numerics")
)
RESULTS = ROOT / "benchmarks" / "results"
FOLDERS = {"An H100": "nvidia-h100-80gb-hbm3", "An H200": "nvidia-h200"}
LAYERS = {
    "bias, ReLU": "linear/bias_relu",
    "sigmoid, scale, residual": "linear/sigmoid_scale_residual",
    "scale, BatchNorm (eval)": "linear/scale_batch_norm",
    "scale, BatchNorm (training mode, forward)": "linear/scale_batch_norm:train",
    "ReLU, divide": "linear/relu_div",
}
AGAINST = {"eager": "vs_eager", "`torch.compile`": "vs_compile", "bare": "vs_bare"}
DTYPES = {"fp32 `highest`": "fp32 highest", "fp32 `high`": "fp32 high", "bf16": "bf16"}
RANDOM = {"fp32 `highest`": "fp32_highest_packed", "fp32 `high`": "fp32_high", "bf16": "bf16"}
SHORT = {
    "bias, ReLU": "bias_relu",
    "sigmoid, scale": "sigmoid_scale",
    "bias, GELU": "bias_gelu",
    "GELU": "bias_gelu",
    "residual": "residual",
}
HOST = {
    ("linear_relu", "64 x 1024 x 1024"): ("linear_relu", "function"),
    ("linear_relu", "16 x 256 x 256"): ("linear_relu_small", "function"),
    ("training step", "64 x 1024 x 1024"): ("train_step", "module"),
}


@dataclass(frozen=True)
class Row:
    """One line of a table, with what "the same" stands for, and the section's record of results."""

    folder: str
    what: str
    cells: dict[str, str]

    def __str__(self) -> str:
        return f"{self.folder}: {self.what}, {self.cells['M x N x K']}, {self.cells.get('against', '')}"

    def figures(self) -> dict[str, float]:
        """By dtype."""
        found = {dtype: self.cells.get(column, "") for column, dtype in DTYPES.items()}
        return {dtype: float(cell) for dtype, cell in found.items() if cell}


def rows(page: Path, folder: str = "") -> Iterator[Row]:
    """The lines of a page's tables that have sizes."""
    columns: list[str] = []
    what = ""
    for line in page.read_text(encoding="utf-8").splitlines():
        folder = next((name for start, name in FOLDERS.items() if line.startswith(start)), folder)
        if not line.startswith("|"):
            columns = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not columns:
            columns = cells
        elif "M x N x K" in columns and not line.startswith("|---"):
            row = dict(zip(columns, cells, strict=True))
            what = (
                what if cells[0].startswith("the same") else cells[0].partition(", host time")[0].strip("`")
            )
            yield Row(folder, what, row)


@cache
def cases(folder: str, record: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / folder / record / "summary.json").read_text())["cases"]
    return found


def mean_of(figures: list[float]) -> float:
    return math.exp(sum(map(math.log, figures)) / len(figures))


def table(page: Path, first: str) -> list[dict[str, str]]:
    """The table whose first line begins so, by columns."""
    lines = iter(page.read_text(encoding="utf-8").splitlines())
    head = next(line for line in lines if line.startswith(first))
    columns, found = [cell.strip() for cell in head.strip("|").split("|")], []
    for line in lines:
        if not line.startswith("|"):
            break
        found.append(dict(zip(columns, [cell.strip() for cell in line.strip("|").split("|")], strict=True)))
    return found[1:]


def of(record: str) -> list[Row]:
    return [row for row in rows(PERFORMANCE) if row.cells.get("record") == f"`{record}`"]


LAYER_ROWS = [
    *rows(README, FOLDERS["An H200"]),
    *(row for record in ("bench", "few-rows") for row in of(record) if row.what in LAYERS),
]


@pytest.mark.parametrize("row", LAYER_ROWS, ids=str)
def test_layers(row: Row) -> None:
    record = row.cells.get("record", "`bench`").strip("`")
    sizes = row.cells["M x N x K"].replace(" ", "")
    against = AGAINST[row.cells.get("against", "eager")]
    for dtype, figure in row.figures().items():
        measured = cases(row.folder, record)[f"{LAYERS[row.what]} {sizes} {dtype}"][against]
        assert abs(figure - measured) <= 0.00501, (dtype, measured)


@pytest.mark.parametrize("row", of("host"), ids=str)
def test_host_times(row: Row) -> None:
    """The other's time over ours, as everywhere on the page."""
    name, ours = HOST[row.what, row.cells["M x N x K"]]
    other = "f_linear" if "F.linear" in row.cells["against"] else "eager"
    for dtype, figure in row.figures().items():
        us = cases(row.folder, "host")[f"{name}/{dtype.split()[0]}"]
        assert abs(figure - us[other] / us[ours]) <= 0.00501, (dtype, us)


@pytest.mark.parametrize("row", of("glu"), ids=str)
def test_pairs_of_products(row: Row) -> None:
    for column, dtype in DTYPES.items():
        found = [
            case["vs_compile"] for name, case in cases(row.folder, "glu").items() if name.endswith(dtype)
        ]
        if not row.cells[column]:
            assert not found
            continue
        assert row.cells["M x N x K"] == f"{len(found)} layers"
        assert row.cells[column] == f"{mean_of(found):.2f} ({min(found):.2f})"


@pytest.mark.parametrize("row", [row for seed in (66, 92, 671) for row in of(f"random-{seed}")], ids=str)
def test_random_shapes(row: Row) -> None:
    """Geometric mean and worst ratio."""
    measured = cases(row.folder, row.cells["record"].strip("`"))
    name = LAYERS[row.what.partition(", geomean")[0]].removeprefix("linear/")
    for column, dtype in RANDOM.items():
        if cell := row.cells[column]:
            case = measured[f"{name}/{dtype}"]
            assert cell == f"{case['geomean']:.2f} ({case['worst']:.2f})"
            assert str(case["points"]) in row.cells["M x N x K"]


def worst_points() -> dict[str, list[str]]:
    """Of the H100's random shapes: the cells of the records' own tables, by dtype and size."""
    files = [RESULTS / FOLDERS["An H100"] / f"random-{seed}" / "tables.md" for seed in (66, 92)]
    every = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in every]
    named = [cells for cells in lines if cells[0].startswith("bias_relu/") and "x" in cells[1]]
    return {f"{cells[0].removeprefix('bias_relu/')} {cells[1]}": cells for cells in named}


@pytest.mark.parametrize("row", table(PERFORMANCE, "| shape | type |"), ids=lambda row: row["shape"])
def test_the_worst_random_shapes(row: dict[str, str]) -> None:
    """Ratio, and microseconds of epigemm, of the faster one and of the bare product."""
    dtype, shape = RANDOM.get(row["type"], row["type"]), row["shape"].replace(" ", "")
    _, _, ratio, _, ours, best, other, bare, *_ = worst_points()[f"{dtype} {shape}"]
    assert row["ratio"] == f"{float(ratio):.2f}"
    faster = f"{best.replace('addmm_activation', '`torch._addmm_activation`')}, {float(other):.1f}"
    assert row["the faster one, us"] == faster
    assert row["epigemm, us"] == f"{float(ours):.1f}"
    assert row["bare, us"] == f"{float(bare):.1f}"


def test_no_worse_random_shape_is_left_out() -> None:
    shown = table(PERFORMANCE, "| shape | type |")
    least = max(float(row["ratio"]) for row in shown)
    assert len(shown) == sum(round(float(cells[2]), 2) <= least for cells in worst_points().values())


@pytest.mark.parametrize("row", [*of("short-65"), *of("short-91")], ids=str)
def test_short_sums(row: Row) -> None:
    name = SHORT[row.what.partition(", geomean")[0]]
    waves = cases(row.folder, row.cells["record"].strip("`"))[f"{name}/bf16"]["waves"]
    assert str(waves["points"]) in row.cells["M x N x K"]
    assert row.cells["bf16"] == f"{waves['geomean']:.2f} ({waves['worst']:.2f})"


def test_how_many_short_sums_there_are() -> None:
    text = " ".join(PERFORMANCE.read_text(encoding="utf-8").split())
    h100, h200 = (cases(FOLDERS[f"An {gpu}"], f"short-{seed}") for gpu, seed in (("H100", 91), ("H200", 65)))
    points = [sum(case["points"] for case in measured.values()) for measured in (h100, h200)]
    assert f"the H100's has {points[0]:,} of 2,400 points, the H200's {points[1]:,}" in text


def test_host_times_in_words() -> None:
    """Those that are longer than eager's."""
    text = " ".join(PERFORMANCE.read_text(encoding="utf-8").split())
    host = cases(FOLDERS["An H200"], "host")

    def over(name: str, ours: str = "function") -> float:
        ratio: float = host[name][ours] / host[name]["eager"]
        return ratio

    small = spread([over(f"linear_relu{size}/fp32") for size in ("", "_small")])
    fp32, bf16 = (over(f"train_step/{dtype}", "module") for dtype in ("fp32", "bf16"))
    assert f"takes {small} times eager's" in text
    assert f"with bias and GELU {over('custom_gelu/fp32'):.2f} times" in text
    assert f"training step {fp32:.2f} times in fp32 and {bf16:.2f} in bf16" in text


@pytest.mark.parametrize("row", of("layers"), ids=str)
def test_layers_of_models(row: Row) -> None:
    """Geometric means."""
    measured = cases(row.folder, "layers")
    names = [SHORT[name] for name in row.what.partition(", geomeans")[0].split("; ")]
    found = [
        [case["bf16_vs_bare"] for key, case in measured.items() if key.startswith(f"{name}/")]
        for name in names
    ]
    assert all(len(each) == 20 for each in found)
    assert row.cells["bf16"] == "; ".join(f"{mean_of(each):.2f}" for each in found)


def spread(figures: list[float]) -> str:
    return f"{min(figures):.2f} to {max(figures):.2f}"


@pytest.mark.parametrize("row", of("custom"), ids=str)
def test_epilogues_in_python(row: Row) -> None:
    """The least and the largest ratio of a size."""
    sizes = row.cells["M x N x K"].replace(" ", "")
    measured = [case for name, case in cases(row.folder, "custom").items() if name.endswith(f"/{sizes}")]
    if count := re.match(r"\d+", row.what):
        assert len(measured) == int(count[0])
    for column, key in (("fp32 `highest`", "fp32_vs_best"), ("bf16", "bf16_vs_best")):
        assert row.cells[column] == spread([case[key] for case in measured if key in case])


@pytest.mark.parametrize("row", [row for row in of("bench") if "elementwise" in row.what], ids=str)
def test_elementwise_operators(row: Row) -> None:
    for column, dtype in (("fp32 `highest`", "fp32 highest"), ("bf16", "bf16")):
        ending = f"{row.cells['M x N x K'].replace(' ', '')} {dtype}"
        found = [case for name, case in cases(row.folder, "bench").items() if name.endswith(ending)]
        assert len(found) == 5
        assert row.cells[column] == spread([case["vs_bare"] for case in found])


def test_ranges_of_the_readmes_columns() -> None:
    columns = zip(*(row.figures().values() for row in rows(README, "nvidia-h200")), strict=True)
    ranges = [f"{min(found):.2f} to {max(found):.2f} times" for found in columns]
    told, text = (" ".join(each.read_text(encoding="utf-8").split()) for each in (PERFORMANCE, README))
    assert re.findall(r"[\d.]+ to [\d.]+ times", told.partition("All figures")[0]) == ranges
    assert f"they are {ranges[0]} as fast" in text
    measured = cases(FOLDERS["An H200"], "bench")
    names = [
        f"{LAYERS[row.what]} {row.cells['M x N x K'].replace(' ', '')} fp32 highest" for row in rows(README)
    ]
    split = [measured[name]["ms"]["eager"] / measured[name]["ms"]["epigemm_plain"] for name in names]
    assert f"Without that, `highest` gives {min(split):.2f} to {max(split):.2f}" in text


def test_what_tf32_alone_gives() -> None:
    layers = cases(FOLDERS["An H200"], "bench")
    fp32, tf32 = (
        layers[f"linear/bias_relu 1024x8192x8192 fp32 {name}"]["ms"] for name in ("highest", "high")
    )
    sweep = json.loads((RESULTS / FOLDERS["An H200"] / "gradings" / "gradings.json").read_text())["sweep"]
    (errors,) = (each["errors"] for each in sweep if (each["data"], each["k"]) == ("uniform_linear", 8192))
    of_tf32, split = (errors[name]["max_ratio"] / errors["sgemm"]["max_ratio"] for name in ("tf32", "split"))
    ratio = f"{fp32['eager'] / tf32['eager']:.1f} times as fast"
    page, readme = (" ".join(each.read_text(encoding="utf-8").split()) for each in (NUMERICS, README))
    assert f"takes {tf32['eager']:.3f} ms in place of {fp32['eager']:.3f}: it is {ratio}" in page
    assert f"at K = 8192 is {of_tf32:.0f} times SGEMM's" in page and f"at {of_tf32:.0f} times the" in readme
    assert f"{fp32['eager'] / tf32['eager']:.1f} at {of_tf32:.0f} times the error" in PERFORMANCE.read_text()
    assert f"{fp32['epigemm']:.3f} ms, with {split:.1f} times SGEMM's" in page and ratio in readme


def test_how_many_tests_a_gpu_has_run() -> None:
    record = json.loads((RESULTS / FOLDERS["An H100"] / "tests.json").read_text())
    chosen, skipped = record["selection"]["chosen"], record["outcomes"]["skipped"]
    assert f" {chosen:,} tests ({skipped} skipped)" in PERFORMANCE.read_text(encoding="utf-8")
    assert record["outcomes"]["passed"] == chosen - skipped


def test_first_calls() -> None:
    """Of epigemm and of `torch.compile`: with nothing cached, and from the disk."""
    record = json.loads((RESULTS / FOLDERS["An H100"] / "custom" / "summary.json").read_text())
    text = " ".join(PERFORMANCE.read_text(encoding="utf-8").split())
    for who in ("", "compile_"):
        first, cached = record[f"{who}first_call_s"], record[f"{who}cached_call_ms"]
        unit, of_one = (" s", 1e3) if who else (" ms", 1)
        bf16, fp32 = (f"{cached[dtype] / of_one:.1f}" for dtype in ("bf16", "fp32"))
        words = f"{first['bf16']:.1f} s in bf16 and {first['fp32']:.1f} s in fp32"
        assert f"{words}, {bf16} and {fp32}{unit} from" in text


PRECISIONS = {"fp32 `highest`": "fp32_highest", "fp32 `high`": "fp32_high", "bf16": "bf16"}
VARIANTS = {
    '`torch.compile` / with the backend "epigemm"': "backend_vs_compile",
    'eager / `fuse(model, options={"backend": "eager"})`': "eager_options_vs_eager",
}


@pytest.mark.parametrize(
    ("first", "gpu"), [("| what | batch |", "An H100"), ("| operator by operator | batch |", "An H200")]
)
def test_whole_models(first: str, gpu: str) -> None:
    """Geometric means, and the least upper quartile of a case; of the records that are there."""
    variant = ""
    rows_of_means = table(MODELS, first)
    assert rows_of_means
    places = ("small", "large")
    batches = {name: dict(zip(places, each.batches, strict=True)) for name, each in NETWORKS.items()}
    for row in rows_of_means:
        variant = VARIANTS.get(next(iter(row.values())), variant)
        record = json.loads((RESULTS / FOLDERS[gpu] / "models" / "summary.json").read_text())
        least = min(
            case["quartiles"][variant][2]
            for name, case in record["cases"].items()
            if variant in case["quartiles"]
            and name.split("/")[-1] == "x".join(map(str, batches[name.split("/")[0]][row["batch"]]))
        )
        assert row["least"] == f"{least:.2f}"
        for column, precision in PRECISIONS.items():
            mean = record["geomeans"][f"{precision}/inference/{row['batch']}"][variant]
            assert row[column] == f"{mean:.2f}"


def test_eight_bits_and_experts() -> None:
    """Each line of that table names its record and its key; none is left out."""
    section = PERFORMANCE.read_text().partition("## Eight bits and experts")[2].partition("\n## ")[0]
    told = re.findall(r"\| ([\d.]+) \(([\d.]+)\) \| `(\w+)`, `(\w+)` \|", section)
    found = {
        (f"{mean:.2f}", f"{worst:.2f}", name, key)
        for name in ("fp8", "experts")
        for key, (mean, worst) in json.loads(
            (RESULTS / FOLDERS["An H200"] / name / "summary.json").read_text()
        )["geomeans"].items()
    }
    assert set(told) == found


def test_kernelbench() -> None:
    record = json.loads((RESULTS / FOLDERS["An H200"] / "kernelbench" / "summary.json").read_text())
    means, source = record["geomeans"]["level2, products taken"], PERFORMANCE.read_text()
    eager, compiled = (means[ratio] for ratio in ("fuse_vs_eager", "backend_vs_compile"))
    page, readme = (" ".join(text.split()) for text in (source, README.read_text()))
    assert f"{len(record['cases'])} problems of level 2 have a product" in page
    assert f"`fuse` is {eager['geomean']:.2f} times" in page and f"{compiled['geomean']:.2f} times" in page
    assert f"**{eager['geomean']:.2f} times**" in readme and f"{compiled['geomean']:.2f} times" in readme
    assert f"The least are {eager['worst']:.2f} to" in page
    numbers, bars = (
        re.findall(r"[\d.]+", line.partition("[")[2])
        for line in source.splitlines()
        if line.startswith(("  x-axis", "  bar"))
    )
    ratios = {
        re.findall(r"/(\d+)_", name)[0]: f"{case['fuse_vs_eager']:.2f}"
        for name, case in record["cases"].items()
    }
    assert dict(zip(numbers, bars, strict=True)) == ratios


def test_errors_of_fp32() -> None:
    """What the page about numerics says first, and on which classes of data it does not hold."""
    graded, other = (
        json.loads((RESULTS / FOLDERS[gpu] / "gradings" / "gradings.json").read_text())
        for gpu in ("An H200", "An H100")
    )
    assert all(graded[key] == other[key] for key in ("sweep", "few_rows"))
    text = " ".join(NUMERICS.read_text(encoding="utf-8").split())
    ratios = largest_errors(graded["sweep"], 128)
    larger = [ratio for ratio in ratios.values() if ratio > 1]
    assert f"on {len(ratios) - len(larger)} of {len(ratios)} classes of data" in text
    assert f"it is up to {max(larger):.1f} times SGEMM's" in text
    few = largest_errors(graded["few_rows"], 1)
    *others, worst = sorted(few[name] for name, ratio in ratios.items() if ratio <= 1)
    assert f"up to {max(others):.1f} times SGEMM's on {len(others)} of the {len(others) + 1} classes" in text
    assert f"and {worst:.1f} times on the other one" in text


def largest_errors(points: list[dict[str, Any]], k: int) -> dict[str, float]:
    """By class of data: fp16x3's largest error over SGEMM's, at worst from this K on."""
    found: dict[str, float] = {}
    for point in (point for point in points if point["k"] >= k):
        split, sgemm = (point["errors"][name]["max_ratio"] for name in ("split", "sgemm"))
        found[point["data"]] = max(found.get(point["data"], 0.0), split / sgemm)
    return found
