"""`epigemm.precompile`: link what calls will take, before the first of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from epigemm import checks, decisions, kernels
from epigemm.calls import FIND, LinearCall
from epigemm.epilogues import MATRIX, PER_COLUMN, PER_ROW, SCALAR
from epigemm.linked import LinkedEpilogue
from epigemm.precision import DEFAULT
from epigemm.user_epilogue import UserEpilogue


def precompile(
    function: UserEpilogue,
    shapes: Iterable[tuple[int, int, int]],
    *,
    dtype: torch.dtype = torch.bfloat16,
    precision: str | None = None,
    device: torch.device | str | None = None,
) -> list[str]:
    """Link an epilogue into the kernels that calls of these sizes take, so that no call waits for that.

    For servers that start, and before a CUDA graph is captured, where nothing is compiled. Kernels stay on disk; see
    `epigemm.export_cache` for other machines.

    Args:
        function: what `epigemm.epilogue` made.
        shapes: sizes of the products, (M, N, K) each.
        dtype: of x, the weight and the operands.
        precision: of fp32 products, as for `epigemm.linear`; with a packed weight and without one.
        device: the GPU; None: the current one.

    Returns:
        The names of the kernels that were linked now.

    Raises:
        TypeError: `function` is no epilogue of the user's.
        RuntimeError: there is no GPU with epigemm's kernels, or an epilogue cannot be linked; the message says why.

    Example:
        >>> epigemm.precompile(swish_clamp, [(1, 4096, 4096), (2048, 4096, 4096)])  # doctest: +SKIP
    """
    if not isinstance(function, UserEpilogue):
        raise TypeError(
            f"function: got {type(function).__name__}; accepted is what epigemm.epilogue makes of a function"
        )
    place = torch.device("cuda" if device is None else device)
    linked: list[str] = []
    for m, n, k in shapes:
        call = _call(
            function, m, n, k, dtype, DEFAULT if precision is None else checks.precision(precision), place
        )
        if not kernels.has_native(call.x) or not call.x.is_cuda:
            raise RuntimeError(
                f"device: got {place}, where no kernel of epigemm's runs ({kernels.why_none(call.x) or 'it is no GPU'})"
            )
        assert isinstance(call.epilogue, LinkedEpilogue)
        for missing in _missing(call):
            if reason := call.epilogue.link(missing, call.x.device):
                raise RuntimeError(f"{function.traced.name}: {reason}")
            linked += missing.split(",")
    return linked


def _call(
    function: UserEpilogue, m: int, n: int, k: int, dtype: torch.dtype, precision: str, device: torch.device
) -> LinearCall:
    """A call of these sizes. Its tensors hold anything: it is decided on, not run."""
    x = torch.empty((m, k), dtype=dtype, device=device)
    shapes = {PER_COLUMN: (n,), PER_ROW: (m, 1), MATRIX: (m, n)}
    operands: list[Tensor] = []
    scalars: list[float] = []
    for spec in function.traced.operands:
        if spec.kind == SCALAR:
            scalars.append(0.0)
        else:
            operands.append(torch.empty(shapes[spec.kind], dtype=dtype, device=device))
    epilogue = function.linked([spec.kind == SCALAR for spec in function.traced.operands])
    weight = torch.empty((n, k), dtype=dtype, device=device)
    out = torch.empty((m, n), dtype=dtype, device=device)
    return LinearCall(epilogue, x, weight, None, operands, scalars, precision, FIND, out=out)


def _missing(call: LinearCall) -> Iterable[str]:
    """The names of the kernels to link, between commas, each time those that are still missing."""
    code = decisions.fp32_code(call)
    packed = sum(decisions.NO_COST << shift for shift in decisions.SHIFTS.values())
    for slices in (0, packed) if call.x.dtype == torch.float32 else (0,):
        if missing := decisions.missing_kernels(call, code, slices):
            yield missing
