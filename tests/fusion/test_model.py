"""What a fused model keeps: parameters, state, copies, modes, hooks, and the way back."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import epigemm
from epigemm.fusion import rewrite
from tests.fusion.eager import assert_all_fused, fuse_eagerly, report_of
from tests.support.untyped import backward


class Block(nn.Module):
    """A layer of every kind, with modes and a float that the forward reads."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.fc1, self.act = nn.Linear(24, width), nn.ReLU()
        self.fc2, self.scale, self.bn = (
            nn.Linear(width, 12),
            nn.Parameter(torch.randn(12)),
            nn.BatchNorm1d(12),
        )
        self.out = nn.Linear(12, 8)
        self.factor = 2.0

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


def assert_same(actual: nn.Module, expected: nn.Module, *inputs: Any, fused: bool | None = None) -> None:
    """Equal outputs; and that all of it ran fused, or that something did not."""
    torch.manual_seed(1)
    wanted = expected(*inputs)
    torch.manual_seed(1)
    got = actual(*inputs)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    if fused:
        assert_all_fused(actual)


def test_fuses_and_leaves_the_original_alone(model: Block, x: Tensor) -> None:
    fused = fuse_eagerly(model)
    assert_same(fused, model, x, fused=True)
    assert [site.formula for site in report_of(fused).sites] == [
        "relu(acc + c1)",
        "(c3 * ((acc + c1) * c2)) + c4",
        "(sigmoid(acc + c1) * 2) + (acc + c1)",
    ]
    assert type(model) is Block and not hasattr(model, "fusion_report")
    assert type(fused) is Block


def test_in_place(model: Block, x: Tensor) -> None:
    original = copy.deepcopy(model)
    assert fuse_eagerly(model, inplace=True) is model
    assert_same(model, original, x, fused=True)


def test_dry_run_changes_nothing(x: Tensor) -> None:
    model = Block().train()
    before, state = dict(vars(model)), copy.deepcopy(model.state_dict())
    report = fuse_eagerly(model, dry_run=True, example_inputs=(x,))
    assert len(report.sites) == 3
    assert vars(model) == before and "_compiled_call_impl" not in vars(model)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=0)
    assert len(fuse_eagerly(model, dry_run=True, example_inputs={"x": x}).sites) == 3


