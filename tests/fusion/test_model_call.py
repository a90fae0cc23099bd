"""What a call of a fused model checks before it runs a graph, beyond Dynamo's own guards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import epigemm
from epigemm import fusion
from epigemm.fusion import kinds, model_call, profit
from epigemm.fusion.changes import Watched

WIDTH = 16


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def report_of(fused: Any) -> fusion.FusionReport:
    report = fused.fusion_report
    assert isinstance(report, fusion.FusionReport)
    return report


def graphs(fused: Any) -> int:
    count = fused._compiled_call_impl._graphs
    assert isinstance(count, int)
    return count


def same(fused: Any, plain: Any, *inputs: Any) -> list[tuple[str, str]]:
    with fusion.watch() as unfused:
        torch.testing.assert_close(fused(*inputs), plain(*inputs), rtol=1e-4, atol=1e-4)
    return unfused


def test_a_sequential_has_a_graph() -> None:
    plain = mlp()
    fused = epigemm.fuse(plain)
    assert same(fused, plain, torch.randn(3, WIDTH)) == []
    assert [site.formula for site in report_of(fused).sites] == ["gelu(acc + c1)", "acc + c1"]


def test_one_graph_serves_every_batch() -> None:
    plain = mlp()
    fused = epigemm.fuse(plain)
    for rows in (5, 7, 64, 6):
        x = torch.randn(rows, WIDTH)
        assert same(fused, plain, x) == []
        assert vars(x) == {}  # no mark is left on what the caller owns
    assert graphs(fused) == 1


def test_more_models_of_a_class_than_dynamo_compiles() -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.fc, self.scale = nn.Linear(WIDTH, WIDTH), scale

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.fc(x)) * self.scale

    models = [Scaled(float(number)) for number in range(12)]
    fused: list[Any] = [epigemm.fuse(model) for model in models]
    x = torch.randn(3, WIDTH)
    for mine, plain in zip(fused, models, strict=True):
        assert same(mine, plain, x) == []
        assert len(report_of(mine).sites) == 1


def test_a_limit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_call, "RECOMPILE_LIMIT", 2)
    plain = mlp()
    fused = epigemm.fuse(plain)
    for dims in range(1, 5):
        same(fused, plain, torch.randn(*([2] * dims), WIDTH))
    assert graphs(fused) == 2 and "2 graphs: further kinds of calls run as they were" in str(
        fused.fusion_report
    )


@pytest.mark.parametrize("changes", [False, True])
def test_hooks_registered_after_the_first_call(changes: bool) -> None:
    plain = mlp()
    fused = epigemm.fuse(copy.deepcopy(plain), inplace=True)
    x = torch.randn(3, WIDTH)
    assert same(fused, plain, x) == []
    seen: list[int] = []

    def hook(module: nn.Module, args: Any, result: Tensor) -> Tensor | None:
        seen.append(1)
        return result * 2 if changes else None

    for model in (plain, fused):
        model[0].register_forward_hook(hook)
    same(fused, plain, x)
    assert seen == [1, 1]


def test_global_hooks() -> None:
    plain = mlp()
    fused, seen = epigemm.fuse(plain), []
    x = torch.randn(3, WIDTH)
    same(fused, plain, x)
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    try:
        assert same(fused, plain, x) == [("Sequential", "there are global module hooks")]
    finally:
        handle.remove()
    assert seen.count(nn.GELU) == 2
    assert same(fused, plain, x) == []


@pytest.mark.parametrize(
    ("place", "name"),
    [
        *((F, "linear"), (F, "gelu"), (nn.Linear, "forward"), (nn.Module, "__call__")),
        *((nn.Linear, "__call__"), (nn.GELU, "_call_impl")),  # which they inherit
    ],
)
def test_patched_functions(place: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = mlp()
    fused = epigemm.fuse(plain)
    x = torch.randn(3, WIDTH)
    same(fused, plain, x)
    before = getattr(place, name)
    monkeypatch.setattr(place, name, lambda *args, **kwargs: before(*args, **kwargs) * 2)
    (reason,) = {reason for _, reason in same(fused, plain, x)}
    assert f".{name} was replaced" in reason
    monkeypatch.undo()
    assert same(fused, plain, x) == []


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def inner(self, x: Tensor) -> Tensor:
        return self.dropout(torch.relu(self.fc(x)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return torch.relu(self.fc(x)) + result


def test_checkpoints_run_as_they_were() -> None:
    """Of such a graph, run operator by operator, the gradients are of other random numbers."""
    plain = Checkpointed().train()
    fused = epigemm.fuse(plain)
    x = torch.randn(3, WIDTH, requires_grad=True)
    for _ in range(2):
        found = []
        for model in (plain, fused):
            torch.manual_seed(4)
            (gradient,) = torch.autograd.grad(model(x).square().sum(), x)
            found.append(gradient)
        torch.testing.assert_close(found[1], found[0])
    assert "an operator of higher order" in str(fused.fusion_report)


def test_modes_and_types() -> None:
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.3))
    fused = epigemm.fuse(copy.deepcopy(plain), inplace=True)
    for training in (True, False, True):
        plain.train(training), fused.train(training)
        for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
            x = torch.randn(5, WIDTH)
            with context:
                torch.manual_seed(0)
                expected = plain(x)
                torch.manual_seed(0)
                actual = fused(x)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
            assert actual.requires_grad == expected.requires_grad
    plain.eval(), fused.eval()
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(5, WIDTH)
        assert fused(x).dtype is plain(x).dtype
    for mine, other in zip(fused.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, other)


def test_other_ways_to_call_run_as_they_were() -> None:
    plain = mlp()
    fused = epigemm.fuse(plain)
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(fused.forward(x), plain(x), rtol=0, atol=0)  # type: ignore[no-untyped-call]
    assert graphs(fused) == 0
    torch.testing.assert_close(
        torch.func.functional_call(fused, dict(fused.named_parameters()), (x,)), plain(x)
    )
    stacked, buffers = torch.func.stack_module_state([fused, epigemm.fuse(mlp())])
    assert stacked["0.weight"].shape == (2, WIDTH, WIDTH) and buffers == {}
    assert torch.jit.script(fused)(x).shape == (3, WIDTH)
    rows = torch.randn(4, 3, WIDTH)
    torch.testing.assert_close(torch.vmap(fused)(rows), plain(rows), rtol=1e-4, atol=1e-4)


def test_where_nothing_pays_the_call_is_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profit, "judged", lambda *args, **kwargs: profit.Judged(profit.SLOWER))
    monkeypatch.setattr(kinds, "ON_CUDA_ALONE", False)
    plain = mlp()
    fused, x = epigemm.fuse(plain), torch.randn(3, WIDTH)
    torch.testing.assert_close(fused(x), plain(x))
    assert graphs(fused) == 1 and not report_of(fused).sites
    call: Any = fused._compiled_call_impl
    monkeypatch.setattr(call, "_compiled", None)
    for rows in (3, 3):
        torch.testing.assert_close(fused(torch.randn(rows, WIDTH)).shape, (rows, WIDTH))
    assert same(fused, plain, x.as_subclass(type("Sub", (Tensor,), {}))) == [
        ("Sequential", "an argument is a Sub")
    ]


@pytest.mark.parametrize("by_name", [False, True])
def test_nested_tensors_are_left_alone(by_name: bool) -> None:
    plain = mlp()
    rows = torch.nested.nested_tensor([torch.randn(2, WIDTH), torch.randn(3, WIDTH)])
    fused: Any = epigemm.fuse(plain)
    with epigemm.fusion.watch() as unfused:
        result = fused(input=rows) if by_name else fused(rows)
    for found, expected in zip(result.unbind(), plain(rows).unbind(), strict=True):
        torch.testing.assert_close(found, expected)
    assert unfused == [("Sequential", "an argument is a nested tensor")]


@pytest.mark.parametrize("enters", [False, True])
def test_nothing_is_recorded_in_inference_mode(enters: bool) -> None:
    """Though enable_grad inside of it turns on the flag that says so."""

    class Enabled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                return torch.relu(torch.addmm(x, x, self.matrix)) + x @ self.matrix

    plain = Enabled()
    fused = epigemm.fuse(plain)
    with torch.inference_mode(enters):
        x = torch.randn(3, WIDTH)
        assert same(fused, plain, x) == []
        assert fused(x).requires_grad == plain(x).requires_grad == (not enters)
    assert len(report_of(fused).sites) == 2


def test_a_patched_function_that_is_in_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the traced code names is looked at."""

    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cos(self.fc(x)).arctan()

    plain = Rotated()
    fused, x = epigemm.fuse(plain), torch.randn(3, WIDTH)
    for place, name in ((torch, "cos"), (Tensor, "arctan")):
        assert same(fused, plain, x) == []
        with monkeypatch.context() as patch:
            patch.setattr(place, name, lambda z: z * 2)
            assert same(fused, plain, x) == [("Rotated", f"{place.__name__}.{name} was replaced")]
    assert same(fused, plain, x) == []


