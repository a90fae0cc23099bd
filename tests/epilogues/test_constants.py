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
    BOTH = [1.0]  # noqa: RUF012


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


def _handed_on(owner: Any, acc: Tensor) -> Any:
    return acc * owner.slope


def _with_an_attribute() -> None:
    pass


class Marked(float):
    scale = 2.0


_with_an_attribute.slope = 2.0  # type: ignore[attr-defined]
MARKED = Marked(1.0)
look_up = {"limit": 2.0}.get


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("return _handed_on(Settings, acc)", "'Settings' is used as a whole"),
        ("other = Settings; return acc * other.slope", "'Settings' is used as a whole"),
        ("return acc * getattr(Settings, 'slope')", "'Settings' is used as a whole"),
        ("other = module; return acc * other.LIMIT", "'module' is used as a whole"),
        ("other = _with_an_attribute; return acc * other.slope", "'_with_an_attribute' is used as a whole"),
        ("from tests.epilogues.test_constants import LIMIT; return acc * LIMIT", "is imported inside"),
        ("from importlib import import_module as f; return acc * f(__name__).LIMIT", "import_module reads"),
        ("return acc * importlib.import_module(__name__).LIMIT", "import_module reads"),
        ("return acc * sys.modules[__name__].LIMIT", "'sys.modules' is captured, and a dict may"),
        ("return acc * globals()['LIMIT']", "globals reads what may change unseen"),
        ("return acc * sys._getframe(0).f_globals['LIMIT']", "_getframe reads what may change unseen"),
        ("return acc * len(open(__file__).read())", "open reads what may change unseen"),
        ("return acc * look_up('limit', 1.0)", "'look_up' is captured, and a builtin_function_or_method may"),
        ("return acc * MARKED.scale", "'MARKED' is captured, and a Marked may change unseen"),
        ("return module.helper.__call__(acc)", "'module.helper.__call__' is captured, and a method-wrapper"),
        ("return acc * Mode.BOTH.value[0]", "'Mode.BOTH' is captured, and a Mode may change unseen"),
    ],
)
def test_what_may_change_unseen_is_refused(body: str, text: str) -> None:
    """Others are in tests/net/refused.txt."""
    namespace = dict(globals())
    exec(f"def function(acc):\n    {body}", namespace)
    with pytest.raises((NotImplementedError, TypeError), match=re.escape(text)) as caught:
        trace(namespace["function"])
    assert str(caught.value).startswith("function (<string>:2): ")


def test_what_cannot_change_is_taken() -> None:
    """A class in a closure, what is imported of Python and of torch, and numbers of `sys`."""

    class Local:
        slope = 0.5

    def uses(acc: Tensor) -> Any:
        import math

        from torch.nn import functional

        return functional.relu(acc * Local.slope) * math.pi + sys.float_info.epsilon

    traced = trace(uses)
    acc = torch.randn(3, 4)
    torch.testing.assert_close(traced.reference(acc), uses(acc))
