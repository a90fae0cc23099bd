"""On a GPU the planner decides what is fused, by the times of its plan and of the fallback."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import epigemm
from epigemm.arguments.calls import LinearCall
from epigemm.epilogues.library import BIAS, BIAS_RELU
from epigemm.epilogues.registry import EPILOGUES
from epigemm.fusion import matmuls, profit
from epigemm.fusion.chains import Chain, ChainFinder
from epigemm.fusion.profit import Judged, Way
from epigemm.planner.gpus import KNOWN
from tests.fusion.eager import graph_of, report_of
from tests.support.pretended import describe

M, N, K = 4096, 4096, 4096


def chain_of(function: Any, *inputs: Tensor) -> Chain:
    """The chain of the one product in a function of one result, which is not computed."""
    graph = graph_of(function, *inputs)
    (product,) = (each for each in map(matmuls.understand, graph.nodes) if isinstance(each, matmuls.Product))
    return ChainFinder(graph).chain(product)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


def gated(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    return F.silu(x @ weight.t()) * other


def normed(x: Tensor, weight: Tensor, vector: Tensor) -> Tensor:
    return F.batch_norm(F.linear(x, weight), vector, vector)


def test_where_gradients_are_recorded_the_product_decides() -> None:
    """A training step keeps the product: the epilogue is a kernel of its own then."""
    x, weight, matrix = torch.rand(6, 8), torch.rand(4, 8, requires_grad=True), torch.rand(6, 4)
    assert profit.call_of(chain_of(gated, x, weight, matrix)).epilogue is BIAS


def call(m: int, dtype: torch.dtype, k: int = K, n: int = N) -> LinearCall:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return LinearCall(BIAS, empty(m, k), empty(n, k), (empty(n),))


FP32, BF16 = torch.float32, torch.bfloat16
# An epilogue, M, N = K, a type, whether autograd records, and why it is not fused.
ASKED = [
    (BIAS, M, N, FP32, False, ""),  # on fp16 slices, where there are rows enough
    (BIAS, 8, N, FP32, False, ""),  # in multiply-adds
    (BIAS, M, N, BF16, False, profit.SLOWER),  # cuBLAS adds a bias itself
    (BIAS, M, N, FP32, True, ""),
    (BIAS_RELU, M, N, BF16, False, ""),  # cuBLAS with a ReLU is a fused call
    (BIAS_RELU, M, N, BF16, True, profit.RECORDED),
    (BIAS_RELU, M, 256, FP32, False, ""),
    (BIAS_RELU, M, 256, FP32, True, profit.SLOWER),  # PyTorch's layer has a cheaper derivative
]


@pytest.mark.parametrize("asked", ASKED)
def test_the_planner_decides(asked: Any, hopper: Tensor) -> None:
    epilogue, m, n, dtype, is_recorded, why_not = asked
    found = profit.judged_there(
        call(m, dtype, n, n)._replace(epilogue=epilogue), hopper, is_recorded=is_recorded
    )
    assert found.why_not == why_not


@pytest.mark.parametrize("reason", ["", "nvJitLink was not found"])
def test_a_kernel_that_cannot_be_linked_gains_nothing(
    reason: str, hopper: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On other GPUs than Hopper no kernel is in the package."""
    asked = call(48, torch.bfloat16, 64, 1024)._replace(epilogue=EPILOGUES["bias_gelu"])
    describe(monkeypatch, KNOWN["A100 80 GB"].numbers, linked=lambda *call: reason)
    found = profit.judged_there(asked, hopper)
    assert found.why_not == reason and found.way is Way.FUSED
    assert found.fused_us < found.fallback_us / 1.1


def test_the_fallback_is_that_of_the_precision_in_force(hopper: Tensor) -> None:
    """At `high` it is cuBLAS in TF32, which takes less than half of SGEMM's time."""
    times = {}
    for wish in ("highest", "high"):
        asked = call(1024, torch.float32, 1024, 2048)._replace(precision=wish)
        times[wish] = profit.judged_there(asked, hopper).fallback_us
    assert 0 < times["high"] < times["highest"] / 2


def several(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As KernelBench 2/81."""
    z = F.linear(x, weight, bias)
    return torch.clamp(torch.tanh(torch.clamp(z * torch.sigmoid(z) / 2.0, -1, 1)), -1, 1)


def scaled(x: Tensor, weight: Tensor, vector: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, weight) * vector)


OF_GEMM = Judged(profit.SLOWER, Way.FALLBACK, 100.0, 100.0)
"""A GPU whose plan is the fallback."""


@pytest.mark.parametrize(
    ("function", "learns", "way"),
    [
        (several, "", Way.TWO_KERNELS),
        (several, "xwv", Way.TWO_KERNELS),
        (linear, "", Way.FALLBACK),
        (normed, "", Way.FALLBACK),
        (scaled, "xw", Way.TWO_KERNELS),
        (scaled, "xwv", Way.FALLBACK),  # the vector's gradient would be a matrix first
    ],
)
def test_several_kernels_behind_a_product_become_one(
    function: Any, learns: str, way: Way, hopper: Tensor
) -> None:
    given = torch.rand(6, 8), torch.rand(4, 8), torch.rand(4)
    for name, each in zip("xwv", given, strict=True):
        each.requires_grad_(name in learns)
    chain = chain_of(function, *given)
    found = profit.in_two_kernels(chain, OF_GEMM, hopper)
    assert found.way is way and (found.why_not == "") == (way is Way.TWO_KERNELS)
    notes = profit.notes(chain, found)
    assert len(notes) == (way is Way.TWO_KERNELS)
    if function is several and notes:
        assert notes[0].endswith("in the place of 6")


@pytest.mark.parametrize("lost", ["ELEMENTWISE", "DERIVATIVE"])
def test_two_kernels_need_one_that_can_be_linked(
    lost: str, hopper: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded, its derivative, too."""
    describe(monkeypatch, linked=lambda epilogue, name, device: "none" if name == lost else "")
    for learns in (False, True):
        chain = chain_of(several, torch.rand(6, 8), torch.rand(4, 8, requires_grad=learns), torch.rand(4))
        found = profit.in_two_kernels(chain, OF_GEMM, hopper)
        assert (found.why_not == "") == (lost == "DERIVATIVE" and not learns)
        # Inductor makes one kernel of several itself.
        assert profit.judged(chain, is_eager=False).why_not == profit.SLOWER


def test_a_rewriting_whose_products_are_not_fused_is_undone(hopper: Tensor) -> None:
    """PyTorch's encoder layer stays one node, and nothing is copied so that sums lie in rows."""
    x, nodes = torch.randn(4, 8, 24), list[str]()

    def backend(graph_module: fx.GraphModule, _: Any) -> Any:
        nodes.extend(node.name for node in graph_module.graph.nodes if node.op == "call_function")
        return graph_module.forward

    options: dict[str, Any] = {"backend": backend, "strict": True}
    with torch.no_grad():
        layer = nn.TransformerEncoderLayer(24, 2, 48, 0.0, "gelu", batch_first=True).eval()
        fused = epigemm.fuse(layer, options=options)
        fused(x)
    assert len(nodes) == 1
    assert report_of(fused).notes == [f"_transformer_encoder_layer_fwd stays as it is: {profit.SLOWER}"]
