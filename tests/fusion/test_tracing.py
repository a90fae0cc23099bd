"""Forwards that torch.fx would get wrong: they run as they are, or under a guard."""

from __future__ import annotations

import contextlib
import re
import sys
import textwrap
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from epigemm import fusion
from epigemm.fusion import tracing
from tests.fusion.test_spellings import report_of

FACTOR = 2.0


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.second = nn.Linear(24, 24), nn.Linear(24, 24)
        self.inner = nn.Sequential(nn.Linear(24, 24), nn.ReLU())
        self.blocks = nn.ModuleList([nn.Linear(24, 24) for _ in range(2)])
        self.drop = nn.Dropout(0.5)
        self.register_buffer("flag", torch.tensor(True))
        self.plain = torch.full((24,), 0.5)
        self.outputs: list[Any] = []
        self.sizes = [1.0, 2.0]
        self.config = types.SimpleNamespace(factor=2.0)
        self.nested = {"on": True}
        self.text = "text"
        self.register_buffer("weights", torch.full((24,), 0.5))
        self.count = 0


def made(forward: Callable[..., Any], **attributes: Any) -> Any:
    model: Any = type("Model", (Base,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model.eval()


def compare(fused: Any, model: Any, *args: Any, **kwargs: Any) -> list[tuple[str, str]]:
    """What ran unfused, after both gave the same result."""
    torch.manual_seed(0)
    expected = model(*args, **kwargs)
    torch.manual_seed(0)
    with fusion.watch() as unfused:
        actual = fused(*args, **kwargs)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert type(actual) is type(expected)
    return unfused


def branches(self: Any, x: Tensor) -> Any:
    h = torch.relu(self.fc(x))
    return h if h.sum() > 0 else -h


def asks_for_type(self: Any, x: Any) -> Tensor:
    return torch.relu(self.fc(x if isinstance(x, Tensor) else x[0]))


def asks_torch_for_type(self: Any, x: Any) -> Tensor:
    return torch.relu(self.fc(x if torch.is_tensor(x) else x[0]))


def without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = torch.relu(self.fc(x))
    return torch.relu(self.second(h))


@torch.no_grad()
def decorated(self: Any, x: Tensor) -> Tensor:
    return torch.relu(self.fc(x))


def casts(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.relu(self.fc(x))


def asks_for_gradients(self: Any, x: Tensor) -> Any:
    h = torch.relu(self.fc(x))
    return h * 2 if torch.is_grad_enabled() else h


def assigns(self: Any, x: Tensor) -> Any:
    self.count += 1
    return torch.relu(self.fc(x)) * self.count


def appends(self: Any, x: Tensor) -> Any:
    h = torch.relu(self.fc(x))
    self.outputs.append(1)
    return h


def draws(self: Any, x: Tensor) -> Tensor:
    return torch.relu(self.fc(x)) + torch.randn(24)


def computes_ahead(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * (self.plain * 2)


def reads_values(self: Any, x: Tensor) -> Tensor:
    return torch.relu(self.fc(x)) if self.flag else self.fc(x)


def reads_an_iterator(self: Any, x: Tensor) -> Tensor:
    return torch.relu(self.fc(x)) * len(self.generators)


def computes_with_numbers(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * torch.full((24,), 2.0)


def nothing_changes(self: Any, x: Tensor) -> Tensor:
    with contextlib.nullcontext():
        return torch.relu(self.fc(x))


def reads_a_configuration(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * self.config.factor


def returns_a_module(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)), self.second


def calls_unknown_functions(self: Any, x: Tensor) -> Any:
    return torch.relu(self.fc(x)) * len(self.text.upper()) * len(textwrap.fill(self.text))


class Result(dict[str, Any]):
    pass


def returns_its_own_class(self: Any, x: Tensor) -> Any:
    return Result(y=torch.relu(self.fc(x)))


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (branches, "decides by a tensor's value"),
        (asks_for_type, "asks for the type of a tensor"),
        (asks_torch_for_type, "reads the global torch.is_tensor"),
        (without_gradients, "has a with block"),
        (nothing_changes, "has a with block"),
        (decorated, "wrapped by a decorator"),
        (casts, "has a with block"),
        (asks_for_gradients, "reads the global torch.is_grad_enabled"),
        (assigns, "assigns the attribute count"),
        (appends, "changes self.outputs"),
        (draws, "reads the global torch.randn"),
        (computes_ahead, "self.plain, a tensor that is no parameter and no buffer"),
        (computes_with_numbers, "reads the global torch.full"),
        (reads_values, "decides by a tensor's value"),
        (reads_an_iterator, "self.generators, a set"),
        (reads_a_configuration, "self.config, a SimpleNamespace"),
        (returns_its_own_class, "reads the global Result, a class"),
        (returns_a_module, "returns a module"),
        (calls_unknown_functions, "fill reads the global TextWrapper"),
    ],
    ids=lambda v: v.__name__ if callable(v) else "",
)
def test_untraceable_forwards_run_as_they_are(forward: Any, reason: str) -> None:
    model = made(forward, generators={torch.Generator()})
    before = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    fused = epigemm.fuse(model, inplace=True)
    assert type(fused).__name__ == "Model"
    skipped = [skip for skip in report_of(fused).skipped if skip.name == "Model"]
    assert len(skipped) == 1
    assert re.search(reason, skipped[0].reason), skipped[0].reason
    assert {name: vars(model)[name] for name in before} == before
    assert model.count == 0 and model.outputs == []
    # The child that can be traced is fused all the same.
    assert [site.name for site in report_of(fused).sites] == ["inner: 0"]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(9, 24)


def test_optional_arguments(x: Tensor) -> None:
    def forward(self: Any, x: Tensor, mask: Tensor | None = None, double: bool = False) -> Tensor:
        h = torch.relu(self.fc(x))
        h = h if mask is None else h * mask
        return h * 2 if double else h

    model = made(forward)
    fused = epigemm.fuse(model)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    calls = [((x,), {}), ((), {"x": x}), ((x, None), {}), ((x,), {"double": False})]
    for args, kwargs in calls:
        assert compare(fused, model, *args, **kwargs) == []
    calls = [((x, torch.rand(24)), {}), ((x,), {"double": True})]
    for args, kwargs in calls:
        assert compare(fused, model, *args, **kwargs) != []
    calls = [((), {}), ((x,), {"x": x}), ((x, None, False, 1), {}), ((x,), {"other": 1})]
    for args, kwargs in calls:
        with pytest.raises(TypeError):
            fused(*args, **kwargs)


def test_required_arguments_that_are_no_tensors(x: Tensor) -> None:
    def forward(self: Any, x: Tensor, mask: Any) -> Tensor:
        h = torch.relu(self.fc(x))
        return h if mask is None else h * mask

    model = made(forward)
    fused = epigemm.fuse(model)
    assert compare(fused, model, x, torch.rand(24)) == []
    assert compare(fused, model, x, None) != []
    assert compare(fused, model, x, 2.0) != []


def test_variable_arguments(x: Tensor) -> None:
    def forward(self: Any, x: Tensor, *more: Tensor, **named: Tensor) -> Tensor:
        h = torch.relu(self.fc(x))
        for other in (*more, *named.values()):
            h = h + other
        return h

    model = made(forward)
    fused = epigemm.fuse(model)
    assert compare(fused, model, x) == []
    assert compare(fused, model, x, x) != []
    assert compare(fused, model, x, other=x) != []


def change_nested(model: Any) -> None:
    model.nested["on"] = False


def change_sizes(model: Any) -> None:
    model.sizes[1] = 5.0


def change_child(model: Any) -> None:
    model.drop.p = 0.25


def change_child_mode(model: Any) -> None:
    model.drop.train()


def change_kind(model: Any) -> None:
    model.second = nn.Identity()


def change_global(model: Any) -> None:
    globals()["FACTOR"] = 5.0


def change_function(model: Any) -> None:
    model.function = torch.tanh


def change_blocks(model: Any) -> None:
    model.blocks.append(nn.Linear(24, 24))


def reads_everything(self: Any, x: Tensor) -> Any:
    h = torch.relu(self.fc(x)) * self.sizes[1]
    if self.nested["on"]:
        h = h + 1
    h = F.dropout(h, self.drop.p, self.drop.training)
    for block in self.blocks:
        h = torch.relu(block(h))
    h = self.function(self.second(h)) * FACTOR + self.weights.sum()
    return {"h": h, "more": (h, [self.count])}


@pytest.mark.parametrize(
    "change",
    [
        change_nested,
        change_sizes,
        change_child,
        change_child_mode,
        change_kind,
        change_global,
        change_function,
        change_blocks,
    ],
    ids=lambda f: f.__name__,
)
def test_everything_that_was_read_is_watched(change: Any, x: Tensor) -> None:
    model = made(reads_everything, function=torch.sin)
    fused = epigemm.fuse(model, inplace=True)
    plain = made(reads_everything, function=torch.sin)
    plain.load_state_dict(model.state_dict())
    assert len(report_of(fused).sites) == 5
    assert compare(fused, plain, x) == []
    try:
        change(fused), change(plain) if change is not change_global else None
        plain.load_state_dict(fused.state_dict())
        # A plan for the other mode is at hand.
        assert (compare(fused, plain, x) == []) is (change is change_child_mode)
    finally:
        globals()["FACTOR"] = 2.0


def test_closures_are_watched(x: Tensor) -> None:
    factor = 2.0

    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.relu(self.fc(x)) * factor

    model = made(forward)
    fused = epigemm.fuse(model)
    assert compare(fused, model, x) == []
    factor = 3.0
    assert compare(fused, model, x) == [("Model", "the global factor has changed")]


def test_inner_sequentials_are_looked_through(x: Tensor) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.sigmoid(self.net(torch.relu(self.first(x))))

    first = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Sequential(nn.Linear(24, 24)))
    net = nn.Sequential(nn.Sequential(nn.Linear(24, 24)), nn.ReLU())
    model = made(forward, first=first, net=net)
    fused = epigemm.fuse(model)
    assert [site.function for site in report_of(fused).sites if site.name != "inner: 0"] == [
        "linear_relu"
    ] * 3
    assert compare(fused, model, x) == []
    seen: list[Any] = []
    fused.net.register_forward_hook(lambda *_: seen.append(1))
    assert compare(fused, model, x) != []
    assert seen == [1]
    model.net.append(nn.Linear(24, 24)), fused.net.append(model.net[-1])
    assert compare(fused, model, x) != []


def test_a_chain_computes_where_its_product_stood(x: Tensor) -> None:
    """What is written between a product and the rest of its chain is seen as before."""

    def input_is_written(self: Any, x: Tensor) -> Any:
        x = x.clone()
        z = self.fc(x)
        x.zero_()
        return z.relu() + x

    def scale_is_written(self: Any, x: Tensor) -> Any:
        z = self.fc(x)
        self.scale.add_(1)
        return z * self.scale

    def scale_comes_later(self: Any, x: Tensor) -> Any:
        z = self.fc(x)
        scale = self.second(x).sum(0)
        return z * scale

    for forward, count in ((input_is_written, 1), (scale_is_written, 1), (scale_comes_later, 2)):
        model = made(forward)
        model.register_buffer("scale", torch.rand(24))
        fused = epigemm.fuse(model)
        sites = [site for site in report_of(fused).sites if site.name != "inner: 0"]
        assert len(sites) == count
        before = model.scale.clone()
        expected = model(x)
        model.scale.copy_(before)
        torch.testing.assert_close(fused(x), expected, rtol=1e-5, atol=1e-5)


def test_modules_with_a_forward_of_their_own(x: Tensor) -> None:
    """Set on the instance: on a layer of a chain, and on the model."""
    model = made(lambda self, x: torch.relu(self.fc(x)))
    fused = epigemm.fuse(model)
    fused.fc.forward = lambda x: x * 2
    torch.testing.assert_close(fused(x), torch.relu(x * 2))
    again = epigemm.fuse(fused)
    assert "has a forward of its own" in str(report_of(again))
    torch.testing.assert_close(again(x), torch.relu(x * 2))
    model.forward = lambda x: x
    assert "forward of its own" in str(epigemm.fuse(model, dry_run=True))


def test_graph_modules_and_script_modules(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(24, 8), nn.ReLU())
    graph_module = torch.fx.symbolic_trace(model)
    fused = epigemm.fuse(graph_module, inplace=True)
    assert len(report_of(fused).sites) == 1
    torch.testing.assert_close(fused(x), model(x))
    scripted = nn.Sequential(torch.jit.script(model))
    report = epigemm.fuse(scripted, dry_run=True)
    assert not report.sites and "TorchScript" in str(report)


def test_fused_models_can_be_traced_by_fx(x: Tensor) -> None:
    model = made(lambda self, x: torch.relu(self.fc(x)))
    traced = torch.fx.symbolic_trace(epigemm.fuse(model))
    torch.testing.assert_close(traced(x), model(x))


def test_callbacks_of_weak_references_are_no_calls() -> None:
    """They run whenever something has gone, in the midst of any forward; torch's own tables have some."""
    found: dict[str, bool] = {}

    def profile(frame: types.FrameType, event: str, argument: object) -> None:
        if event == "call":
            found[frame.f_code.co_name] = tracing._is_about_the_dead(frame)

    class Key:
        pass

    def gone(reference: object) -> None:
        pass

    def called(value: object) -> None:
        pass

    key = Key()
    references = [weakref.ref(key, gone)]
    sys.setprofile(profile)
    try:
        called(Key)
        del key
    finally:
        sys.setprofile(None)
    assert references[0]() is None and found["gone"] and not found["called"]
