"""`epigemm.epilogue`: values, gradients, compilers and errors of epilogues that are made at run time."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from epigemm import Matrix, PerColumn, PerRow, Scalar, UserEpilogue

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@epigemm.epilogue
def bias_gelu(acc: Tensor, bias: PerColumn) -> Tensor:
    return F.gelu(acc + bias)


@epigemm.epilogue
def layer_scale(acc: Tensor, bias: PerColumn, gamma: PerColumn, residual: Matrix) -> Tensor:
    return (acc + bias) * gamma + residual


@epigemm.epilogue
def gate(acc: Tensor, other: Matrix) -> Tensor:
    return F.silu(acc) * other


@epigemm.epilogue
def dequantised(acc: Tensor, of_row: PerRow, of_column: PerColumn) -> Tensor:
    return acc * of_row * of_column


@epigemm.epilogue
def bounded(acc: Tensor, low: Scalar = -0.5, high: Scalar = 0.75) -> Tensor:
    return torch.clamp(acc, low, high)


@epigemm.epilogue
def plain(acc: Tensor) -> Tensor:
    return acc * 1.0


@epigemm.epilogue
def everything(
    acc: Tensor,
    a: PerColumn,
    b: PerColumn,
    c: PerColumn,
    d: PerColumn,
    r: PerRow,
    q: PerRow,
    m: Matrix,
    n: Matrix,
    s: Scalar,
    t: Scalar,
) -> Tensor:
    result: Tensor = (acc + a) * b + torch.tanh(c) * d + r * s + q * t + m * torch.sigmoid(n)
    return result


FUNCTIONS = [bias_gelu, layer_scale, gate, dequantised, bounded, plain, everything]
IDS = [function.traced.name for function in FUNCTIONS]


@dataclass
class Given:
    """A call's tensors, and what it should give."""

    x: Tensor
    weight: Tensor
    operands: list[Any]

    def wide(self) -> list[Any]:
        return [value.double() if isinstance(value, Tensor) else value for value in self.operands]


def seen(function: UserEpilogue, operands: list[Any]) -> list[Any]:
    """Operands as the function sees them beside a result `[M, N]`."""
    found = []
    for spec, value in zip(function.traced.operands, operands, strict=True):
        if spec.kind == "per_row":
            value = value.reshape(-1, 1)
        elif spec.kind == "matrix":
            value = value.reshape(-1, value.shape[-1])
        found.append(value)
    return found


def expected(function: UserEpilogue, acc: Tensor, operands: list[Any]) -> Tensor:
    """The Python function itself, in fp64."""
    wide = acc.double()
    plain_function: Callable[..., Tensor] = vars(function)["__wrapped__"]
    result: Tensor = plain_function(wide.reshape(-1, wide.shape[-1]), *seen(function, operands))
    return result.reshape(acc.shape)


def draw(
    function: UserEpilogue,
    rng: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
    lead: tuple[int, ...] = (37,),
    n: int = 40,
    k: int = 72,
    *,
    vectors: torch.dtype | None = None,
    scalars: str = "numbers",
) -> Given:
    def random(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64).to(device, of)

    operands: list[Any] = []
    for place, spec in enumerate(function.traced.operands):
        of = dtype if vectors is None or place % 2 else vectors
        if spec.kind == "scalar":
            number = 0.25 + place / 8 if spec.name != "low" else -0.25
            tensor = torch.tensor(
                number, device=device, dtype=torch.float64 if dtype == torch.float64 else torch.float32
            )
            operands.append(tensor if scalars == "tensors" else number)
        else:
            shape = {"per_column": (n,), "per_row": lead, "matrix": (*lead, n)}[spec.kind]
            operands.append(random(*shape, of=of))
    return Given(random(*lead, k), random(n, k) / k**0.5, operands)


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, size: float = 4.0) -> None:
    """Two roundings to the dtype (of the product and of the result), each of numbers of this size at most."""
    unit = {torch.float32: 2.0**-20, torch.float64: 2.0**-46}.get(dtype, torch.finfo(dtype).eps)
    bound = unit * (want.abs() + size)
    off = (got.double() - want).abs() > bound
    assert got.dtype == dtype and not bool(off.any()), f"{int(off.sum())} of {off.numel()} differ"
    assert not bool(got.isnan().any())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("lead", [(37,), (2, 3, 5), (), (0,)], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS, ids=IDS)
