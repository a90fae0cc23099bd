"""Results are no views, in graphs of the backend, too: autograd refuses to write a view made under `no_grad` later.

Of calls: tests/ops/test_layouts.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import epigemm
from tests.support.thorough import in_turn

N, K = 6, 8
assert epigemm.__version__  # importing the package is what makes the backend known


class Target(nn.Module):
    """A target without a gradient, written in place by what has one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.fc = nn.Linear(K, N), nn.Linear(K, N)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            t = torch.sigmoid(self.gate(x))
        t *= self.fc(x).flip(-1)
        return t


@pytest.mark.parametrize(
    ("lead", "inner"), in_turn([(3,), (2, 3), (1, 1, 3)], ["eager", "aot_eager"]), ids=str
)
@pytest.mark.usefixtures("fresh_compiler")
def test_in_graphs_of_the_backend(lead: tuple[int, ...], inner: str) -> None:
    model, x = Target(), torch.randn(*lead, K)
    want = model(x)
    found = torch.compile(model, backend="epigemm", options={"backend": inner}, fullgraph=True)(x)
    torch.testing.assert_close(found, want)
    found.sum().backward()
