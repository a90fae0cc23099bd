"""Calls in whose graphs nothing is fused run the plain model; every few calls their kind is looked at again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import epigemm
from epigemm import _native
from epigemm.arguments import precision
from epigemm.fusion import kinds, model_call, profit
from epigemm.fusion.chains import Chain
from epigemm.fusion.kinds import Kinds
from epigemm.fusion.profit import Judged, Way
from epigemm.fusion.values import hint

WIDTH = 8


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of CPU tensors have kinds, too; and batches of 64 rows alone are worth a fused call."""

    def judged(chain: Chain, **_: bool) -> Judged:
        pays = hint(chain.product.value.shape[0]) >= 64
        return Judged("" if pays else profit.SLOWER, Way.TENSORS, 1000.0, 500.0)

    monkeypatch.setattr(kinds, "ON_CUDA_ALONE", False)
    monkeypatch.setattr(kinds, "CALLS", 3)
    monkeypatch.setattr(profit, "judged", judged)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.runs = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        if not torch.compiler.is_compiling():
            self.runs += 1
        return F.gelu(self.fc(x)) * scale


def fused_model() -> tuple[Any, Model]:
    model = Model()
    return epigemm.fuse(model, inplace=True), model


def test_a_kind_runs_as_it_was_and_is_asked_again() -> None:
    fused, model = fused_model()
    x = torch.rand(4, WIDTH)
    with torch.no_grad():
        expected = F.gelu(model.fc(x))
        for runs in (0, 1, 2, 3, 3, 4, 5, 6, 6, 7):  # the first call, and each fourth, looks for its graph
            torch.testing.assert_close(fused(x), expected)
            assert model.runs == runs


def test_kinds_are_told_apart() -> None:
    """A large batch is fused though a small one is not; so it is with gradients, types and modes."""
    fused, model = fused_model()
    small, large = torch.rand(4, WIDTH), torch.rand(4 * 64, WIDTH)
    with torch.no_grad():
        for _ in range(3):
            fused(small)
            torch.testing.assert_close(fused(large), F.gelu(model.fc(large)))
        assert model.runs == 2 and len(fused.fusion_report.sites) == 1
    fused(small)
    assert model.runs == 2
    fused.eval()
    fused(small)
    assert model.runs == 2
    fused(small)
    assert model.runs == 3


def test_what_is_asked_of_a_call() -> None:
    x = torch.rand(4, WIDTH)
    of = Kinds(nn.Linear(WIDTH, WIDTH), []).of
    assert of((x,), {}) == of((x.clone(),), {})
    assert of((x, 3), {}) == of((x, 4), {})
    kind = of((x,), {})
    others: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x[:2],), {}),
        ((x.double(),), {}),
        ((x, None), {}),
        ((x, True), {}),
        ((x,), {"y": x}),
        ((x.clone().requires_grad_(),), {}),
    ]
    for args, named in others:
        assert of(args, named) != kind
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with mode:
            assert of((x,), {}) != kind


class Switched(nn.Module):
    """A layer that an attribute switches off, as an adapter is."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.is_on = True
        self.runs = 0

    def forward(self, x: Tensor, rows: int) -> Tensor:
        if not torch.compiler.is_compiling():
            self.runs += 1
        return F.gelu(self.fc(x[:rows])) if self.is_on else x + 1


@contextmanager
def process_group(file: Path) -> Iterator[None]:
    """Of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("decide", ["predict", "measure"])
def test_what_was_called_before_decides_nothing(decide: Any, tmp_path: Path) -> None:
    """Neither an attribute, nor a size, nor a number that may be one. The processes of a group had other calls."""
    with nullcontext() if decide == "predict" else process_group(tmp_path / "group"):
        _switch_and_call(decide)


def _switch_and_call(decide: Any) -> None:
    model = Switched()
    fused: Any = epigemm.fuse(model, inplace=True, decide=decide)
    x = torch.rand(256, WIDTH)
    with torch.no_grad():
        for is_on, rows in ((False, 128), (False, 128), (True, 128), (True, 4), (True, 4), (True, 130)):
            model.is_on = is_on
            expected = F.gelu(model.fc(x[:rows])) if is_on else x + 1
            torch.testing.assert_close(fused(x, rows), expected)
    assert model.runs == 0 and fused.fusion_report.sites


