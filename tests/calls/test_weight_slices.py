"""fp32 calls on fp16 slices: which calls take them, which memory they use, and what computes the others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from epigemm.packs import weight_packs
from tests.ops.op import Op
from tests.support.pieces import Road
from tests.support.public import PUBLIC_LINEAR
from tests.support.thorough import in_turn
from tests.support.untyped import backends, backward


def same_results(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("function", "packed"), in_turn(PUBLIC_LINEAR, [False, True]), ids=lambda v: getattr(v, "name", str(v))
)
def test_every_function_runs_there(function: Op, packed: bool, road: Road, rng: torch.Generator) -> None:
    m, n, k = road.size
    arguments = function.draw(rng, (m,), n, k, device=road.device)
    expected = function.reference(**arguments)
    if packed:
        arguments["weight"] = epigemm.pack(arguments["weight"])
    same_results(function.call(**arguments), expected)
    same_results(function.call(**arguments, strict=True), expected)
    out = torch.empty(m, n, device=road.device)
    assert function.call(**arguments, out=out) is out
    same_results(out, expected)
    assert [launch.packed for launch in road.take()] == [packed] * 3


OUTS: dict[str, Callable[[int, int, torch.device], Tensor]] = {
    "contiguous": lambda m, n, d: torch.empty(m, n, device=d),
    "columns of a wider one": lambda m, n, d: torch.empty(m, n + 4, device=d)[:, :n],
    "rows off 16 bytes": lambda m, n, d: torch.empty(m, n + 1, device=d)[:, :n],
    "start off 16 bytes": lambda m, n, d: torch.empty(m * n + 1, device=d)[1:].view(m, n),
    "transposed": lambda m, n, d: torch.empty(n, m, device=d).t(),
    "every other column": lambda m, n, d: torch.empty(m, 2 * n, device=d)[:, ::2],
    "three dimensions": lambda m, n, d: torch.empty(m // 2, 2, n, device=d),
    "three dimensions, gaps": lambda m, n, d: torch.empty(m // 2, 3, n, device=d)[:, :2],
}


@pytest.mark.parametrize(("layout", "narrower"), in_turn([*OUTS], [0, 1, 2, 3]))
def test_outputs(layout: str, narrower: int, road: Road) -> None:
    """What the kernels cannot store to is written by a copy, and nothing beside it."""
    m, n, k = road.size[0], road.size[1] - narrower, 4 * road.size[2]  # a product that is worth the copy
    out = OUTS[layout](m, n, road.device)
    root = out._base if out._base is not None else out
    root.fill_(float("nan"))
    x, weight = torch.randn(*out.shape[:-1], k, device=road.device), torch.randn(n, k, device=road.device)
    epigemm.linear(x, weight, out=out)
    road.check(out.reshape(m, n), x.reshape(m, k), weight)
    assert int(root.isnan().sum()) == root.numel() - m * n
    (launch,) = road.take()
    copied = launch.out != out.data_ptr()
    launches = epigemm.explain("linear", x, weight, out=out).kernels
    assert copied == any("torch copy of the result" in kernel for kernel in launches)
    if layout == "contiguous":
        assert copied == (narrower > 0)


@pytest.mark.parametrize(("fallback_us", "runs"), [(1e6, True), (10.5, False)])
def test_a_copy_that_takes_the_gain(fallback_us: float, runs: bool, road: Road) -> None:
    m, n, k = road.size
    for size in (road.size, (m, n - 1, k)):
        road.measure(10.0, fallback_us, size=size)
    x, weight = road.x(), road.weight()
    for given, expected in ((weight, True), (weight[:-1], runs)):
        road.check(epigemm.linear(x, given), x, given)
        assert len(road.take()) == expected
    if not runs:
        reasons = epigemm.explain("linear", x, weight[:-1]).reasons
        assert any("copying the result takes what was gained" in reason for reason in reasons)


ELSEWHERE: dict[str, tuple[tuple[int, int, int], dict[str, Any], str]] = {
    "no rows": ((0, 512, 256), {}, "empty"),
    "no columns": ((64, 0, 256), {}, "empty"),
    "no sum": ((64, 64, 0), {}, "empty"),
    "small K": ((2048, 512, 64), {}, "K = 64"),
    "tiny": ((20, 20, 256), {}, "expected to be at least as fast"),
    "ieee": ((2048, 512, 256), {"precision": "ieee"}, "at most 16 rows|not on a CUDA device"),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_calls_that_run_elsewhere(case: str, road: Road) -> None:
    (m, n, k), options, reason = ELSEWHERE[case]
    x, weight = torch.randn(m, k, device=road.device), torch.randn(n, k, device=road.device)
    same_results(epigemm.linear_relu(x, weight, **options), F.relu(F.linear(x, weight)))
    assert not road.take()
    reasons = epigemm.explain("linear_relu", x, weight, **options).reasons
    assert any(re.search(reason, text) for text in reasons), reasons
    with pytest.raises(RuntimeError, match=rf"strict: got True .*({reason})"):
        epigemm.linear_relu(x, weight, **options, strict=True)


def always_on_pieces(road: Road) -> None:
    """Whatever dispatch thinks of the size."""
    _, n, k = road.size
    for size in (road.size, (weight_packs._MANY_ROWS, n, k)):
        road.measure(10.0, 100.0, size=size)
    road.measure(90.0, 100.0, arithmetics=["tf32"])


def settings(how: str) -> None:
    """Both of torch's settings APIs."""
    if how in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(how)
    else:
        backends.cuda.matmul.fp32_precision = how
        backends.mkldnn.matmul.fp32_precision = how


