"""Products of rows in groups (`F.grouped_mm`) with what follows them: values, gradients, what is left alone, profit.

Rows behind the last group are undefined, and are not compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd

from epigemm.fusion import FusionReport, profit
from tests.fusion.test_profit import chain_of
from tests.support.pieces import DEVICE
from tests.support.pretended import H200, Pretended, pretend_gpu
from tests.support.thorough import in_turn

ROWS, GROUPS, N, K = 16, 3, 32, 8
BF16 = torch.bfloat16
U = torch.finfo(BF16).eps / 2
ENDS = {"an empty one": (3, 3, 10), "all in one": (16, 16, 16), "none": (0, 0, 0)}
aten: Any = torch.ops.aten
private: Any = torch._grouped_mm


class Given(NamedTuple):
    """What the functions read; `share` is in fp32, as routers' weights are."""

    x: Tensor
    weight: Tensor
    columns: Tensor
    biases: Tensor
    matrix: Tensor
    number: Tensor
    share: Tensor
    offs: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self[:-1]


Made = Callable[[Any, Given], Tensor]


def given_of(*tensors: Tensor) -> Given:
    return Given._make(tensors)


def drawn(ends: str = "an empty one", scale: float = 1.0) -> Given:
    shapes = ((ROWS, K), (GROUPS, N, K), (N,), (GROUPS, N), (ROWS, N), ())
    tensors = [(torch.randn(shape) * scale).to(BF16) for shape in shapes]
    return given_of(*tensors, torch.rand(ROWS), torch.tensor(ENDS[ends], dtype=torch.int32))


