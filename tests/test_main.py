"""`python -m epigemm`: what it prints, and that its self-test would see a wrong result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import epigemm
from epigemm import __main__ as main
from epigemm._native import registry
from tests.support.pretended import describe, pretend_gpu


def test_the_report() -> None:
    text = main.report()
    built = epigemm.build_info()
    for value in built.values():
        assert isinstance(value, dict) or str(value) in text
    assert all(family in text for family in built["families"]) and "{" not in text and ": \n" not in text
    assert f"epilogues: {', '.join(each['name'] for each in registry())}\n" in text
    x, weight = (f"[{dtype}, 1024 x 4096 x 4096]" for dtype in ("bfloat16", "float32"))
    assert text.index("what would run here:") < text.index(x) < text.index(weight)


def test_right_results() -> None:
    assert main.wrong_results("cpu") == []


@pytest.mark.parametrize("error", [1e-2, float("nan")])
def test_wrong_results(error: float) -> None:
    given = torch.randn(64, 96), torch.randn(128, 96), torch.randn(128)
    result = epigemm.linear_relu(*given)
    assert main.is_right(result, *given)
    result[3, 5] += 0.5 + error
    assert not main.is_right(result, *given)


def test_which_kernels_run_and_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU; on a Hopper and an older GPU, in whose places the CPU stands; on a device without any of them."""
    cpu = torch.device("cpu")
    loops, *gemms = main._kernels(cpu)
    assert loops == "    elementwise functions, by PyTorch's operators: run"
    assert len(gemms) == 3 and all(line.endswith(": the tensors are not on a CUDA device") for line in gemms)
    with monkeypatch.context() as patch:
        pretend_gpu(patch, 44)
        assert [line.rpartition(": ")[2] for line in main._kernels(cpu)] == ["run"] * 4
        pretend_gpu(patch, 45)
        describe(patch, (75, 40))
        assert all(line.rpartition(": ")[2] != "run" for line in main._kernels(cpu)[1:])
    assert all("kernels for CUDA and CPU" in line for line in main._kernels(torch.device("meta")))


def test_the_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path))
    (tmp_path / "measured.json").write_text("{}")
    assert main.main([]) == 0
    said = capsys.readouterr().out
    assert f"cache: {tmp_path}: 0 linked kernels, measured choices, 2 bytes\n" in said
    assert said.endswith("self-test: results agree with float64\n")
    assert main.main(["--clear-cache"]) == 0
    assert capsys.readouterr().out == f"removed 1 files, 2 bytes: {tmp_path}\n"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit, match="0"):
        main.main(["--help"])
    said = capsys.readouterr().out
    assert "--clear-cache" in said and "EPIGEMM_CACHE_DIR" in said and "TORCH_LOGS" in said
    with pytest.raises(SystemExit, match="2"):
        main.main(["--no-such"])
