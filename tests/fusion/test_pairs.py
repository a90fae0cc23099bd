"""A product whose halves are multiplied becomes a pair of products, where nothing else reads it and that is faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from epigemm.fusion import FusionReport, matmuls, pairs, profit
from epigemm.fusion.chains import Chain, ChainFinder
from epigemm.fusion.pairs import Pair
from epigemm.fusion.profit import Judged, Way
from epigemm.fusion.rewrite import name_of
from epigemm.linker import loader
from epigemm.planner import plans
from tests.fusion.eager import fuse_eagerly
from tests.fusion.gated_forwards import LEFT, TAKEN, K, Layers, N, by_transpose, chunk, stacked
from tests.support.thorough import in_turn

ROWS = 6
NOTE = " its halves are two products, of which one multiplies by the other"


def model_of(forward: Callable[..., Any], bias: bool = True) -> Any:
    torch.manual_seed(1)
    return type("Model", (Layers,), {"forward": forward})(bias).eval()


def compiled(model: Any, backend: str) -> tuple[Any, FusionReport]:
    """Fused, or by the backend."""
    if backend == "fuse":
        fused = fuse_eagerly(model)
        return fused, fused.fusion_report
    torch._dynamo.reset()
    report = FusionReport()
    options: Any = {"backend": backend, "report": report.add}
    return torch.compile(model, backend="epigemm", fullgraph=True, options=options), report


def check(call: Any, model: Any, x: Tensor) -> None:
    """Equal values, types and strides."""
    actual, expected = call(x), model(x)
    pairs_of = zip(actual, expected, strict=True) if isinstance(expected, tuple) else [(actual, expected)]
    for mine, other in pairs_of:
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
        assert mine.stride() == other.stride()


@pytest.mark.parametrize(
    ("forward", "setting"),
    in_turn(TAKEN, ["bias-fuse", "bare-aot_eager", "bare-fuse", "bias-aot_eager"]),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_two_products_of_one(forward: Callable[..., Any], setting: str) -> None:
    bias, backend = setting.split("-")
    model = model_of(forward, bias == "bias")
    # A transpose that is made without gradients, of what has one, is the right operand as it stands (torch 2.10).
    model.requires_grad_(forward is not by_transpose)
    call, report = compiled(model, backend)
    with torch.no_grad():
        check(call, model, torch.randn(2, ROWS, K))
    assert len(report.sites) == 2 and not report.skipped, report
    assert [note.partition(":")[2] for note in report.notes] == [NOTE], report


def test_one_behind_the_other() -> None:
    """The second layer's x is what the first one's halves give."""
    model = model_of(stacked)
    call, report = compiled(model, "fuse")
    with torch.no_grad():
        check(call, model, torch.randn(ROWS, K))
        check(call, model, torch.randn(2 * ROWS, K))
    assert len(report.sites) == 4 and len(report.notes) == 2, report
    assert [site.function for site in report.sites if site.function.endswith("mul")] == [
        "linear_sigmoid_mul"
    ] * 2


@pytest.mark.parametrize("forward", LEFT, ids=lambda each: each.__name__)
def test_left_as_it_was(forward: Callable[..., Any]) -> None:
    model = model_of(forward)
    call, report = compiled(model, "fuse")
    with torch.no_grad():
        check(call, model, torch.randn(2, ROWS, K))
    assert len(report.sites) + len(report.skipped) == 1 and not report.notes, report


def test_not_where_gradients_are_recorded() -> None:
    """x's gradient would take two products and a sum."""
    model = model_of(chunk)
    call, report = compiled(model, "fuse")
    check(call, model, torch.randn(ROWS, K, requires_grad=True))
    assert len(report.sites) == 1 and not report.notes
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    check(call, model, torch.randn(ROWS, K))
    assert len(report.sites) == 3 and len(report.notes) == 1, "another graph"


def test_not_under_autocast() -> None:
    """Each of the two would cast x."""
    model = model_of(chunk)
    call, report = compiled(model, "fuse")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        call(torch.randn(ROWS, K))
        assert len(report.sites) == 1 and not report.notes
        call(torch.randn(ROWS, K, dtype=torch.bfloat16))
        assert not report.notes, "the weight is cast"


