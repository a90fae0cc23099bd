"""Compares the two models of every file in `kernelbench/`: same parameters, same outputs.

`python examples/compare_kernelbench.py` runs the earlier sizes, on a GPU the real ones as well.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import torch

FOLDER = Path(__file__).parent / "kernelbench"


def load(path: Path) -> ModuleType:
    """Import one example from its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"path: got {path}; accepted is a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(module: ModuleType, size: tuple[int, ...], device: str) -> None:
    """Print the largest difference between the models' outputs in both modes; AssertionError when they disagree."""
    inputs = [tensor.to(device) for tensor in module.get_inputs(size)]
    for training in (False, True):
        outputs = []
        for kind in (module.Model, module.ModelNew):
            torch.manual_seed(0)
            model = kind(*module.get_init_inputs(size)).to(device).train(training)
            with torch.no_grad():
                outputs.append(model(*inputs))
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)
        difference = float(outputs[1].sub_(outputs[0]).abs_().max())
        mode = "training" if training else "eval"
        print(f"{module.__name__} on {device}, {tuple(size)}, {mode}: largest difference {difference:.1e}")


def main() -> None:
    """Compare all files at every size that is practical here."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for path in sorted(FOLDER.glob("*.py")):
        module = load(path)
        sizes = [value for name, value in vars(module).items() if name.startswith(("REAL", "EARLIER"))]
        for size in sizes if device == "cuda" else [module.EARLIER]:
            compare(module, size, device)


if __name__ == "__main__":
    main()
