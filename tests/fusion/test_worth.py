"""Which products are worth fusing: those that keep the device longer than a fused call keeps the host."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import epigemm
from epigemm import fusion, plans
from epigemm import precision as _precision
from epigemm.fusion import chains, rest, site, worth
from tests.fusion.conftest import Limits
from tests.support.untyped import torch as untyped

BF16, FP32 = torch.bfloat16, torch.float32
RELU, NORM, LONE = chains.RELU, chains.BATCH_NORM, chains.LINEAR
LARGE, WIDE, TALL = (1024, 8192, 8192), (256, 4096, 4096), (4096, 4096, 4096)


@pytest.fixture(autouse=True)
def limits(every_size: Limits, monkeypatch: pytest.MonkeyPatch) -> Limits:
    """The limits as they are."""
    monkeypatch.setattr(worth, "LIMITS", every_size)
    return every_size


def why_not(function: str, size: tuple[int, int, int], dtype: torch.dtype, *, learns: bool = False) -> str:
    """For tensors of a GPU, which are only pretended."""
    m, n, k = size
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(m, k, dtype=dtype, device="cuda")
        weight = torch.empty(n, k, dtype=dtype, device="cuda", requires_grad=learns)
        return worth.why_not(function, x, weight)


# As measured on an H200: whether the fused model was faster at this size, or as fast.
@pytest.mark.parametrize(
    ("function", "size", "dtype", "setting", "learns", "fused"),
    [
        (RELU, (16, 4096, 4096), BF16, "ieee", False, False),
        (RELU, TALL, BF16, "ieee", False, True),
        (NORM, WIDE, BF16, "ieee", False, False),
        (NORM, TALL, BF16, "ieee", False, True),
        (RELU, LARGE, BF16, "ieee", True, False),
        (NORM, LARGE, BF16, "ieee", True, False),
        (RELU, (16, 4096, 4096), FP32, "ieee", False, True),
        (RELU, (1, 4096, 4096), FP32, "ieee", False, False),
        (NORM, (16, 4096, 4096), FP32, "ieee", False, False),
        (NORM, WIDE, FP32, "ieee", False, True),
        (RELU, (2048, 256, 512), FP32, "ieee", False, False),
        (RELU, (2048, 1024, 1024), FP32, "ieee", False, True),
        (LONE, (3152, 768, 192), FP32, "ieee", False, False),
        (LONE, (25216, 768, 192), FP32, "ieee", False, True),
        (RELU, (256, 2048, 2048), FP32, "ieee", True, False),
        (RELU, WIDE, FP32, "ieee", True, True),
        (RELU, TALL, FP32, "ieee", True, True),
        (NORM, LARGE, FP32, "ieee", True, True),
        (RELU, WIDE, FP32, "tf32", False, False),
        (RELU, LARGE, FP32, "tf32", False, True),
    ],
)
def test_what_is_fused_in_eager_mode(
    function: str,
    size: tuple[int, int, int],
    dtype: torch.dtype,
    setting: str,
    learns: bool,
    fused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_precision, "torch_setting", lambda device_type: setting)
    monkeypatch.setattr(worth, "REAL", (FakeTensor,))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    expected = "" if fused else worth.TOO_SMALL
    assert why_not(function, size, dtype, learns=learns) == expected
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert why_not(function, size, dtype, learns=learns) == ""


@pytest.mark.parametrize(
    ("size", "dtype", "learns", "fused"),
    [
        ((16, 4096, 4096), BF16, False, False),
        (LARGE, BF16, False, True),
        (LARGE, BF16, True, False),
        ((256, 1024, 1024), FP32, False, False),
        ((256, 1024, 4096), FP32, False, True),
        (WIDE, FP32, False, True),
        (WIDE, FP32, True, True),
    ],
)
def test_what_is_fused_in_compiled_graphs(
    size: tuple[int, int, int], dtype: torch.dtype, learns: bool, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_precision, "torch_setting", lambda device_type: "ieee")
    assert why_not(RELU, size, dtype, learns=learns) == ("" if fused else worth.TOO_SMALL)
    with worth.in_cuda_graphs():
        assert why_not(RELU, size, dtype, learns=learns) == ""
    assert why_not(RELU, size, dtype, learns=learns) == ("" if fused else worth.TOO_SMALL)


@pytest.mark.parametrize("keeps_pack", [False, True])
def test_a_compiler_keeps_products_that_no_kernel_is_faster_at(
    keeps_pack: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def why_not_on_pieces(*problem: Any) -> str:
        asked.append(problem)
        return "" if keeps_pack else "the weight has to be split"

    monkeypatch.setattr(plans, "why_not_on_pieces", why_not_on_pieces)
    monkeypatch.setattr(_precision, "torch_setting", lambda device_type: "ieee")
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, weight = (torch.empty(*shape, device="cuda") for shape in ((256, 4096), (1024, 4096)))
        assert worth.why_not(RELU, x, weight, keeps_pack=keeps_pack) == "", "there is no GPU to ask about"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        expected = "" if keeps_pack else worth.NO_KERNEL
        assert worth.why_not(RELU, x, weight, keeps_pack=keeps_pack) == expected
    assert asked == [("bias_relu", 256, 1024, 4096, keeps_pack, "split", False, 0)]


def test_the_setting_is_a_constant_to_dynamo() -> None:
    def marked() -> None:
        pass

    untyped.compiler.assume_constant_result(marked)
    assert vars(marked) and vars(marked).items() <= vars(worth._fp32_arithmetic).items()


def test_what_fusion_needs_is_imported_with_it() -> None:
    """Dynamo takes a second to import: not for those who compile nothing."""
    code = """
