"""Generators and coroutines that leave a call: they must run when they are used, not when the call is traced.

Dynamo runs a generator to its end when it leaves the traced code, and a coroutine when it is made. A generator inside
the traced code is correct: `sum(layer(x) for layer in self.layers)` stays fused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, NoReturn
from unittest.mock import patch

from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.functions import LocalGeneratorObjectVariable

GENERATOR = "a generator leaves the traced code, and Dynamo would run it to its end at once"
COROUTINE = "it calls a coroutine, which Dynamo would run at once"
_SUSPENDED = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def is_coroutine(codes: Iterable[CodeType]) -> bool:
    """Whether one of the functions runs only when it is awaited."""
    return any(code.co_flags & _SUSPENDED for code in codes)


@contextmanager
def kept_inside(leave: Callable[[str], NoReturn]) -> Iterator[None]:
    """In the block, call `leave` with the reason if a generator would leave the code that Dynamo traces."""

    def returned(translator: Any) -> None:
        if translator.stack and isinstance(translator.stack[-1], LocalGeneratorObjectVariable):
            leave(GENERATOR)

    def stored(*_: Any) -> NoReturn:
        leave(GENERATOR)

    with (
        compile_lock,
        patch.object(InstructionTranslator, "replace_tos_if_return_is_generator", returned, create=True),
        patch.object(LocalGeneratorObjectVariable, "reconstruct", stored),
    ):
        yield
