"""Under autocast a result has the type that PyTorch promotes to: of the product, in 16 bits, and what is beside it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import epigemm
from epigemm import Matrix, PerColumn, PerRow, Scalar
from tests.support.activations import ACT

LEAD, N, K = (2, 3), 6, 8
SHAPES = {
    "column": (N,),
    "row": LEAD,
    "matrix": (*LEAD, N),
    "shared": (1, 1, N),
    "mean": (N,),
    "var": (N,),
    "scalar": (),
}


@epigemm.epilogue
def added(acc: Tensor, bias: PerColumn, residual: Matrix) -> Any:
    return acc + bias + residual


@epigemm.epilogue
def optional(acc: Tensor, bias: PerColumn | None = None, residual: Matrix | None = None) -> Any:
    acc = acc if bias is None else acc + bias
    return torch.tanh(acc) if residual is None else torch.tanh(acc) + residual


@epigemm.epilogue
def compared(acc: Tensor, residual: Matrix, factor: PerColumn) -> Any:
    return torch.where(residual > 0, acc, acc * 2.0) * factor


@epigemm.epilogue
def cast(acc: Tensor, residual: Matrix) -> Any:
    return (acc + residual).to(torch.bfloat16)


@epigemm.epilogue
def by_row(acc: Tensor, scale: PerRow, limit: Scalar) -> Any:
    return torch.clamp(acc * scale, -limit, limit)


@epigemm.epilogue
def detached(acc: Tensor, residual: Matrix) -> Any:
    return acc * residual.detach()


@epigemm.epilogue
def several(acc: Tensor, bias: PerColumn, residual: Matrix) -> Any:
    z = acc + bias
    return torch.sigmoid(z), [z + residual, z.sum(0)]


@epigemm.epilogue
def bias_twice(acc: Tensor, bias: PerColumn, residual: Matrix) -> Any:
    z = acc + bias
    return z - bias, z * residual, (z * residual).amax(1)


class Case(NamedTuple):
    call: Callable[..., Any]  # of x, weight, bias, operands
    plain: Callable[..., Any]  # PyTorch, of z = F.linear(x, weight, bias) and the operands
    operands: Sequence[str]  # what each is, of `SHAPES`
    has_bias: bool = True


def batch_norm(z: Tensor, scale: Tensor | None, mean: Tensor, var: Tensor) -> Tensor:
    z = z if scale is None else z * scale
    return F.batch_norm(z.flatten(0, -2), mean, var).view(z.shape)


def folded(x: Tensor, weight: Tensor, bias: Tensor, *vectors: Tensor) -> Tensor:
    return epigemm.linear_scale_batch_norm(x, weight, bias, *vectors)


def layer(kind: Any, *operands: str) -> Callable[..., Tensor]:
    """A call of a layer over the given parameters."""
    made = kind(K, N)

    def call(x: Tensor, weight: Tensor, bias: Tensor, *values: Tensor) -> Tensor:
        state = {"weight": weight, "bias": bias, **dict(zip(operands, values, strict=False))}
        result: Tensor = torch.func.functional_call(made, state, (x, *values[len(operands) :]))
        return result

    return call


CASES = {
    "linear": Case(epigemm.linear, lambda z: z, ()),
    **{
        f"linear_{name}": Case(getattr(epigemm, f"linear_{name}"), ACT[name], ())
        for name in ("relu", "silu", "tanh", "gelu")
    },
    "sigmoid_scale_residual": Case(
        epigemm.linear_sigmoid_scale_residual, lambda z, s: torch.sigmoid(z) * s + z, ["scalar"]
    ),
    "relu_div": Case(epigemm.linear_relu_div, lambda z, d: torch.relu(z) / d, ["scalar"]),
    "scale": Case(epigemm.linear_scale, lambda z, s: z * s, ["column"]),
    "scale_batch_norm": Case(folded, batch_norm, ["column", "mean", "var"]),
    "batch_norm": Case(
        lambda x, w, b, *v: epigemm.linear_scale_batch_norm(x, w, b, None, *v),
        lambda z, *v: batch_norm(z, None, *v),
        ["mean", "var"],
    ),
    "batch_norm_relu": Case(
        epigemm.linear_batch_norm_relu,
        lambda z, *v: torch.relu(batch_norm(z, None, *v)),
        ["mean", "var"],
    ),
    "residual": Case(epigemm.linear_residual, torch.add, ["matrix"]),
    "residual_of_rows": Case(epigemm.linear_residual, torch.add, ["shared"], False),
    "layer_scale": Case(epigemm.linear_layer_scale_residual, lambda z, v, m: m + v * z, ["column", "matrix"]),
    **{
        f"gated_{name}": Case(
            lambda *a, name=name: epigemm.linear_gated(*a, activation=name),
            lambda z, m, name=name: ACT[name](z) * m,
            ["matrix"],
        )
        for name in ACT
    },
    "LinearResidual": Case(layer(epigemm.nn.LinearResidual), torch.add, ["matrix"]),
    "LinearGated": Case(layer(epigemm.nn.LinearGated), lambda z, m: F.silu(z) * m, ["matrix"]),
    "LinearLayerScaleResidual": Case(
        layer(epigemm.nn.LinearLayerScaleResidual, "layer_scale"),
        lambda z, v, m: m + v * z,
        ["column", "matrix"],
    ),
    "own_layer": Case(layer(lambda *sizes: epigemm.nn.Linear(*sizes, epilogue=added)), torch.add, ["matrix"]),
    "added": Case(added, torch.add, ["matrix"]),
    "optional": Case(optional, lambda z, m: torch.tanh(z) + m, ["matrix"]),
    "optional_without": Case(
        lambda x, w, b, m: optional(x, w, None, m), torch.add, ["matrix"], False
    )._replace(plain=lambda z, m: torch.tanh(z) + m),
    "optional_bias": Case(optional, torch.tanh, ()),
    "compared": Case(
        lambda x, w, b, *o: compared(x, w, *o),
        lambda z, m, v: torch.where(m > 0, z, z * 2.0) * v,
        ["matrix", "column"],
        False,
    ),
    "cast": Case(
        lambda x, w, b, m: cast(x, w, m), lambda z, m: (z + m).to(torch.bfloat16), ["matrix"], False
    ),
    "by_row": Case(
        lambda x, w, b, r: by_row(x, w, r, 0.5),
        lambda z, r: torch.clamp(z * r[..., None], -0.5, 0.5),
        ["row"],
        False,
    ),
    "detached": Case(lambda x, w, b, m: detached(x, w, m), lambda z, m: z * m.detach(), ["matrix"], False),
    "several": Case(
        several,
        lambda z, m: (torch.sigmoid(z), [z + m, z.float().flatten(0, -2).sum(0)]),
        ["matrix"],
    ),
    "bias_twice": Case(
        lambda x, w, b, *o: bias_twice(x, w, *o),
        lambda z, b, m: ((z + b) - b, (z + b) * m, ((z.float() + b) * m).amax(-1)),
        ["column", "matrix"],
        False,
    ),
}
DTYPES = [torch.bfloat16, torch.float16]


class Given(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    operands: list[Tensor]

    @property
    def leaves(self) -> list[Tensor]:
        return [each for each in (self.x, self.weight, self.bias, *self.operands) if each is not None]


def draw(case: Case, narrow: Sequence[bool], dtype: torch.dtype, *, recorded: bool = False) -> Given:
    """Tensors in fp32; of the operands those that `narrow` says in autocast's type."""
    rng = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    operands = [some(*SHAPES[kind]) for kind in case.operands]
    operands = [
        each.abs() + 0.5 if kind in ("var", "scalar") else each
        for kind, each in zip(case.operands, operands, strict=True)
    ]
    operands = [
        each.to(dtype) if is_narrow else each for each, is_narrow in zip(operands, narrow, strict=True)
    ]
    given = Given(some(*LEAD, K), some(N, K), some(N) if case.has_bias else None, operands)
    statistics = [each for each, kind in zip(operands, case.operands, strict=True) if kind in ("mean", "var")]
    for each in given.leaves:
        each.requires_grad_(recorded and not any(each is other for other in statistics))
    return given


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


every_case = pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{name}-{str(dtype)[6:]}")
        for name, case in CASES.items()
        for dtype in DTYPES
        if name != "cast"
        or dtype is torch.bfloat16  # what a function casts to has the product's type all the same
    ],
)


@every_case
@pytest.mark.parametrize("how", ["no_grad", "recorded", "vmap", "inference_mode"])
def test_types_and_numbers(case: Case, how: str, dtype: torch.dtype) -> None:
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
            loss.backward()
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
    function = epigemm.linear_scale_batch_norm if name == "scale_batch_norm" else case.call
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
    moved = [None if each is None else each.cuda() for each in (*given[:3], *given.operands)]
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