class Writes(nn.Module):
    """Changes all that a call can change."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.cache = nn.Linear(8, 8), torch.zeros(8)
        self.code = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.recorded = self.fc.weight * 2  # a tensor with a history, which deepcopy refuses
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        Writes.calls += 1
        self.seen.append(1)
        self.fresh = 1
        h = torch.relu(self.fc(x))
        with torch.no_grad():
            self.cache.add_(1)
            self.code.add_(h.mean(0))
            self.recorded.add_(1)
            x.mul_(2)
        return h * random.random() * float(np.random.rand()) + torch.rand(8)


def test_a_dry_run_undoes_what_forward_writes() -> None:
    model, x = Writes(), torch.ones(4, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    recorded = model.recorded.detach().clone()
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    epigemm.fuse(model, dry_run=True, example_inputs=(x,))
    assert (Writes.calls, model.seen, hasattr(model, "fresh")) == (0, [], False)
    assert torch.equal(x, torch.ones(4, 8)) and torch.equal(model.cache, torch.zeros(8))
    assert torch.equal(model.recorded, recorded)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[2])
    assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[index]


@pytest.mark.parametrize("inplace", [False, True])
def test_where_dynamo_is_turned_off(model: Block, x: Tensor, inplace: bool, monkeypatch: Any) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    rewrite.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="TORCHDYNAMO_DISABLE"):
        epigemm.fuse(model, inplace=inplace)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        fused = epigemm.fuse(model, inplace=inplace)
    assert "TORCHDYNAMO_DISABLE" in str(fused.fusion_report)
    torch.testing.assert_close(fused(x), model(x), rtol=0, atol=0)


def test_parameters_and_buffers_are_the_same_objects(model: Block) -> None:
    fused = fuse_eagerly(model)
    for kind in ("named_parameters", "named_buffers"):
        mine, other = dict(getattr(fused, kind)()), dict(getattr(model, kind)())
        assert list(mine) == list(other) and all(mine[name] is other[name] for name in mine)
    assert list(fused.state_dict()) == list(model.state_dict())
    assert [name for name, _ in fused.named_modules()] == [name for name, _ in model.named_modules()]


def test_live_changes_take_effect(model: Block, x: Tensor) -> None:
    fused = fuse_eagerly(model)
    with torch.no_grad():
        model.fc1.weight.mul_(-1)
        model.bn.running_var.add_(1)  # type: ignore[union-attr]
    assert_same(fused, model, x, fused=True)
    model.load_state_dict(Block().state_dict())
    assert_same(fused, model, x, fused=True)
    fresh = Block().eval()
    fused.load_state_dict(fresh.state_dict())
    assert_same(fused, fresh, x, fused=True)
    fused.fc1.weight = fresh.fc1.weight = nn.Parameter(torch.randn(16, 24))
    assert_same(fused, fresh, x, fused=True)


def test_optimisers_step_both(model: Block, x: Tensor) -> None:
    """An optimiser made before fusing trains the fused model."""
    model.train()
    reference = copy.deepcopy(model)
    optimisers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, reference)]
    fused = fuse_eagerly(model)
    for step in range(3):
        for m, optimiser in zip((fused, reference), optimisers, strict=True):
            torch.manual_seed(step)
            optimiser.zero_grad()
            backward(m(x).square().mean())
            optimiser.step()
    for (name, mine), (_, other) in zip(
        fused.state_dict().items(), reference.state_dict().items(), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=name)


def test_unfuse_restores(model: Block, x: Tensor) -> None:
    fuse_eagerly(model, inplace=True)
    assert epigemm.unfuse(model) is model
    assert "_compiled_call_impl" not in vars(model)
    assert not hasattr(model, "fusion_report")
    assert_same(model, copy.deepcopy(model), x)
    assert epigemm.unfuse(model) is model


def test_fusing_twice_is_fusing_once(model: Block, x: Tensor) -> None:
    fused = fuse_eagerly(fuse_eagerly(model), inplace=True)
    assert_same(fused, model, x, fused=True)
    assert len(report_of(fused).sites) == 3


def test_modes(model: Block, x: Tensor) -> None:
    """Both plans run fused as far as BatchNorm allows; statistics and dropout are those of the original."""
    for start in (True, False):
        fused = fuse_eagerly(copy.deepcopy(model).train(start))
        plain = copy.deepcopy(model)
        for training in (False, True, True, False):
            assert_same(fused.train(training), plain.train(training), x, fused=True)
        for mine, other in zip(fused.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(mine, other)


def test_batch_norm_alone_in_training(model: Block, x: Tensor) -> None:
    """A mode that differs between a module and its children."""
    fused, plain = fuse_eagerly(model), copy.deepcopy(model)
    fused.bn.train(), plain.bn.train()
    assert_same(fused, plain, x, fused=True)
    assert int(fused.bn.num_batches_tracked) == 1
    fused.bn.track_running_stats = plain.bn.track_running_stats = False
    for m in (fused, plain):
        m.bn.running_mean = m.bn.running_var = None
    assert_same(fused.eval(), plain.eval(), x)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_plain_models(model: Block, x: Tensor, way: str) -> None:
    """torch drops the compiled call. They can be fused again."""
    fused = fuse_eagerly(model)
    fused(x)
    if way == "deepcopy":
        again = copy.deepcopy(fused)
    elif way == "pickle":
        again = pickle.loads(pickle.dumps(fused))
    else:
        file = io.BytesIO()
        torch.save(fused, file)
        again = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
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


def test_attributes_are_watched(model: Block, x: Tensor) -> None:
    fused, plain = fuse_eagerly(model), copy.deepcopy(model)
    for factor in (3.0, -1.0, 2.0):
        fused.factor = plain.factor = factor
        assert_same(fused, plain, x, fused=True)


def hooks() -> list[tuple[str, Any]]:
    return [
        ("forward_pre", lambda m, seen: m.register_forward_pre_hook(lambda *_: seen.append(1))),
        ("forward", lambda m, seen: m.register_forward_hook(lambda *_: seen.append(1))),
        ("forward_changes", lambda m, seen: m.register_forward_hook(lambda m, a, r: seen.append(1) or r * 2)),
        ("backward_pre", lambda m, seen: m.register_full_backward_pre_hook(lambda *_: seen.append(1))),
        ("backward", lambda m, seen: m.register_full_backward_hook(lambda *_: seen.append(1))),
    ]


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "register"), hooks(), ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize("target", ["fc1", "act", "bn", ""])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_hooks_fire(x: Tensor, name: str, register: Any, target: str, before: bool) -> None:
    """Hooks on a layer of a chain, and on the model itself, set before or after fusing."""
    model = nn.Sequential()
    for child, module in (
        ("fc1", nn.Linear(24, 8)),
        ("act", nn.ReLU()),
        ("fc2", nn.Linear(8, 8)),
        ("bn", nn.BatchNorm1d(8)),
    ):
        model.add_module(child, module)
    model.eval()
    plain = copy.deepcopy(model)
    seen: list[int] = []
    expected: list[int] = []
    register(plain.get_submodule(target), expected)
    if before:
        register(model.get_submodule(target), seen)
        fused = fuse_eagerly(model)
    else:
        fused = fuse_eagerly(model)
        register(fused.get_submodule(target), seen)
    results = []
    for m in (plain, fused):
        argument = x.clone().requires_grad_()
        result = m(argument)
        backward(result.sum())
        results.append((result, argument.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    assert seen == expected == [1]


def test_global_hooks_fire(model: Block, x: Tensor) -> None:
    fused, seen = fuse_eagerly(model), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    try:
        assert_same(fused, model, x, fused=False)
    finally:
        handle.remove()
    assert seen.count(nn.ReLU) == 2 and seen.count(nn.BatchNorm1d) == 2


def test_shared_layers_and_tied_weights(x: Tensor) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(24, 24)
            self.head = nn.Linear(24, 24, bias=False)
            self.head.weight = self.fc.weight

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.fc(torch.relu(self.fc(x))))
            return torch.relu(self.head(h)) / 2

    plain = Tied()
    fused = fuse_eagerly(copy.deepcopy(plain), inplace=True)
    assert fused.head.weight is fused.fc.weight
    for m in (plain, fused):
        backward(m(x).square().sum())
    torch.testing.assert_close(fused.fc.weight.grad, plain.fc.weight.grad, rtol=1e-4, atol=1e-4)
    assert_same(fused, plain, x, fused=True)
    assert len(report_of(fused).sites) == 3


def test_parametrised_weights_stay(x: Tensor) -> None:
    for after in (False, True):
        model = nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        plain = copy.deepcopy(model)
        if after:
            model = fuse_eagerly(model)
        for m in (model, plain):
            parametrizations.weight_norm(m[0])
        fused = model if after else fuse_eagerly(model, inplace=True)
        assert_same(fused, plain, x)


def test_pruned_weights_stay(x: Tensor) -> None:
    """Pruning keeps the product's weight in a plain attribute, which a pre-hook makes anew."""
    model = nn.Sequential(nn.Linear(24, 8), nn.ReLU())
    prune.l1_unstructured(model[0], "weight", amount=0.5)  # type: ignore[no-untyped-call]
    fused = fuse_eagerly(model, inplace=True)
    torch.testing.assert_close(fused(x), fused._call_impl(x))


