"""The short scripts of examples/ run, and print what they promise."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.models.networks import ViTLayer
from tests.models.example import package
from tests.support.examples import EXAMPLES as FOLDER
from tests.support.examples import load
from tests.support.pretended import without_gpu

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="examples are not at hand")


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("functional", "linear_relu: epigemm::linear"),
        ("custom_epilogue", "swiglu: as PyTorch has it"),
        ("custom_epilogue", "layer: as PyTorch has it"),
        ("module", "after 50 steps"),
        ("fuse", "gate: linear_sigmoid_mul_add: "),
        ("fuse", "in torch.compile's graph: 4 sites"),
    ],
)
def test_script(name: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    load(FOLDER / f"{name}.py").main()
    assert printed in capsys.readouterr().out


def test_a_model_with_batch_norm_learns(capsys: pytest.CaptureFixture[str]) -> None:
    """In both ways the same; the script itself raises an error where a model has learned nothing."""
    load(FOLDER / "batch_norm.py").main(["--quick"])
    printed = capsys.readouterr().out
    first, second = re.findall(r"ms a step, loss ([\d.]+) to [\d.]+$", printed, re.M)
    assert float(first) == pytest.approx(float(second), rel=1e-2)
    assert re.search(r"^eager takes [\d.]+ times as long$", printed, re.M)
    assert "batch statistics" in printed


class VisionTransformer(nn.Module):
    """In torchvision's place: the same arguments, another layer."""

    def __init__(
        self,
        *,
        image_size: int,
        patch_size: int,
        num_layers: int,
        num_heads: int,
        hidden_dim: int,
        mlp_dim: int,
        num_classes: int,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden_dim, patch_size, patch_size)
        self.places = nn.Parameter(torch.randn((image_size // patch_size) ** 2, hidden_dim))
        self.layers = nn.Sequential(*(ViTLayer(hidden_dim, num_heads, mlp_dim) for _ in range(num_layers)))
        self.head = nn.Linear(hidden_dim, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        result: Tensor = self.head(self.layers(x).mean(1))
        return result


@pytest.mark.parametrize("models", ["torchvision", "stand-in"])
def test_the_cells_of_a_torchvision_model(
    models: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    fresh_compiler: None,
) -> None:
    """All cells, one after another, with the small model of a CPU; without torchvision, with a model of its kind."""
    pytest.importorskip("matplotlib", reason="pip install epigemm[bench]").use("Agg")
    if models == "torchvision":
        try:
            package("torchvision")
        except Exception as error:  # also an installation that does not fit this torch
            pytest.skip(f"torchvision cannot be imported ({type(error).__name__}: {error})")
    else:
        found: Any = ModuleType("torchvision.models")
        found.VisionTransformer, found.vit_b_16 = VisionTransformer, None
        monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
        monkeypatch.setitem(sys.modules, "torchvision.models", found)
    without_gpu(monkeypatch)
    monkeypatch.chdir(tmp_path)
    cells = runpy.run_path(str(FOLDER / "torchvision_model.py"))
    printed = capsys.readouterr().out
    assert "products fused" in printed
    assert re.search(r"linear_gelu\w*: gelu\(acc \+ c1\)", printed)
    assert set(cells["times"]) == {"eager", "fused", "compiled"}
    assert all(time > 0 for time in cells["times"].values())
    assert (tmp_path / "torchvision_model.png").stat().st_size > 1000