import sys, torch
before = set(sys.modules)
import epigemm
assert not {name for name in set(sys.modules) - before if name.startswith(("sympy", "torch._dynamo"))}
assert "epigemm.fusion" not in sys.modules
epigemm.fuse(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
assert epigemm.fusion is sys.modules["epigemm.fusion"]
assert not {name for name in set(sys.modules) - before if name.startswith("torch._dynamo")}
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_fp64_and_cpus_run_unfused_and_say_so() -> None:
    assert why_not(RELU, LARGE, torch.float64) == worth.IN_FP64
    fused = epigemm.fuse(nn.Sequential(nn.Linear(128, 128), nn.ReLU()))
    with fusion.watch() as unfused:
        fused(torch.randn(128, 128))
    assert unfused == [("0", worth.ON_CPU)]


def test_unfused_calls_of_hooked_layers_are_calls_of_the_modules() -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    fused, seen = epigemm.fuse(model, inplace=True), []
    x = torch.randn(2, 8)
    expected = fused(x)
    model[0].register_forward_hook(lambda *given: seen.append("hook"))
    torch.testing.assert_close(fused(x), expected, rtol=0, atol=0)
    assert seen == ["hook"]


def calls_of_sites(fused: nn.Module, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sites each of 300 calls went through; every result is compared with the first."""
    counted: list[int] = []
    call = site.Site.__call__

    def counting(self: site.Site, *inputs: Any) -> Any:
        counted[-1] += 1
        return call(self, *inputs)

    monkeypatch.setattr(site.Site, "__call__", counting)
    results = []
    for _ in range(300):
        counted.append(0)
        results.append(fused(x))
    assert all(torch.equal(result, results[0]) for result in results)
    return counted


def test_forwards_rest_where_nothing_is_worth_fusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The original forward runs, and from time to time the fused one looks again; or at once for other calls."""
    fused: Any = epigemm.fuse(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    counted = calls_of_sites(fused, torch.randn(2, 8), monkeypatch)
    assert counted == [1, *[0] * 256, 1, *[0] * 42]
    counted.append(0)
    fused(torch.randn(3, 8))
    with torch.no_grad():
        fused(torch.randn(3, 8))
        with fusion.watch() as unfused:
            fused(torch.randn(3, 8))
    assert counted[-1] == 3 and unfused == [("0", worth.ON_CPU)]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert rest._captures(torch.empty(1)) is False


def test_forwards_in_which_something_is_fused_do_not_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worth, "LIMITS", {})
    fused = epigemm.fuse(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()))
    assert calls_of_sites(fused, torch.randn(2, 8), monkeypatch) == [2] * 300


def test_a_rest_ends_though_threads_raced_for_its_last_call() -> None:
    once, x = rest.Rest(), torch.randn(2, 8)
    once.begin(x)
    once.left = -1
    assert not once.lasts(x)
    once.begin(x)
    assert once.lasts(x) and not once.lasts(torch.randn(3, 8)) and not once.lasts(None)


def test_sites_rest_on_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside one that is fused: what they replaced runs, and what has changed meanwhile holds."""
    looked: list[str] = []

    def why_not(function: str, x: torch.Tensor, weight: torch.Tensor, **_: bool) -> str:
        looked.append(function)
        return worth.TOO_SMALL if weight.shape[0] == 8 else ""

    monkeypatch.setattr(worth, "why_not", why_not)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 16), nn.ReLU())
    fused, x, seen = epigemm.fuse(model, inplace=True), torch.randn(2, 8), []
    for _ in range(10):
        fused(x)
    assert len(looked) == 11, "one at the first site, ten at the second"
    model[0].register_forward_hook(lambda *given: seen.append("hook"))
    with torch.no_grad():
        model[0].weight.mul_(2)
        expected = nn.Sequential(*model)(x)
        seen.clear()
        torch.testing.assert_close(fused(x), expected)
    assert seen == ["hook"]


def test_every_kind_of_call_has_a_limit(limits: Limits) -> None:
    arithmetics, modes = ("16 bits", "tf32", "ieee"), ("inference", "training", "compiled")
    assert set(limits) == {(a, m, folded) for a in arithmetics for m in modes for folded in (False, True)}


def test_a_model_rests_for_all_modules_inside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One look for the whole model, though it is not fused itself; nobody inside looks."""
    model: Any = Stack(Gated(), Gated(), Gated())
    fused = epigemm.fuse(model)
    x = torch.randn(2, 8)
    looked: list[int] = []
    lasts = rest.Rest.lasts

    def counting(self: rest.Rest, first: Any) -> bool:
        looked[-1] += 1
        return lasts(self, first)

    monkeypatch.setattr(rest.Rest, "lasts", counting)
    results = []
    for _ in range(4):
        looked.append(0)
        results.append(fused(x))
    assert looked == [0, 1, 1, 1] and all(torch.equal(result, model(x)) for result in results)
    assert type(fused) is not Stack and type(epigemm.unfuse(fused)) is Stack


class Stack(nn.Sequential):
    """As people derive from it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)


class Gated(nn.Module):
    """A forward of its own; raises where its gate says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.layer(x))


