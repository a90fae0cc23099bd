"""Graphs that are replayed: results stay valid, what has changed is seen, and the rest runs kernel by kernel."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epigemm
from epigemm.fusion import replayed
from epigemm.fusion.replayable import RECORDED
from tests.fusion.launchers import Block, Function, StandIn, assert_same, fused, reasons
from tests.fusion.zoo import EVERYTHING, Example


def test_the_first_call_runs_and_later_ones_are_replayed(launcher: StandIn) -> None:
    model = Block().eval()
    mine = fused(model)
    for replays in (0, 1, 2, 3):
        assert_same(mine, model, torch.rand(6, 8))
        assert launcher.replays == replays
    assert mine.fusion_report.cuda_graphs.captured == 1 and not reasons(mine)
    assert "CUDA graphs captured: 1" in str(mine.fusion_report)


def test_results_of_several_calls_are_valid(launcher: StandIn) -> None:
    model = Block().eval()
    mine = fused(model)
    with torch.no_grad():
        inputs = [torch.rand(6, 8) for _ in range(5)]
        results = [mine(x) for x in inputs]
        for x, y in zip(inputs, results, strict=True):
            torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-5)
    assert launcher.replays == 4


def test_sizes_have_graphs_of_their_own_up_to_a_limit(
    launcher: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replayed, "MOST_GRAPHS", 3)
    model = Block().eval()
    mine = fused(model)
    for _ in range(3):
        for rows in (2, 3, 4, 5):
            assert_same(mine, model, torch.rand(rows, 8))
    assert mine.fusion_report.cuda_graphs.captured == 3 == len(launcher.graphs)
    assert launcher.replays == 6
    assert reasons(mine) == replayed.FULL


def test_graphs_that_are_gone_leave_room(launcher: StandIn) -> None:
    model = Block().eval()
    mine = fused(model)
    for _ in range(2):
        assert_same(mine, model, torch.rand(2, 8))
    replays = vars(mine)["_compiled_call_impl"]._replays
    assert len(replays._entries) == 1
    torch._dynamo.reset()
    launcher.graphs.clear()
    gc.collect()
    assert len(replays._entries) == 0


def test_memory_is_given_back_with_the_model(launcher: StandIn) -> None:
    """Dynamo keeps the code of a graph for good, and what it calls."""
    model = Block().eval()
    mine = fused(model)
    for _ in range(3):
        assert_same(mine, model, torch.rand(2, 8))
    entries = weakref.WeakSet(vars(mine)["_compiled_call_impl"]._replays._entries)
    assert len(entries) == 1
    weight = weakref.ref(model.fc1.weight)
    del model, mine
    launcher.graphs.clear()
    gc.collect()
    assert len(entries) == 0 and weight() is None


def strided(rows: int) -> Tensor:
    return torch.rand(rows, 16)[:, ::2]


def test_strides_are_part_of_a_kind(launcher: StandIn) -> None:
    model = Function(lambda z, x: z + x)
    mine = fused(model)
    for x in (torch.rand(4, 8), strided(4), torch.rand(8, 4).t()) * 3:
        assert_same(mine, model, x)
    assert len(launcher.graphs) == 3


def test_repeated_elements_are_refused(launcher: StandIn) -> None:
    model = Block().eval()
    mine = fused(model)
    for _ in range(3):
        assert_same(mine, model, torch.rand(1, 8).expand(4, 8))
    assert not launcher.graphs
    assert reasons(mine) == replayed.OVERLAPS


# --- parameters ------------------------------------------------------------------------------------------------------


def write(model: Block) -> None:
    with torch.no_grad():
        model.fc1.weight.mul_(2)
        model.table.add_(1)


def load(model: Block) -> None:
    model.load_state_dict(Block().state_dict())


def write_data(model: Block) -> None:
    model.fc1.weight.data.mul_(-1)


def other_parameter(model: Block) -> None:
    model.fc1.weight = nn.Parameter(torch.rand(16, 8))


def other_data(model: Block) -> None:
    model.fc2.weight.data = torch.rand(8, 16)


def other_buffer(model: Block) -> None:
    model.table = torch.rand(8)


@pytest.mark.parametrize(
    ("change", "is_recaptured"),
    [
        (write, False),
        (load, False),
        (write_data, False),
        (other_parameter, True),
        (other_data, True),
        (other_buffer, True),
    ],
)
def test_changed_parameters_are_seen(
    launcher: StandIn, change: Callable[[Block], None], is_recaptured: bool
) -> None:
    """In place the graph reads them as they are; elsewhere it is captured again."""
    model = Block().eval()
    mine = epigemm.fuse(model, inplace=True, cuda_graphs=True)
    plain = Block().eval()
    for _ in range(2):
        for _ in range(4):
            plain.load_state_dict(model.state_dict())
            assert_same(mine, plain, torch.rand(6, 8))
        change(model)
    for _ in range(4):
        plain.load_state_dict(model.state_dict())
        assert_same(mine, plain, torch.rand(6, 8))
    assert len(launcher.graphs) == (3 if is_recaptured else 1)


def test_another_dtype_is_another_graph(launcher: StandIn) -> None:
    model = Block().eval()
    mine = epigemm.fuse(model, inplace=True, cuda_graphs=True)
    for dtype in (torch.float32, torch.float64, torch.float32):
        mine.to(dtype)
        for _ in range(3):
            x = torch.rand(6, 8, dtype=dtype)
            with torch.no_grad():
                torch.testing.assert_close(mine(x), model._call_impl(x))  # type: ignore[no-untyped-call]
    assert len(launcher.graphs) >= 2


def test_parameters_that_move_at_every_call(launcher: StandIn) -> None:
    model = Block().eval()
    mine = epigemm.fuse(model, inplace=True, cuda_graphs=True)
    for _ in range(60):
        model.fc1.weight.data = torch.rand(16, 8)
        with torch.no_grad():
            x = torch.rand(6, 8)
            torch.testing.assert_close(mine(x), model._call_impl(x))  # type: ignore[no-untyped-call]
    assert len(launcher.graphs) < 12
    assert reasons(mine) == replayed.MOVING


def test_a_parameter_that_is_an_argument(launcher: StandIn) -> None:
    """First it is taken for one that is read where it lies."""
    model = Function(lambda z, x, other: z * other)
    mine = fused(model)
    assert_same(mine, model, torch.rand(4, 8), mine.fc.bias.detach())
    with torch.no_grad():
        for _ in range(3):
            assert_same(mine, model, torch.rand(4, 8), mine.fc.bias)
    for _ in range(4):
        assert_same(mine, model, torch.rand(4, 8), torch.rand(8))
    assert launcher.replays


# --- results ---------------------------------------------------------------------------------------------------------


def shared(z: Tensor, x: Tensor) -> Any:
    a, b = z.chunk(2, -1)
    return a, z + 1, b, 3, None, z.sum(0)


@pytest.mark.parametrize(
    "function",
    [
        shared,
        lambda z, x: z.t() * 2,
        lambda z, x: (z + 1)[:, 0],
        lambda z, x: (z + 1).sum(0).expand(4, 8),
        lambda z, x: {"a": z, "b": [z, z * 2]},
        lambda z, x: (z, x.view(-1)[3:], x),
        lambda z, x: (z * 2).to(torch.float16),
        lambda z, x: (z > 0, z.argmax(-1)),
        lambda z, x: z[:0],
    ],
)
def test_results_are_those_of_a_call(launcher: StandIn, function: Callable[..., Any]) -> None:
    """Values, strides, and what shares memory with what."""
    model = Function(function)
    mine = fused(model)
    with torch.no_grad():
        kept = []
        for _ in range(4):
            x = torch.rand(4, 8)
            found, expected = mine(x), model(x)
            kept.append((found, expected))
            for found, expected in kept:
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, check_stride=True)
            mine_all, other_all = (
                [part for part in torch.utils._pytree.tree_leaves(each) if isinstance(part, Tensor)]
                for each in (found, expected)
            )
            assert _sharing([*mine_all, x]) == _sharing([*other_all, x])
    assert launcher.replays == 3


def _sharing(tensors: list[Tensor]) -> list[int]:
    memories = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [memories.index(memory) for memory in memories]


@pytest.mark.parametrize(
    "function", [lambda z, x, c: (z, c.conj()), lambda z, x, c: (z, d := c * 2, d.conj())]
)
def test_conjugates(launcher: StandIn, function: Callable[..., Any]) -> None:
    """Their numbers are not those in memory."""
    model = Function(function)
    mine = fused(model)
    for _ in range(3):
        assert_same(mine, model, torch.rand(4, 8), torch.randn(3, dtype=torch.complex64))
    assert "a result is a conjugate" in reasons(mine)


def test_memory_around_an_input(launcher: StandIn) -> None:
    """The copy that a graph reads has none."""
    model = Function(lambda z, x: z + x.as_strided((4, 8), (16, 1), 16))
    mine = fused(model)
    for _ in range(3):
        assert_same(mine, model, torch.rand(8, 16)[2:6, ::2])
    assert not launcher.graphs


def test_inference_mode_gives_inference_tensors(launcher: StandIn) -> None:
    model = Block().eval()
    mine = fused(model)
    for is_inference in (True, False, True):
        for _ in range(3):
            with torch.inference_mode(is_inference), torch.no_grad():
                y = mine(torch.rand(6, 8))
                assert y.is_inference() is is_inference
    assert launcher.replays


@pytest.mark.parametrize("example", EVERYTHING, ids=str)
def test_whole_models(launcher: StandIn, example: Example) -> None:
    model = example.make().eval()
    mine = fused(model)
    with torch.no_grad():
        kept = []
        for _ in range(4):
            inputs = example.inputs()
            kept.append((mine(*inputs), model(*inputs)))
    for found, expected in kept:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert launcher.replays == 3 and not reasons(mine)


# --- around it -------------------------------------------------------------------------------------------------------


def test_threads(launcher: StandIn) -> None:
    """Each has right results; a lock keeps one from another's memory."""
    model = Block().eval()
    mine = fused(model)
    assert_same(mine, model, torch.rand(6, 8))
    together = threading.Barrier(4)

    def work(seed: int) -> None:
        together.wait()
        for place in range(40):
            with torch.no_grad():
                x = torch.full((2 + place % 3, 8), float(seed))
                torch.testing.assert_close(mine(x), model(x), rtol=1e-5, atol=1e-5)

    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(work, seed) for seed in range(4)]:
            each.result()
    assert launcher.replays > 40


