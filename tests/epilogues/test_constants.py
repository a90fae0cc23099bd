"""Constants that a decorated function reads from outside: what is accepted, and that later changes are not seen."""

from __future__ import annotations

import builtins
import enum
import importlib  # noqa: F401 # of functions that are written as text
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm import epilogue
from epigemm.epilogues.declaration import trace

LIMIT = 2.0


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
    monkeypatch: pytest.MonkeyPatch,
    function: Callable[..., Any],
    owner: Any,
    attribute: str,
    value: object,
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


class Marked(float):
    scale = 2.0


MARKED = Marked(1.0)
look_up = {"limit": 2.0}.get


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("from importlib import import_module as f; return acc * f(__name__).LIMIT", "import_module reads"),
        ("return acc * importlib.import_module(__name__).LIMIT", "import_module reads"),
        ("return acc * globals()['LIMIT']", "globals reads what may change unseen"),
        ("return acc * sys._getframe(0).f_globals['LIMIT']", "_getframe reads what may change unseen"),
        ("return acc * len(open(__file__).read())", "open reads what may change unseen"),
        ("return acc * look_up('limit', 1.0)", "'look_up' is captured, and a builtin_function_or_method may"),
        ("return acc * MARKED.scale", "'MARKED' is captured, and a Marked may change unseen"),
    ],
)
def test_what_may_change_unseen_is_refused(body: str, text: str) -> None:
    """Others are in tests/net/refused.txt."""
    namespace = dict(globals())
    exec(f"def function(acc):\n    {body}", namespace)
    with pytest.raises((NotImplementedError, TypeError), match=re.escape(text)) as caught:
        trace(namespace["function"])
    assert str(caught.value).startswith("function (<string>:2): ")


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