def test_a_member_that_moves_from_class_to_class() -> None:
    def make(**members: Any) -> Any:
        return type("Layer", (nn.Module,), members)

    def helper(self: Any) -> None:
        pass

    for first, second in ((make(helper=helper), make()), (make(), make(helper=helper))):
        watched = Watched(nn.Sequential(first(), second()))
        assert not watched.why_not()
        giver, taker = (first, second) if "helper" in vars(first) else (second, first)
        taker.helper = helper
        del giver.helper
        assert watched.why_not() == "a class of the model has changed since"


def test_gradients_of_unused_parameters_are_none() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return F.silu(self.fc(x))

    plain, x = Unused(), torch.randn(3, WIDTH)
    fused = epigemm.fuse(copy.deepcopy(plain), inplace=True)
    for model in (plain, fused):
        torch.autograd.backward(model(x).sum())
    torch.testing.assert_close(fused.fc.weight.grad, plain.fc.weight.grad)
    assert plain.unused.weight.grad is None and fused.unused.weight.grad is None


def test_what_cannot_be_traced_runs_as_it_was() -> None:
    class Numpy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.fc(x))
            rows = [row for row in h if float(row.sum()) > 0]
            return torch.stack([*rows, h[0]]) * float(h.detach().numpy().max())

    plain = Numpy()
    fused = epigemm.fuse(plain)
    for _ in range(2):
        same(fused, plain, torch.randn(3, WIDTH))


