"""Fuse a whole model: by one line, or by one argument of torch.compile.

`python examples/fuse.py`
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import epigemm


class Model(nn.Module):
    """Plain PyTorch: nothing here knows of epigemm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(inplace=True))
        self.gate = nn.Linear(256, 256)
        self.norm = nn.BatchNorm1d(256)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """[M, 128] to [M, 10]."""
        z = self.gate(self.body(x))
        z = torch.sigmoid(z) * 2.0 + z
        result: Tensor = self.head(self.norm(z))
        return result


def main() -> None:
    """Fuse the model in both ways, and compare."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Model().to(device).eval()
    x = torch.randn(512, 128, device=device)

    fused = epigemm.fuse(model)

    reports: list[epigemm.FusionReport] = []
    # Without "backend" here, Inductor compiles the rest of the graph.
    options: dict[str, Any] = {"backend": "aot_eager", "report": reports.append}
    compiled = torch.compile(model, backend="epigemm", options=options)

    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(fused(x), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-4)
    print(fused.fusion_report)
    print(f"in torch.compile's graph: {len(reports[0].sites)} sites")


if __name__ == "__main__":
    main()
