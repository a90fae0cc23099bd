"""Packs of weights: their size, which weight they belong to, when they are current, and how calls use them."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm.packs import weight_packs
from tests.support.pieces import AT_HIGHEST, Road, decode, held, pack_size
from tests.support.untyped import backward

Parameter = torch.nn.Parameter


def fresh(weight: Tensor, pieces: int) -> bytes:
    """What the native operator makes of the weight as it is."""
    buffer = torch.empty(pack_size(weight, pieces), dtype=torch.uint8, device=weight.device)
    torch.ops.epigemm._split_rows_out(weight.detach(), pieces, buffer)
    return held(buffer, weight, pieces)


def kept(weight: Tensor, pieces: int) -> bytes:
    """What the weight's kept pack holds."""
    return held(weight_packs.kept(weight)[pieces].buffer, weight, pieces)


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 64), (3, 65), (64, 128), (65, 7), (100, 8), (100, 9), (2, 1000)], ids=str
)
def test_bytes_are_those_of_the_kernels(shape: tuple[int, int], pieces: int, device: torch.device) -> None:
    """The native operator takes exactly this size and refuses less, to the section."""
    matrix = torch.randn(*shape, device=device)
    size = weight_packs.pack_bytes(*shape, pieces)
    torch.ops.epigemm._split_rows_out(matrix, pieces, torch.empty(size, dtype=torch.uint8, device=device))
    with pytest.raises(RuntimeError, match="pack"):
        torch.ops.epigemm._split_rows_out(
            matrix, pieces, torch.empty(size - 1, dtype=torch.uint8, device=device)
        )


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_pack_holds_the_weight(pieces: int) -> None:
    weight = torch.randn(33, 130)
    matrix = decode(weight_packs.keep(weight, pieces).buffer, 33, 130, pieces)
    error = (matrix - weight.double()).abs().amax(1) / weight.abs().amax(1).double()
    assert float(error.max()) < (2.0**-21 if pieces == 2 else 2.0**-10)
    assert pieces == 1 or float(error.max()) > 0.0


# --- changes of a weight --------------------------------------------------------------------------------------------


