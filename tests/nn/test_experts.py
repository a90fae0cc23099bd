"""`epigemm.nn.Experts` against a loop over tokens and their experts in float64. Errors: net/errors.txt."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import epigemm
from epigemm.nn import Experts
from tests.support.formulas import formula
from tests.support.thorough import in_turn

TOKENS, EXPERTS, K, N = 9, 5, 32, 16


squared_relu = epigemm.epilogue(formula("acc -> torch.relu(acc) * torch.relu(acc)"))


ACTIVATIONS: dict[Any, Any] = {
    "identity": lambda z: z,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
    squared_relu: lambda z: torch.relu(z).square(),
}
LAYERS: list[dict[str, Any]] = [
    *({"activation": name} for name in list(ACTIVATIONS)[:-1]),
    *({"activation": name, "gated": False} for name in ACTIVATIONS if name != "sigmoid"),
    *({"activation": "silu", "bias": True, "gated": gated} for gated in (True, False)),
    {"activation": "gelu", "bias": True, "two": True},
]
# Of each token: random experts, one for all, two of them without any; and no tokens.
ROUTINGS = {
    "random": lambda: torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(TOKENS)]),
    "one expert": lambda: torch.full((TOKENS, 1), 3),
    "some have none": lambda: torch.randint(1, 4, (TOKENS, 3), dtype=torch.int32),
    "no tokens": lambda: torch.empty(0, 2, dtype=torch.int64),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def layer(dtype: torch.dtype, two: bool = False, **settings: Any) -> Experts:
    made = Experts(EXPERTS, K, N, dtype=dtype, **settings)
    if not two:
        return made
    assert made.bias is not None
    (weight, weight2), (bias, bias2) = (
        [nn.Parameter(half.detach().clone()) for half in whole.chunk(2, 1)]
        for whole in (made.weight, made.bias)
    )
    second = {"weight2": weight2, "bias2": bias2, "activation": settings["activation"]}
    return Experts.from_parameters(weight, made.down, bias, made.down_bias, **second)


def routed(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    indices = ROUTINGS[name]()
    return torch.randn(len(indices), K).to(dtype), indices, torch.rand(indices.shape).to(dtype)


def by_loop(made: Experts, x: Tensor, indices: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The result in float64, and a bound of its error in x's dtype.

    A product's sums are in fp32, it is rounded, and the sum with a bias again. Slopes of the activations are at most
    1.13, of the square at most twice its argument.
    """
    u, u32 = torch.finfo(x.dtype).eps / 2, torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps / 2
    activation = ACTIVATIONS[made.activation]
    exact = {name: each.double() for name, each in made.named_parameters()}
    results, bounds = [], []
    for token, experts, shares in zip(x.double(), indices.tolist(), weights.double(), strict=True):
        sums = [torch.zeros(K, dtype=torch.float64)] * 2
        for expert, share in zip(experts, shares, strict=True):

            def product(
                h: Tensor, error: Any, weight: str, bias: str, expert: int = expert
            ) -> tuple[Tensor, Tensor]:
                of, b = exact[weight][expert], exact[bias][expert] if bias in exact else torch.zeros(())
                magnitude = h.abs() @ of.abs().t() + b.abs()
                return h @ of.t() + b, (error + 0 * h) @ of.abs().t() + (3 * u + len(h) * u32) * magnitude

            z, error = product(token, 0.0, "weight", "bias")
            gate, gate_error = torch.ones(()), torch.zeros(())
            if made.weight2 is not None:
                gate, gate_error = product(token, 0.0, "weight2", "bias2")
            elif made.gated:
                (z, gate), (error, gate_error) = z.chunk(2), error.chunk(2)
            slope = 1.13 if isinstance(made.activation, str) else 2 * (z.abs() + error)
            active, error = activation(z), slope * error + 2 * u * activation(z).abs()
            hidden = active * gate
            error = error * (gate.abs() + gate_error) + active.abs() * gate_error + u * hidden.abs()
            y, error = product(hidden, error, "down", "down_bias")
            sums = [sums[0] + share * y, sums[1] + share * (error + 4 * u * y.abs())]
        results.append(sums[0])
        bounds.append(sums[1])
    found, bound = (torch.stack(each) if each else torch.zeros(0, K).double() for each in (results, bounds))
    return found, bound


@pytest.mark.parametrize(
    ("settings", "way"), in_turn(LAYERS, list(itertools.product(DTYPES, ROUTINGS))), ids=str
)
def test_values(settings: dict[str, Any], way: tuple[torch.dtype, str]) -> None:
    dtype, routing = way
    made, given = layer(dtype, **settings), routed(routing, dtype)
    with torch.no_grad():
        found = made(*given)
        expected, bound = by_loop(made, *given)
    assert found.dtype is dtype and found.shape == expected.shape
    excess = (found.double() - expected).abs() - bound
    assert not bool((excess > 0).any()), float(excess.max())
    torch.testing.assert_close(made(*given).detach(), found)  # recorded


