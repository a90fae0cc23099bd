"""Tuning with epilogues that are made at run time, on a CPU with scripted times and a fake linker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import epigemm
from epigemm.epilogues.registry import LINKED, typed
from epigemm.linker import store
from epigemm.planner import times
from tests.linker.fakes import REAL, Linking
from tests.support.choices import forget
from tests.support.formulas import formula
from tests.support.pretended import HOPPER, pretend_gpu
from tests.support.stage import DEVICE, Stage, draw
from tools.planner import ask_planner

doubled_relu: Any = epigemm.epilogue(formula("acc, bias: PerColumn -> torch.relu(acc + bias) * 2.0"))
NAME = typed(doubled_relu.traced, [False]).name


@pytest.fixture
def links(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Linking:
    """The compiler's libraries are fakes; `loaded` says how many plans had run by then."""
    made = Linking(monkeypatch, tmp_path, seconds=0.02)
    made.ran, stage.module.is_linked = (lambda: len(stage.ran)), made.has
    pretend_gpu(monkeypatch, DEVICE, linking=REAL)
    return made


def source(name: str = NAME) -> str:
    answer = ask_planner(name, 40, 256, 128, "bfloat16", "ieee", gpu=HOPPER, device=DEVICE)
    return str(answer["source"])


def test_it_is_measured_once_all_kernels_are_linked(stage: Stage, links: Linking) -> None:
    found = epigemm.tune(doubled_relu, *draw())
    (entry,) = found.entries
    assert entry.epilogue == NAME and entry.bias and not found.left_out
    tiles = {(plan[0], plan[1]) for _, plan in stage.ran}
    kernels = {name for name in links.loaded if "elementwise" not in name}
    assert len(kernels) == len(tiles) > 2
    assert set(links.loaded.values()) == {0}, "no plan ran before the last kernel was there"
    if len(os.sched_getaffinity(0)) > 1:
        assert links.linker.most_at_once > 1
    assert sum(each.chosen for each in found.candidates) == 1
    assert source() == "cache"
    assert times.in_table(times.read(), "NVIDIA H200") == {entry.key: entry}
    x, weight, bias = draw()
    expected = torch.relu(torch.nn.functional.linear(x, weight).float() + bias) * 2
    torch.testing.assert_close(doubled_relu(x, weight, bias), expected.to(x.dtype), rtol=2e-2, atol=1e-1)


def test_what_cannot_be_linked_is_left_out(stage: Stage, links: Linking) -> None:
    every = {each.plan[:2] for each in epigemm.tune(doubled_relu, *draw()).candidates if each.plan}
    forget(DEVICE)
    stage.ran.clear()
    links.loaded.clear()
    store.made.values.clear()
    links.bad = lambda symbol: symbol.endswith("_bfloat16_2")
    found = epigemm.tune(doubled_relu, *draw())
    assert {each.plan[:2] for each in found.candidates if each.plan} == {
        each for each in every if each[1] != 2
    }
    assert not any(plan[1] == 2 for _, plan in stage.ran)
    assert found.entries and found.left_out
    assert all("Malformed" in reason for reason in found.left_out)
    assert "left out: " in str(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_where_nothing_can_be_linked_the_call_stays(stage: Stage, links: Linking, dtype: torch.dtype) -> None:
    links.lose_libraries()
    x, weight, bias = draw(dtype=dtype)
    found = epigemm.tune(doubled_relu, x, weight, bias)
    assert not found.entries and not found.candidates and not stage.ran
    assert found.left_out == ["nvJitLink was not found"]
    assert str(found).endswith("left out: nvJitLink was not found")
    assert source() == "model"


def test_fp32_is_measured_on_slices(stage: Stage, links: Linking) -> None:
    x, weight, bias = draw(m=24, n=64, dtype=torch.float32)
    found = epigemm.tune(doubled_relu, x, epigemm.pack(weight), bias)
    assert {entry.arithmetic for entry in found.entries} == {"split"}
    assert "epigemm_open_fixup" in links.loaded


def test_a_later_process_has_the_choice(stage: Stage, links: Linking) -> None:
    """There the file is read before the epilogue is made."""
    (entry,) = epigemm.tune(doubled_relu, *draw()).entries
    made = LINKED.pop(NAME)
    forget(DEVICE)
    times.load(DEVICE)
    epigemm.tune("linear_relu", *draw())
    kept = times.in_table(times.read(), "NVIDIA H200")[entry.key]
    assert kept == entry, "though nobody knows the name"
    doubled_relu.traced.forms.clear()
    again = typed(doubled_relu.traced, [False])
    assert (again.name, again.number) == (NAME, made.number)
    assert source() == "cache"
