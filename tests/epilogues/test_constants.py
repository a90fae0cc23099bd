"""Constants that a decorated function reads from outside: later changes are not seen. Refusals: net/refused.txt."""

from __future__ import annotations

import builtins
import enum
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm import epilogue
from epigemm.epilogues.declaration import trace


class Settings:
    slope = 0.5

    @staticmethod
    def halved(x: Tensor, by: float = 2.0) -> Tensor:
        return x / by


def _uses_settings(acc: Tensor) -> Tensor:
    return Settings.halved(acc) * Settings.slope


module = types.ModuleType("module")
exec("LIMIT = 2.0\ndef helper(x):\n    return x * LIMIT", module.__dict__)


def _uses_a_module(acc: Tensor) -> Any:
    return module.helper(acc)


builtins.FACTOR, builtins.OTHER = 2.0, 2.0  # type: ignore[attr-defined]


def _uses_a_builtin(acc: Tensor) -> Any:
    return acc * FACTOR * max(builtins.OTHER, 1.0)  # type: ignore[name-defined, attr-defined]  # noqa: F821


class Mode(enum.Enum):
    FAST = enum.auto()
    SLOW = 2.0


def _uses_an_enum(acc: Tensor) -> Any:
    return acc if FAST is Mode.SLOW else acc * Mode.SLOW.value


FAST = Mode.FAST


@pytest.mark.parametrize(
    ("function", "owner", "attribute", "value"),
    [
        (_uses_settings, Settings, "slope", 0.25),
        (_uses_settings, Settings.halved, "__defaults__", (4.0,)),
        (_uses_settings, Settings, "halved", torch.relu),
        (_uses_a_module, module, "LIMIT", 3.0),
        (_uses_a_module, module, "helper", torch.relu),
        (_uses_a_builtin, builtins, "FACTOR", 3.0),
        (_uses_a_builtin, builtins, "OTHER", 3.0),
        (_uses_an_enum, Mode.SLOW, "_value_", 3.0),
    ],
)
def test_constants_are_those_of_the_decoration(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], owner: Any, attribute: str, value: object
) -> None:
    """A later change is not noticed: not by a call, not by a compiled one, and not by a trace of Dynamo's."""
    made = epilogue(function)
    acc = torch.tensor([[1.0, -2.0]])
    want = function(acc)
    monkeypatch.setattr(owner, attribute, value)
    compiled = torch.compile(made.elementwise, backend="eager", fullgraph=True)
    for call in (made.elementwise, compiled):
        torch.testing.assert_close(call(acc), want)
    assert not torch.equal(epilogue(function).elementwise(acc), want)


def test_whatever_is_read_at_the_decoration_is_a_constant() -> None:
    """A class in a closure and as a whole, what is imported inside, and numbers of `sys`."""

    class Local:
        slope = 0.5

    def handed_on(owner: Any, acc: Tensor) -> Any:
        return acc * owner.slope

    def uses(acc: Tensor) -> Any:
        import math

        from torch.nn import functional

        return functional.relu(handed_on(Local, acc) * Local.slope) * math.pi + sys.float_info.epsilon

    traced = trace(uses)
    acc = torch.randn(3, 4)
    torch.testing.assert_close(traced.reference(acc), uses(acc))