def test_quantised_layers_stay(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()).eval()
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})  # type: ignore[no-untyped-call]
    fused = fuse_eagerly(quantised)
    assert_same(fused, quantised, x)
    assert not report_of(fused).sites


def test_wrapped_in_data_parallel(model: Block, x: Tensor) -> None:
    wrapped = nn.DataParallel(model)
    fused = fuse_eagerly(wrapped)
    assert fused is wrapped and "it holds a DataParallel" in str(report_of(fused))
    assert_same(fused, model, x)
    assert_same(nn.DataParallel(fuse_eagerly(model)), model, x)


def test_replicas_of_data_parallel_are_as_torchs() -> None:
    """A replica of a module that was compiled in place calls the module itself, with its parameters."""
    compiled = nn.Sequential(nn.Linear(24, 8), nn.ReLU())
    fused, x = fuse_eagerly(compiled), torch.randn(4, 24)
    compiled.compile(backend="eager")
    for module in (compiled, fused):
        replica: Any = module._replicate_for_data_parallel()
        replica._modules = {"0": nn.Linear(24, 8), "1": nn.ReLU()}
        assert torch.equal(replica(x), module(x))


class Fake(nn.Module):
    """Stands for the wrappers that shard parameters, which need a process group."""


@pytest.mark.parametrize("name", ["FullyShardedDataParallel", "DistributedDataParallel", "FSDPModule"])
def test_sharding_wrappers_are_left_alone(model: Block, name: str) -> None:
    wrapper = type(name, (Fake,), {})()
    wrapper.module = model
    outer = nn.Sequential(wrapper)
    for inplace in (True, False):
        fused = fuse_eagerly(outer, inplace=inplace)
        assert fused is outer and not report_of(fused).sites
        assert name in str(report_of(fused))
    assert type(model) is Block


