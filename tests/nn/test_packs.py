"""Modules keep the packs of their weights, whichever way a weight changes, moves or is copied."""

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
from torch import Tensor, nn

import epigemm
from epigemm.packs import weight_packs
from tests.support.pieces import Road


class Plain(nn.Module):
    """The module under test beside what it replaces, over the same parameters."""

    def __init__(self, road: Road) -> None:
        super().__init__()
        self.linear = nn.Linear(road.size[2], road.size[1], device=road.device)
        self.fused = epigemm.nn.LinearReLU.from_linear(self.linear)

    def both(self, x: Tensor) -> None:
        """Calls without gradients agree with plain PyTorch."""
        with torch.no_grad():
            actual, expected = self.fused(x), torch.relu(self.linear(x))
        # fp32 sums of K terms, added in different orders.
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def packed(road: Road) -> list[bool]:
    return [launch.packed for launch in road.take()]


def test_the_first_call_packs_and_the_others_find_it(road: Road) -> None:
    both, x = Plain(road), road.x()
    for _ in range(3):
        both.both(x)
    launches = road.take()
    assert [launch.packed for launch in launches] == [True] * 3
    assert len({launch.pack for launch in launches}) == 1
    assert list(weight_packs.kept(both.linear.weight)) == [2]


def optimiser_step(both: Plain, x: Tensor, optimiser: str, **options: Any) -> None:
    optimise = getattr(torch.optim, optimiser)(both.fused.parameters(), lr=0.1, **options)
    both.fused(x).square().mean().backward()
    optimise.step()
    optimise.zero_grad()


def assign_state(both: Plain, x: Tensor) -> None:
    state = {name: torch.randn_like(value) for name, value in both.fused.state_dict().items()}
    both.fused.load_state_dict(state, assign=True)
    for name, parameter in both.fused.named_parameters():
        setattr(both.linear, name, parameter)


def load_state(both: Plain, x: Tensor) -> None:
    both.fused.load_state_dict({name: value * 2 for name, value in both.fused.state_dict().items()})


def there_and_back(both: Plain, x: Tensor) -> None:
    both.to("cpu").to(x.device)


def through_halves(both: Plain, x: Tensor) -> None:
    both.bfloat16().float()


def to_empty(both: Plain, x: Tensor) -> None:
    both.to_empty(device=x.device)
    both.linear.reset_parameters()


def new_parameter(both: Plain, x: Tensor) -> None:
    both.linear.weight = nn.Parameter(torch.randn_like(both.linear.weight))
    both.fused.weight = both.linear.weight


def copy_in(both: Plain, x: Tensor) -> None:
    with torch.no_grad():
        both.fused.weight.copy_(torch.randn_like(both.fused.weight))


def uncounted(both: Plain, x: Tensor) -> None:
    both.fused.weight.data.mul_(2)
    both.fused.repack()


def hand_written_training(both: Plain, x: Tensor) -> None:
    """Gradient descent as old tutorials write it: nothing counts the change."""
    both.fused(x).square().mean().backward()
    assert both.fused.weight.grad is not None
    both.fused.weight.data -= 0.5 * both.fused.weight.grad
    both.fused.zero_grad()


CHANGES: dict[str, Callable[[Plain, Tensor], None]] = {
    "SGD": lambda both, x: optimiser_step(both, x, "SGD"),
    "AdamW fused": lambda both, x: optimiser_step(both, x, "AdamW", fused=True),
    "Adam foreach": lambda both, x: optimiser_step(both, x, "Adam", foreach=True),
    "gradient descent by hand": hand_written_training,
    "load_state_dict": load_state,
    "load_state_dict(assign=True)": assign_state,
    "to(device)": there_and_back,
    "to(dtype)": through_halves,
    "to_empty": to_empty,
    "a new parameter": new_parameter,
    "copy_": copy_in,
    "data.mul_ and repack": uncounted,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_modules_weight(change: str, road: Road) -> None:
    both, x = Plain(road), road.x()
    both.both(x)
    for _ in range(2):
        CHANGES[change](both, x)
        road.take()
        both.both(x)
        both.both(x)
        assert packed(road) == [True, True]


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["deepcopy", "pickle"],
)
def test_copies_have_packs_of_their_own(duplicate: Callable[[Any], Any], road: Road) -> None:
    both, x = Plain(road), road.x()
    both.both(x)
    twin = duplicate(both)
    assert not weight_packs.kept(twin.linear.weight)
    with torch.no_grad():
        twin.linear.weight.mul_(-1)
    twin.both(x)
    both.both(x)


