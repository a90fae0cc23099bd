"""What the tests of the entry share: recording what it answers."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm.calls import entry
from epigemm.planner.reasons import Reason
from tests.support.pretended import another_empty, replace_entry

BUILT_IN = [
    pytest.mark.skipif(not hasattr(Tensor, "__dlpack_c_exchange_api__"), reason="torch: no exchange API"),
    pytest.mark.skipif(
        importlib.util.find_spec("epigemm._entry") is None, reason="built without the headers of Python"
    ),
]
WITH_ENTRY = [*BUILT_IN, pytest.mark.usefixtures("known_device")]
"""The marks of tests that need the entry; `BUILT_IN` of those that need it on CPUs alone."""
DONE = "done"


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[Reason | str]:
    """For each result that the entry was asked for, `DONE`, or the reason why it did not answer.

    Where PyTorch's operators compute a call on a CPU, it is `DONE`, too.
    """
    answers: list[Reason | str] = []

    class Watched:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            function = getattr(native, name)
            if name == "sees":  # whose answer is not one to a call
                return function  # type: ignore[no-any-return]

            def watch(*args: Any) -> Any:
                found = function(*args)
                results = found if isinstance(found, tuple) else (found,)
                answers.extend(
                    DONE if isinstance(each, Tensor) or each == Reason.BY_REFERENCE else Reason(each)
                    for each in results
                    if each is not None
                )
                return found

            return watch

    native = entry._module
    replace_entry(monkeypatch, Watched())
    return answers


@pytest.fixture
def known_device(device: torch.device) -> None:
    """The first call on a GPU is the cold path's, which loads what was measured there."""
    epigemm.linear(torch.ones(2, 8, device=device), torch.ones(8, 8, device=device))


@contextmanager
def results_of(*functions: Callable[..., Any]) -> Iterator[list[Any]]:
    """What these functions of Python return, one result for each call of this thread in the block."""
    codes, found = {each.__code__ for each in functions}, list[Any]()

    def look(frame: FrameType, event: str, result: Any) -> None:
        if event == "return" and frame.f_code in codes:
            found.append(result)

    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(None)


@contextmanager
def failing(function: Callable[..., Any], error: Exception, after: int = 0) -> Iterator[None]:
    """In the block, a call of a function of Python raises this error, behind `after` that do not."""
    left = [after]

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is function.__code__:
            left[0] -= 1
            if left[0] < 0:
                raise error

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


POISON = 0xFF  # every fp16 and fp32 of such bytes is NaN


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every workspace and result that calls allocate holds NaN before."""

    def poisoned(*sizes: int, **options: Any) -> Tensor:
        made = torch.empty(*sizes, **options)
        return made.fill_(POISON if made.dtype is torch.uint8 else math.nan)

    with another_empty(entry._module, poisoned):
        yield


def linear_arguments(x: Any, weight: Any, **changed: Any) -> tuple[Any, ...]:
    """`entry.linear`'s arguments for a bare product."""
    given: dict[str, Any] = {"epilogue": epigemm.epilogues.library.BIAS, "x": x, "weight": weight}
    scalars = (changed.pop("scalar"),) if "scalar" in changed else ()
    given |= {"operands": (changed.pop("bias", None), *scalars)} | dict.fromkeys(("fold", "precision", "out"))
    given |= {"strict": False}
    return tuple((given | changed).values())