@pytest.mark.parametrize("form", ["linear", "elementwise"])
def test_values(
    form: str,
    function: UserEpilogue,
    lead: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    rng: torch.Generator,
) -> None:
    given = draw(function, rng, dtype, device, lead)
    z = torch.randn(*lead, 40, generator=rng, dtype=torch.float64).to(device, dtype)
    acc = given.x.double() @ given.weight.double().t()
    call: Callable[..., Tensor] = function if form == "linear" else function.elementwise
    inputs = (given.x, given.weight) if form == "linear" else (z,)
    out = torch.full_like(z, float("nan")) if form == "linear" else z
    want = expected(function, acc if form == "linear" else z, given.wide())
    size = 16.0 if form == "linear" else 4.0
    result = call(*inputs, *given.operands)
    assert result.shape == want.shape
    assert_close(result, want, dtype, size)
    assert call(*inputs, *given.operands, out=out) is out
    assert_close(out, want, dtype, size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scalars", ["numbers", "tensors"])
def test_fp32_operands_beside_16_bits(
    scalars: str, dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    given = draw(everything, rng, dtype, device, vectors=torch.float32, scalars=scalars)
    want = expected(everything, given.x.double() @ given.weight.double().t(), given.wide())
    assert_close(everything(given.x, given.weight, *given.operands), want, dtype, 16.0)
    assert_close(
        everything.elementwise(want.to(dtype), *given.operands),
        expected(everything, want.to(dtype), given.wide()),
        dtype,
        16.0,
    )


@pytest.mark.parametrize("rows", [1, 5, 16, 33, 64, 100, 256, 1000])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_sizes(rows: int, dtype: torch.dtype, device: torch.device, rng: torch.Generator) -> None:
    """Every family of kernels, with operands of every kind."""
    for n, k in ((256, 512), (264, 136), (1000, 1024), (17, 40)):
        given = draw(everything, rng, dtype, device, (rows,), n, k)
        want = expected(everything, given.x.double() @ given.weight.double().t(), given.wide())
        assert_close(everything(given.x, given.weight, *given.operands), want, dtype, 16.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_operands_as_they_may_lie(dtype: torch.dtype, device: torch.device, rng: torch.Generator) -> None:
    """Transposed and broadcast matrices, vectors with gaps and of one number."""
    given = draw(everything, rng, dtype, device, (256,), 264, 512)
    a, b, c, d, r, q, m, n, s, t = given.operands
    lying = [
        torch.stack([a, a], 1)[:, 0],
        b,
        c[:1].expand(264),
        d,
        torch.stack([r, r], 1)[:, 0],
        q[:1].expand(256),
        m.t().contiguous().t(),
        n[:1].expand(256, 264),
        s,
        t,
    ]
    wide = [value.double() if isinstance(value, Tensor) else value for value in lying]
    want = expected(everything, given.x.double() @ given.weight.double().t(), wide)
    assert_close(everything(given.x, given.weight, *lying), want, dtype, 16.0)
    assert_close(
        everything.elementwise(want.to(dtype), *lying),
        expected(everything, want.to(dtype), wide),
        dtype,
        16.0,
    )


@pytest.mark.parametrize("precision", ["highest", "high", "ieee", "tf32", None])
def test_precision(precision: str | None, device: torch.device, rng: torch.Generator) -> None:
    given = draw(everything, rng, torch.float32, device, (300,), 512, 1024)
    want = expected(everything, given.x.double() @ given.weight.double().t(), given.wide())
    result = everything(given.x, epigemm.pack(given.weight), *given.operands, precision=precision)
    exact = precision in ("highest", "ieee", None)
    assert_close(result, want, torch.float32, 16.0 if exact else 2.0**14)


@pytest.mark.parametrize("function", FUNCTIONS, ids=IDS)
@pytest.mark.parametrize("form", ["linear", "elementwise"])
def test_gradients(form: str, function: UserEpilogue, device: torch.device, rng: torch.Generator) -> None:
    given = draw(function, rng, torch.float64, device, (3, 2), 5, 4, scalars="tensors")
    operands = [value.requires_grad_() for value in given.operands]
    x, weight = given.x.requires_grad_(), given.weight.requires_grad_()
    z = torch.randn(3, 2, 5, generator=rng, dtype=torch.float64).to(device).requires_grad_()
    call: Callable[..., Tensor] = function if form == "linear" else function.elementwise
    inputs = (x, weight, *operands) if form == "linear" else (z, *operands)
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS, ids=IDS)
def test_gradients_of_every_operand(
    function: UserEpilogue, dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    """By the derivative's kernel where there is one, against autograd in fp64."""
    if function is bounded and dtype.itemsize == 2:
        pytest.skip("the product that is saved is rounded to 16 bits, perhaps across a bound")
    given = draw(function, rng, dtype, device, (33,), 24, 16, scalars="tensors")
    wide = [value.double().requires_grad_() for value in given.wide()]
    x, weight = given.x.double().requires_grad_(), given.weight.double().requires_grad_()
    grad = torch.randn(33, 24, generator=rng, dtype=torch.float64).to(device, dtype)
    wanted = torch.autograd.grad(expected(function, x @ weight.t(), wide), [x, weight, *wide], grad.double())
    leaves = [tensor.requires_grad_() for tensor in (given.x, given.weight, *given.operands)]
    found = torch.autograd.grad(function(*leaves), leaves, grad)
    for leaf, one, other in zip(leaves, found, wanted, strict=True):
        assert one.dtype == leaf.dtype
        unit = {torch.float32: 2.0**-17, torch.float64: 2.0**-44}.get(dtype, 4 * torch.finfo(dtype).eps)
        bound = unit * (other.abs() + other.abs().mean() + 1) * 4
        assert not bool(((one.double() - other).abs() > bound).any())


def test_autograd_sees_what_it_should(device: torch.device, rng: torch.Generator) -> None:
    given = draw(layer_scale, rng, torch.float32, device)
    gamma = given.operands[1].requires_grad_()
    result = layer_scale(given.x, given.weight, *given.operands)
    torch.autograd.backward(result.sum())
    z = given.x.double() @ given.weight.double().t() + given.operands[0].double()
    assert given.x.grad is None and gamma.grad is not None
    torch.testing.assert_close(gamma.grad.double(), z.sum(0), rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match="out="):
        layer_scale(given.x, given.weight, *given.operands, out=torch.empty_like(result))


@pytest.mark.parametrize("recorded", [False, True])
def test_torch_compile(recorded: bool, device: torch.device, rng: torch.Generator) -> None:
    given = draw(everything, rng, torch.float32, device)
    x = given.x.requires_grad_(recorded)

    def call(x: Tensor, *operands: Any) -> Tensor:
        return everything(x * 1.0, given.weight, *operands)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, *given.operands), call(x, *given.operands), rtol=1e-5, atol=1e-5)
    if recorded:
        one, other = (torch.autograd.grad(f(x, *given.operands).sum(), x)[0] for f in (compiled, call))
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_new_scalar_compiles_nothing(device: torch.device, rng: torch.Generator) -> None:
    given = draw(bounded, rng, torch.bfloat16, device)
    results = [bounded(given.x, given.weight, -high, high) for high in (0.125, 0.25, 0.5)]
    assert [float(result.max()) for result in results] == [0.125, 0.25, 0.5]
    assert len(bounded._linked) == 1


def test_vmap(device: torch.device, rng: torch.Generator) -> None:
    given = draw(layer_scale, rng, torch.float32, device, (4, 6))
    bias, gamma, residual = given.operands
    found = torch.vmap(lambda x, r: layer_scale(x, given.weight, bias, gamma, r))(given.x, residual)
    torch.testing.assert_close(
        found, layer_scale(given.x, given.weight, bias, gamma, residual), rtol=1e-5, atol=1e-5
    )


def test_autocast(device: torch.device, rng: torch.Generator) -> None:
    given = draw(layer_scale, rng, torch.float32, device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        result = layer_scale(given.x, given.weight, *given.operands)
    want = expected(layer_scale, given.x.double() @ given.weight.double().t(), given.wide())
    assert result.dtype == torch.float32  # by its operands
    assert_close(result.bfloat16(), want, torch.bfloat16, 16.0)


def test_batch_invariance(device: torch.device, rng: torch.Generator) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        given = draw(everything, rng, dtype, device, (50,), 44, 60)
        with epigemm.batch_invariant():
            every = everything(given.x, given.weight, *given.operands)
            some = [
                value[7:8] if spec.kind in ("per_row", "matrix") else value
                for spec, value in zip(everything.traced.operands, given.operands, strict=True)
            ]
            one = everything(given.x[7:8], given.weight, *some)
        assert torch.equal(every[7:8], one)
        want = expected(everything, given.x.double() @ given.weight.double().t(), given.wide())
        assert_close(every, want, dtype, 16.0)


def test_export_is_refused(device: torch.device) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return plain(x, weight)

    given = (torch.randn(4, 8, device=device), torch.randn(8, 8, device=device))
    with pytest.raises(Exception, match=r"torch\.export"):
        torch.export.export(Model(), given, strict=False)


def test_strict_and_explain(device: torch.device, rng: torch.Generator) -> None:
    given = draw(bias_gelu, rng, torch.bfloat16, device, (512,), 512, 512)
    text = str(epigemm.explain(bias_gelu, given.x, given.weight, *given.operands))
    assert "bias_gelu" in text
    if device.type == "cuda":
        return
    with pytest.raises(RuntimeError, match="strict: got True"):
        bias_gelu(given.x, given.weight, *given.operands, strict=True)


BAD: dict[str, tuple[type[Exception], str, Callable[[Given], object]]] = {
    "missing": (TypeError, "residual: got None", lambda g: layer_scale(g.x, g.weight, *g.operands[:2])),
    "unknown": (TypeError, "got an operand 'gain'", lambda g: layer_scale(g.x, g.weight, *g.operands[:2], gain=1.0)),
    "twice": (TypeError, "'bias' twice", lambda g: layer_scale(g.x, g.weight, g.operands[0], bias=g.operands[0])),
    "too many": (TypeError, "got 4 operands", lambda g: layer_scale(g.x, g.weight, *g.operands, 1.0)),
    "no tensor": (TypeError, "bias: got float", lambda g: layer_scale(g.x, g.weight, 1.0, *g.operands[1:])),
    "length": (RuntimeError, r"bias: got shape \[3\]", lambda g: bias_gelu(g.x, g.weight, g.x[0, :3])),
    "matrix": (RuntimeError, "residual: got shape", lambda g: layer_scale(g.x, g.weight, *g.operands[:2], g.x)),
    "dtype": (RuntimeError, "bias: got dtype", lambda g: bias_gelu(g.x, g.weight, g.operands[1].half())),
    "x": (RuntimeError, "x: got shape", lambda g: layer_scale(g.x[:, :3], g.weight, *g.operands)),
    "weight": (RuntimeError, "weight: got shape", lambda g: plain(g.x, g.weight[0])),
    "x is none": (TypeError, "x: got None", lambda g: plain(None, g.weight)),  # type: ignore[arg-type]
    "scalar": (TypeError, "high: got bool", lambda g: bounded(g.x, g.weight, 0.0, True)),
    "precision": (ValueError, "precision", lambda g: plain(g.x, g.weight, precision="exact")),
    "out": (RuntimeError, "out: got shape", lambda g: plain(g.x, g.weight, out=g.x)),
    "overlap": (RuntimeError, "share memory", lambda g: layer_scale(g.x, g.weight, *g.operands, out=g.operands[2])),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, device: torch.device, rng: torch.Generator) -> None:
    kind, words, call = BAD[name]
    given = draw(layer_scale, rng, torch.float32, device)
    with pytest.raises(kind, match=words):
        call(given)


def test_layer(device: torch.device, rng: torch.Generator) -> None:
    layer = epigemm.nn.Linear(72, 40, epilogue=layer_scale, device=device)
    given = draw(layer_scale, rng, torch.float32, device)
    _, gamma, residual = given.operands
    assert layer.bias is not None
    want = expected(
        layer_scale,
        given.x.double() @ layer.weight.double().t(),
        [layer.bias.double(), gamma.double(), residual.double()],
    )
    for result in (layer(given.x, gamma, residual), layer(given.x, residual=residual, gamma=gamma)):
        assert_close(result.detach(), want.detach(), torch.float32, 16.0)
    assert copy.deepcopy(layer).epilogue is layer_scale
    assert pickle.loads(pickle.dumps(layer)).epilogue is layer_scale
    assert "epilogue=layer_scale" in repr(layer)
    plain_linear = nn.Linear(72, 40, device=device)
    shared = epigemm.nn.Linear.from_linear(plain_linear, epilogue=bias_gelu)
    assert shared.weight is plain_linear.weight
    torch.testing.assert_close(shared(given.x), F.gelu(plain_linear(given.x)), rtol=1e-4, atol=1e-4)
    bare = epigemm.nn.Linear.from_linear(plain_linear)
    torch.testing.assert_close(bare(given.x), plain_linear(given.x), rtol=1e-4, atol=1e-4)
    with pytest.raises(TypeError, match="bias: got True"):
        epigemm.nn.Linear(4, 4, bias=True, epilogue=gate)
    with pytest.raises(TypeError, match="epilogue: got function"):
        epigemm.nn.Linear(4, 4, epilogue=F.relu)  # type: ignore[arg-type]


def test_an_operand_without_a_gradient_under_vmap() -> None:
    """As PyTorch: what `detach` or a comparison ends has none, although a batched tensor does not tell of its own."""

    @epigemm.epilogue
    def ended(acc: Tensor, gate: Matrix) -> Tensor:
        return acc * gate.detach()

    x, weight, gate = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(2, 3, 5, requires_grad=True)
    pairs = ((lambda x, r: ended(x, weight, r), x), (ended.elementwise, torch.randn(2, 3, 5)))
    for call, first in pairs:
        assert not torch.vmap(call)(first, gate).requires_grad
        assert torch.vmap(call)(first.clone().requires_grad_(), gate).requires_grad