@pytest.mark.parametrize("settings", LAYERS, ids=str)
def test_gradients(settings: dict[str, Any]) -> None:
    """Those of the loop; experts without tokens have none."""
    made = layer(torch.float64, **settings)
    for routing in ("random", "one expert"):
        x, indices, weights = routed(routing, torch.float64)
        leaves = [x.requires_grad_(), weights.requires_grad_(), *made.parameters()]
        found = torch.autograd.grad(made(x, indices, weights).sin().sum(), leaves)
        expected = torch.autograd.grad(by_loop(made, x, indices, weights)[0].sin().sum(), leaves)
        torch.testing.assert_close(found, expected)
        if routing == "one expert":
            assert not any(bool(each[0].any()) for each in found[2:])


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """An error where something asks for a tensor's value, or for a size that depends on one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if any(
            each in name for each in ("_local_scalar_dense", "nonzero", "unique", "masked_select", "item")
        ):
            raise AssertionError(f"{name} waits for the GPU")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("settings", [{}, {"bias": True, "gated": False}], ids=str)
def test_nothing_waits_for_the_gpu(settings: dict[str, Any]) -> None:
    made, (x, indices, weights) = layer(torch.bfloat16, **settings), routed("random", torch.bfloat16)
    with Waits():  # type: ignore[no-untyped-call]
        with torch.no_grad():
            made(x, indices, weights)
        made(x.requires_grad_(), indices, weights.requires_grad_()).sum().backward()
    assert x.grad is not None and weights.grad is not None
    with pytest.raises(AssertionError, match="waits for the GPU"), Waits():  # type: ignore[no-untyped-call]
        x.sum().item()


class Mixture(nn.Module):
    """A router, its experts and a residual."""

    def __init__(self, dtype: torch.dtype, **settings: Any) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(K, EXPERTS, dtype=dtype), layer(dtype, **settings)

    def forward(self, x: Tensor) -> Tensor:
        weights, indices = self.router(x).softmax(1).topk(2)
        result: Tensor = x + self.experts(x, indices, weights)
        return result


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["aot_eager", "epigemm"])
@pytest.mark.parametrize("settings", [{}, {"bias": True, "gated": False}], ids=str)
def test_within_a_compiled_model(settings: dict[str, Any], backend: str) -> None:
    """One graph, without gradients and with them, at two numbers of tokens."""
    model = Mixture(torch.bfloat16, **settings)
    options = {"options": {"backend": "aot_eager"}} if backend == "epigemm" else {}
    compiled: Any = torch.compile(model, backend=backend, fullgraph=True, dynamic=True, **options)  # type: ignore[call-overload]
    for tokens in (9, 13):
        x = torch.randn(tokens, K, dtype=torch.bfloat16)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=2**-6, atol=2**-6)
        parameters = list(model.parameters())
        grads = [
            torch.autograd.grad(call(x).float().square().sum(), parameters) for call in (compiled, model)
        ]
        for mine, other in zip(*grads, strict=True):
            torch.testing.assert_close(mine, other, rtol=2**-5, atol=2**-5 * float(other.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("settings", [{}, {"bias": True, "gated": False}], ids=str)
def test_other_routings(settings: dict[str, Any], dtype: torch.dtype) -> None:
    """Of an exported layer, and of each of a batch."""
    made, given = layer(dtype, **settings), [routed("random", dtype) for _ in range(2)]
    expected = torch.stack([made(*each) for each in given])
    exported = torch.export.export(made, given[0]).module()
    torch.testing.assert_close(torch.stack([exported(*each) for each in given]), expected)
    batches = [torch.stack(each) for each in zip(*given, strict=True)]
    torch.testing.assert_close(torch.vmap(made)(*batches), expected)


@pytest.mark.parametrize("settings", [{"bias": True}, LAYERS[-1]], ids=str)
def test_parameters(settings: dict[str, Any]) -> None:
    """Copies and pickles compute the same; new ones are drawn; they may be on the device meta."""
    made, given = layer(torch.float32, **settings), routed("random", torch.float32)
    names = ["weight", "down", "bias", "down_bias", *["weight2", "bias2"] * ("two" in settings)]
    assert list(made.state_dict()) == names
    expected = made(*given)
    for same in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(same(*given), expected)
    before = [each.detach().clone() for each in made.parameters()]
    made.reset_parameters()
    for now, was in zip(made.parameters(), before, strict=True):
        assert not torch.equal(now, was) and now.abs().max() <= 1 / (N if now.shape[1] == K else K) ** 0.5
    assert (
        f"experts=5, in_features=32, hidden_features=16, bias=True, activation='{made.activation}'"
        in repr(made)
    )
    assert all(each.is_meta for each in Experts(2, 8, 4, True, device="meta").parameters())


def test_over_parameters() -> None:
    """They are shared, as is the gate, which their shapes tell."""
    first = layer(torch.float32, bias=True)
    given = (first.weight, first.down, first.bias, first.down_bias)
    made, inputs = Experts.from_parameters(*given), routed("random", torch.float32)
    assert made.weight is first.weight and made.down_bias is first.down_bias and made.gated
    assert torch.equal(made(*inputs), first(*inputs))
    assert not Experts.from_parameters(nn.Parameter(torch.ones(EXPERTS, N, K)), first.down).gated