def test_packs_are_in_no_state(road: Road) -> None:
    both, x = Plain(road), road.x()

    def sizes() -> tuple[list[str], int, int, set[str]]:
        file = io.BytesIO()
        torch.save(both.fused.state_dict(), file)
        attributes = set(vars(both.fused)) | set(vars(both.fused.weight))
        return list(both.fused.state_dict()), file.tell(), len(pickle.dumps(both.fused)), attributes

    before = sizes()
    both.both(x)
    assert weight_packs.kept(both.fused.weight)
    assert sizes() == before
    assert len(list(both.fused.buffers())) == 0


def test_a_freed_module_frees_its_pack(road: Road) -> None:
    both, x = Plain(road), road.x()
    both.both(x)
    buffer = weakref.ref(weight_packs.kept(both.fused.weight)[2].buffer)
    del both
    gc.collect()
    assert buffer() is None


def test_a_replaced_weight_frees_its_pack(road: Road) -> None:
    both, x = Plain(road), road.x()
    both.both(x)
    buffer = weakref.ref(weight_packs.kept(both.fused.weight)[2].buffer)
    new_parameter(both, x)
    gc.collect()
    assert buffer() is None


def test_tied_weights_share_a_pack(road: Road) -> None:
    both, x = Plain(road), road.x()
    other = epigemm.nn.LinearReLUDiv.from_linear(both.linear, divisor=2.0)
    both.both(x)
    with torch.no_grad():
        torch.testing.assert_close(other(x), torch.relu(both.linear(x)) / 2, rtol=1e-4, atol=1e-4)
    launches = road.take()
    assert len({launch.pack for launch in launches}) == 1 and len(launches) == 2


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_batch_norm_layers_keep_theirs(training: bool, road: Road) -> None:
    module = epigemm.nn.LinearScaleBatchNorm1d(road.size[2], road.size[1], device=road.device).train(training)
    plain, x = copy.deepcopy(module), road.x()
    with torch.no_grad():
        for _ in range(2):
            expected = plain.bn(plain.linear(x) * plain.scale)
            torch.testing.assert_close(module(x), expected, rtol=1e-3, atol=1e-3)
    assert packed(road) == [True, True]
    module.linear.weight.data.mul_(-1)
    plain.linear.weight.data.mul_(-1)
    module.repack()
    with torch.no_grad():
        expected = plain.bn(plain.linear(x) * plain.scale)
        torch.testing.assert_close(module(x), expected, rtol=1e-3, atol=1e-3)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_weights_made_for_one_call_keep_no_pack(road: Road) -> None:
    """Parametrised ones, and those of functional_call: packing them would cost every call what only many repay."""
    both, x = Plain(road), road.x(road.rows_worth_a_pack_alone())
    owners = len(weight_packs._owners)
    other = torch.randn_like(both.linear.weight)
    handed = {"weight": other, "bias": both.linear.bias}
    with torch.no_grad():
        actual = torch.func.functional_call(both.fused, handed, (x,))
        torch.testing.assert_close(actual, torch.relu(x @ other.t() + both.linear.bias), rtol=1e-3, atol=1e-3)
        assert not road.take() and not weight_packs.kept(other), (
            "worth a pack that is there, not one for this call"
        )
        torch.nn.utils.parametrize.register_parametrization(both.fused, "weight", Doubled())
        for given, launched in ((x, []), (road.x(), [False])):
            expected = torch.relu(2 * given @ both.linear.weight.t() + both.linear.bias)
            torch.testing.assert_close(both.fused(given), expected, rtol=1e-3, atol=1e-3)
            assert packed(road) == launched
    both.fused.repack()
    assert len(weight_packs._owners) == owners


def test_repack_does_nothing_where_nothing_is_packed() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        module = epigemm.nn.LinearReLU(256, 256, dtype=dtype)
        module.repack()
        assert not weight_packs.kept(module.weight)