def test_models_that_cannot_be_copied(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(24, 8), nn.ReLU())
    model.stream = (number for number in range(3))  # type: ignore[assignment]
    fused = fuse_eagerly(model)
    assert fused is model and type(fused) is nn.Sequential
    assert "cannot be copied" in str(report_of(fused)) and "inplace=True" in str(report_of(fused))
    fused = fuse_eagerly(model, inplace=True)
    assert_same(fused, nn.Sequential(*model), x, fused=True)


def test_meta_and_half_and_to(model: Block) -> None:
    fused = fuse_eagerly(copy.deepcopy(model))
    fused.to(torch.float64)
    assert_same(fused, model.to(torch.float64), torch.randn(9, 24, dtype=torch.float64), fused=False)
    with torch.device("meta"):
        assert fuse_eagerly(Block())(torch.randn(9, 24)).shape == (9, 8)


def test_default_device_mode_does_not_unfuse(model: Block, x: Tensor) -> None:
    fused = fuse_eagerly(model)
    with torch.device("cpu"):
        assert_same(fused, model, x, fused=True)


def test_inference_mode_and_deterministic(model: Block, x: Tensor) -> None:
    fused = fuse_eagerly(model)
    with torch.inference_mode():
        assert_same(fused, model, x, fused=True)
    torch.use_deterministic_algorithms(True)
    try:
        assert_same(fused, model, x, fused=True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_model_that_is_gone_leaves_no_parameters(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(x.shape[-1], 8), nn.GELU())
    fused: Any = fuse_eagerly(model)
    fused(x)
    assert fused.fusion_report.sites
    weight = weakref.ref(model[0].weight)
    del model, fused
    gc.collect()
    assert weight() is None


def test_forward_mode(model: Block, x: Tensor) -> None:
    fused = fuse_eagerly(model)
    tangents = (
        torch.func.jvp(fused, (x,), (torch.ones_like(x),)),
        torch.func.jvp(model, (x,), (torch.ones_like(x),)),
    )
    torch.testing.assert_close(tangents[0], tangents[1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fuse_eagerly(3), "model: got int; accepted is a torch.nn.Module"),
        (lambda: epigemm.unfuse(None), "model: got NoneType"),  # type: ignore[type-var]
        (lambda: fuse_eagerly(nn.ReLU(), inplace=1), "inplace: got int; accepted is True or False"),
        (lambda: fuse_eagerly(nn.ReLU(), dry_run="yes"), "dry_run: got str"),
        (lambda: fuse_eagerly(nn.ReLU(), dry_run=True), "example_inputs: got NoneType"),
        (lambda: fuse_eagerly(nn.ReLU(), example_inputs=(1,)), "example_inputs: got some without"),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()
