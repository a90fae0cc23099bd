"""Packs as a user sees them: values after each way of writing a weight, copies, states, threads, and their memory.

On a CPU the kernels are written in PyTorch and multiply what is in a pack: a stale one gives a wrong result.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

import epigemm
from epigemm.packs import weight_packs
from tests.support.pieces import Road, decode, pack_size
from tests.support.thorough import in_turn
from tests.support.untyped import backward


def packed(road: Road) -> list[bool]:
    """Of each launch, whether it read a pack."""
    return [launch.packed for launch in road.take()]


def few_rows(road: Road) -> Tensor:
    """An x that costs a CPU little."""
    return road.x(256 if road.device.type == "cpu" else None)


class Holder(NamedTuple):
    """A weight with packs, what multiplies by it, the same in PyTorch, and what makes the packs again."""

    weight: Parameter
    call: Callable[[Tensor], Tensor]
    plain: Callable[[Tensor], Tensor]
    repack: Callable[[], object]

    def check(self, x: Tensor) -> None:
        """Without gradients; sums of K terms are added in different orders, and may cancel."""
        with torch.no_grad():
            expected = self.plain(x)
            step = 2e-5 * float(expected.abs().max())
            torch.testing.assert_close(self.call(x), expected, rtol=1e-4, atol=step)


def by_pack(road: Road) -> Holder:
    weight = Parameter(road.weight())
    held = epigemm.pack(weight)
    return Holder(weight, lambda x: epigemm.linear(x, held), lambda x: F.linear(x, weight), held.repack)


def by_function(road: Road) -> Holder:
    weight = Parameter(road.weight())
    repack = epigemm.pack(weight).repack
    return Holder(weight, lambda x: epigemm.linear(x, weight), lambda x: F.linear(x, weight), repack)


def by_layer(road: Road) -> Holder:
    layer = epigemm.nn.LinearReLU(road.size[2], road.size[1], device=road.device)
    assert isinstance(layer.weight, Parameter)
    repack = epigemm.pack(layer.weight).repack
    return Holder(layer.weight, layer, lambda x: F.linear(x, layer.weight, layer.bias).relu(), repack)


def by_norm(road: Road) -> Holder:
    layer = epigemm.nn.LinearScaleBatchNorm1d(road.size[2], road.size[1], device=road.device).eval()
    weight = layer.linear.weight
    assert isinstance(weight, Parameter)
    return Holder(
        weight, layer, lambda x: layer.bn(layer.linear(x) * layer.scale), epigemm.pack(weight).repack
    )


def by_halves(road: Road) -> Holder:
    """Of one weight with the rows of both products: each half has a pack of its own."""
    layer = epigemm.nn.LinearGLU(road.size[2], road.size[1], device=road.device)

    def plain(x: Tensor) -> Tensor:
        first, second = F.linear(x, layer.weight, layer.bias).chunk(2, -1)
        return F.silu(first) * second

    assert isinstance(layer.weight, Parameter)

    def repack() -> None:
        for half in layer.weight.chunk(2):
            epigemm.pack(half)

    repack()
    return Holder(layer.weight, layer, plain, repack)


HOLDERS = {"pack": by_pack, "layer": by_layer, "function": by_function, "halves": by_halves, "norm": by_norm}
holders = pytest.mark.parametrize("holder", HOLDERS)


# --- ways to write a weight ------------------------------------------------------------------------------------------


def step(weight: Tensor, optimiser: str, **options: Any) -> None:
    weight.grad = torch.ones_like(weight)
    getattr(torch.optim, optimiser)([weight], lr=0.5, **options).step()
    weight.grad = None


def in_inference_mode(weight: Tensor) -> None:
    with torch.inference_mode():
        weight.mul_(3)


def load_state(weight: Tensor) -> None:
    module = nn.Module()
    module.register_parameter("weight", weight)  # type: ignore[arg-type]
    module.load_state_dict({"weight": torch.randn(weight.shape)})


def step_compiled(weight: Tensor) -> None:
    torch.compiler.reset()
    optimise = torch.optim.SGD([weight], lr=0.5)
    weight.grad = torch.ones_like(weight)
    torch.compile(optimise.step, backend="aot_eager")()
    weight.grad = None


SEEN: dict[str, Callable[[Tensor], Any]] = {
    "SGD": lambda w: step(w, "SGD"),
    "SGD fused": lambda w: step(w, "SGD", fused=True),
    "SGD foreach": lambda w: step(w, "SGD", foreach=True),
    "Adam": lambda w: step(w, "Adam"),
    "AdamW fused": lambda w: step(w, "AdamW", fused=True),
    "SGD compiled": step_compiled,
    "copy_": lambda w: w.copy_(torch.randn(w.shape)),
    "mul_": lambda w: w.mul_(2),
    "a view": lambda w: w[1].fill_(7),
    "detach": lambda w: w.detach().fill_(2),
    "foreach": lambda w: torch._foreach_mul_([w], 3.0),
    "inference mode": in_inference_mode,
    "load_state_dict": load_state,
    "data = other": lambda w: setattr(w, "data", torch.randn_like(w) / w.shape[1] ** 0.5),
    "data = other layout": lambda w: setattr(w, "data", torch.randn(w.shape[::-1], device=w.device).t()),
    "init": lambda w: nn.init.uniform_(w),
}


@pytest.mark.parametrize(("write", "holder"), in_turn([*SEEN], [*HOLDERS]))
def test_a_write_is_seen(write: str, holder: str, road: Road) -> None:
    """Every one that torch counts, and the steps of fused optimisers, which it does not count."""
    held, x = HOLDERS[holder](road), few_rows(road)
    for _ in range(2):
        held.check(x)
        assert all(packed(road))
        with torch.no_grad() if "SGD" not in write and "Adam" not in write else torch.enable_grad():
            SEEN[write](held.weight)
        held.check(x)
        held.check(x)
        assert not any(packed(road)), "no call makes a stale pack again"
        held.repack()


@pytest.mark.parametrize("alias", [Tensor.detach, lambda w: w[:], lambda w: w.detach()[1:]])
def test_a_fused_step_is_seen_by_aliases(alias: Callable[[Tensor], Tensor], road: Road) -> None:
    """Nothing else tells that another tensor over the parameter's memory has changed."""
    weight, x = Parameter(road.weight()), few_rows(road)
    with torch.no_grad():
        other = alias(weight)
        epigemm.pack(other)
        epigemm.linear(x, other)
        step(weight, "SGD", fused=True)
        road.check(epigemm.linear(x, other), x, other)
    assert packed(road)[0]


