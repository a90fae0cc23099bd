"""Calls that one kernel of torch's own answers faster than any of ours: remembered, and then made without asking again.

cuBLAS adds a bias, and a ReLU behind it, by itself. A small call that ends there should not pay the host's time for a
look at the fused kernels first: that takes as long as the call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epigemm import execution, packs, plans
from epigemm import precision as _precision
from epigemm.epilogues import BIAS, BIAS_RELU, Epilogue

_REMEMBERED = 4096  # calls; when there are more, all are judged again
_EPILOGUES = (BIAS, BIAS_RELU)
_STRIDED = torch.strided
_addmm_activation = torch._addmm_activation
_linear = torch.nn.functional.linear

Key = tuple[Any, ...]
_verdicts: dict[Key, bool] = {}
plans.on_forget(_verdicts.clear)


def key_of(
    epilogue: Epilogue, x: Tensor, weight: Tensor, bias: Tensor | None, precision: str, pack_use: str
) -> Key | None:
    """All that decides whether a call is torch's; None for one that torch does not answer in one kernel.

    A result for the same key is right whatever the tensors' strides are.
    """
    if bias is None or epilogue not in _EPILOGUES or not x.is_cuda or x.dim() != 2:
        return None
    dtype, setting = x.dtype, ""
    if dtype is torch.float32:
        setting = _precision.torch_setting("cuda")
    return (
        epilogue.name,
        dtype,
        x.shape,
        weight.shape,
        bias.shape,
        bias.is_contiguous(),
        (x.layout, weight.layout, bias.layout),
        precision,
        setting,
        pack_use,
        x.get_device(),
    )


def answers(key: Key | None) -> bool:
    """Whether the call is known to be torch's."""
    return _verdicts.get(key, False) if key is not None else False


def run(epilogue: Epilogue, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The call by torch's kernel."""
    return _linear(x, weight, bias) if epilogue is BIAS else _addmm_activation(bias, x, weight.t())


def remember(
    key: Key | None,
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    precision: str,
    out: Tensor,
) -> None:
    """Judge a call that has just been answered, unless it was judged before."""
    if key is None or key in _verdicts:
        return
    if len(_verdicts) >= _REMEMBERED:
        _verdicts.clear()
    _verdicts[key] = bias is not None and _is_torchs(epilogue, x, weight, bias, precision, out)


def _is_torchs(
    epilogue: Epilogue, x: Tensor, weight: Tensor, bias: Tensor, precision: str, out: Tensor
) -> bool:
    """Whether torch takes one kernel and dispatch expects it to be the faster one, at these sizes."""
    (m, k), n = x.shape, weight.shape[0]
    strided = x.layout is _STRIDED and weight.layout is _STRIDED and bias.layout is _STRIDED
    one_kernel = epilogue is BIAS or execution.gemm_adds_relu(epilogue, x, weight, bias, precision, out)
    if not strided or not one_kernel or not plans.has_gpu_kernels(x):
        return False
    if x.dtype is torch.float32 and _precision.needs_override(precision, "cuda"):
        return False
    roads = execution.linear_roads(x, precision)
    for arithmetic in roads.fused:
        if arithmetic in packs.PIECES:
            for packed in (True, False):
                problem = (
                    epilogue.name,
                    m,
                    n,
                    k,
                    packed,
                    arithmetic,
                    roads.tf32_allowed,
                    x.get_device(),
                    True,
                )
                if not plans.split_plan(*problem).why_not:
                    return False
        elif arithmetic != _precision.IEEE or x.dtype is not torch.float32:
            plan = execution.fused_plan(epilogue, x, weight, bias, (), (), arithmetic, out)
            if plan["fused"] or not plan["candidates"]:
                return False
    return True