def test_calls_that_gain_keep_their_graph_beside_calls_of_their_kind_that_do_not() -> None:
    """An adapter that is switched off once."""
    model = Switched()
    fused: Any = epigemm.fuse(model, inplace=True)
    x = torch.rand(256, WIDTH)
    with torch.no_grad():
        for is_on in (True, False, True, True):
            model.is_on = is_on
            fused(x, 128)
    assert model.runs == 0


def test_where_nothing_is_measured_there_are_no_kinds() -> None:
    known = Kinds(nn.Linear(WIDTH, WIDTH), [], [], measures=False)
    assert known.about is None and known.of((torch.rand(4, WIDTH),), {}) is None


def test_the_callers_fp32_setting_counts() -> None:
    """Not the one that a call of another thread has switched to for its own GEMM."""
    of, x = Kinds(nn.Linear(WIDTH, WIDTH), []).of, torch.rand(4, WIDTH)
    kind = of((x,), {})
    with precision.switched("cuda", "tf32"):
        assert of((x,), {}) == kind
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert of((x,), {}) != kind
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_parameters_are_tensors() -> None:
    of, x = Kinds(nn.Linear(WIDTH, WIDTH), []).of, torch.rand(4, WIDTH)
    made = [nn.Parameter(each) for each in (x, torch.rand(64, WIDTH), x.double())]
    assert len({of((each,), {}) for each in made}) == 3
    assert of((made[0],), {}) == of((nn.Parameter(x.clone()),), {})


def test_tensors_without_memory_or_strides_have_kinds() -> None:
    of, x = Kinds(nn.Linear(WIDTH, WIDTH), []).of, torch.rand(4, WIDTH)

    class Derived(Tensor):
        pass

    odd = [x.to_sparse(), x.to_sparse_csr(), x.to("meta"), torch.nested.nested_tensor([x, x])]
    for each in odd:
        assert of((each,), {}) == of((each,), {}) is not None
    assert of((x.as_subclass(Derived),), {}) not in (of((x,), {}), None)


def test_text_types_and_dtypes_are_told_apart() -> None:
    of = Kinds(nn.Linear(WIDTH, WIDTH), []).of
    kinds_of = [
        of((value,), {})
        for value in ("a", "b", "\ud800", torch.half, torch.float, 1, 1.5, object(), None, ())
    ]
    assert len({*kinds_of}) == len(kinds_of)

    class Unhashable(str):
        __hash__ = None  # type: ignore[assignment]

    assert of((Unhashable("a"),), {}) == of((Unhashable("b"),), {})


def test_a_list_that_loses_its_values_meanwhile() -> None:
    class Clears(str):
        def __hash__(self) -> int:
            values.clear()
            return 1

    values: list[Any] = []
    values += [Clears(), values]
    assert Kinds(nn.Linear(WIDTH, WIDTH), []).of((values,), {}) is not None and not values


def test_the_module_refuses_other_arguments() -> None:
    about: Any = Kinds(nn.Linear(WIDTH, WIDTH), [], []).about
    wrong: list[Any] = [
        (None, True, ()),
        (None, True, [], {}),
        (None, True, (), ()),
        ((), True, (), {}),
        ((*about[:-3], "2", *about[-2:]), True, (), {}),
    ]
    for args in wrong:
        with pytest.raises(TypeError):
            _native.entry.kind(*args)


def test_without_the_module_there_are_no_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "asked", kinds._not_asked)
    monkeypatch.setattr(model_call, "asked", kinds._not_asked)
    assert Kinds(nn.Linear(WIDTH, WIDTH), []).of((torch.rand(4, WIDTH),), {}) is None
    fused, model = fused_model()
    x = torch.rand(4, WIDTH)
    for _ in range(3):
        torch.testing.assert_close(fused(x), F.gelu(model.fc(x)))
    assert model.runs == 0


