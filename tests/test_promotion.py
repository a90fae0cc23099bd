"""Under autocast a result has the type that PyTorch promotes to: of the product, in 16 bits, and what is beside it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import epigemm
from tests.support.every_function import CASES, LEAD, Case, Given, K, N, draw, several
from tests.support.thorough import in_turn

DTYPES = [torch.bfloat16, torch.float16]


def expected(case: Case, given: Given) -> list[Tensor]:
    return tree_leaves(case.plain(F.linear(given.x, given.weight, given.bias), *given.operands))


def choices(case: Case) -> list[tuple[bool, ...]]:
    """Which operands are in 16 bits. The vectors of a BatchNorm are of one type for PyTorch."""
    count = len(case.operands)
    every = list(itertools.product((False, True), repeat=count))
    return (
        [each for each in every if case.operands[-1] != "var" or each[-2:] == (False, False)]
        if count
        else every
    )


def assert_as_pytorch(case: Case, given: Given, got: Any, dtype: torch.dtype) -> None:
    """Types as PyTorch's; numbers no further from the exact ones than two roundings of 16 bits."""
    want, found = expected(case, given), tree_leaves(got)
    assert [each.dtype for each in found] == [each.dtype for each in want]
    with torch.autocast("cpu", enabled=False):
        x, weight, bias = (None if each is None else each.to(dtype).double() for each in given[:3])
        assert x is not None and weight is not None
        exact = expected(case, Given(x, weight, bias, [each.double() for each in given.operands]))
    size = 4 * max(
        float(F.linear(x, weight, bias).detach().abs().max()),
        *(float(each.detach().abs().max()) for each in exact),
    )
    for mine, theirs in zip(found, exact, strict=True):
        assert float((mine.double() - theirs).abs().max()) <= torch.finfo(dtype).eps * size


# What a function casts to has the product's type all the same.
PAIRS = [(name, dtype) for dtype in DTYPES for name in CASES if name != "cast" or dtype is torch.bfloat16]
every_case = pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(CASES[name], dtype, id=f"{name}-{str(dtype)[6:]}") for name, dtype in PAIRS],
)


@pytest.mark.parametrize(
    ("pair", "how"),
    in_turn(PAIRS, ["no_grad", "recorded", "vmap", "inference_mode"]),
    ids=lambda each: each if isinstance(each, str) else f"{each[0]}-{each[1]}",
)
def test_types_and_numbers(pair: tuple[str, torch.dtype], how: str) -> None:
    case, dtype = CASES[pair[0]], pair[1]
    modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "vmap": torch.no_grad}
    for narrow in choices(case):
        given = draw(case, narrow, dtype, recorded=how == "recorded")
        with torch.autocast("cpu", dtype), modes.get(how, torch.enable_grad)():
            if how == "vmap":
                dims = [0 if kind in ("matrix", "row", "shared") else None for kind in case.operands]
                pairs = zip(given.operands, case.operands, strict=True)
                spread = [each.expand(2, 1, N) if kind == "shared" else each for each, kind in pairs]
                got = torch.vmap(
                    lambda x, *operands, given=given: tree_leaves(
                        case.call(x, given.weight, given.bias, *operands)
                    ),
                    (0, *dims),
                )(given.x, *spread)
                if case is CASES["several"]:  # a sum over the rows of each
                    got[2] = got[2].sum(0)
            else:
                got = case.call(given.x, given.weight, given.bias, *given.operands)
            assert_as_pytorch(case, given, got, dtype)


@every_case
def test_gradients(case: Case, dtype: torch.dtype) -> None:
    for narrow in choices(case):
        ours, theirs = (draw(case, narrow, dtype, recorded=True) for _ in range(2))
        with torch.autocast("cpu", dtype):
            got = tree_leaves(case.call(ours.x, ours.weight, ours.bias, *ours.operands))
            want = expected(case, theirs)
        for results, given in ((got, ours), (want, theirs)):
            loss = sum((each.float() * torch.arange(each.numel()).view(each.shape)).sum() for each in results)
            assert isinstance(loss, Tensor)
            loss.backward()  # type: ignore[no-untyped-call]
            del given
        for mine, other in zip(ours.leaves, theirs.leaves, strict=True):
            if other.grad is None:
                assert mine.grad is None
                continue
            assert mine.grad is not None and mine.grad.dtype is mine.dtype
            error = (mine.grad.double() - other.grad.double()).abs().max()
            assert float(error) <= 16 * torch.finfo(dtype).eps * (1 + float(other.grad.abs().max()))


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "scale",
        "scale_batch_norm",
        "batch_norm_relu",
        "layer_scale",
        "LinearGated",
        "own_layer",
        "several",
    ],
)
def test_compiled(name: str, recorded: bool) -> None:
    case, dtype = CASES[name], torch.bfloat16
    given = draw(case, [False] * len(case.operands), dtype, recorded=recorded)
    torch._dynamo.reset()
    call = torch.compile(case.call, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype):
        assert_as_pytorch(case, given, call(given.x, given.weight, given.bias, *given.operands), dtype)


