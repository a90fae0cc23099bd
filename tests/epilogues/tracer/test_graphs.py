"""The trace of a function leaves all other threads alone, and waits for none."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from tests.support.other_threads import TIMEOUT

X, WEIGHT = torch.randn(6, 8), torch.randn(4, 8)


def pause() -> None:
    """For a function that is traced, which may capture no object that can change: the thread has what to do."""
    threading.current_thread().inside()  # type: ignore[attr-defined]


compiled = torch.compile(lambda x: torch.relu(x @ WEIGHT.t()), backend="eager")


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16], ids=str)
def test_many_threads_decorate_at_once(default: torch.dtype) -> None:
    """All are in the middle of their traces at the same time, and each gets its own function, of fp32 numbers."""
    count = 4
    barrier = threading.Barrier(count)
    found: dict[int, Any] = {}

    def decorate(number: int) -> None:
        def body(acc: Tensor) -> Tensor:
            first = torch.tanh(acc)
            pause()
            return first * torch.where(acc > 0, number + 0.1, 0.7) + torch.sigmoid(acc)

        vars(threading.current_thread())["inside"] = lambda: barrier.wait(TIMEOUT)
        found[number] = epigemm.epilogue(body)

    threads = [threading.Thread(target=decorate, args=(number,)) for number in range(count)]
    torch.set_default_dtype(default)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        assert torch.get_default_dtype() is default
    finally:
        torch.set_default_dtype(torch.float32)
    z = X @ WEIGHT.t()
    for number in range(count):
        expected = torch.tanh(z) * torch.where(z > 0, number + 0.1, 0.7) + torch.sigmoid(z)
        torch.testing.assert_close(found[number](X, WEIGHT), expected)
