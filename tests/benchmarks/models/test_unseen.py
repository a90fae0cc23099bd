"""The nine models that were added after fusion was written: what they compute, and that fusion computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epigemm
from benchmarks.models import unseen, vision
from benchmarks.models.networks import RMSNorm, Tokens

Small = tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]
WORDS = 50


def words() -> tuple[Tensor, ...]:
    return (torch.randint(WORDS, (3, 7)),)


def images(side: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(2, 3, side, side),)


def tokens(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Tokens(WORDS, 32, [layer(), layer()], RMSNorm(32))


SMALL: dict[str, Small] = {
    "nerf": (lambda: unseen.NeRF(32, 8), lambda: (torch.rand(20, 3), torch.rand(20, 3))),
    "siren": (lambda: unseen.siren(32, 3), lambda: (torch.rand(20, 2),)),
    "tabular-resnet": (lambda: unseen.tabular_resnet(8, 32, 2), lambda: (torch.randn(20, 8),)),
    "opt": (tokens(lambda: unseen.OPTLayer(32, 4, 64)), words),
    "mixtral": (tokens(lambda: unseen.MixtralLayer(32, 4, 2, 64, experts=4)), words),
    "wav2vec2": (
        lambda: unseen.Wav2Vec2(16, 32, [unseen.Wav2Vec2Layer(32, 4, 64)], reach=8, groups=4),
        lambda: (torch.randn(2, 3000),),
    ),
    "swin-t": (lambda: vision.Swin(32, (2, 2), side=64, size=8), images(64)),
    "convnext-t": (lambda: vision.ConvNeXt((16, 32), (1, 2)), images(32)),
    "segformer": (lambda: vision.SegFormer((8, 16, 16, 24), (1, 1, 1, 1), 32), images(64)),
}


@pytest.mark.parametrize("name", SMALL)
def test_fusion_computes_the_same(name: str) -> None:
    build, inputs = SMALL[name]
    torch.manual_seed(0)
    model, given = build(), inputs()
    # One of them by Inductor, as by default; the others without the time that it takes to compile.
    fused: Any = epigemm.fuse(model, options={"backend": "inductor" if name == "siren" else "eager"})
    for is_training in (False, True):
        model.train(is_training), fused.train(is_training)
        found = []
        for each in (model, fused):
            output = each(*given)
            output.square().mean().backward()
            found.append([output.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
            model.zero_grad()
        assert len(found[0]) == len(found[1]) == len(list(model.parameters())) + 1
        for right, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
    assert fused.fusion_report.sites
