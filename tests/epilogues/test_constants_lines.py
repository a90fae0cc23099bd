"""Which line of the user's code is running: no line of this package or of torch."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm.epilogues import constants as lines

HERE = __file__


def line_of(function: Callable[..., Any], text: str) -> int:
    """The first line of a function's with a text."""
    source, start = inspect.getsourcelines(function)
    return start + next(number for number, line in enumerate(source) if text in line)


def test_frames_of_torch_and_of_contexts_are_passed_over() -> None:
    seen: list[str] = []

    class Looks(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            frame = sys._getframe().f_back  # not this line
            assert frame is not None
            seen.append(lines.user_line(frame, "nowhere"))
            return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        yield

    def calls(x: Tensor) -> Tensor:
        with context():
            return torch.relu(x)

    x = torch.ones(2)
    with Looks():
        calls(x)
    assert seen == [f"{HERE}:{line_of(calls, 'torch.relu')}"]


def early(acc: Tensor) -> Any:
    z = torch.relu(acc)
    if z is acc:
        return acc
    return (
        z,
        acc,
    )


@pytest.mark.parametrize(
    ("last", "expected"), [("z = torch", "return acc"), ("if z is", "return acc"), ("        z,", "z,")]
)
def test_the_return_behind_the_last_call(last: str, expected: str) -> None:
    found = lines.return_line(early, f"{HERE}:{line_of(early, last)}")
    file, _, number = found.rpartition(":")
    first = line_of(early, expected)
    assert file == HERE and first - 1 <= int(number) <= first + 2