@pytest.mark.parametrize("backend", ["fuse", "aot_eager"])
def test_not_in_an_inference_mode_of_the_models_own(backend: str) -> None:
    """AOTAutograd can trace no view of a parameter there; around the model it does not see the mode."""

    def within(self: Any, x: Tensor) -> Any:
        with torch.inference_mode():
            return chunk(self, x)

    for forward, count in ((within, 0), (chunk, 1)):
        model = model_of(forward)
        call, report = compiled(model, backend)
        with torch.no_grad() if forward is within else torch.inference_mode():
            check(call, model, torch.randn(ROWS, K))
        assert report.sites and len(report.notes) == count, report


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits(dtype: torch.dtype) -> None:
    model = model_of(chunk).to(dtype)
    call, report = compiled(model, "fuse")
    x = torch.randn(ROWS, K, dtype=dtype)
    with torch.no_grad():
        torch.testing.assert_close(call(x), model(x), rtol=4 * torch.finfo(dtype).eps, atol=1e-2)
    assert len(report.notes) == 1


# --- what pays -------------------------------------------------------------------------------------------------------


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> fx.Graph:
    """Of a function of one result, which is not computed."""
    found: list[fx.Graph] = []

    def backend(graph_module: fx.GraphModule, _: object) -> Callable[..., object]:
        found.append(graph_module.graph)
        return lambda *_: (torch.empty(0),)

    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return found[0]


def swiglu(x: Tensor, weight: Tensor) -> Tensor:
    a, b = F.linear(x, weight).chunk(2, -1)
    return F.silu(a) * b


def of_pytorch(x: Tensor, weight: Tensor) -> Tensor:
    return F.glu(F.linear(x, weight), -1)


def judged(graph: fx.Graph, judge: Callable[[Chain], Judged]) -> dict[Chain, Judged]:
    finder, understood = ChainFinder(graph), map(matmuls.understand, reversed(list(graph.nodes)))
    chains = [finder.chain(each) for each in understood if isinstance(each, matmuls.Product)]
    return {chain: judge(chain) for chain in chains}


def taken_apart(graph: fx.Graph, one_us: float) -> Pair:
    one = judged(graph, lambda chain: Judged(profit.SLOWER, Way.FALLBACK, one_us, one_us))
    us = pairs.read_by_halves(graph, one)
    (pair,) = pairs.take_apart(graph, us, us).values()
    return pair


SIZES = torch.empty(4096, 64), torch.empty(2 * 2048, 64)
MOVED_US = 4096 * 2048 * 4 / 3e6  # a matrix of the result's size in fp32


@pytest.mark.parametrize("one_by_one", [True, False], ids=["eager", "Inductor"])
@pytest.mark.parametrize("function", [swiglu, of_pytorch])
def test_the_kernels_behind_are_counted(function: Callable[..., Any], one_by_one: bool) -> None:
    """In eager mode SiLU and a product, or `F.glu`; Inductor makes one kernel of both."""
    graph, one_us = graph_of(function, *SIZES), 1000.0
    pair = taken_apart(graph, one_us)
    passes, kernels = (5, 2) if function is swiglu and one_by_one else (3, 1)
    behind_us = kernels * 3.0 + passes * MOVED_US
    for fused_us, pays in ((0.48 * (one_us + behind_us), True), (0.49 * (one_us + behind_us), False)):
        found = judged(graph, lambda chain, us=fused_us: Judged("", Way.FUSED, 2000.0, us))  # type: ignore[misc]
        assert pairs.pays(pair, found, one_by_one=one_by_one) == pays


