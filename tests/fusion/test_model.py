"""What a fused model keeps: parameters, state, copies, its class, modes, hooks, and the way back."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import epigemm
from tests.fusion.eager import assert_all_fused, fuse_eagerly, report_of
from tests.support.untyped import backward


class Block(nn.Module):
    """A layer of every kind, with modes and a float that the forward reads."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.fc1, self.act = nn.Linear(24, width), nn.ReLU()
        self.fc2, self.scale = nn.Linear(width, 12), nn.Parameter(torch.randn(12))
        self.bn, self.out, self.factor = nn.BatchNorm1d(12), nn.Linear(12, 24), 2.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.fc1(x))
        h = F.dropout(self.bn(self.fc2(h) * self.scale), 0.5, self.training)
        z = self.out(h)
        return torch.sigmoid(z) * self.factor + z  # type: ignore[no-any-return]


@pytest.fixture
def model() -> Block:
    return Block().eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(9, 24)


def assert_same(actual: Any, expected: Any, *inputs: Any, fused: bool = False) -> None:
    """Equal outputs; and that all of it ran fused, where that is asked."""
    torch.manual_seed(1)
    wanted = expected(*inputs)
    torch.manual_seed(1)
    got = actual(*inputs)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    if fused:
        assert_all_fused(actual)


def test_it_shares_the_model_and_leaves_it_alone(model: Block, x: Tensor) -> None:
    fused = fuse_eagerly(model)
    assert_same(fused, model, x, fused=True)
    assert [site.formula for site in report_of(fused).sites] == [
        "relu(acc + c1)",
        "(c3 * ((acc + c1) * c2)) + c4",
        "(sigmoid(acc + c1) * 2) + (acc + c1)",
    ]
    assert type(model) is Block and type(fused) is Block and not hasattr(model, "fusion_report")
    for kind in ("named_parameters", "named_buffers"):
        mine, other = dict(getattr(fused, kind)()), dict(getattr(model, kind)())
        assert list(mine) == list(other) and all(mine[name] is other[name] for name in mine)
    assert list(fused.state_dict()) == list(model.state_dict())
    assert [name for name, _ in fused.named_modules()] == [name for name, _ in model.named_modules()]


def test_in_place_and_back(model: Block, x: Tensor) -> None:
    original = copy.deepcopy(model)
    assert fuse_eagerly(model, inplace=True) is model
    assert_same(model, original, x, fused=True)
    for _ in range(2):
        assert epigemm.unfuse(model) is model
        assert "_compiled_call_impl" not in vars(model) and not hasattr(model, "fusion_report")
    assert_same(model, original, x)


def test_fusing_twice_is_fusing_once(model: Block, x: Tensor) -> None:
    fused = fuse_eagerly(fuse_eagerly(model), inplace=True)
    assert_same(fused, model, x, fused=True)
    assert len(report_of(fused).sites) == 3


# --- changes between calls --------------------------------------------------------------------------------------------


def test_live_changes_take_effect(model: Block, x: Tensor) -> None:
    fused = fuse_eagerly(model)
    with torch.no_grad():
        model.fc1.weight.mul_(-1)
        model.bn.running_var.add_(1)  # type: ignore[union-attr]
    assert_same(fused, model, x, fused=True)
    fresh = Block().eval()
    fused.load_state_dict(fresh.state_dict())
    assert_same(fused, fresh, x, fused=True)
    fused.fc1.weight = fresh.fc1.weight = nn.Parameter(torch.randn(16, 24))
    assert_same(fused, fresh, x, fused=True)