def test_a_fused_step_that_raises_is_seen(road: Road) -> None:
    """It may have written some parameters before."""
    held, x = by_function(road), few_rows(road)
    held.check(x)
    other = Parameter(torch.zeros(2, device=road.device))
    optimiser: Any = torch.optim.SGD([{"params": [held.weight]}, {"params": [other]}], lr=0.5, fused=True)
    optimiser.param_groups[1]["lr"] = "no number"
    held.weight.grad, other.grad = torch.ones_like(held.weight), torch.ones_like(other)
    with pytest.raises(Exception):  # noqa: B017, PT011
        optimiser.step()
    held.weight.grad = None
    held.check(x)
    first, *others = packed(road)
    assert first and not any(others)


@holders
def test_a_write_that_torch_does_not_count_needs_repack(holder: str, road: Road) -> None:
    held, x = HOLDERS[holder](road), few_rows(road)
    held.check(x)
    with torch.no_grad():
        before = held.call(x).clone()
        held.weight.data.add_(1)
        assert torch.equal(held.call(x), before), "torch counts this by now: the documentation may say so"
        held.repack()
        held.check(x)
    packs = {launch.pack for launch in road.take()}
    assert len(packs) == 1 + (holder == "halves"), "it is made again in the same memory"


@holders
def test_training_by_hand(holder: str, road: Road) -> None:
    """Gradient descent as old tutorials write it: nothing counts the change, so no pack is believed after it."""
    held, x = HOLDERS[holder](road), few_rows(road)
    for _ in range(2):
        held.check(x)
        assert all(packed(road))
        result = held.call(x)
        torch.testing.assert_close(result, held.plain(x), rtol=1e-4, atol=1e-4)
        assert not any(packed(road)), "a gradient of the weight is asked for"
        backward(result.square().mean())
        assert held.weight.grad is not None
        held.weight.data -= 0.5 * held.weight.grad
        held.weight.grad = None
        held.check(x)
        assert not any(packed(road))
        held.repack()


def new_parameter(layer: nn.Module) -> None:
    layer.weight = Parameter(torch.randn_like(layer.weight))  # type: ignore[arg-type]