@pytest.mark.parametrize("name", ["scale", "scale_batch_norm", "residual", "layer_scale", "added"])
def test_out(name: str) -> None:
    case = CASES[name]
    given = draw(case, [False] * len(case.operands), torch.bfloat16)
    arguments = (given.x, given.weight, given.bias, *given.operands)
    function: Any = epigemm.linear_scale_batch_norm if name == "scale_batch_norm" else case.call
    out, narrow = torch.empty(*LEAD, N), torch.empty(*LEAD, N, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert function(*arguments, out=out) is out
        assert torch.equal(out, function(*arguments))
        with pytest.raises(RuntimeError, match=r"^out: got dtype torch.bfloat16; accepted is torch.float32"):
            function(*arguments, out=narrow)
        with pytest.raises(RuntimeError, match=r"^strict: .*result is float32"):
            function(*arguments, strict=True)
        with pytest.raises(TypeError, match=r"^strict: got int"):
            function(*arguments, strict=1)
        with pytest.raises(ValueError, match=r"^precision: got 'fp8'"):
            function(*arguments, precision="fp8")
        with pytest.raises(RuntimeError, match=r"^x: got shape"):
            function(given.x[..., 1:], *arguments[1:])
        with pytest.raises(RuntimeError, match=r"^\w+: got shape \[1\]"):
            function(*arguments[:-1], torch.ones(1))
        found = str(epigemm.explain(function, *arguments))
    assert "autocast: an operand is float32, and so is the result" in found
    launches = found[found.index("launches:") :]
    assert (
        launches.index("torch GEMM (addmm")
        < launches.index("from bfloat16 to float32")
        < launches.index("backward")
    )


def test_strict_and_explained_with_several_results() -> None:
    given = draw(CASES["several"], [False], torch.bfloat16)
    arguments = (given.x, given.weight, given.bias, *given.operands)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError, match=r"^strict: "):
            several(*arguments, strict=True)
        found = epigemm.explain(several, *arguments)
        narrow = epigemm.explain(several, *arguments[:3], given.operands[0].bfloat16())
    assert "autocast: an operand is float32" in found.reasons[0] and "autocast" not in str(narrow.reasons)
    assert [each.split(", ")[-1] for each in found.results[:2]] == ["x's dtype", "fp32"]
    casts = [number for number, each in enumerate(found.kernels) if "from bfloat16 to float32" in each]
    assert casts == [1 + next(number for number, each in enumerate(found.kernels) if "GEMM" in each)]


def test_a_residual_stream_stays_in_fp32() -> None:
    """A stream of 16 bits would lose 8 bits at each block."""
    torch.manual_seed(0)
    layers = [epigemm.nn.LinearResidual(32, 32) for _ in range(24)]
    stream = theirs = torch.randn(4, 32) * 8
    exact = stream.double()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for each in layers:
            each.weight *= 0.05
            stream, theirs = each(stream, stream), F.linear(theirs, each.weight, each.bias) + theirs
            with torch.autocast("cpu", enabled=False):
                exact = (
                    F.linear(exact, each.weight.double(), None if each.bias is None else each.bias.double())
                    + exact
                )
    errors = [float((each.double() - exact).norm() / exact.norm()) for each in (stream, theirs)]
    assert errors[0] <= 1.1 * errors[1] < 2e-3


def test_fp64_and_no_autocast_are_left() -> None:
    """Outside of autocast the result has x's type; fp64 is not cast."""
    x, weight, residual = torch.randn(3, K), torch.randn(N, K), torch.randn(3, N)
    assert epigemm.linear_residual(x.half(), weight.half(), None, residual).dtype is torch.float16
    with torch.autocast("cpu", torch.float16):
        found = epigemm.linear_residual(x.double(), weight.double(), None, residual.double())
        assert found.dtype is torch.float64
    with torch.autocast("cpu", torch.float16, enabled=False):
        assert epigemm.linear_residual(x.half(), weight.half(), None, residual).dtype is torch.float16


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("recorded", [False, True])
def test_on_a_gpu(name: str, recorded: bool) -> None:
    case = CASES[name]
    if name == "cast":
        return
    given = draw(case, [False] * len(case.operands), torch.bfloat16)
    moved: list[Any] = [None if each is None else each.cuda() for each in (*given[:3], *given.operands)]
    for each in moved:
        if recorded and each is not None and not name.endswith(("batch_norm", "batch_norm_relu")):
            each.requires_grad_()
    if name.startswith(("Linear", "own")):
        return  # layers on a CPU
    with torch.autocast("cuda", torch.bfloat16):
        got = tree_leaves(case.call(*moved))
        want = tree_leaves(case.plain(F.linear(*moved[:3]), *moved[3:]))
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype is theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=5e-2, atol=1e-1)