@pytest.mark.parametrize("mode", ["deterministic", "invariant"])
def test_where_equal_calls_give_equal_bits_there_are_no_kinds(mode: str) -> None:
    of, x = Kinds(nn.Linear(WIDTH, WIDTH), []).of, torch.rand(4, WIDTH)
    torch.use_deterministic_algorithms(mode == "deterministic")
    try:
        with epigemm.batch_invariant(mode == "invariant"):
            assert of((x,), {}) is None
    finally:
        torch.use_deterministic_algorithms(False)
    assert of((x,), {}) is not None


def test_processes_together_do_not_run_what_one_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(4, WIDTH)
    for gains in (True, False):
        known = Kinds(nn.Linear(WIDTH, WIDTH), [])
        kind = known.of((x,), {})
        assert kind
        known.note(kind, gains=gains)
        assert known.of((x,), {}) == (kind if gains else True)
        with monkeypatch.context() as patch:
            patch.setattr(torch.distributed.distributed_c10d._world, "_default_pg", object())
            assert torch.distributed.is_initialized()
            assert known.of((x,), {}) is None and known.trial(kind) is None
        assert known.of((x,), {}) is not None


def test_of_a_container_the_first_values_stand_for_all() -> None:
    """A cache of keys and values has two tensors a layer; to look at all takes the host longer than a kernel."""
    of = Kinds(nn.Linear(WIDTH, WIDTH), []).of
    x = torch.rand(4, WIDTH)
    pair = x, x
    for made in (list, tuple, lambda layers: {str(layer): each for layer, each in enumerate(layers)}):
        assert of((x, made([pair, pair, x])), {}) == of((x, made([pair] * 32)), {})
        assert of((x, made([pair] * 2)), {}) != of((x, made([pair, (x, None)])), {})
    round_trip: list[Any] = [x]
    round_trip[0:0] = [round_trip]
    assert of((round_trip,), {}) is not None  # a list in itself


def test_the_parameters_dtype_is_part_of_a_kind() -> None:
    """`model.half()` changes no token."""
    model = nn.Sequential(nn.Embedding(8, WIDTH), nn.Linear(WIDTH, WIDTH))
    of, tokens = Kinds(model, []).of, torch.arange(8)
    kind = of((tokens,), {})
    model.half()
    assert of((tokens,), {}) != kind
    assert Kinds(nn.GELU(), []).of((tokens,), {}) is not None


def test_on_a_cpu_and_where_it_is_off_there_are_no_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(4, WIDTH)
    for name, value in (("CALLS", 0), ("CALLS", 3), ("ON_CUDA_ALONE", True)):
        monkeypatch.setattr(kinds, name, value)
        assert (Kinds(nn.Linear(WIDTH, WIDTH), []).of((x,), {}) is None) == (name != "CALLS" or not value)


def test_under_jit_trace_there_are_no_kinds() -> None:
    """Sizes are tensors there."""
    fused, model = fused_model()
    x = torch.rand(4, WIDTH)
    traced = torch.jit.trace(fused, (x,))  # type: ignore[no-untyped-call]
    torch.testing.assert_close(traced(x), model(x))


def test_whoever_sees_every_call_sees_none_of_a_kinds() -> None:
    class Seeing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    x, of = torch.rand(4, WIDTH), Kinds(nn.Linear(WIDTH, WIDTH), []).of
    with Seeing():
        assert of((x,), {}) is None
    assert not seen


def test_a_default_device_changes_no_kind() -> None:
    x, of = torch.rand(4, WIDTH), Kinds(nn.Linear(WIDTH, WIDTH), []).of
    kind = of((x,), {})
    with torch.device("cpu"):
        assert of((x,), {}) == kind


def test_hooks_writes_and_errors_are_eagers() -> None:
    """Whatever runs: a hook that is registered later, a buffer that counts, and a wrong argument."""

    class Counting(Model):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            self.count += 1
            return super().forward(x, scale=scale)

    fused: Any = epigemm.fuse(Counting(), inplace=True)
    x = torch.rand(4, WIDTH)
    seen: list[int] = []
    with torch.no_grad():
        for call in range(1, 9):
            if call == 3:
                fused.fc.register_forward_hook(lambda *_: seen.append(1))
            y = fused(x)
            assert fused.count == call and len(seen) == max(0, call - 2)
            torch.testing.assert_close(y, F.gelu(F.linear(x, fused.fc.weight, fused.fc.bias)))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                fused(torch.rand(4, WIDTH + 1))
            with pytest.raises(TypeError, match="unexpected keyword"):
                fused(x, other=1)


