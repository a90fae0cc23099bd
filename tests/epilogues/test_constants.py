"""Constants that a decorated function reads from outside: what is accepted, and that later changes are not seen."""

from __future__ import annotations

import builtins
import enum
import importlib
import os
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


def _through_a_helper(acc: Tensor) -> Any:
    return _handed_on(Settings, acc)


def _by_another_name(acc: Tensor) -> Any:
    other = Settings
    return acc * other.slope


def _by_getattr(acc: Tensor) -> Any:
    return acc * getattr(Settings, "slope")  # noqa: B009


def _of_a_module(acc: Tensor) -> Any:
    other = module
    return acc * other.LIMIT


def _of_a_function(acc: Tensor) -> Any:
    other = _with_an_attribute
    return acc * other.slope  # type: ignore[attr-defined]


def _with_an_attribute() -> None:
    pass


_with_an_attribute.slope = 2.0  # type: ignore[attr-defined]


def _imported_inside(acc: Tensor) -> Any:
    from tests.epilogues.test_constants import LIMIT

    return acc * LIMIT


def _imported_by_name(acc: Tensor) -> Any:
    return acc * importlib.import_module(__name__).LIMIT


def _of_sys(acc: Tensor) -> Any:
    return acc * sys.modules[__name__].LIMIT


def _of_globals(acc: Tensor) -> Any:
    return acc * globals()["LIMIT"]


def _of_eval(acc: Tensor) -> Any:
    return acc * eval("LIMIT")


def _imported_under_a_name(acc: Tensor) -> Any:
    from importlib import import_module as found

    return acc * found(__name__).LIMIT


def _of_a_frame(acc: Tensor) -> Any:
    return acc * sys._getframe(0).f_globals["LIMIT"]


def _of_the_environment(acc: Tensor) -> Any:
    return acc * float(os.environ.get("LIMIT", "2.0"))


def _of_a_file(acc: Tensor) -> Any:
    return acc * len(open(__file__).read())  # noqa: PTH123


look_up = {"limit": 2.0}.get


def _of_a_table(acc: Tensor) -> Any:
    return acc * look_up("limit", 1.0)


class Marked(float):
    scale = 2.0


MARKED = Marked(1.0)


def _of_a_number(acc: Tensor) -> Any:
    return acc * MARKED.scale


def _of_a_wrapper(acc: Tensor) -> Any:
    return module.helper.__call__(acc)


def _of_a_list_in_an_enum(acc: Tensor) -> Any:
    return acc * Mode.BOTH.value[0]


def _of_a_setting(acc: Tensor) -> Any:
    return acc * 2.0 if torch.backends.cudnn.deterministic else acc


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (_through_a_helper, "'Settings' is used as a whole"),
        (_by_another_name, "'Settings' is used as a whole"),
        (_by_getattr, "'Settings' is used as a whole"),
        (_of_a_module, "'module' is used as a whole"),
        (_of_a_function, "'_with_an_attribute' is used as a whole"),
        (_imported_inside, r"tests\.epilogues\.test_constants is imported inside"),
        (_imported_under_a_name, "import_module reads what may change unseen"),
        (_imported_by_name, "import_module reads what may change unseen"),
        (_of_sys, r"'sys\.modules' is captured, and a dict may change unseen"),
        (_of_globals, "globals reads what may change unseen"),
        (_of_eval, "eval reads what may change unseen"),
        (_of_a_frame, "_getframe reads what may change unseen"),
        (_of_the_environment, "environ reads what may change unseen"),
        (_of_a_file, "open reads what may change unseen"),
        (_of_a_table, "'look_up' is captured, and a builtin_function_or_method may change unseen"),
        (_of_a_number, "'MARKED' is captured, and a Marked may change unseen"),
        (_of_a_wrapper, r"'module\.helper\.__call__' is captured, and a method-wrapper may change unseen"),
        (_of_a_list_in_an_enum, r"'Mode\.BOTH' is captured, and a Mode may change unseen"),
        (_of_a_setting, "backends reads a state"),
    ],
)
def test_what_may_change_unseen_is_refused(function: Callable[..., Any], text: str) -> None:
    with pytest.raises((NotImplementedError, TypeError), match=text) as caught:
        trace(function)
    lines = {line for *_, line in function.__code__.co_lines() if line is not None}
    named = re.search(rf"{re.escape(__file__)}:(\d+)", str(caught.value))
    assert named is not None and int(named[1]) in lines - {function.__code__.co_firstlineno}, str(
        caught.value
    )


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
