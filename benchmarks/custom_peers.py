"""The alternatives of ``--custom``: a decorated function, the built-in, eager, compilers, QuACK, the bare product."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import epigemm
from benchmarks import peers_quack
from benchmarks.cases import Case, Data
from benchmarks.custom_cases import CASES, MATRIX, CustomCase, decorate
from benchmarks.peers import COMPILE, Alternative, Peer, all_peers
from benchmarks.records import BUILTIN, EAGER, MAX_AUTOTUNE, OURS

_QUACK_TITLE = "QuACK, tuned"
_SHARED = (EAGER, "mm", COMPILE, MAX_AUTOTUNE)
# Where no kernel of ours runs, the product is rounded once before the function.
_ROUNDINGS = 1


def _custom(case: Case) -> CustomCase:
    return CASES[case.problem.formula.epilogue]


@functools.cache
def decorated(name: str) -> Any:
    """The decorated function of a case, one for all sizes and dtypes, as in a user's module."""
    return decorate(CASES[name])


def weight_of(data: Data) -> Any:
    """The weight as a call of ours is given it: fp32 with its pieces."""
    assert data.weight is not None
    return epigemm.pack(data.weight) if data.weight.dtype == torch.float32 else data.weight


def ours(case: Case, data: Data, out: Tensor) -> Alternative:
    """The decorated function."""
    function, operands = decorated(_custom(case).name), _custom(case).given(data.parameters)
    x, weight = data.x, weight_of(data)

    def run() -> Tensor:
        result: Tensor = function(x, weight, **operands, out=out)
        return result

    return Alternative(OURS, "epigemm.epilogue", run, intermediate_roundings=_ROUNDINGS)


def _builtin(case: Case, data: Data, out: Tensor) -> Alternative:
    builtin, operands = _custom(case).builtin, _custom(case).given(data.parameters)
    assert builtin is not None
    x, weight, function = data.x, weight_of(data), builtin
    return Alternative(
        BUILTIN,
        "epigemm's built-in",
        lambda: function(x, weight, **operands, out=out),
        intermediate_roundings=_ROUNDINGS,
    )


def _quack(case: Case, data: Data, out: Tensor) -> Alternative:
    custom = _custom(case)
    if custom.quack != peers_quack.ADD:
        run = peers_quack.act(data, out, custom.quack)
    else:
        (matrix,) = (name for name, operand in custom.operands.items() if operand.kind == MATRIX)
        run = peers_quack.add(data, out, data.parameters.vectors[matrix])
    return Alternative(peers_quack.NAME, _QUACK_TITLE, run)


def _has_builtin(case: Case, device: torch.device) -> str:
    return "" if _custom(case).builtin else "no built-in computes it"


def _quack_fuses(case: Case, device: torch.device) -> str:
    if device.type != "cuda":
        return "needs a GPU"
    if case.setting.dtype_name == "fp32":
        return "16-bit only"
    return "" if _custom(case).quack else "no function of QuACK's computes it"


def custom_peers() -> list[Peer]:
    """Every alternative, ours first."""
    return [
        Peer(OURS, "epigemm.epilogue", ours),
        Peer(BUILTIN, "epigemm's built-in", _builtin, _has_builtin),
        *(peer for peer in all_peers() if peer.name in _SHARED),
        Peer(peers_quack.NAME, _QUACK_TITLE, _quack, _quack_fuses, peers_quack.PACKAGES, slow_on=("cuda",)),
    ]