def replica_of(fused: Any) -> Any:
    """As `nn.DataParallel` makes one: the model's attributes, with tensors of its own."""
    made = fused.__new__(type(fused))
    made.__dict__ = {**vars(fused), "_modules": {"fc": nn.Linear(WIDTH, WIDTH)}}
    return made


@pytest.mark.parametrize("undo", [False, True])
def test_a_replica_has_tensors_of_its_own(undo: bool) -> None:
    """Also where the kind of its call gains nothing, and when the model was unfused or fused again."""
    fused, _ = fused_model()
    x = torch.rand(4, WIDTH)
    with torch.no_grad():
        for _ in range(2):
            fused(x)
        replica = replica_of(fused)
        for each in (fused, replica, fused, replica):
            torch.testing.assert_close(each(x), F.gelu(each.fc(x)))
        if undo:
            epigemm.unfuse(fused)
        else:
            epigemm.fuse(fused, inplace=True)
        for _ in range(3):
            torch.testing.assert_close(replica(x), F.gelu(replica.fc(x)))
            torch.testing.assert_close(fused(x), F.gelu(fused.fc(x)))


def test_callers_are_looked_at_where_there_are_copies_alone() -> None:
    """What a call of a kind that gains nothing costs is one question and one function."""
    fused, _ = fused_model()
    x, call = torch.rand(4, WIDTH), vars(fused)["_compiled_call_impl"]
    with torch.no_grad():
        fused(x)
        assert kinds.asked(call._kinds.about, False, (x,), {}) is True
        replica = replica_of(fused)
        assert kinds.asked(call._kinds.about, False, (x,), {}) is False
        del replica
        assert kinds.asked(call._kinds.about, False, (x,), {}) is True
        epigemm.unfuse(fused)
        assert kinds.asked(call._kinds.about, False, (x,), {}) is False


def test_whoever_compiles_a_fused_model_compiles_the_model() -> None:
    """With a hook Dynamo traces what a call of the model runs, also one of a kind that gains nothing."""
    torch._dynamo.reset()
    fused, model = fused_model()
    x, seen = torch.rand(4, WIDTH), list[int]()
    with torch.no_grad():
        fused(x)
        fused.register_forward_hook(lambda *_: seen.append(1))
        compiled: Any = torch.compile(fused, backend="aot_eager", fullgraph=True)
        for calls in (1, 2, 3):
            torch.testing.assert_close(compiled(x), F.gelu(model.fc(x)))
            assert len(seen) == calls
    torch._dynamo.reset()


def test_while_it_is_traced_the_model_itself_is_called() -> None:
    fused, model = fused_model()
    x = torch.rand(64, WIDTH)
    for traced in (make_fx(fused)(x), torch.export.export(fused, (x,)).module()):
        torch.testing.assert_close(traced(x), F.gelu(model.fc(x)))
    assert not fused.fusion_report.sites


def test_whoever_watches_sees_all() -> None:
    fused, _ = fused_model()
    x = torch.rand(4, WIDTH)
    with torch.no_grad():
        for _ in range(3):
            with epigemm.fusion.watch() as unfused:
                fused(x)
            assert unfused == [("fc", profit.SLOWER)]
            fused(x)


def test_two_models_of_a_class_with_a_break_in_their_graphs() -> None:
    class Broken(Model):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            y = super().forward(x)
            torch._dynamo.graph_break()
            return F.gelu(self.fc(y))

    models = [Broken() for _ in range(3)]
    fused = [epigemm.fuse(model) for model in models]
    x = torch.rand(64, WIDTH)
    with torch.no_grad():
        for _ in range(2):
            for mine, model in zip(fused, models, strict=True):
                torch.testing.assert_close(mine(x), model(x))
    for mine in fused:
        report: Any = mine.fusion_report
        assert len(report.sites) == 2, report