def test_a_chain_that_is_not_fused_counts_by_its_kernels() -> None:
    """Only the one that reads the other has to be."""
    graph = graph_of(swiglu, *SIZES)
    pair, silu_us = taken_apart(graph, 1000.0), 3.0 + 2 * MOVED_US

    def judge(chain: Chain, plain_us: float) -> Judged:
        if chain.function == "linear_mul":
            return Judged("", Way.FUSED, 500.0, 500.0)
        return Judged(profit.SLOWER, Way.FALLBACK, plain_us, plain_us)

    whole_us = 1000.0 + 2 * 3.0 + 5 * MOVED_US
    for left_us, pays in ((0.96 * whole_us, True), (0.98 * whole_us, False)):
        found = judged(graph, lambda chain, us=left_us - 500.0 - silu_us: judge(chain, us))  # type: ignore[misc]
        assert pairs.pays(pair, found, one_by_one=True) == pays
    nothing = judged(graph, lambda chain: Judged(profit.SLOWER, Way.FALLBACK, 1.0, 1.0))
    assert not pairs.pays(pair, nothing, one_by_one=True)


def test_one_kernel_for_both_counts_in_full() -> None:
    """Its time is that of both products. The operators of the chain that has it are those of one."""
    graph = graph_of(swiglu, *SIZES)
    pair, whole_us = taken_apart(graph, 1000.0), 1000.0 + 2 * 3.0 + 5 * MOVED_US

    def judge(chain: Chain, both_us: float) -> Judged:
        us = both_us if chain.function == "linear_mul" else 0.0
        return Judged("", Way.FUSED, 500.0, us, both="of both")

    for both_us, pays in ((0.96 * whole_us, True), (0.98 * whole_us, False)):
        found = judged(graph, lambda chain, us=both_us: judge(chain, us))  # type: ignore[misc]
        assert pairs.pays(pair, found, one_by_one=True) == pays


@pytest.mark.parametrize(
    ("dtype", "size", "pays"),
    [
        (torch.bfloat16, (4096, 3072, 1024), True),
        (torch.bfloat16, (16, 2816, 1024), False),
        (torch.float32, (4096, 3072, 1024), True),
        (torch.float32, (64, 1024, 256), False),
    ],
)
def test_the_planner_decides(
    dtype: torch.dtype, size: tuple[int, int, int], pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an H200 that is described to it: at few rows two products take longer than one."""
    monkeypatch.setattr(plans, "gpu_numbers", lambda device: (90, 132))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(loader, "would_link", lambda *call: "")
    place, (m, n, k) = torch.empty(0), size
    graph = graph_of(swiglu, torch.empty(m, k, dtype=dtype), torch.empty(2 * n, k, dtype=dtype))

    def judge(chain: Chain) -> Judged:
        return profit.judged_there(profit.call_of(chain), place)

    us = pairs.read_by_halves(graph, judged(graph, judge))
    (pair,) = pairs.take_apart(graph, us, us).values()
    assert pairs.pays(pair, judged(graph, judge), one_by_one=True) == pays


def test_one_product_stays_where_views_read_what_is_computed_later() -> None:
    """A size of a dynamic batch, behind the product."""

    class Model(Layers):
        def forward(self, x: Tensor) -> Any:
            z = self.fc(x.view(-1, K))
            size = x.shape[0] * x.shape[1]
            a, b = z.view(size, 2, N).unbind(1)
            return self.down(F.silu(a) * b * z[:, :N])

    model, report = Model().eval(), FusionReport()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(pairs, "pays", lambda *_, **__: False)
        call = torch.compile(
            model, backend="epigemm", dynamic=True, options={"backend": "aot_eager", "report": report.add}
        )
        for lead in ((2, 3), (4, 5)):
            check(call, model, torch.randn(*lead, K))
    assert len(report.sites) == 2 and not report.skipped and not report.notes, report


def test_only_those_that_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one stays as it was; one whose x is what another one gave, too."""
    for place in (0, 1):
        lost = ("fc", "down")[place]
        monkeypatch.setattr(pairs, "pays", lambda pair, *_, lost=lost, **__: name_of(pair.first) != lost)
        model = model_of(stacked)
        call, report = compiled(model, "fuse")
        with torch.no_grad():
            check(call, model, torch.randn(ROWS, K))
        assert len(report.sites) == 3 and len(report.notes) == 1
        assert report.notes[0].startswith(("down", "fc")[place])