def by_loop(x: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
    """`F.grouped_mm` in any type, with zeros behind the last group."""
    begins = [0, *offs.tolist()]
    parts = [x[i:j] @ each for i, j, each in zip(begins, begins[1:], right, strict=False)]
    return torch.cat([*parts, x.new_zeros(len(x) - begins[-1], right.shape[2])])


def mm(multiply: Any, g: Given) -> Tensor:
    result: Tensor = multiply(g.x, g.weight.mT, offs=g.offs)
    return result


def by_columns(multiply: Any, g: Given) -> Tensor:
    """Of weights as `torch.bmm` has them."""
    return torch.relu(multiply(g.x, g.weight.mT.contiguous(), offs=g.offs))


def biased(multiply: Any, g: Given) -> Tensor:
    group = torch.searchsorted(g.offs, torch.arange(ROWS), right=True).clamp(max=GROUPS - 1)
    return F.silu(mm(multiply, g) + g.biases[group])


def gated(multiply: Any, g: Given) -> Tensor:
    first, second = (multiply(g.x, half.mT, offs=g.offs) for half in g.weight.chunk(2, 1))
    result: Tensor = F.silu(first) * second
    return result


def written(multiply: Any, g: Given) -> Tensor:
    """The same with ends that are written between the products, each of which clamps them."""
    ends = g.offs.clone()
    before = ends.clamp(0, ROWS)
    ends.add_(1)
    both = [each.cummax(0).values for each in (before, ends.clamp(0, ROWS))]
    pairs = zip(g.weight.chunk(2, 1), both, strict=True)
    first, second = (multiply(g.x, half.mT, offs=each) for half, each in pairs)
    result: Tensor = F.silu(first) * second
    return result


def halves(multiply: Any, g: Given) -> Tensor:
    first, second = mm(multiply, g).chunk(2, -1)
    return F.gelu(first) * second


TAKEN: dict[str, tuple[Made, int, str]] = {
    "alone": (mm, 0, "acc"),
    "relu": (lambda multiply, g: torch.relu(mm(multiply, g)), 1, "relu(acc)"),
    "transposed": (by_columns, 1, "relu(acc)"),
    "columns": (lambda multiply, g: torch.tanh(mm(multiply, g) + g.columns), 1, "tanh(acc + c1)"),
    "biases": (biased, 1, "(acc + m1) * sigmoid(acc + m1)"),
    "share": (lambda multiply, g: mm(multiply, g) * g.share.to(BF16)[:, None], 1, "acc * r1"),
    "of tokens": (lambda multiply, g: mm(multiply, g).view(8, 2, N) * g.matrix[:, :1].view(8, 2, 1), 1, "acc * r1"),
    "matrix": (lambda multiply, g: g.matrix + torch.sigmoid(mm(multiply, g)) * g.number, 1, "m1 + (sigmoid(acc) * s1)"),
    "number": (lambda multiply, g: torch.relu(mm(multiply, g)) * g.number, 1, "relu(acc) * s1"),
    "two": (gated, 2, "acc * sigmoid(acc)"),
    "written": (written, 2, "acc * sigmoid(acc)"),
    "halves": (halves, 2, "gelu(acc)"),
}  # fmt: skip
"""Functions, how many chains they have where no gradient is recorded, and the first one's formula."""


def compiled(made: Made, backend: Any = "eager", **settings: Any) -> tuple[Any, list[FusionReport]]:
    reports: list[FusionReport] = []
    options = {"backend": backend, "report": reports.append, "strict": True}

    def function(*given: Tensor) -> Tensor:
        return made(F.grouped_mm, given_of(*given))

    return torch.compile(function, backend="epigemm", fullgraph=True, options=options, **settings), reports


def flat(result: Tensor, g: Given) -> Tensor:
    """The rows that are in groups."""
    return result.reshape(ROWS, -1)[: int(g.offs[-1])]


def check(call: Any, made: Made, g: Given) -> None:
    """A fused call rounds at most as often as PyTorch's operators one by one."""
    wide = given_of(*(each.double() for each in g.leaves), g.offs)
    exact, plain, found = (flat(each, g) for each in (made(by_loop, wide), made(by_loop, g), call(*g)))
    assert found.dtype is BF16 and found.shape == exact.shape
    if exact.numel():
        bound = 1.25 * (plain.double() - exact).abs().max() + 2 * U * exact.abs().max()
        assert (found.double() - exact).abs().max() <= bound


@pytest.mark.parametrize(
    ("name", "way"),
    in_turn(list(TAKEN), [(backend, ends) for ends in ENDS for backend in ("eager", "aot_eager")]),
    ids=str,
)
def test_values(name: str, way: tuple[str, str]) -> None:
    made, chains, formula = TAKEN[name]
    call, reports = compiled(made, way[0])
    g = drawn(way[1])
    with torch.no_grad():
        check(call, made, g)
    (report,) = reports
    assert report.sites and not report.skipped and report.chains == (chains, chains)
    assert report.sites[0].formula == formula and report.sites[0].function.startswith("grouped_linear")


@pytest.mark.parametrize("spelled", [private, aten._grouped_mm, aten._grouped_mm.default], ids=range(3))
def test_spellings(spelled: Any) -> None:
    g, made = drawn(), TAKEN["relu"][0]
    call, reports = compiled(lambda _, given: made(spelled, given))
    check(call, made, g)
    assert reports[0].chains == (1, 1)


@pytest.mark.parametrize(("name", "backend"), in_turn(list(TAKEN), ["eager", "aot_eager"]), ids=str)
def test_gradients(name: str, backend: str) -> None:
    """As near to those in float64 as PyTorch's; of what is in no group there is none."""
    made, g = TAKEN[name][0], drawn(scale=0.5)
    call, _ = compiled(made, backend)
    results = []
    for function, dtype in ((lambda *each: made(by_loop, given_of(*each)), torch.float64), (call, BF16)):
        leaves = [each.to(dtype).requires_grad_() for each in g.leaves]
        loss = flat(function(*leaves, g.offs), g).double().square().sum()
        results.append(torch.autograd.grad(loss, leaves, allow_unused=True))
    for exact, found in zip(*results, strict=True):
        assert (exact is None) == (found is None)
        if exact is not None:
            assert bool(found.isfinite().all())
            assert (found.double() - exact).abs().max() <= 16 * U * exact.abs().max()
    assert not bool(results[1][0][int(g.offs[-1]) :].any())


def test_the_number_of_rows_may_change() -> None:
    made = TAKEN["share"][0]
    call, reports = compiled(made, "aot_eager", dynamic=True)
    g = drawn()
    for rows in (15, 13, 10):
        given = g._replace(x=g.x[:rows], share=g.share[:rows])
        found = call(*given)[:10].double()
        exact = made(by_loop, given_of(*(each.double() for each in given.leaves), g.offs))[:10]
        assert (found - exact).abs().max() <= 4 * U * exact.abs().max()
    assert len(reports) == 1 and reports[0].chains == (1, 1)


def test_a_traced_chain_is_one_operator() -> None:
    graphs: list[fx.GraphModule] = []
    backend = aot_autograd(fw_compiler=lambda graph, _: graphs.append(graph) or graph.forward)  # type: ignore[func-returns-value]
    call, _ = compiled(TAKEN["columns"][0], backend)
    with torch.no_grad():
        check(call, TAKEN["columns"][0], drawn())
    targets = [node.target for node in graphs[0].graph.nodes]
    assert torch.ops.epigemm.grouped_linear.default in targets
    assert not {aten._grouped_mm.default, aten.tanh.default} & {*targets}


def normed(multiply: Any, g: Given) -> Tensor:
    return F.batch_norm(mm(multiply, g), g.columns, g.columns.abs() + 1)


LEFT: dict[str, tuple[Made, str]] = {
    "batches": (
        lambda multiply, g: torch.relu(private(g.x.view(GROUPS - 1, -1, K), g.weight[1:].mT)).flatten(0, 1),
        "its groups are not of rows",
    ),
    "columns in groups": (
        lambda multiply, g: torch.relu(private(g.x.t().contiguous(), g.matrix, offs=g.offs)).flatten(0, 1),
        "its groups are not of rows",
    ),
    "rows that share a matrix": (
        lambda multiply, g: mm(multiply, g).view(8, 2, N) + g.matrix[:8, None],
        "is repeated along rows, which are in groups",
    ),
    "a BatchNorm": (normed, "is a BatchNorm of rows in groups"),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    made, reason = LEFT[name]
    call, reports = compiled(made)
    g = drawn("all in one")
    with torch.no_grad():
        torch.testing.assert_close(call(*g), made(F.grouped_mm, g), rtol=8 * U, atol=8 * U)
    (report,) = reports
    assert report.chains[1] == 0 and reason in f"{report}{report.not_taken}"


# --- on a GPU --------------------------------------------------------------------------------------------------------


def relu(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return torch.relu(private(x, weight.mT, offs=offs))


def product(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    result: Tensor = private(x, weight.mT, offs=offs)
    return result


def cast(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return product(x, weight, offs).float().clone().bfloat16()


def of_wide(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return (product(x, weight, offs).float() * x.float()).bfloat16()


@pytest.mark.parametrize(
    ("made", "n", "is_recorded", "why_not"),
    [
        (relu, 64, False, ""),
        (product, 64, False, profit.SLOWER),
        (cast, 64, False, profit.SLOWER),
        (of_wide, 64, False, profit.SLOWER),
        (relu, 64, True, profit.RECORDED),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_what_pays(made: Any, n: int, is_recorded: bool, why_not: str, hopper: Tensor) -> None:
    """A chain does where a kernel computes it, and nothing is cast for it; PyTorch's product alone is left."""
    offs = torch.tensor([10, 20, 30, 64], dtype=torch.int32)
    chain = chain_of(made, torch.randn(64, 64).bfloat16(), torch.randn(4, n, 64).bfloat16(), offs)
    found = profit.judged_there(profit.call_of(chain), hopper, is_recorded=is_recorded)
    assert found.why_not == why_not
    assert found.way is profit.Way.FUSED


@pytest.mark.parametrize(("name", "joins"), [("two", True), ("halves", True), ("written", False)])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_pairs(name: str, joins: bool, backend: str, hopper: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel, and two calls where it does not run; also where a compiler traces the graph."""
    made, g = TAKEN[name][0], drawn()
    call, reports = compiled(made, backend)
    with torch.no_grad():
        check(call, made, g)
        assert str(reports[0]).count("computed by one kernel with") == 2 * joins
        gpu = Pretended()
        pretend_gpu(monkeypatch, DEVICE, gpu, gpu=H200)
        check(call, made, g)
        assert gpu.pairs == joins
