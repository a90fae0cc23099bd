"""Every layer as a module: names and draws of `nn.Linear`, copies, pickles, states, meta devices, what is printed."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import epigemm
from tests.ops.op import COUNT, TWO_WEIGHTS, Op, results_of
from tests.ops.table import rows

N, K = 16, 24

layers = rows(
    "modules", lambda op: op.layer is not None and not op.of_kind(COUNT) and op.name != "nn.Chained"
)


def made(op: Op, *, bias: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    assert op.layer is not None
    return op.layer(N, K, dtype, bias)


def linear_of(op: Op, *, bias: bool = True) -> nn.Linear:
    """PyTorch's layer with the same rows."""
    return nn.Linear(K, 2 * N if op.of_kind(TWO_WEIGHTS) else N, bias)


def are_same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == again and torch.equal(value, found) for (name, value), (again, found) in pairs)


@layers
@pytest.mark.parametrize("bias", [True, False])
def test_names_and_random_draws_are_those_of_linear(op: Op, bias: bool) -> None:
    """The same seed gives the same parameters; the state of a layer with nothing of its own loads both ways."""
    torch.manual_seed(3)
    linear = linear_of(op, bias=bias)
    torch.manual_seed(3)
    module = made(op, bias=bias)
    inner = getattr(module, "linear", module)
    assert all(torch.equal(inner.state_dict()[name], value) for name, value in linear.state_dict().items())
    if list(module.state_dict()) == list(linear.state_dict()):
        other = made(op, bias=bias)
        other.load_state_dict(linear.state_dict())
        assert are_same(other, module)
        linear_of(op, bias=bias).load_state_dict(module.state_dict())


@layers
def test_copies_pickles_and_states(op: Op, rng: torch.Generator) -> None:
    """And what is printed names what was configured."""
    module, inputs = op.module(op.draw(rng))
    expected = results_of(module(*inputs))
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    loaded = copy.deepcopy(made(op)).train(module.training)
    loaded.load_state_dict(torch.load(buffer))
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert all(map(torch.equal, results_of(twin(*inputs)), expected)) and repr(twin) == repr(module)
        for mine, other in zip(module.parameters(), twin.parameters(), strict=True):
            assert mine is not other and torch.equal(mine, other)
    text = repr(module)
    assert type(module).__name__ in text and f"in_features={K}, out_features={N}, bias=True" in text
    assert "precision=None" in text and "strict" not in text and "batch_invariant" not in text
    assert all(str(value) in text for value in dict(op.fixed).values())
    with epigemm.batch_invariant():
        assert "precision=None, batch_invariant=True" in repr(module)


@layers
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_made_on_the_meta_device(op: Op, assign: bool, rng: torch.Generator) -> None:
    filled, inputs = op.module(op.draw(rng))
    with torch.device("meta"):
        module = made(op).train(filled.training)
    assert all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    on_meta = module(*(each.to("meta") for each in inputs))
    assert on_meta.is_meta and on_meta.shape == (9, N)
    state = filled.state_dict()
    if not assign:
        module.to_empty(device="cpu")
    module.load_state_dict(state, assign=assign)
    assert torch.equal(module(*inputs), filled(*inputs))
    if assign:
        assert all(value.data_ptr() == state[name].data_ptr() for name, value in module.state_dict().items())
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in module.parameters())


@layers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reset_parameters(op: Op, dtype: torch.dtype) -> None:
    """A layer draws what its constructor draws; a loop over a model's modules leaves no tensor as it was."""
    torch.manual_seed(1)
    expected, other = made(op, dtype=dtype), made(op, dtype=dtype)
    assert not are_same(expected, other)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.fill_(77)
    torch.manual_seed(1)
    other.reset_parameters()
    assert are_same(expected, other)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.fill_(77)
    for module in other.modules():
        reset: Any = module.reset_parameters
        reset()
    assert not any((tensor == 77).any() for tensor in other.state_dict().values())
