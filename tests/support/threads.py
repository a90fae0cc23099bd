"""How many threads of torch's a process of the tests has; what several threads do at once."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


def processes() -> int:
    """How many processes of pytest-xdist's run tests at once, all of them on the same GPU."""
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def share_cores() -> None:
    """Give each process of pytest-xdist's its part of the cores: torch would start a thread for every core in each.

    Threads that wait for one another on cores that are taken use up more time than the tests do.
    """
    count = processes()
    if count == 1 or "OMP_NUM_THREADS" in os.environ:
        return
    threads = max(1, (os.cpu_count() or 1) // count)
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for the processes that tests start


def at_once(count: int, work: Callable[[int], object]) -> None:
    """`work` of each number, each in a thread of its own, from the moment when all are there; what is raised there.

    Python changes between them as often as it can.
    """
    barrier, interval = threading.Barrier(count), sys.getswitchinterval()

    def begun(number: int) -> None:
        barrier.wait()
        work(number)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(count) as pool:
            for each in [pool.submit(begun, number) for number in range(count)]:
                each.result()
    finally:
        sys.setswitchinterval(interval)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """A block in which torch's loops run in so many threads, whatever the process has."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