def assign_state(layer: nn.Module) -> None:
    state = {name: torch.randn_like(value) for name, value in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)


def there_and_back(layer: nn.Module) -> None:
    device = layer.weight.device
    layer.to("cpu").to(device)  # type: ignore[arg-type]


def emptied(layer: Any) -> None:
    layer.to_empty(device=layer.weight.device)
    layer.reset_parameters()


MOVES: dict[str, Callable[[Any], object]] = {
    "load_state_dict(assign=True)": assign_state,
    "to(device)": there_and_back,
    "to(dtype)": lambda layer: layer.bfloat16().float(),
    "to_empty": emptied,
    "a new parameter": new_parameter,
    "reset_parameters": lambda layer: layer.reset_parameters(),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_layer_whose_parameters_move(move: str, road: Road) -> None:
    held, x = by_layer(road), road.x()
    held.check(x)
    for _ in range(2):
        MOVES[move](held.call)
        held.check(x)
        epigemm.pack(held.call.weight)  # type: ignore[attr-defined]
        held.check(x)
    assert packed(road)[::2] == [True] * 3


def test_an_address_that_comes_back_is_not_the_old_weight() -> None:
    """`weight.data = other` keeps identity and version; here the address, too, and what torch has freed comes back."""
    memory = torch.randn(64, 64).numpy()
    weight = Parameter(torch.from_numpy(memory))
    pack = weight_packs.keep(weight, 2)
    for _ in range(50):
        weight.data = torch.empty(0)
        weight.data = torch.from_numpy(memory)
        assert not pack.is_current(weight)


# --- whose a pack is, and how long -----------------------------------------------------------------------------------


@holders
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_and_states_carry_no_pack(holder: str, how: str, road: Road) -> None:
    """They compute by their own weight, and are no larger than before."""
    if holder == "function":
        pytest.skip("a function")
    held, x = HOLDERS[holder](road), few_rows(road)
    module: Any = epigemm.pack(held.weight) if holder == "pack" else held.call
    size = len(pickle.dumps(module))
    held.check(x)
    assert len(pickle.dumps(module)) == size
    twin = copy.deepcopy(module) if how == "deepcopy" else pickle.loads(pickle.dumps(module))
    with torch.no_grad():
        expected = held.call(x).clone()
        (twin.weight if holder != "norm" else twin.linear.weight).zero_()
        twin_call = (lambda x: epigemm.linear(x, twin)) if holder == "pack" else twin
        assert not torch.allclose(twin_call(x), expected)
        torch.testing.assert_close(held.call(x), expected)
    if holder != "pack":
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        assert file.tell() < sum(t.nbytes for t in module.state_dict().values()) + 10_000


@holders
def test_a_pack_dies_with_its_weight(holder: str, road: Road) -> None:
    gc.collect()  # what earlier tests have left
    owners = len(weight_packs.owners)
    held = HOLDERS[holder](road)
    held.check(few_rows(road))
    parts = held.weight.detach().chunk(2) if holder == "halves" else (held.weight,)
    found = [weight_packs.kept(part) for part in (*parts, held.weight)]
    buffers = [weakref.ref(each[2].buffer) for each in found if each]
    assert len(weight_packs.owners) > owners
    del held, parts, found
    gc.collect()
    assert all(each() is None for each in buffers) and len(weight_packs.owners) == owners


def test_a_replaced_weight_frees_its_pack(road: Road) -> None:
    held = by_layer(road)
    held.check(road.x())
    buffer = weakref.ref(weight_packs.kept(held.weight)[2].buffer)
    layer: Any = held.call
    del held
    new_parameter(layer)
    gc.collect()
    assert buffer() is None


def test_tied_weights_share_a_pack(road: Road) -> None:
    held, x = by_layer(road), few_rows(road)
    other = epigemm.nn.LinearReLUDiv(road.size[2], road.size[1], bias=False, device=road.device)
    other.weight = held.weight
    held.check(x)
    with torch.no_grad():
        torch.testing.assert_close(other(x), F.linear(x, held.weight).relu(), rtol=1e-4, atol=1e-4)
        epigemm.linear(x, epigemm.pack(held.weight))
    launches = road.take()
    assert len({launch.pack for launch in launches}) == 1 and len(launches) == 3


def test_other_weights_have_none(road: Road) -> None:
    """A pack is of one tensor object: no alias and no copy has it, and no call makes one."""
    weight, x = road.weight(), road.x()
    parameter = Parameter(weight)
    epigemm.pack(parameter)
    with torch.no_grad():
        for other in (weight, parameter.detach(), parameter[:], nn.Buffer(weight), Parameter(weight)):
            road.check(epigemm.linear(x, other), x, weight)
            assert not weight_packs.kept(other)
        with torch.autocast(road.device.type, torch.bfloat16):
            epigemm.linear(x, parameter)
    assert packed(road) == [False] * 5


def test_a_plain_call_uses_a_current_pack(road: Road) -> None:
    """Of a weight that was packed for others; `pack` again makes a stale one current."""
    weight, x = road.weight(), road.x()
    held = epigemm.pack(weight)
    assert held.nbytes == epigemm.pack(weight).nbytes == pack_size(weight, 2)
    road.check(epigemm.linear(x, weight), x, weight)
    weight.mul_(2)
    road.check(epigemm.linear(x, weight), x, weight)
    epigemm.pack(weight)
    road.check(epigemm.linear(x, weight), x, weight)
    assert packed(road) == [True, False, True]


def test_each_arithmetic_has_packs_of_its_own(road: Road) -> None:
    """TF32 and IEEE need none, nor does a K that never runs on slices, nor a CPU."""
    weight = torch.randn(2048, 1024, device=road.device)
    for precision, slices in (("ieee", ()), ("tf32", ()), ("highest", (2,)), ("high", (1, 2))):
        held = epigemm.pack(weight, precision=precision)
        assert held.nbytes == sum(pack_size(weight, each) for each in slices)
    assert epigemm.pack(torch.randn(512, 64, device=road.device)).nbytes == 0


def test_without_the_kernels_nothing_is_held() -> None:
    weight, x = torch.randn(256, 256), torch.randn(512, 256)
    held = epigemm.pack(weight)
    held.repack()
    assert held.nbytes == 0 and "PackedWeight" in repr(held)
    assert torch.equal(epigemm.linear_relu(x, held), epigemm.linear_relu(x, weight))


@pytest.mark.parametrize("change", ["bfloat16", "double", "flat"])
def test_repack_frees_what_nobody_can_use_any_more(change: str, road: Road) -> None:
    module = nn.Linear(road.size[2], road.size[1], device=road.device)
    held = epigemm.pack(module.weight)
    if change == "flat":
        module.weight.data = module.weight.data.flatten()
    else:
        getattr(module, change)()
    held.repack()
    assert held.nbytes == 0 and not weight_packs.kept(module.weight)


def test_inference_tensors_are_split_at_every_call(road: Road) -> None:
    """They have no version counter. A pack of another weight that is made there serves outside."""
    parameter = Parameter(road.weight())
    with torch.inference_mode():
        weight, x = road.weight(), road.x()
        held, other = epigemm.pack(weight), epigemm.pack(parameter)
        assert held.nbytes == 0 and other.nbytes > 0
        for _ in range(2):
            road.check(epigemm.linear(x, held), x, weight)
            weight.mul_(2)
        epigemm.linear(x, other)
    with torch.no_grad():
        parameter.mul_(2)
        x = road.x()
        road.check(epigemm.linear(x, other), x, parameter)
    assert packed(road) == [False, False, True, False]


# --- what a pack holds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("shape", [(1, 1), (3, 65), (64, 128), (65, 7), (100, 9), (2, 1000)], ids=str)
def test_bytes_are_those_of_the_kernels(shape: tuple[int, int], slices: int, device: torch.device) -> None:
    """The native operator takes exactly this size, and what it writes is the matrix."""
    matrix, split = torch.randn(*shape, device=device), torch.ops.epigemm._split_rows_out
    size = weight_packs.pack_bytes(*shape, slices)
    pack = torch.empty(size, dtype=torch.uint8, device=device)
    split(matrix, slices, pack)
    with pytest.raises(RuntimeError, match="pack"):
        split(matrix, slices, pack[:-1].clone())
    error = (decode(pack.cpu(), *shape, slices) - matrix.cpu().double()).abs().amax(1)
    assert float((error / matrix.cpu().abs().amax(1).double()).max()) < (
        2.0**-21 if slices == 2 else 2.0**-10
    )
