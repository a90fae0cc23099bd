"""Models that `fuse` leaves alone, with the reason. Arguments that it refuses: tests/net/programs.txt."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import epigemm
from epigemm.fusion import rewrite
from tests.fusion.eager import fuse_eagerly, report_of


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU())


def scripted() -> Any:
    return torch.jit.script(layers())


def never(model: nn.Module) -> Any:
    raise ValueError("never")


def copied(by: Callable[[Any], Any]) -> Any:
    """With a copy of its own."""
    return type("Own", (nn.Sequential,), {"__deepcopy__": lambda self, memo: by(self)})(nn.Linear(8, 8))


def wrapped(name: str) -> nn.Module:
    """In a stand-in for a wrapper that shards parameters, which needs a process group."""
    return nn.Sequential(type(name, (nn.Sequential,), {})(layers()))


def compiled() -> nn.Module:
    model = layers()
    model.compile(backend="eager")
    return model


LEFT_ALONE: dict[str, Callable[[], Any]] = {
    "it is a RecursiveScriptModule": scripted,
    "its copy does not share parameters": lambda: nn.Sequential(scripted(), nn.Linear(8, 8)),
    "it is a Sequential": lambda: fx.symbolic_trace(layers()),
    "it is a GraphModule": lambda: torch.export.export(layers(), (torch.randn(3, 8),)).module(),
    "it holds a DataParallel": lambda: nn.Sequential(nn.DataParallel(layers())),
    "it holds a FullyShardedDataParallel": lambda: wrapped("FullyShardedDataParallel"),
    "it holds a DistributedDataParallel": lambda: wrapped("DistributedDataParallel"),
    "it holds a FSDPModule": lambda: wrapped("FSDPModule"),
    "it has been compiled already, by model.compile()": compiled,
    "it has been compiled already, by torch.compile": lambda: torch.compile(layers(), backend="eager"),
    "it cannot be copied (ValueError: never)": lambda: copied(never),
    "its copy shares, or has other, modules": lambda: copied(lambda model: model),
    "its copy does not share parameters; fuse(model, inplace=True) needs no copy": lambda: copied(
        lambda model: type(model)(nn.Linear(8, 8))
    ),
    "its copy is a Sequential": lambda: copied(lambda model: layers()),
}


@pytest.mark.parametrize("reason", LEFT_ALONE)
def test_left_alone(reason: str) -> None:
    model = LEFT_ALONE[reason]()
    call, x = vars(model).get("_compiled_call_impl"), torch.randn(3, 8)
    expected = model(x)
    for _ in range(2):
        fused = fuse_eagerly(model)
        assert fused is model and f"left alone: {reason}" in report_of(fused).notes[0]
        assert str(report_of(fused)).startswith("0 of 0 products fused")
    torch.testing.assert_close(fused(x), expected)
    epigemm.unfuse(fused)
    assert not hasattr(fused, "fusion_report") and vars(model).get("_compiled_call_impl") is call


class Gives(nn.Module):
    def forward(self, x: Tensor) -> Any:
        while True:
            yield x
            x = torch.relu(x)


def test_generators_are_left_alone() -> None:
    """Dynamo would run one to its end."""
    model = Gives()
    fused: Any = fuse_eagerly(model)
    assert fused is model and "its forward is a generator" in report_of(fused).notes[0]
    assert torch.equal(next(fused(x := torch.randn(3, 8))), x)


def test_a_model_that_cannot_be_copied_is_fused_in_place() -> None:
    model, x = layers(), torch.randn(3, 8)
    model.stream = (number for number in range(3))  # type: ignore[assignment]
    assert "it cannot be copied" in str(report_of(fuse_eagerly(model)))
    torch.testing.assert_close(fuse_eagerly(model, inplace=True)(x), nn.Sequential(*model)(x))
    assert report_of(model).sites


@pytest.mark.parametrize("inplace", [False, True])
def test_where_dynamo_is_turned_off(inplace: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    rewrite.warn_once.cache_clear()
    model, x = layers(), torch.randn(3, 8)
    with pytest.warns(UserWarning, match="TORCHDYNAMO_DISABLE"):
        epigemm.fuse(model, inplace=inplace)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        fused = epigemm.fuse(model, inplace=inplace)
    assert "TORCHDYNAMO_DISABLE" in str(fused.fusion_report)
    torch.testing.assert_close(fused(x), model(x), rtol=0, atol=0)


def test_replicas_of_data_parallel_are_as_torchs() -> None:
    """A replica of a module that was compiled in place calls the module itself, with its parameters."""
    plain, x = layers(), torch.randn(4, 8)
    fused = fuse_eagerly(plain)
    torch.testing.assert_close(nn.DataParallel(fused)(x), plain(x))
    plain.compile(backend="eager")
    for module in (plain, fused):
        replica: Any = module._replicate_for_data_parallel()
        replica._modules = dict(layers()._modules)
        assert torch.equal(replica(x), module(x))
