"""Fixtures, the `gpu` and `slow` markers, and a summary of what was skipped and why."""

from __future__ import annotations

import atexit
import gc
import json
import os
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from benchmarks.harness import environment
from benchmarks.harness.shards import Selection, Shard
from tests.support.cases import cuda_unavailable, fused_unavailable
from tests.support.compiling import fresh_compiler, join_logs, measure_no_guards
from tests.support.pieces import road
from tests.support.splitting import split_rows
from tests.support.stage import stage
from tests.support.thorough import a_third_of, choose, is_thorough
from tests.support.threads import share_cores
from tests.support.untyped import backends
from tests.support.untyped import torch as untyped
from tests.support.watching import answered, known_device

# Fixtures that tests of several rooms have, and an operator's CPU kernel.
__all__ = ["answered", "fresh_compiler", "known_device", "road", "split_rows", "stage"]

share_cores()
measure_no_guards()
join_logs()

# Code that Inductor has kept from an earlier version of an operator would be run again.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="epigemm-inductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

# What a user has measured on this machine is not what these tests expect of dispatch. Processes of pytest-xdist share
# the folder of the one that starts them: a kernel that many tests need is linked once.
if "EPIGEMM_TEST_CACHE_DIR" not in os.environ:
    os.environ["EPIGEMM_TEST_CACHE_DIR"] = tempfile.mkdtemp(prefix="epigemm-cache-")
    atexit.register(shutil.rmtree, os.environ["EPIGEMM_TEST_CACHE_DIR"], ignore_errors=True)
os.environ["EPIGEMM_CACHE_DIR"] = os.environ["EPIGEMM_TEST_CACHE_DIR"]

