"""Layers with weights of 8 bits: against float64 of what is multiplied, with the states and the layers that stay."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal import two_tensor

import epigemm
from epigemm import Matrix, PerColumn
from tests.fusion.eager import fuse_eagerly
from tests.ops.eight_bits import close
from tests.support.thorough import in_turn

ours = epigemm.nn
TwoTensor: Any = two_tensor.TwoTensor
M, K, N = 5, 144, 160  # a block of 128 and a part of one
E4M3 = torch.float8_e4m3fn
RECIPES = ("row", "tensor", "1x128")


@epigemm.epilogue
def summed(acc: Tensor, matrix: Matrix, bias: PerColumn | None = None) -> Tensor:
    return torch.relu(acc if bias is None else acc + bias) + matrix


@epigemm.epilogue
def two(acc: Tensor, bias: PerColumn) -> tuple[Tensor, Tensor]:
    z = acc + bias
    return torch.relu(z), z * 2.0


# A layer, what follows its product in PyTorch, and whether it reads a matrix.
Made = tuple[Callable[..., nn.Module], Callable[[Tensor, Tensor], Tensor], bool]
LAYERS: dict[str, Made] = {
    "torch's": (nn.Linear, lambda z, m: z, False),
    "Linear": (ours.Linear, lambda z, m: z, False),
    "a user's": (lambda *sizes, **o: ours.Linear(*sizes, epilogue=summed, **o), lambda z, m: z.relu() + m, True),
    "GELU": (ours.LinearGELU, lambda z, m: F.gelu(z), False),
    "scale": (lambda k, n, **o: ours.LinearSigmoidScaleResidual(k, n, 2.0, **o),
              lambda z, m: z + 2 * z.sigmoid(), False),
    "residual": (ours.LinearResidual, lambda z, m: z + m, True),
    "gated": (ours.LinearGated, lambda z, m: F.silu(z) * m, True),
    "layer scale": (lambda *sizes, **o: ours.LinearLayerScaleResidual(*sizes, init_values=0.5, **o),
                    lambda z, m: m + 0.5 * z, True),
    "GLU": (ours.LinearGLU, lambda z, m: F.silu(z[..., :N]) * z[..., N:], False),
    "GLU of two": (
        lambda *sizes, **o: ours.LinearGLU.from_linears(nn.Linear(*sizes, **o), nn.Linear(*sizes, **o)),
        lambda z, m: F.silu(z[..., :N]) * z[..., N:], False,
    ),
}  # fmt: skip


def rounded(tensor: Tensor, recipe: str, height: int = 1) -> Tensor:
    """What the numbers of 8 bits stand for, in float64. `height`: of a block."""
    if recipe == "1x128":
        every = [torch.split(each, 128, -1) for each in torch.split(tensor.flatten(0, -2), height)]
        rows = [torch.cat([rounded(each, "tensor") for each in row], -1) for row in every]
        return torch.cat(rows).view(tensor.shape)
    wide = tensor.detach().float()
    largest = wide.abs().amax(-1, keepdim=True) if recipe == "row" else wide.abs().max()
    scale = largest.clamp(min=2.0**-100) / torch.tensor(448.0)
    return (wide / scale).to(E4M3).double() * scale.double()


def saved(value: Any) -> Any:
    """It, written and read; Python's own pickle has no 8-bit floats of torch's."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=isinstance(value, dict))


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(K, 48), nn.GELU(), nn.Linear(48, N)).eval()


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(("name", "recipe"), in_turn([*LAYERS], RECIPES), ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(name: str, recipe: str, bias: bool, dtype: torch.dtype) -> None:
    """Sums of numbers of 8 bits, to whose scales the epilogue is applied; x has leading axes."""
    make, after, reads = LAYERS[name]
    layer: Any = make(K, N, bias=bias).to(dtype)
    parts = [getattr(layer, each, None) for each in ("weight", "weight2", "bias", "bias2")]
    weight, added = (
        torch.cat([each for each in of if each is not None])
        for of in (parts[:2], [*parts[2:], torch.zeros(0)])
    )
    x, matrix = torch.randn(2, M, K).to(dtype), torch.randn(2, M, N).to(dtype)
    made: Any = ours.quantise(layer, recipe)
    assert (made is layer) == (name != "torch's") and f"quantised={recipe!r}" in repr(made)
    assert not any(each.requires_grad for each in made.parameters())
    shapes = {"row": (len(weight),), "tensor": (), "1x128": (len(weight) // N * 2, 2)}
    assert made.weight_scale.shape == shapes[recipe]
    found = made(x, *[matrix] * reads)
    pieces = torch.split(weight, N) if recipe == "1x128" else [weight]
    z = rounded(x, recipe) @ torch.cat([rounded(each, recipe, 128) for each in pieces]).t()
    exact = after(z + added.double() if bias else z, matrix.double())
    assert found.dtype is dtype and found.shape == exact.shape
    if "GLU" in name and dtype is not torch.float32:  # two calls, of which the first one's result is rounded
        torch.testing.assert_close(found.double(), exact, rtol=1.01 * torch.finfo(dtype).eps, atol=1e-4)
    else:
        close(found, exact)


@pytest.mark.parametrize("recipe", RECIPES)
def test_special_rows(recipe: str) -> None:
    """Zeros, tiny and huge numbers have a scale; of an infinity or a NaN the row gets NaN."""
    layer = ours.quantise(nn.Linear(K, N, bias=False), recipe)
    x = torch.randn(6, K)
    x[0], x[1], x[2] = 0, x[1] * 1e-35, x[2] * 1e30
    found = layer(x)
    assert bool(found.isfinite().all()) and not found[0].any()
    for call in (layer, torch.compile(layer, backend="aot_eager")):
        assert call(x[:0]).shape == (0, N) and call(x[0]).shape == (N,)
    x[3, 5], x[4, 5] = torch.inf, torch.nan
    is_nan = layer(x).isnan().all(-1)
    assert is_nan[3:5].all() and (recipe == "tensor" or not is_nan[[0, 1, 2, 5]].any())


def test_accuracy_of_a_model() -> None:
    """Three bits of a mantissa: 2^-4 of each factor at most, and less of sums of many."""
    plain, x = model(), torch.randn(64, K)
    expected = plain(x).detach()
    for recipe in RECIPES:
        found = ours.quantise(copy.deepcopy(plain), recipe)(x)
        assert float((found - expected).norm() / expected.norm()) < 0.06


def test_states() -> None:
    """A state has the numbers of 8 bits and their scales; a model that was quantised likewise loads it."""
    for recipe in RECIPES:
        made, x = ours.quantise(model(), recipe), torch.randn(M, K)
        state = made.state_dict()
        assert [*state] == [f"{at}.{name}" for at in (0, 2) for name in ("weight", "bias", "weight_scale")]
        assert state["0.weight"].dtype is E4M3 and state["0.weight_scale"].dtype is torch.float32
        other = ours.quantise(model(), recipe)
        assert not torch.equal(other(x), made(x))
        other.load_state_dict(saved(state))
        for same in (other, copy.deepcopy(made), saved(made)):
            assert torch.equal(same(x), made(x))
        with torch.device("meta"):
            empty = ours.quantise(model(), recipe)
        empty.load_state_dict(state, assign=True)
        assert torch.equal(empty(x), made(x))
        with pytest.raises(RuntimeError, match="Missing key"):
            made.load_state_dict(model().state_dict())
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight_scale"):
        made.load_state_dict(ours.quantise(model(), "row").state_dict())


@pytest.mark.parametrize(("recipe", "dtype"), itertools.product(RECIPES, DTYPES[1:]), ids=str)
def test_casts(recipe: str, dtype: torch.dtype) -> None:
    """They leave the numbers of 8 bits and their scales as they are; a cast model loads what another one saves."""
    plain, *others = (nn.Sequential(model(), ours.LinearGLU(N, N)) for _ in range(3))
    made, x = ours.quantise(plain, recipe), torch.randn(M, K).to(dtype)
    before = copy.deepcopy(made.state_dict())
    state = saved(made.to(dtype).state_dict())
    for name, each in before.items():
        expected = each.to(dtype) if "bias" in name else each
        assert state[name].dtype is expected.dtype and torch.equal(state[name].float(), expected.float())
    for same in (
        ours.quantise(others[0].to(dtype), recipe),
        ours.quantise(others[1], recipe).to("cpu", dtype),
    ):
        same.load_state_dict(state)
        assert torch.equal(same(x), made(x))
    away = made.float().to("meta", dtype).state_dict()
    assert all(away[name].dtype is each.dtype and away[name].is_meta for name, each in state.items())


@pytest.mark.parametrize("recipe", RECIPES)
def test_wrapped_tensors(recipe: str) -> None:
    """An x that wraps others is quantised by what it wraps."""
    made, x = ours.quantise(model(), recipe), torch.randn(M, K)
    found = made(TwoTensor(x, 2 * x))
    assert type(found) is TwoTensor and torch.equal(found.a, made(x)) and torch.equal(found.b, made(2 * x))


def test_which_layers() -> None:
    """In place; a layer with two names is one; a tied weight and the layers that are not given stay."""
    whole = nn.ModuleDict({"embedding": nn.Embedding(N, K), "head": nn.Linear(K, N), "body": model()})
    head: Any = whole["head"]
    head.weight = whole["embedding"].weight
    whole["again"] = whole["body"][0]  # type: ignore[index]
    body = whole["body"]
    assert ours.quantise(body) is body and whole["head"] is head and type(whole["again"]) is nn.Linear
    whole["body"], whole["again"] = (shared := model()), shared[0]
    assert ours.quantise(whole) is whole
    assert whole["again"] is shared[0] and isinstance(shared[0], ours.Linear)
    assert whole["embedding"].weight is head.weight and head.weight.requires_grad
    assert isinstance(whole["head"], ours.Linear)


class Derived(nn.Linear):
    """It may compute something else."""


STAY: dict[str, Callable[[], nn.Module]] = {
    "a subclass": lambda: Derived(K, N),
    "K": lambda: nn.Linear(24, N),
    "no K": lambda: nn.Linear(0, N),
    "fp64": lambda: nn.Linear(K, N).double(),
    "several results": lambda: ours.Linear(K, N, epilogue=two),
    "BatchNorm": lambda: ours.LinearBatchNormReLU(K, N),
    "attention": lambda: nn.MultiheadAttention(K, 2),
    "encoder": lambda: nn.TransformerEncoderLayer(K, 2, 48),
    "no layer": nn.ReLU,
    "quantised": lambda: ours.quantise(nn.Linear(K, N)),
}


@pytest.mark.parametrize("name", STAY)
def test_what_stays(name: str) -> None:
    """Beside another layer that is quantised; alone it is an error."""
    stays, other = STAY[name](), nn.Linear(K, N)
    state = {key: value.clone() for key, value in stays.state_dict().items()}
    both: Any = ours.quantise(nn.Sequential(stays, other))
    assert both[0] is stays and both[1] is not other
    for key, value in stays.state_dict().items():
        assert value.dtype is state[key].dtype and torch.equal(value.float(), state[key].float())
    with pytest.raises(
        ValueError, match=r"^module: got a .* without a layer that can be quantised; accepted is"
    ):
        ours.quantise(stays)


def hook(made: Any) -> None:
    made[2].register_forward_hook(lambda module, given, result: result)


def wrap(made: Any) -> None:
    layer = made[2] = ours.Linear.from_linear(made[2])
    layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach()))


@pytest.mark.parametrize(
    ("change", "error"), [(hook, "in 2 got .*_forward_hooks"), (wrap, "in 2 got a weight of type Two")]
)
def test_nothing_is_changed_by_an_error(change: Callable[[Any], None], error: str) -> None:
    made = model()
    change(made)
    before = [*made.children()]
    with pytest.raises(ValueError, match=f"^module: {error}.*accepted"):
        ours.quantise(made)
    assert [*made.children()] == before and made[2].weight.requires_grad


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled(recipe: str, backend: str) -> None:
    """What follows a layer in the model is part of its call; x is quantised by the graph."""
    torch._dynamo.reset()
    made = ours.quantise(nn.Sequential(model(), ours.LinearGLU(N, N)), recipe)
    reports: list[Any] = []
    options: Any = {"backend": backend, "report": reports.append, "strict": True}
    compiled: Any = torch.compile(made, backend="epigemm", options=options, fullgraph=True)
    with torch.no_grad():
        for rows in (M, 7):
            x = torch.randn(2, rows, K)
            torch.testing.assert_close(compiled(x), made(x), rtol=1e-5, atol=1e-5)
    formulas = [[site.formula for site in report.sites] for report in reports]
    assert formulas == [["gelu(acc + c1)", "acc + c1", "acc + c1"]] * 2


def test_fused_with_gradients_on() -> None:
    made = ours.quantise(nn.Sequential(model(), nn.Tanh()))
    fused, x = fuse_eagerly(made, strict=True), torch.randn(M, K)
    torch.testing.assert_close(fused(x), made(x), rtol=1e-6, atol=1e-6)
    assert [site.formula for site in fused.fusion_report.sites] == ["gelu(acc + c1)", "tanh(acc + c1)"]
    assert "what follows is rounded to 8 bits" in str(fused.fusion_report)
