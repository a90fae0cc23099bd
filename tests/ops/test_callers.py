"""A call is the same whoever sees it: other kinds of tensors, modes, profilers, processes, and a build without C++."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import epigemm
from tests.ops.op import COUNT, TWO_WEIGHTS, WEIGHT, Arguments, Op, results_of, tensors_of
from tests.ops.table import few, rows, some
from tests.ops.test_autograd import Call, gradients, upstream_of, with_leaves


class Sees(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operator, and changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class SeesFunctions(TorchFunctionMode):
    """Every function, and changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    """Of tensors, with nothing of its own."""


def leaked(value: Tensor, transform: Any) -> Tensor:
    """A tensor of a transformation that is over."""
    found: list[Tensor] = []

    def leak(row: Tensor) -> Tensor:
        found.append(row)
        return row.sum()

    transform(leak)(value if transform is torch.func.grad else value[None])
    return found[0]


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "subclass": lambda t: t.as_subclass(Subclass),
    "negated": lambda t: torch._neg_view(-t),
    "of torch.func.grad": lambda t: leaked(t, torch.func.grad),
}


def loosely(op: Op) -> dict[str, Any]:
    """How near results in fp32 are."""
    bounds = {"rtol": 1e-5, "atol": 1e-5} if any(each.is_fp32 for each in op.results) else {}
    return bounds | {"check_dtype": False}


@rows("kinds of tensors", lambda op: not op.of_kind(COUNT) and some(op))
def test_other_kinds_of_tensors(op: Op, rng: torch.Generator) -> None:
    """x, and what it is multiplied by; without a gradient and with one of every operand."""
    arguments = op.draw(rng, dtype=torch.float64)
    want = results_of(op.reference(**arguments))
    upstream = upstream_of(want, rng)
    expected = gradients(op, op.reference, with_leaves(op, arguments), upstream)
    names = [op.input, *op.of_kind(WEIGHT, TWO_WEIGHTS)] if op.layer is None else [op.input]
    for name, kind in itertools.product(names, KINDS):
        found = results_of(op.call(**{**arguments, name: KINDS[kind](arguments[name])}))
        torch.testing.assert_close([each.as_subclass(Tensor) for each in found], want, **loosely(op))
        if kind == "of torch.func.grad" or name not in op.leaves(arguments):
            continue
        leaves = with_leaves(op, arguments)
        results = results_of(op.call(**{**leaves, name: KINDS[kind](leaves[name])}))
        pairs = [(a, b) for a, b in zip(results, upstream, strict=True) if a.requires_grad]
        inputs = [leaves[each] for each in op.leaves(arguments)]
        got = torch.autograd.grad([a for a, _ in pairs], inputs, [b.to(a) for a, b in pairs])
        torch.testing.assert_close([each.as_subclass(Tensor) for each in got], expected, **loosely(op))


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dispatch mode": Sees,
    "function mode": SeesFunctions,
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "old profiler": torch.autograd.profiler.profile,
}


@rows("modes", lambda op: not op.of_kind(COUNT) and some(op))
def test_modes_change_nothing(op: Op, rng: torch.Generator) -> None:
    """Results, and first and second derivatives, which are taken outside."""
    arguments = op.draw(rng, dtype=torch.float64, tensor_numbers=True)
    expected = derivatives(op, op.reference, arguments, nullcontext)
    for mode in MODES.values():
        torch.testing.assert_close(derivatives(op, op.call, arguments, mode), expected, **loosely(op))


def derivatives(
    op: Op, call: Call, arguments: Arguments, mode: Callable[[], AbstractContextManager[Any]]
) -> list[Tensor]:
    """The results of a plain and of a recorded call, and derivatives of both orders of all of them."""
    given = with_leaves(op, arguments)
    with mode():
        plain, results = results_of(call(**arguments)), results_of(call(**given))
    total: Any = sum(each.square().sum() for each in results if each.requires_grad)
    leaves = [given[name] for name in op.leaves(arguments)]
    first = torch.autograd.grad(total, leaves, create_graph=True)
    again: Any = sum(each.square().sum() for each in first)
    second = torch.autograd.grad(again, leaves, materialize_grads=True) if again.requires_grad else ()
    return [each.detach() for each in (*plain, *results, *first, *second)]


@rows("names for profilers", lambda op: op.function is not None and op.is_linear and few(op))
def test_a_profiler_is_told(op: Op, rng: torch.Generator) -> None:
    """A plain call has an event of its own."""
    arguments = op.draw(rng)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        op.call(**arguments)
    assert any(event.key.startswith("epigemm::") for event in profile.key_averages())


def live_tensors() -> int:
    gc.collect()
    return sum(type(found) is Tensor for found in gc.get_objects())


@rows("references", few)
def test_nothing_leaks(op: Op, device: torch.device, rng: torch.Generator) -> None:
    """References of arguments and results, over calls that are right and calls that are refused."""
    arguments = op.draw(rng, device=device)
    wrong = {**arguments, op.input: arguments[op.input].double()}
    kept = [*tensors_of(arguments).values(), wrong[op.input]]

    def counts() -> tuple[list[int], int]:
        for _ in range(10):
            op.call(**arguments)
            if op.is_linear:
                with pytest.raises(RuntimeError):
                    op.call(**wrong)
        return [sys.getrefcount(tensor) for tensor in kept], live_tensors()

    counts()
    assert counts() == counts()


def test_a_child_process_may_call() -> None:
    """Of sizes for one thread: PyTorch's own threads do not survive a fork."""
    x, weight = torch.randn(4, 8), torch.randn(16, 8)
    expected = epigemm.linear_silu(x, weight)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(epigemm.linear_silu(x, weight), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_without_the_module_of_plain_calls() -> None:
    """As on a CPython without the stable ABI: every row, plain, recorded and into `out`."""
    script = textwrap.dedent("""
        import sys
        sys.modules["epigemm._entry"] = None
        import torch
        from epigemm.calls import entry
        from tests.ops.bounds import assert_right
        from tests.ops.table import OPS
        assert entry._module is None
        for op in OPS:
            rng = torch.Generator().manual_seed(0)
            for dtype in (torch.float64, torch.bfloat16):
                arguments = op.draw(rng, (19,), dtype=dtype)
                assert_right(op, op.call(**arguments), arguments, dtype)
                if op.takes_out:
                    out = torch.full((19, 16), float("nan"), dtype=dtype)
                    assert op.call(**arguments, out=out) is out
                    assert_right(op, out, arguments, dtype)
                arguments[op.input].requires_grad_()
                assert_right(op, op.call(**arguments), arguments, dtype)
        """)
    subprocess.run([sys.executable, "-c", script], check=True)
