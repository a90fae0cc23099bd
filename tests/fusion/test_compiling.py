"""What Inductor compiles with the backend "epigemm": options, training, caches. More: test_model_compiled."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import epigemm
from epigemm.fusion import FusionReport

IN, OUT = 12, 8


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(IN, OUT), nn.Linear(OUT, IN)

    def forward(self, x: Tensor) -> Any:
        z = self.last(torch.relu(self.first(x)))
        return z + 2 * torch.sigmoid(z)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "reduce-overhead"},
        *({"options": each} for each in ({"max_autotune": False}, {"freezing": True}, {"cpp_wrapper": True})),
    ],
    ids=str,
)
def test_inductor_compiles_the_rest(settings: dict[str, Any]) -> None:
    """With its options and modes."""
    model, x = Plain().eval(), torch.randn(5, IN)
    plain = copy.deepcopy(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fast: Any = torch.compile(model, backend="epigemm", fullgraph=True, **settings)
        torch.testing.assert_close(fast(x), plain(x), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_inductor_trains() -> None:
    """A graph that is traced again, as Inductor has Dynamo do for a number that changes, is reported once."""
    model, reports = nn.Sequential(nn.Linear(IN, OUT), nn.Tanh(), nn.LayerNorm(OUT)), list[FusionReport]()
    options: dict[str, Any] = {"report": reports.append}
    fast: Any = torch.compile(model, backend="epigemm", fullgraph=True, dynamic=True, options=options)
    x, upstream = torch.randn(5, IN), torch.randn(5, OUT)
    found = [torch.autograd.grad(each(x), [*model.parameters()], upstream) for each in (fast, model)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert [len(report.sites) for report in reports] == [1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("by", ["fuse", "backend"])
def test_autocast_rounds_the_bias_with_the_product(by: str, dtype: torch.dtype) -> None:
    """A sum near 0, of some 800 each: the product alone would be off by 800 roundings."""
    x, weight = torch.rand(16, 64).to(dtype) + 8, torch.rand(OUT, 64).to(dtype) + 1
    model = nn.Sequential(nn.Linear(64, OUT), nn.Tanh())
    bias = -(x @ weight.mT).float().mean(0).to(dtype)
    model[0].weight, model[0].bias = nn.Parameter(weight.float()), nn.Parameter(bias.float())
    options: dict[str, Any] = {"backend": "aot_eager"}
    made: Any = (
        epigemm.fuse(model) if by == "fuse" else torch.compile(model, backend="epigemm", options=options)
    )
    z = nn.functional.linear(x.double(), weight.double(), bias.double())
    with torch.no_grad(), torch.autocast("cpu", dtype):
        error = (made(x.float()).double() - torch.tanh(z)).abs().max()
    # Two roundings of the sum, whose slope is 1 at most, and 64 additions of its terms.
    assert float(error) <= 2 * torch.finfo(dtype).eps * float(z.abs().max() + 1) + 64 * 2.0**-24 * 800


@pytest.mark.slow
def test_caches_on_disk_know_what_was_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal but for one number: neither gets the other's graph."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, layer = torch.randn(5, IN), nn.Linear(IN, OUT)
    for divisor in (2.0, 5.0):
        torch._dynamo.reset()
        counters.clear()

        def function(x: Tensor, divisor: float = divisor) -> Tensor:
            return (torch.relu(layer(x)) / divisor).sin()

        fast: Any = torch.compile(function, backend="epigemm", fullgraph=True, dynamic=False)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), function(x), rtol=1e-4, atol=1e-4)
        assert (
            counters["aot_autograd"]["autograd_cache_hit"] == counters["inductor"]["fxgraph_cache_hit"] == 0
        )
