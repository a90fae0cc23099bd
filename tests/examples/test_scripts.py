"""The short scripts of examples/ run, and print what they promise."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"

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
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    assert printed in capsys.readouterr().out
