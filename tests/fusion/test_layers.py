"""PyTorch's own attention and encoder layers: their products are taken, and nothing differs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from epigemm.fusion import FusionReport
from tests.support.thorough import in_turn

E, HEADS = 16, 2


def encoder(**settings: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(E, HEADS, 24, dropout=0.0, **settings)


class Attention(nn.Module):
    """Two calls of attention, of which one reads another memory, and what follows writes to one result."""

    def __init__(self, *, need_weights: bool = False, **settings: Any) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(E, HEADS, **settings)
        self.cross = nn.MultiheadAttention(E, HEADS, **settings)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Any:
        found, weights = self.own(x, x, x, need_weights=self.need_weights)
        turned = found.transpose(0, 1)
        turned *= 2
        other, _ = self.cross(x, found, found)
        return x + other, found, weights, turned


class Causal(nn.Module):
    """A mask, and a mask of padding, which the fast path would read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = encoder(batch_first=True)

    def forward(self, x: Tensor) -> Any:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.layer(x, src_mask=mask)


# What makes them, and how many products are taken in eval mode without gradients, and with gradients.
MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "encoder": (lambda: encoder(batch_first=True), 4, 4),
    "encoder, no bias": (lambda: encoder(batch_first=True, bias=False), 4, 4),
    "encoder, sequence first": (lambda: encoder(), 4, 4),
    "encoder, gelu, norm first": (
        lambda: encoder(batch_first=True, norm_first=True, activation="gelu"),
        4,
        4,
    ),
    "attention": (lambda: Attention(), 5, 5),
    "attention with weights": (lambda: Attention(need_weights=True, batch_first=True), 5, 5),
    "attention of other widths": (lambda: Attention(kdim=E, vdim=E, bias=False), 5, 5),
    "attention, more keys": (lambda: Attention(add_bias_kv=True, add_zero_attn=True), 5, 5),
    "a mask": (Causal, 0, 4),
    "transformer": (
        lambda: nn.Sequential(nn.Linear(E, E), nn.TransformerEncoder(encoder(batch_first=True), 2)),
        9,
        9,
    ),
}


def run(model: nn.Module, x: Tensor, learns: bool) -> list[Tensor]:
    with torch.set_grad_enabled(learns):
        given = model(x)
    results = [each for each in (given if isinstance(given, tuple) else (given,)) if each is not None]
    if not learns:
        return results
    total = torch.stack([each.square().sum() for each in results]).sum()
    return [*results, *torch.autograd.grad(total, [x, *model.parameters()], allow_unused=True)]


# With gradients or without, by either backend.
WAYS = [(False, "eager"), (True, "aot_eager"), (True, "eager"), (False, "aot_eager")]


@pytest.mark.parametrize(("name", "way"), in_turn([*MODELS], WAYS), ids=str)
def test_layers(name: str, way: tuple[bool, str]) -> None:
    learns, backend = way
    make, *counts = MODELS[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make().train(learns)
    reports: list[FusionReport] = []
    options: dict[str, Any] = {"backend": backend, "report": reports.append, "strict": True}
    compiled: Any = torch.compile(copy.deepcopy(model), backend="epigemm", options=options)
    for batch in (3, 5):  # the second size makes it symbolic
        x = torch.randn(batch, 4, E, requires_grad=learns)
        expected, actual = run(model, x, learns), run(compiled, x, learns)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        kinds = [
            [(each.stride(), each.requires_grad) for each in found]
            for found in (actual, expected)
            if not learns
        ]
        assert len(set(map(str, kinds))) <= 1
    assert len(reports) == 2
    for report in reports:
        assert len(report.sites) == counts[learns] and not report.skipped, report
        assert bool(report.notes) == (not counts[learns]), report
    if not counts[learns]:
        assert reports[0].notes == ["_transformer_encoder_layer_fwd stays as it is: it has a mask"]