def test_modes(model: Block, x: Tensor) -> None:
    """Both plans run fused as far as BatchNorm allows; statistics and dropout are those of the original."""
    for start in (True, False):
        fused, plain = fuse_eagerly(copy.deepcopy(model).train(start)), copy.deepcopy(model)
        for training in (False, True, True, False):
            assert_same(fused.train(training), plain.train(training), x, fused=True)
        fused.bn.train(), plain.bn.train()
        assert_same(fused, plain, x, fused=True)
        for mine, other in zip(fused.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(mine, other)


def test_types_devices_and_modes_of_torch(model: Block, x: Tensor) -> None:
    fused = fuse_eagerly(copy.deepcopy(model))
    torch.use_deterministic_algorithms(True)
    try:
        with torch.inference_mode(), torch.device("cpu"):
            assert_same(fused, model, x, fused=True)
    finally:
        torch.use_deterministic_algorithms(False)
    tangents = [torch.func.jvp(each, (x,), (torch.ones_like(x),)) for each in (fused, model)]
    torch.testing.assert_close(*tangents)
    assert_same(fused.to(torch.float64), model.to(torch.float64), x.double())
    with torch.device("meta"):
        assert fuse_eagerly(Block())(torch.randn(9, 24)).shape == (9, 24)


@pytest.mark.every(3)
@pytest.mark.parametrize("target", ["fc1", "bn", ""])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(
    "register",
    [
        lambda m, seen: m.register_forward_pre_hook(lambda *_: seen.append(1)),
        lambda m, seen: m.register_forward_hook(lambda m, a, r: seen.append(1) or r * 2),
        lambda m, seen: m.register_full_backward_pre_hook(lambda *_: seen.append(1)),
        lambda m, seen: m.register_full_backward_hook(lambda *_: seen.append(1)),
    ],
)
def test_hooks_fire(model: Block, x: Tensor, register: Any, before: bool, target: str) -> None:
    """Hooks on a layer of a chain, and on the model itself, set before or after fusing."""
    plain, fused, seen = copy.deepcopy(model), model, [[], []]  # type: ignore[var-annotated]
    if before:
        register(model.get_submodule(target), seen[0])
    fused = fuse_eagerly(model)
    if not before:
        register(fused.get_submodule(target), seen[0])
    register(plain.get_submodule(target), seen[1])
    results = []
    for m in (fused, plain):
        argument = x.clone().requires_grad_()
        result = m(argument)
        backward(result.sum())
        results.append((result, argument.grad))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert seen == [[1], [1]]


# --- weights that are not the layer's own -----------------------------------------------------------------------------


class Tied(nn.Module):
    """A layer that is called twice, and one with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(24, 24), nn.Linear(24, 24, bias=False)
        self.head.weight = self.fc.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.fc(torch.relu(self.fc(x))))
        return torch.relu(self.head(h)) / 2


def test_tied_weights(x: Tensor) -> None:
    plain = Tied()
    fused = fuse_eagerly(copy.deepcopy(plain), inplace=True)
    assert fused.head.weight is fused.fc.weight
    for m in (plain, fused):
        backward(m(x).square().sum())
    torch.testing.assert_close(fused.fc.weight.grad, plain.fc.weight.grad, rtol=1e-4, atol=1e-4)
    assert_same(fused, plain, x, fused=True)
    assert len(report_of(fused).sites) == 3


COMPUTED: dict[str, Callable[[Any], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old weight_norm": lambda layer: torch.nn.utils.weight_norm(layer),
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_computed_weights(x: Tensor, name: str, after: bool) -> None:
    """`weight` is a property, or a plain attribute that a hook computes."""
    plain = nn.Sequential(nn.Linear(24, 24), nn.ReLU()).eval()
    model = copy.deepcopy(plain)
    fused = fuse_eagerly(model, inplace=True) if after else model
    for made in (plain, model):
        torch.manual_seed(0)
        COMPUTED[name](made[0])
    fused = fused if after else fuse_eagerly(model, inplace=True)
    for _ in range(2):
        assert_same(fused, plain, x)
        with torch.no_grad():
            for parameter in (*plain.parameters(), *fused.parameters()):
                parameter.mul_(1.5)


def test_quantised_layers_stay(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(24, 8), nn.ReLU()).eval()
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})  # type: ignore[no-untyped-call]
    fused = fuse_eagerly(quantised)
    assert_same(fused, quantised, x)
    assert not report_of(fused).sites


def test_lazy_layers(x: Tensor) -> None:
    fused = fuse_eagerly(nn.Sequential(nn.LazyLinear(24), nn.ReLU()), inplace=True)
    torch.testing.assert_close(fused(x), torch.relu(fused[0](x)))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_weights_can_be_swapped(backend: str) -> None:
    """No weak reference to a parameter stays, as after torch.compile."""
    model, x = nn.Linear(8, 8), torch.randn(3, 8)
    fused: Any = epigemm.fuse(model, options={"backend": backend})
    fused(x)
    gc.collect()  # Inductor leaves some in cycles
    torch.utils.swap_tensors(model.weight, nn.Parameter(torch.zeros(8, 8)))  # type: ignore[no-untyped-call]
    torch.testing.assert_close(fused(x), model.bias.expand(3, 8))


def test_a_model_that_is_gone_leaves_no_parameters(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(24, 8), nn.GELU())
    fused: Any = fuse_eagerly(model)
    fused(x)
    assert fused.fusion_report.sites
    weight = weakref.ref(model[0].weight)
    del model, fused
    gc.collect()
    assert weight() is None


# --- copies and classes -----------------------------------------------------------------------------------------------


def saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved])
def test_copies_are_plain_models(model: Block, x: Tensor, copied: Callable[[Any], Any]) -> None:
    """torch drops the compiled call. They can be fused again."""
    fused = fuse_eagerly(model)
    fused(x)
    again = copied(fused)
    assert type(again) is Block and again.fusion_report is None and "_compiled_call_impl" not in vars(again)
    assert_same(again, model, x)
    with torch.no_grad():
        again.fc1.weight.zero_()
    assert not torch.equal(again(x), fused(x))
    assert_same(fuse_eagerly(again), again, x, fused=True)


def test_a_shallow_copy_is_a_plain_model(model: Block, x: Tensor) -> None:
    fused = fuse_eagerly(model)
    again = copy.copy(fused)
    assert_same(again, model, x)
    assert "is not fused" in str(epigemm.explain(again, x)) and "fused by" in str(epigemm.explain(fused, x))


class Other(Block):
    def forward(self, x: Tensor) -> Any:
        return torch.relu(self.fc1(x)) * 3


def test_other_classes_and_instances(model: Block, x: Tensor) -> None:
    fused = fuse_eagerly(model)
    other, plain = type(fused)(20).eval(), Block(20).eval()
    other.load_state_dict(plain.state_dict())
    assert_same(other, plain, x)
    assert_same(fuse_eagerly(other), plain, x, fused=True)
    fused.__class__ = model.__class__ = Other
    assert_same(fused, model, x)
    for made in (fused, model):  # the class of a parametrised module is another one, too
        parametrize.register_parametrization(made, "scale", nn.Softplus())
    assert_same(fused, model, x)
    assert_same(fuse_eagerly(model, inplace=True), fused, x)


class Unregistered(nn.Module):
    """Holds layers and tensors that torch does not know of, and an object that a forward may ask about."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.tied, self.layers, self.table = self.fc, [nn.Linear(4, 4)], {"scale": torch.ones(4)}
        self.modes = [object()]

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.layers[0](self.tied(self.fc(x)))) * self.table["scale"]


def test_what_is_not_registered_is_shared_too() -> None:
    model = Unregistered().eval()
    fused: Any = fuse_eagerly(model)
    assert fused.tied is fused.fc is not model.fc and not fused.training
    assert fused.layers[0] is not model.layers[0] and fused.layers[0].weight is model.layers[0].weight
    assert fused.table is not model.table and fused.table["scale"] is model.table["scale"]
    assert fused.modes[0] is model.modes[0] and fused.modes is not model.modes
    x = torch.randn(3, 4)
    with torch.no_grad():
        model.layers[0].weight.mul_(2)
    assert_same(fused, model, x)
    fused.train().table["scale"] = torch.zeros(4)
    assert not model.training and not model.norm.training and bool(model.table["scale"].all())
