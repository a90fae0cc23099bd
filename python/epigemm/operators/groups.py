"""Rows in groups in compiled graphs: an operator for calls that no gradient is recorded of.

Its schema is here, and not in C++, because it runs in Python alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from epigemm.arguments import checks
from epigemm.arguments.calls import LinearCall
from epigemm.calls import entry, one_kernel, resolve
from epigemm.calls import groups as by_groups
from epigemm.calls.log import current
from epigemm.compilers import is_exporting, is_faked, is_traced, is_transformed, when_imported
from epigemm.epilogues.kinds import MATRIX, SCALAR
from epigemm.epilogues.library import BIAS
from epigemm.epilogues.registry import compute_dtype
from epigemm.planner.reasons import Reason

_SCHEMA = (
    "(str epilogue, Tensor x, Tensor weight, Tensor? offs, Tensor?[] operands, Tensor? weight2) -> Tensor"
)
_LIBRARY = torch.library.Library("epigemm", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"grouped_linear{_SCHEMA}")  # type: ignore[no-untyped-call]


def in_graph(call: LinearCall) -> Tensor | None:
    """One node of a compiler's graph; None where none traces the call, or it is recorded, transformed or exported.

    The operator has neither a derivative nor a rule for vmap, and runs in Python. With a weight2 its first matrix is
    the second product, as of `one_kernel.pair`.
    """
    is_recorded = torch.is_grad_enabled() and any(each.requires_grad for each in call.inputs)
    is_in_eager = not is_traced() and not (entry.sees(*call.inputs) and is_faked())
    if (
        call.invariant
        or call.out is not None
        or is_recorded
        or is_in_eager
        or is_transformed()
        or is_exporting()
    ):
        return None
    wide, pairs = compute_dtype(call.x.dtype), zip(call.epilogue.operands, call.operands, strict=True)
    operands = [_on_device(value, call.x, wide) if spec.kind == SCALAR else value for spec, value in pairs]
    arguments = (call.epilogue.name, call.x, call.weight, call.group_ends, operands, call.weight2)
    result: Tensor = torch.ops.epigemm.grouped_linear(*arguments)
    return result


def _on_device(value: Tensor | float | None, x: Tensor, dtype: torch.dtype) -> Tensor:
    """A scalar as a tensor. A number is filled in by a kernel: to copy it from the host would wait for the device."""
    assert value is not None
    return value.to(dtype) if isinstance(value, Tensor) else x.new_full((), value, dtype=dtype)


def pair(call: LinearCall) -> Tensor | Reason:
    """A pair of products as `one_kernel.pair` makes it, or as one node of a compiler's graph."""
    found = None if call.group_ends is None else in_graph(call)
    if found is None:
        return Reason.NOT_PLAIN if is_traced() else one_kernel.pair(call)
    return found


def _call(
    epilogue: str,
    x: Tensor,
    weight: Tensor,
    offs: Tensor | None,
    operands: Sequence[Tensor | None],
    weight2: Tensor | None,
) -> LinearCall:
    spec = checks.epilogue_named(epilogue, linear=True)
    return LinearCall(spec, x, weight, tuple(operands), weight2=weight2, group_ends=offs)


def _computed(call: LinearCall) -> Tensor:
    call = by_groups.readable(call)
    if call.weight2 is None:
        return resolve.linear(call)
    found = one_kernel.pair(call)
    if isinstance(found, Tensor):
        return found
    second = call._replace(epilogue=BIAS, weight=call.weight2, operands=(None,), weight2=None)
    place = [each.kind for each in call.epilogue.operands].index(MATRIX)
    given = [*call.operands[:place], resolve.linear(second), *call.operands[place + 1 :]]
    return resolve.linear(call._replace(operands=tuple(given), weight2=None))


def _fake(*arguments: object) -> Tensor:
    call = _call(*arguments)  # type: ignore[arg-type]
    if call.group_ends is None:
        checks.batches(call.x, call.weight)
    else:
        checks.groups(call.x, call.weight, call.group_ends)
    shaped = call.x.new_empty((*call.x.shape[:-1], call.weight.shape[1]))
    return shaped if current.log is None else current.log.without_values(_computed, call)


_LIBRARY.impl("grouped_linear", lambda *arguments: _computed(_call(*arguments)), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("epigemm::grouped_linear", _fake, lib=_LIBRARY)


def _count_flops(counter: ModuleType) -> None:
    def formula(epilogue: str, x: Any, weight: Any, offs: Any, operands: Any, weight2: Any, **_: Any) -> int:
        products = 1 if weight2 is None else 2  # of shapes
        return int(2 * products * prod(x) * weight[-2])

    counter.register_flop_formula(torch.ops.epigemm.grouped_linear)(formula)


when_imported("torch.utils.flop_counter", _count_flops)