def gradient_of(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def step(weight: Tensor, optimiser: str, **options: Any) -> None:
    weight.grad = torch.ones_like(weight)
    getattr(torch.optim, optimiser)([weight], lr=0.5, **options).step()
    weight.grad = None


def no_grad(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return torch.no_grad()(change)


def in_inference_mode(weight: Tensor) -> None:
    with torch.inference_mode():
        weight.mul_(3)


def load_state(weight: Tensor) -> None:
    holder = torch.nn.Module()
    holder.register_parameter("weight", weight)  # type: ignore[arg-type]
    holder.load_state_dict({"weight": torch.randn(weight.shape)})


def point_elsewhere(weight: Tensor) -> None:
    weight.data = torch.randn_like(weight)


def transpose_in_place(weight: Tensor) -> None:
    weight.data = torch.randn(weight.shape[::-1], device=weight.device).t()


SEEN: dict[str, Callable[[Tensor], Any]] = {
    "SGD": lambda w: step(w, "SGD"),
    "SGD fused": lambda w: step(w, "SGD", fused=True),
    "SGD foreach": lambda w: step(w, "SGD", foreach=True),
    "Adam": lambda w: step(w, "Adam"),
    "AdamW fused": lambda w: step(w, "AdamW", fused=True),
    "copy_": no_grad(lambda w: w.copy_(torch.randn(w.shape))),
    "mul_": no_grad(lambda w: w.mul_(2)),
    "a view": no_grad(lambda w: w[1].fill_(7)),
    "detach": lambda w: w.detach().fill_(2),
    "foreach": no_grad(lambda w: torch._foreach_mul_([w], 3.0)),
    "inference mode": in_inference_mode,
    "load_state_dict": load_state,
    "data = other": point_elsewhere,
    "data = other layout": transpose_in_place,
    "init": lambda w: torch.nn.init.uniform_(w),
}
UNSEEN: dict[str, Callable[[Tensor], Any]] = {
    "data.fill_": lambda w: w.data.fill_(2),
    "data +=": lambda w: w.data.__iadd__(1),
}


@pytest.mark.parametrize("change", SEEN)
def test_changes_are_seen(change: str, road: Road) -> None:
    """Every counted change, and the steps of fused optimisers, which torch does not count."""
    weight, x = Parameter(road.weight()), road.x()
    packed = epigemm.pack(weight)
    with torch.no_grad():
        road.check(epigemm.linear(x, packed), x, weight)
        address = weight_packs.kept(weight)[2].buffer.data_ptr()
        SEEN[change](weight)
        for _ in range(2):
            road.check(epigemm.linear(x, packed), x, weight)
    assert [launch.packed for launch in road.take()] == [True] * 3
    assert weight_packs.kept(weight)[2].buffer.data_ptr() == address, "made again elsewhere"


@pytest.mark.parametrize("change", UNSEEN)
def test_changes_that_torch_does_not_count_need_repack(change: str, road: Road) -> None:
    weight, x = Parameter(road.weight()), road.x()
    packed = epigemm.pack(weight)
    before = kept(weight, 2)
    UNSEEN[change](weight)
    with torch.no_grad():
        epigemm.linear(x, packed)
    assert kept(weight, 2) == before, "torch counts this by now: the documentation may say so"
    packed.repack()
    with torch.no_grad():
        road.check(epigemm.linear(x, packed), x, weight)


def test_an_address_that_comes_back_is_not_the_old_weight() -> None:
    """`weight.data = other` keeps identity and version; here the address, too, and what torch has freed comes back."""
    memory = torch.randn(64, 64).numpy()
    weight = Parameter(torch.from_numpy(memory))
    pack = weight_packs.keep(weight, 2)
    for _ in range(50):
        weight.data = torch.empty(0)
        weight.data = torch.from_numpy(memory)
        assert not pack.is_current(weight)
    address = pack.buffer.data_ptr()
    again = weight_packs.keep(weight, 2)
    assert again.is_current(weight)
    assert again.buffer.data_ptr() != address, "a product on another stream may still read the old pieces"


@pytest.mark.parametrize("frozen", [False, True])
def test_only_graphs_need_the_same_memory_for_a_weight_that_moved(frozen: bool, road: Road) -> None:
    """In place, the weight's writer has waited for its readers; `weight.data = other` waits for nobody."""
    weight = Parameter(road.weight())
    pack = weight_packs.keep(weight, 2, frozen=frozen)
    in_place: list[Callable[[Tensor], Any]] = [SEEN["mul_"], weight_packs.expire, SEEN["AdamW fused"]]
    for change in in_place:
        change(weight)
        assert weight_packs.keep(weight, 2) is pack
    point_elsewhere(weight)
    weight_packs.expire(weight)
    assert (weight_packs.keep(weight, 2) is pack) == frozen
    assert kept(weight, 2) == fresh(weight, 2)


@pytest.mark.parametrize("change", ["bfloat16", "double", "flat", "away"])
def test_repack_frees_what_nobody_can_use_any_more(
    change: str, road: Road, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = torch.nn.Linear(road.size[2], road.size[1], device=road.device)
    packed = epigemm.pack(module.weight)
    buffer = weakref.ref(weight_packs.kept(module.weight)[2].buffer)
    if change == "away":
        module.cpu()
        monkeypatch.setattr("epigemm.planner.plans.has_gpu_kernels", lambda tensor: tensor.is_cuda)
    elif change == "flat":
        module.weight.data = module.weight.data.flatten()
    else:
        getattr(module, change)()
    packed.repack()
    assert packed.nbytes == 0 and not weight_packs.kept(module.weight) and buffer() is None
    packed.repack()


def test_a_change_of_shape_or_device_makes_a_pack_of_its_own(road: Road) -> None:
    weight = Parameter(road.weight())
    epigemm.pack(weight)
    weight.data = torch.randn(road.size[1] + 8, road.size[2], device=road.device)
    x = road.x()
    with torch.no_grad():
        road.check(epigemm.linear(x, epigemm.pack(weight)), x, weight)


# --- whose it is, and how long --------------------------------------------------------------------------------------


def test_a_pack_dies_with_its_weight(road: Road) -> None:
    gc.collect()  # what earlier tests have left
    weight = Parameter(road.weight())
    packed = epigemm.pack(weight)
    buffer = weakref.ref(weight_packs.kept(weight)[2].buffer)
    owners = len(weight_packs._owners)
    del packed
    gc.collect()
    assert buffer() is not None, "a pack lives as long as the weight"
    del weight
    gc.collect()
    assert buffer() is None
    assert len(weight_packs._owners) == owners - 1


def test_a_weight_may_die_in_a_cycle() -> None:
    weight: Any = torch.randn(16, 16)
    buffer = weakref.ref(weight_packs.keep(weight, 2).buffer)
    weight.itself = weight
    del weight
    gc.collect()
    assert buffer() is None


def test_identity_not_value(road: Road) -> None:
    """Equal weights, aliases and copies have packs of their own, or none."""
    weight = Parameter(road.weight())
    epigemm.pack(weight)
    for other in (weight.detach(), weight.data, weight.clone(), copy.deepcopy(weight), weight[:]):
        assert not weight_packs.kept(other)
    assert weight_packs.kept(weight)


def test_two_of_one_weight_share_a_pack(road: Road) -> None:
    weight = Parameter(road.weight())
    first, second = epigemm.pack(weight), epigemm.pack(weight)
    assert first.nbytes == second.nbytes == pack_size(weight, 2)
    assert len(weight_packs.kept(weight)) == 1


def test_a_plain_weight_uses_a_kept_pack_and_makes_none(road: Road) -> None:
    weight, x = road.weight(), road.x()
    epigemm.linear(x, weight)
    assert not weight_packs.kept(weight)
    epigemm.pack(weight)
    road.check(epigemm.linear(x, weight), x, weight)
    weight.mul_(2)
    road.check(epigemm.linear(x, weight), x, weight)
    assert [launch.packed for launch in road.take()] == [False, True, False]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_copies_and_pickles_carry_no_pack(duplicate: Callable[[Any], Any], road: Road) -> None:
    packed, x = epigemm.pack(Parameter(road.weight())), road.x()
    twin = duplicate(packed)
    assert isinstance(twin, epigemm.PackedWeight) and twin.weight is not packed.weight
    with torch.no_grad():
        twin.weight.mul_(2)
        road.check(epigemm.linear(x, twin), x, twin.weight)
        road.check(epigemm.linear(x, packed), x, packed.weight)
    size = len(pickle.dumps(packed))
    assert size < 1.5 * packed.weight.nbytes + 10_000


def test_both_arithmetics_keep_packs_of_their_own(road: Road) -> None:
    weight = torch.randn(2048, 1024, device=road.device)
    packed = epigemm.pack(weight)
    one = epigemm.pack(weight, precision="high")
    assert set(weight_packs.kept(weight)) == {1, 2}
    assert packed.nbytes == one.nbytes == sum(pack_size(weight, pieces) for pieces in (1, 2))
    weight.data.mul_(2)
    packed.repack()
    for pieces in (1, 2):
        assert kept(weight, pieces) == fresh(weight, pieces)


def test_repack_writes_into_the_same_memory(road: Road) -> None:
    weight = road.weight()
    packed = epigemm.pack(weight)
    address, before = weight_packs.kept(weight)[2].buffer.data_ptr(), kept(weight, 2)
    weight.data.mul_(3)
    packed.repack()
    assert weight_packs.kept(weight)[2].buffer.data_ptr() == address
    assert before != kept(weight, 2) == fresh(weight, 2)


def test_without_the_kernels_nothing_is_held() -> None:
    weight, x = torch.randn(256, 256), torch.randn(512, 256)
    packed = epigemm.pack(weight)
    assert packed.nbytes == 0 and not weight_packs.kept(weight)
    packed.repack()
    assert torch.equal(epigemm.linear_relu(x, packed), epigemm.linear_relu(x, weight))
    assert "PackedWeight" in repr(packed)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_other_arithmetics_need_no_pack(precision: str, road: Road) -> None:
    assert epigemm.pack(road.weight(), precision=precision).nbytes == 0


def test_a_weight_that_never_runs_on_pieces_is_not_packed(road: Road) -> None:
    assert epigemm.pack(torch.randn(512, 64, device=road.device)).nbytes == 0  # K is too small


# --- what cannot be packed ------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "no tensor": (3.0, TypeError, "weight: got float; accepted is a torch.Tensor"),
    "None": (None, TypeError, "weight: got None"),
    "bf16": (torch.zeros(4, 4, dtype=torch.bfloat16), RuntimeError, r"weight: got dtype torch\.bfloat16"),
    "fp64": (torch.zeros(4, 4, dtype=torch.float64), RuntimeError, r"weight: got dtype torch\.float64"),
    "1-D": (torch.zeros(4), RuntimeError, r"weight: got shape \[4\]"),
    "3-D": (torch.zeros(2, 4, 4), RuntimeError, r"weight: got shape \[2, 4, 4\]"),
    "sparse": (torch.zeros(4, 4).to_sparse(), RuntimeError, "weight: got layout torch.sparse_coo"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_weights(case: str) -> None:
    weight, error, message = BAD[case]
    with pytest.raises(error, match=message):
        epigemm.pack(weight)
    with pytest.raises(error, match=message):
        epigemm.PackedWeight(weight)


def test_bad_precision() -> None:
    with pytest.raises(ValueError, match="precision: got 'fast'"):
        epigemm.pack(torch.zeros(4, 4), precision="fast")
    with pytest.raises(TypeError, match="precision: got int"):
        epigemm.pack(torch.zeros(4, 4), precision=3)  # type: ignore[arg-type]


def test_inference_tensors_are_split_at_every_call(road: Road) -> None:
    """They have no version counter: nothing would tell a change."""
    with torch.inference_mode():
        weight, x = road.weight(), road.x()
        packed = epigemm.pack(weight)
        assert packed.nbytes == 0
        for _ in range(2):
            road.check(epigemm.linear(x, packed), x, weight)
            weight.mul_(2)
    assert [launch.packed for launch in road.take()] == [False, False]


def test_a_pack_made_in_inference_mode_serves_outside(road: Road) -> None:
    weight, x = Parameter(road.weight()), road.x()
    with torch.inference_mode():
        packed = epigemm.pack(weight)
        epigemm.linear(x, packed)
    assert not weight_packs.kept(weight)[2].buffer.is_inference()
    with torch.no_grad():
        weight.mul_(2)
        road.check(epigemm.linear(x, packed), x, weight)
    assert [launch.packed for launch in road.take()] == [True, True]


# --- when a pack is made --------------------------------------------------------------------------------------------


def test_a_gradient_of_the_weight_keeps_no_pack(road: Road) -> None:
    """Training: split at every call, right after any change, and the pack of an evaluation before is not believed."""
    weight, x = Parameter(road.weight()), road.x()
    packed = epigemm.pack(weight)
    for _ in range(2):
        result = epigemm.linear(x, packed)
        road.check(result, x, weight)
        backward(result.square().mean())
        weight.data -= 0.5 * gradient_of(weight)  # counted by nothing
        weight.grad = None
        with torch.no_grad():
            road.check(epigemm.linear(x, packed), x, weight)
    forward = [launch for launch in road.take() if launch.shape == road.size]
    assert [launch.packed for launch in forward] == [False, True, False, True]


def test_a_frozen_weight_keeps_its_pack_beside_gradients(road: Road) -> None:
    weight = Parameter(road.weight(), requires_grad=False)
    x = road.x().requires_grad_()
    packed = epigemm.pack(weight)
    loss = epigemm.linear_relu_div(x, packed, divisor=2.0).sum()
    weight_packs.expire(weight)
    backward(loss)
    assert [launch.packed for launch in road.take() if launch.shape == road.size] == [True]


def test_a_stale_pack_is_not_made_again_for_one_short_call(road: Road) -> None:
    """A weight that changes before every call would cost more than torch's GEMM; one that stays gets its pack."""
    weight = road.weight()
    x = road.x(road.rows_worth_a_pack_alone())
    packed = epigemm.pack(weight)
    for change in (lambda: weight.mul_(1.5), lambda: weight_packs.expire(weight)) * 2:
        change()
        road.check(epigemm.linear(x, packed), x, weight)
    assert not road.take()
    for _ in range(2):
        road.check(epigemm.linear(x, packed), x, weight)
    assert [launch.packed for launch in road.take()] == [True, True]


def test_capture_reads_packs_made_on_purpose_alone(road: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph sees later changes of the weight unless the caller froze it."""
    weight, x = road.weight(), road.x()
    weight_packs.keep(weight, 2)  # as a module does without being asked

    def launched() -> list[bool]:
        with monkeypatch.context() as patch:
            patch.setattr(weight_packs, "capturing", lambda device: True)
            torch.ops.epigemm.linear("bias", x, weight, None, [], [], "highest", "keep")
            epigemm.linear(x, weight)
        return [launch.packed for launch in road.take()]

    assert launched() == [False, False]
    packed = epigemm.pack(weight)
    assert launched() == [True, False], "a plain weight says nothing about being frozen"
    weight.mul_(2)
    before = weight_packs.kept(weight)[2]
    assert launched() == [False, False], "stale"
    assert not before.is_current(weight), "nothing is made or kept during capture"
    weight_packs.keep(weight, 2)  # an eager call of a module
    assert launched() == [True, False], "frozen on purpose, it stays so"
    with monkeypatch.context() as patch:
        patch.setattr(weight_packs, "capturing", lambda device: True)
        with pytest.raises(RuntimeError, match="repack: got a call under CUDA graph capture"):
            packed.repack()


def test_threads_make_one_pack(road: Road) -> None:
    weight, x = road.weight(), road.x()
    barrier, failures = threading.Barrier(4), []

    def work() -> None:
        barrier.wait()
        try:
            for _ in range(5):
                torch.ops.epigemm.linear("bias", x, weight, None, [], [], "highest", "keep")
                weight_packs.expire(weight)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len({launch.pack for launch in road.take()}) == 1
    weight_packs.keep(weight, 2)
    assert kept(weight, 2) == fresh(weight, 2)


# --- the operators, called directly ---------------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["keep", "find", "none"])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_operator_believes_no_pack_where_a_gradient_is_wanted(
    use: str, compiled: bool, road: Road
) -> None:
    torch.compiler.reset()
    weight, x = Parameter(road.weight()), road.x()
    epigemm.pack(weight)

    def call(given: Tensor) -> Tensor:
        result: Tensor = torch.ops.epigemm.linear("bias", given, weight, *AT_HIGHEST, use)
        return result

    run: Callable[[Tensor], Tensor] = (
        torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    )
    for _ in range(2):
        with torch.no_grad():
            road.check(call(x), x, weight)
        weight.data.mul_(2)  # counted by nothing
        result = run(x)
        road.check(result, x, weight)
        backward(result.sum())
    with torch.no_grad():
        weight_packs.keep(weight, 2)
        road.check(run(x), x, weight)
    launches = [launch.packed for launch in road.take() if launch.shape == road.size]
    assert launches == [use != "none", False, use == "keep", False, use != "none"]