SELECTION = pytest.StashKey[Selection]()
_LONGEST = 60  # of so many files, those that take the longest, the record has the time, over all processes


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much runs, and a record of the run, for benchmarks/results."""
    parser.addoption(
        "--summary-json", type=Path, help="write what ran, where and with which result to this file"
    )
    parser.addoption(
        "--thorough",
        action="store_true",
        help="all seeds of random tests, three times as many as without, and all combinations",
    )
    parser.addoption("--trees", help="csrc=HASH,python=HASH: git trees of the source, where git is missing")
    parser.addoption(
        "--shard",
        metavar="I/N",
        default="1/1",
        help="run the I-th of N parts; tools/merge_records.py merges what --summary-json writes of all parts",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a shard that there is not, and say how much runs before the tests are collected."""
    try:
        Shard.parse(config.getoption("--shard"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    choose(config.getoption("--thorough"))
    settings.register_profile(
        "epigemm",
        deadline=None,
        max_examples=a_third_of(60),
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("epigemm")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is collected stays: the garbage collector would look at all of it again and again, a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Leave cases out that show nothing new.

    Where no kernel can run, one case of each test on a GPU stands for all: it is skipped, with the reason. On a CPU, a
    test marked `every(n)` runs every n-th case: n has no divisor in common with the number of values of a parameter, so
    each value stays.
    """
    yield
    calls, definition = metafunc._calls, metafunc.definition
    if len(calls) < 2:
        return
    is_gpu = definition.get_closest_marker("gpu") is not None
    on_gpu = [call for call in calls if is_gpu or any(mark.name == "gpu" for mark in call.marks)]
    places = {id(call) for call in on_gpu}
    on_cpu = [call for call in calls if id(call) not in places]
    every = definition.get_closest_marker("every")
    if every is not None and not is_thorough():
        on_cpu = on_cpu[:: every.args[0]]
    calls[:] = on_cpu + (on_gpu[:1] if cuda_unavailable() else on_gpu)


# Behind `-m` and `-k`: what they leave is shared out.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the shard, each of which is in one by its name.

    Skip `gpu` tests where no kernel can run, giving the reason that the library itself gives.
    """
    shard, names = Shard.parse(config.getoption("--shard")), [item.nodeid for item in items]
    left = [item for item in items if not shard.takes(item.nodeid)]
    items[:] = [item for item in items if shard.takes(item.nodeid)]
    if left:
        config.hook.pytest_deselected(items=left)
    selection = Selection.of_names(names, shard, len(items))
    config.stash[SELECTION] = selection
    if hasattr(config, "workeroutput"):
        config.workeroutput["selection"] = selection.to_json()
    reason = cuda_unavailable()
    if not reason:
        return
    skip = pytest.mark.skip(reason=f"gpu: {reason} (one case of each test is counted)")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Tens of thousands of tests stay until the end: the garbage collector need not look at them each time."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Of a run that is interrupted, how many tests it had is known, but not of how many they were chosen."""
    shard = node.config.getoption("--shard")
    node.config.stash.setdefault(SELECTION, Selection(shard, len(ids), of=0, digest=""))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Of pytest-xdist's: its processes collect, all of them the same, and tell this one."""
    if found := getattr(node, "workeroutput", {}).get("selection"):
        node.config.stash[SELECTION] = Selection(**found)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what ran where: a green run that skipped every GPU test must not look like a full one."""
    if hasattr(terminalreporter.config, "workerinput"):
        return  # a process of pytest-xdist's, which knows its own tests alone
    reason = cuda_unavailable()
    gpu = (
        f"{torch.cuda.get_device_name(0)} x{torch.cuda.device_count()}" if not reason else f"none ({reason})"
    )
    terminalreporter.section("epigemm")
    terminalreporter.write_line(f"torch {torch.__version__}, CUDA device: {gpu}")
    skipped: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        skipped[text.removeprefix("Skipped: ")] += 1
    for text, count in skipped.most_common():
        terminalreporter.write_line(f"skipped {count}: {text}")
    if not skipped:
        terminalreporter.write_line("nothing was skipped")
    if path := terminalreporter.config.getoption("--summary-json"):
        device = torch.device("cpu" if reason else "cuda")
        about = environment.describe(device, terminalreporter.config.getoption("--trees"))
        about["command"] = ["python", "-m", "pytest", *about["command"][3:]]
        outcomes = {
            name: len(terminalreporter.stats.get(name, []))
            for name in ("passed", "failed", "error", "skipped")
        }
        failed = [report.nodeid for report in terminalreporter.stats.get("failed", [])]
        seconds: defaultdict[str, float] = defaultdict(float)
        for report in (each for reports in terminalreporter.stats.values() for each in reports):
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.split("::")[0]] += report.duration
        longest = sorted(seconds, key=lambda name: -seconds[name])
        selection = terminalreporter.config.stash[SELECTION].to_json()
        record = {
            "environment": about,
            "selection": selection,
            "outcomes": outcomes,
            "failed": failed,
            "skipped": dict(skipped),
            "seconds": {name: round(seconds[name], 1) for name in longest[:_LONGEST]},
        }
        path.write_text(json.dumps(record, indent=2) + "\n")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device that the test runs on: the CPU always, a GPU where there is one."""
    return torch.device(str(request.param))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """A CPU generator whose seed depends on the test's own name alone, so that a failure repeats."""
    seed = sum(ord(letter) * 31 ** (index % 7) for index, letter in enumerate(request.node.nodeid))
    return torch.Generator().manual_seed(seed % 2**31)


@pytest.fixture
def fused_kernels() -> None:
    """Skip a test of the fused GEMM kernels where none of them runs."""
    if reason := fused_unavailable():
        pytest.skip(f"gpu: {reason}")


_MOST_KEPT = 2 << 30
"""Bytes of device memory that a process may keep after a test: many processes share a GPU."""


@pytest.fixture(autouse=True)
def global_state() -> Iterator[None]:
    """Each test starts from torch's default settings, and a failing one cannot colour the next."""
    if cuda_unavailable():
        # For devices that there are not, torch would keep where it was called.
        torch.default_generator.manual_seed(0)
    else:
        torch.manual_seed(0)
    yield
    if untyped.cuda.is_initialized() and torch.cuda.memory_reserved() > _MOST_KEPT:
        gc.collect()
        torch.cuda.empty_cache()
    torch.set_float32_matmul_precision("highest")
    backends.mkldnn.matmul.fp32_precision = "none"
    backends.fp32_precision = "none"
    backends.cuda.matmul.fp32_precision = "none"
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