class Plain(nn.Module):
    """Of classes with no annotations TorchScript reads those of `nn.Module`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(x))


class Ignoring(Plain):
    __jit_ignored_attributes__ = ("hidden",)
    hidden: type

    def __init__(self) -> None:
        super().__init__()
        self.hidden = Plain


@pytest.mark.parametrize("kind", [Plain, Ignoring])
@pytest.mark.parametrize("called", [False, True])
def test_fused_models_are_scripted_as_the_plain_ones(kind: Any, called: bool) -> None:
    plain = nn.Sequential(kind(), kind())
    fused, x = epigemm.fuse(plain), torch.randn(3, WIDTH)
    fused[0] = epigemm.fuse(epigemm.fuse(plain[0]), inplace=True)
    if called:
        same(fused, plain, x), same(fused[0], plain[0], x)
    for model in (fused, fused[0], epigemm.unfuse(copy.copy(fused[0])), copy.deepcopy(fused[0])):
        expected = plain if model is fused else plain[0]
        torch.testing.assert_close(torch.jit.script(model)(x), expected(x))
    before = set(vars(kind()))
    assert set(vars(epigemm.unfuse(fused)[0])) - {"__overloads__"} == before  # which scripting leaves


def test_scripted_and_wrapped_models_are_left_alone() -> None:
    scripted: Any = torch.jit.script(mlp())
    assert "it is a RecursiveScriptModule" in str(epigemm.fuse(scripted, inplace=True).fusion_report)
    parallel: Any = epigemm.fuse(nn.DataParallel(mlp()))
    assert "it holds a DataParallel" in str(parallel.fusion_report)