def test_two_models_on_one_device(launcher: StandIn) -> None:
    models = [Block().eval(), Block().eval()]
    mine = [fused(model) for model in models]
    with torch.no_grad():
        kept: list[tuple[Tensor, Tensor]] = []
        for _ in range(4):
            for each, model in zip(mine, models, strict=True):
                x = torch.rand(6, 8)
                kept.append((each(x), model(x)))
        for found, expected in kept:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert len(launcher.graphs) == 2


def test_one_model_feeds_itself(launcher: StandIn) -> None:
    """A result that is the next call's argument."""
    model = Block().eval()
    mine = fused(model)
    with torch.no_grad():
        found = expected = torch.rand(6, 8)
        for _ in range(6):
            found, expected = mine(found), model(expected)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_autocast(launcher: StandIn) -> None:
    model = Block().eval()
    mine = fused(model)
    for enabled in (False, True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), torch.no_grad():
            for _ in range(3):
                x = torch.rand(6, 8)
                found, expected = mine(x), model(x)
                assert found.dtype == expected.dtype
                torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert len(launcher.graphs) == 2


@contextmanager
def fp16_accumulation() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = False


@pytest.mark.parametrize("name", ["invariant", "precision", "sdpa", "cudnn", "accumulation"])
def test_settings_that_decide_over_kernels(launcher: StandIn, name: str) -> None:
    model = Block().eval()
    mine = fused(model)
    precision: Any = torch.backends.cuda.matmul
    before = precision.fp32_precision
    contexts: dict[str, Callable[[], Any]] = {
        "invariant": epigemm.batch_invariant,
        "precision": lambda: torch.no_grad(),
        "cudnn": lambda: torch.backends.cudnn.flags(enabled=False),
        "accumulation": fp16_accumulation,
        "sdpa": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    }
    try:
        for _ in range(3):
            precision.fp32_precision = before
            assert_same(mine, model, torch.rand(6, 8))
            if name == "precision":
                precision.fp32_precision = "tf32"
            with contexts[name]():
                assert_same(mine, model, torch.rand(6, 8))
    finally:
        precision.fp32_precision = before
    assert len(launcher.graphs) == 2


def test_a_break_in_the_graph(launcher: StandIn) -> None:
    def function(z: Tensor, x: Tensor) -> Tensor:
        y = z * 2
        torch._dynamo.graph_break()
        return torch.relu(y) + x

    model = Function(function)
    mine = fused(model)
    for _ in range(4):
        assert_same(mine, model, torch.rand(6, 8))
    assert launcher.replays


def test_settings_of_fuse() -> None:
    with pytest.raises(TypeError, match="cuda_graphs: got int; accepted is True or False"):
        epigemm.fuse(Block(), cuda_graphs=1)  # type: ignore[call-overload]
    report = epigemm.fuse(Block().eval(), dry_run=True, cuda_graphs=True, example_inputs=(torch.rand(6, 8),))
    assert report.cuda_graphs is not None and report.cuda_graphs.reasons == [RECORDED]
    plain: Any = epigemm.fuse(Block())
    assert plain.fusion_report.cuda_graphs is None
    torch.testing.assert_close(copy.deepcopy(fused(Block()))(torch.ones(2, 8)).shape, torch.Size([2, 8]))