def test_a_rest_that_raises_leaves_nobody_asleep() -> None:
    fused: Any = epigemm.fuse(nn.Sequential(Gated(), Gated()))
    x = torch.randn(2, 8)
    expected = fused(x)
    handle = fused[1].register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fused(x)
    assert not rest.sleep.deep
    handle.remove()
    torch.testing.assert_close(fused(x), expected, rtol=0, atol=0)


def test_copies_of_a_resting_model_rest_too() -> None:
    fused: Any = epigemm.fuse(nn.Sequential(Gated(), Gated()))
    for copied in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert type(copied) is not nn.Sequential and isinstance(copied, nn.Sequential)
        x = torch.randn(2, 8)
        torch.testing.assert_close(copied(x), fused(x), rtol=0, atol=0)


class Registered(nn.Sequential):
    """Knows the classes that derive from it."""

    def __init_subclass__(cls, **options: Any) -> None:
        raise ValueError(f"unknown {cls.__name__}")


class AsksForItsClass(nn.Sequential):
    """Sees that its class is another one."""

    def forward(self, x: Any) -> Any:
        if kind_of(self) != "AsksForItsClass":
            raise RuntimeError("another class")
        for layer in list(self):
            x = layer(x)
        return x


def kind_of(value: object) -> str:
    return type(value).__name__


class Frozen(nn.Module):
    """Calls its children, and lets nobody change its class."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first, self.second = layers

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            raise AttributeError("frozen")
        super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> Any:
        if x.sum() > 1e9:
            x = x + 1
        return self.second(self.first(x))


@pytest.mark.parametrize("kind", [Registered, AsksForItsClass, Frozen])
def test_a_model_with_code_of_its_own_keeps_its_class(kind: Any) -> None:
    fused = epigemm.fuse(kind(Gated(), Gated()))
    assert type(fused) is kind and type(next(fused.children())) is not Gated
    fused(torch.randn(2, 8))