WISHES = [None, "highest", "ieee", "high", "medium", "tf32"]
ASKED = {"highest": "split", "ieee": "ieee", "high": "scaled", "medium": "scaled", "tf32": "tf32"}
DEFAULTS = {
    "highest": "split",
    "high": "scaled",
    "medium": "scaled",
    "none": "split",
    "ieee": "split",
    "tf32": "scaled",
}


@pytest.mark.every(5)
@pytest.mark.parametrize("setting", DEFAULTS)
@pytest.mark.parametrize("wish", WISHES)
def test_which_arithmetic_runs(setting: str, wish: str | None, road: Road) -> None:
    """The table of precisions, as launched: the call's wish wins, None follows torch."""
    x, weight = road.x(), road.weight()
    settings(setting)
    always_on_pieces(road)
    asked = DEFAULTS[setting] if wish is None else ASKED[wish]
    packed = epigemm.pack(weight, precision=wish)
    assert set(weight_packs.kept(weight)) == (
        {weight_packs.SLICES[asked]} if asked in weight_packs.SLICES else set()
    )
    epigemm.linear(x, packed, precision=wish)
    launched = [launch.arithmetic for launch in road.take()]
    assert launched == ([asked] if asked in weight_packs.SLICES else [])


def test_scaled_against_the_tf32_kernel(road: Road) -> None:
    """Precision "high" takes the faster of both, and scaled fp16 where TF32 does not run on the tensors."""
    x, weight = road.x(), road.weight()
    always_on_pieces(road)
    packed = epigemm.pack(weight, precision="high")

    def launched(given: Tensor, tf32: float) -> list[str]:
        road.measure(tf32, 100.0, arithmetics=["tf32"])
        epigemm.linear(given, packed, precision="high")
        return [launch.arithmetic for launch in road.take()]

    torch.set_float32_matmul_precision("high")
    assert launched(x, 90.0) == ["scaled"]
    assert launched(x, 1.0) == []
    assert launched(x.t().contiguous().t(), 1.0) == ["scaled"], "TF32 needs rows"
    reasons = " ".join(epigemm.explain("linear", x, packed, precision="high").reasons)
    assert "TF32 kernel is expected to be faster" in reasons


def test_gradients_products_run_there_too(road: Road) -> None:
    """Three products of one size, each on fp16 slices; they are those of plain PyTorch."""
    size = 1024 if road.device.type == "cpu" else 4096
    x = torch.randn(size, size, device=road.device).requires_grad_()
    weight = (torch.randn(size, size, device=road.device) / size**0.5).requires_grad_()
    upstream = torch.randn(size, size, device=road.device)
    backward(epigemm.linear_relu(x, weight), upstream)
    launches = road.take()
    assert len(launches) == 3, "forward, x's gradient, the weight's"
    mine = [x.grad, weight.grad]
    x.grad = weight.grad = None
    backward(F.relu(F.linear(x, weight)), upstream)
    for ours, theirs in zip(mine, (x.grad, weight.grad), strict=True):
        assert ours is not None and theirs is not None
        # An output that rounds to the other side of zero is a whole term of the sum.
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-3