def test_training_follows_plain_pytorch(road: Road) -> None:
    """Several steps of a fused optimiser, with evaluations between: losses agree with those of plain layers."""
    torch.manual_seed(1)
    fused = epigemm.nn.LinearReLU(road.size[2], road.size[1], device=road.device)
    plain = nn.Linear(road.size[2], road.size[1], device=road.device)
    plain.load_state_dict(fused.state_dict())
    x, target = road.x(), torch.rand(road.size[0], road.size[1], device=road.device)
    losses: list[list[float]] = [[], []]
    for layer, after, found in ((fused, lambda z: z, losses[0]), (plain, torch.relu, losses[1])):
        optimise = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True)
        for _ in range(4):
            with torch.no_grad():
                found.append(float((after(layer(x)) - target).square().mean()))
            loss = (after(layer(x)) - target).square().mean()
            found.append(loss.item())
            loss.backward()
            optimise.step()
            optimise.zero_grad()
    assert losses[1][0] > 1.05 * losses[1][-1], "nothing was learned"
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_modules_find_their_packs(backend: str, road: Road) -> None:
    """The parameter reaches the operator as the object that it is, frozen or not; changes are followed."""
    torch.compiler.reset()
    both, x = Plain(road), road.x()
    compiled = torch.compile(both.fused, fullgraph=True, backend=backend)

    def check() -> None:
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), torch.relu(both.linear(x)), rtol=1e-4, atol=1e-4)

    for _ in range(3):
        check()
    assert len({launch.pack for launch in road.module.launches}) == 1 and packed(road) == [True] * 3
    with torch.no_grad():
        both.linear.weight.mul_(2)
    check()
    both.linear.weight.requires_grad_(False)
    given = road.x().requires_grad_()
    compiled(given).sum().backward()
    optimiser_step(both, x, "SGD", fused=True)
    both.linear.weight.requires_grad_(True)
    road.take()
    result = compiled(x)
    torch.testing.assert_close(result, torch.relu(both.linear(x)), rtol=1e-4, atol=1e-4)
    assert packed(road) == [False], "a gradient of the weight is asked for"
    result.square().mean().backward()
    with torch.no_grad():
        both.fused(x)
    for _ in range(2):
        both.linear.weight.data.mul_(1.5)  # counted by nothing, after an evaluation has made a pack
        torch.testing.assert_close(compiled(x), torch.relu(both.linear(x)), rtol=1e-4, atol=1e-4)
        both.both(x)  # nor does the evaluation after it believe that pack
    assert packed(road)[-4:] == [False, True, False, True]
    optimise = torch.optim.SGD([both.linear.weight], lr=0.5, fused=True)
    optimise.step()
    check()


def test_a_compiled_optimiser_is_followed(road: Road) -> None:
    torch.compiler.reset()
    both, x = Plain(road), road.x()
    both.both(x)
    optimise = torch.optim.SGD(both.fused.parameters(), lr=0.5)
    step = torch.compile(optimise.step, backend="aot_eager")
    for _ in range(3):
        both.linear.weight.grad = torch.randn_like(both.linear.weight)
        step()
        both.both(x)


def test_packed_weights_compile(road: Road) -> None:
    torch.compiler.reset()
    weight, x = road.weight(), road.x()
    packed_weight = epigemm.pack(weight)
    compiled = torch.compile(
        lambda given: epigemm.linear(given, packed_weight), fullgraph=True, backend="aot_eager"
    )
    for _ in range(2):
        road.check(compiled(x), x, weight)
        weight.mul_(2)
    assert packed(road) == [True, True]


def test_packing_is_not_traced(road: Road) -> None:
    """In a compiled function it breaks the graph and happens where it stands."""
    torch.compiler.reset()
    weight, x = road.weight(), road.x()

    def packing(given: Tensor) -> Tensor:
        return epigemm.linear(given, epigemm.pack(weight))

    road.check(torch.compile(packing, backend="aot_eager")(x), x, weight)
    assert packed(road) == [True]


def test_exported_programs_keep_packs(road: Road) -> None:
    both, x = Plain(road), road.x()
    with torch.no_grad():
        module: Any = torch.export.export(both.fused, (x,)).module()
        for _ in range(2):
            torch.testing.assert_close(module(x), torch.relu(both.linear(x)), rtol=1e-4, atol=1e-4)
    launches = road.take()
    assert [launch.packed for launch in launches] == [True, True]
    assert len({launch.pack for launch in launches}) == 1
