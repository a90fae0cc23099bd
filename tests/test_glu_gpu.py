"""`linear_glu` on a GPU: values, equal calls, packs, CUDA graphs, and where `fuse` makes two products of one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from tests.support.activations import ACT
from tests.support.cases import fused_unavailable
from tests.support.gated import assert_right, draw

pytestmark = pytest.mark.gpu
cuda: Any = torch.cuda
SIZES = [(4096, 3072, 1024), (1024, 4096, 4096), (300, 520, 256), (17, 1024, 1024), (1, 4096, 2048)]


@pytest.mark.parametrize("is_whole", [True, False], ids=["one weight", "two weights"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_against_fp64(size: tuple[int, int, int], dtype: torch.dtype, is_whole: bool) -> None:
    m, n, k = size
    pair = draw((m,), n, k, dtype, device="cuda")
    out = torch.full((m, n), float("nan"), dtype=dtype, device="cuda")
    x, weight, bias, weight2, bias2 = pair
    if is_whole:
        epigemm.linear_glu(*pair.whole, out=out)
    else:
        epigemm.linear_glu(x, weight, bias, weight2=weight2, bias2=bias2, out=out)
    assert_right(out, pair, "silu")


@pytest.mark.parametrize("activation", ACT)
def test_every_activation_is_one_kernel_with_the_gate(activation: str) -> None:
    if reason := fused_unavailable():
        pytest.skip(f"gpu: {reason}")
    pair = draw((4096,), 2048, 512, torch.bfloat16, device="cuda")
    assert_right(epigemm.linear_glu(*pair.whole, activation=activation, strict=True), pair, activation)
    found = epigemm.explain("linear_glu", *pair.whole, activation=activation)
    assert found.path == "fused" and f"gated_{activation}" in found.kernel


@pytest.mark.parametrize("n", [1023, 1024])
def test_halves_that_tma_refuses(n: int) -> None:
    """The second half of an odd number of rows begins at an address that is no multiple of 16 bytes."""
    pair = draw((512,), n, 1023, torch.bfloat16, device="cuda")
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
        pair = draw(lead, n, k, dtype, bias=rng.random() < 0.7, device="cuda")
        activation = rng.choice(list(ACT))
        options: dict[str, Any] = {"activation": activation, "weight2": pair.weight2, "bias2": pair.bias2}
        first, second = (epigemm.linear_glu(*pair[:3], **options) for _ in range(2))
        what = f"{lead} x {n} x {k}, {dtype}, {activation}"
        assert torch.equal(first, second), (what, epigemm.explain("linear_glu", *pair[:3], **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients(dtype: torch.dtype) -> None:
    pair = draw((512,), 1024, 512, dtype, device="cuda")
    ours = [each.clone().requires_grad_() for each in pair.whole if each is not None]
    exact = [each.detach().double().requires_grad_() for each in ours]
    first, second = F.linear(*exact).chunk(2, -1)
    grad = torch.randn(512, 1024, device="cuda", dtype=dtype)
    torch.autograd.backward(F.silu(first) * second, grad.double())
    torch.autograd.backward(epigemm.linear_glu(ours[0], ours[1], ours[2]), grad)
    for mine, other in zip(ours, exact, strict=True):
        assert mine.grad is not None and other.grad is not None
        error = torch.linalg.vector_norm(mine.grad.double() - other.grad) / torch.linalg.vector_norm(
            other.grad
        )
        assert float(error) < (1e-5 if dtype is torch.float32 else 2e-2)


def test_a_captured_layer_reads_the_packs_of_its_halves() -> None:
    """Packed on purpose before the capture, and again after a change: into the same memory."""
    if reason := fused_unavailable():
        pytest.skip(f"gpu: {reason}")
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fuse_makes_two_products_where_that_pays(dtype: torch.dtype) -> None:
    if reason := fused_unavailable():
        pytest.skip(f"gpu: {reason}")
    model = Gated(1024, 3072).to("cuda", dtype).eval()
    with torch.no_grad():
        for rows, is_two in ((8192, True), (16, False)):
            fused: Any = epigemm.fuse(model, options={"backend": "eager"})
            x = torch.randn(rows, 1024, device="cuda", dtype=dtype)
            torch.testing.assert_close(fused(x), model(x), rtol=3e-2, atol=3e-2)
            assert any("halves" in note for note in fused.fusion_report.notes) == is_two
