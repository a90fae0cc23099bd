"""`linear_glu` on a GPU: values, equal calls, packs, CUDA graphs, and where `fuse` makes two products of one."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from tests.support.activations import ACT

pytestmark = pytest.mark.gpu
hopper = pytest.mark.usefixtures("fused_kernels")
cuda: Any = torch.cuda


class Pair(NamedTuple):
    """x, two weights and two biases."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    weight2: Tensor
    bias2: Tensor | None

    @property
    def whole(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """x, one weight with the rows of both, and its bias."""
        both = None if self.bias is None or self.bias2 is None else torch.cat((self.bias, self.bias2))
        return self.x, torch.cat((self.weight, self.weight2)), both


def draw(lead: tuple[int, ...], n: int, k: int, dtype: torch.dtype, *, bias: bool = True) -> Pair:
    """Numbers of the order of one in all products."""
    x, *weights = (torch.randn(*shape, k, device="cuda") for shape in (lead, (n,), (n,)))
    first, second = ((each / k**0.5).to(dtype) for each in weights)
    biases = [torch.randn(n, device="cuda").to(dtype) if bias else None for _ in range(2)]
    return Pair(x.to(dtype), first, biases[0], second, biases[1])


def assert_right(found: Tensor, pair: Pair, activation: str) -> None:
    """Against float64, in bf16."""
    first, second = F.linear(*(None if each is None else each.double() for each in pair.whole)).chunk(2, -1)  # type: ignore[arg-type]
    torch.testing.assert_close(found.double(), ACT[activation](first) * second, rtol=2e-2, atol=5e-2)


@hopper
@pytest.mark.parametrize("activation", ACT)
def test_every_activation_is_one_kernel_with_the_gate(activation: str) -> None:
    pair = draw((4096,), 2048, 512, torch.bfloat16)
    assert_right(epigemm.linear_glu(*pair.whole, activation=activation, strict=True), pair, activation)
    found = epigemm.explain("linear_glu", *pair.whole, activation=activation)
    assert found.path == "fused" and f"gated_{activation}" in found.kernel


@pytest.mark.parametrize("n", [1023, 1024])
def test_halves_that_tma_refuses(n: int) -> None:
    """The second half of an odd number of rows begins at an address that is no multiple of 16 bytes."""
    pair = draw((512,), n, 1023, torch.bfloat16)
    assert_right(epigemm.linear_glu(*pair.whole), pair, "silu")


@pytest.mark.parametrize("seed", range(8))
def test_equal_calls_give_equal_bits(seed: int) -> None:
    """250 random calls a seed, 2,000 in all: the second of two equal ones may find what the first has linked."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(250):
        lead = rng.choice([(rng.randrange(1, 2000),), (2, rng.randrange(1, 600))])
        n, k = rng.choice([rng.randrange(1, 64), 8 * rng.randrange(1, 200)]), rng.randrange(1, 1200)
        dtype = rng.choice([torch.float16, torch.bfloat16, torch.float32])
        pair = draw(lead, n, k, dtype, bias=rng.random() < 0.7)
        activation = rng.choice(list(ACT))
        options: dict[str, Any] = {"activation": activation, "weight2": pair.weight2, "bias2": pair.bias2}
        first, second = (epigemm.linear_glu(*pair[:3], **options) for _ in range(2))
        what = f"{lead} x {n} x {k}, {dtype}, {activation}"
        assert torch.equal(first, second), (what, epigemm.explain("linear_glu", *pair[:3], **options))


@hopper
def test_a_captured_layer_reads_the_packs_of_its_halves() -> None:
    """Packed on purpose before the capture, and again after a change: into the same memory."""
    layer = epigemm.nn.LinearGLU(1024, 2048, device="cuda")
    x = torch.randn(4096, 1024, device="cuda")
    packs = [epigemm.pack(half) for half in layer.weight.chunk(2)]
    graph = cuda.CUDAGraph()
    with torch.no_grad():
        layer(x)
        with torch.cuda.graph(graph):
            out = layer(x)
        for _ in range(2):
            layer.weight.mul_(-0.5)
            for pack in packs:
                pack.repack()
            graph.replay()
            first, second = F.linear(x, layer.weight, layer.bias).chunk(2, -1)
            torch.testing.assert_close(out, F.silu(first) * second, rtol=1e-4, atol=1e-4)


class Gated(nn.Module):
    """As Phi-3's MLP."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(k, 2 * n, bias=False), nn.Linear(n, k, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        result: Tensor = self.down(up * F.silu(gate))
        return result


@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fuse_makes_two_products_where_that_pays(dtype: torch.dtype) -> None:
    model = Gated(1024, 3072).to("cuda", dtype).eval()
    with torch.no_grad():
        for rows, is_two in ((8192, True), (16, False)):
            fused: Any = epigemm.fuse(model, options={"backend": "eager"})
            x = torch.randn(rows, 1024, device="cuda", dtype=dtype)
            torch.testing.assert_close(fused(x), model(x), rtol=3e-2, atol=3e-2)
            assert any("halves" in note for note in fused.fusion_report.notes) == is_two
