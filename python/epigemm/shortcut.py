"""Calls into a new tensor on a GPU, by the shortest road that is known for their like.

How a call runs is decided by its sizes, types and settings, and deciding takes the host longer than the launches
do. So what came of a call is remembered: one kernel of torch's own (cuBLAS adds a bias, and a ReLU behind it, by
itself), or kernels on fp16 pieces with a plan that dispatch gave. Calls alike are then made without asking again.

Everything else decides at every call: 16-bit kernels do that in C++, in a microsecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epigemm import checks, execution, packs, plans, split, torch_gemm
from epigemm import precision as _precision
from epigemm.epilogues import BIAS, BIAS_RELU, Epilogue

_REMEMBERED = 4096  # calls; when there are more, all are judged again
_EPILOGUES = (BIAS, BIAS_RELU)
_TMA_BYTES = 16
_STRIDED = torch.strided
_addmm_activation = torch._addmm_activation
_linear = torch.nn.functional.linear

SECOND_PATH = "second path"  # torch's GEMM, and one elementwise kernel

Key = tuple[Any, ...]


class Torchs:
    """Calls that are torch's: one kernel, which dispatch expects to be the fastest."""

    def run(
        self,
        epilogue: Epilogue,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        operands: Sequence[Tensor],
        scalars: Sequence[float],
        precision: str,
        pack_use: str,
    ) -> Tensor | None:
        """The result; None where the call is not of those after all."""
        rows = x if x.dim() == 2 else x.reshape(-1, weight.shape[1])
        if epilogue is BIAS:
            flat = _linear(rows, weight, bias)
        elif bias is not None:
            flat = _addmm_activation(bias, rows, weight.t())
        else:
            return None
        return flat if x.dim() == 2 else torch_gemm.unflattened(flat, x)


class Form(NamedTuple):
    """How calls on fp16 pieces run, with a kept pack of the weight or without.

    Attributes:
        plan: the GEMM's, as the native operator takes it.
        workspace: bytes.
    """

    plan: tuple[int, ...]
    workspace: int


class OnPieces(NamedTuple):
    """Calls that run on fp16 pieces, on matrices whose result needs no padding.

    Attributes:
        arithmetic: "split" or "scaled".
        pieces: 2 or 1.
        shape: M, N and K.
        packed: with a kept pack; None: that is another road.
        unpacked: with a weight that is split for the call; None: that is another road.
        instead: what takes the calls without a form: `SECOND_PATH`, or one fused kernel in this arithmetic; empty: the
            long road finds out.
    """

    arithmetic: str
    pieces: int
    shape: tuple[int, int, int]
    packed: Form | None
    unpacked: Form | None
    instead: str = ""

    def run(
        self,
        epilogue: Epilogue,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        operands: Sequence[Tensor],
        scalars: Sequence[float],
        precision: str,
        pack_use: str,
    ) -> Tensor | None:
        """The result; None where a pack has to be made, where memory is short, or the road is another one."""
        pack, form = None, self.unpacked
        if pack_use != packs.NONE:
            pack = packs.find(weight, self.pieces)
            if pack is not None:
                form = self.packed
                if not pack.is_current(weight) or packs.capturing(weight.device):
                    return None
            elif pack_use == packs.KEEP and not weight.is_inference():
                form = None
                if self.packed is not None:
                    return None
        if split.has_been_short():
            return None
        if form is None:
            return self._run_instead(epilogue, x, weight, bias, operands, scalars, precision)
        try:
            out = torch_gemm.new_output(x, weight)
            workspace = torch.empty(form.workspace, dtype=torch.uint8, device=x.device)
        except torch.OutOfMemoryError:
            return None  # the long road knows what to do without
        m, n, k = self.shape
        flat = x.dim() == 2
        split.launch(
            epilogue.name,
            x if flat else x.view(m, k),
            weight,
            None if pack is None else pack.read(),
            workspace,
            bias,
            operands or None,
            scalars or None,
            self.arithmetic,
            form.plan,
            out if flat else out.view(m, n),
        )
        return out

    def _run_instead(
        self,
        epilogue: Epilogue,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        operands: Sequence[Tensor],
        scalars: Sequence[float],
        precision: str,
    ) -> Tensor | None:
        if not self.instead:
            return None
        out = torch_gemm.new_output(x, weight)
        call = (epilogue, x, weight, bias, operands, scalars)
        if self.instead == SECOND_PATH:
            return execution.second_path(*call, precision, out)
        return out if execution.fused_once(*call, self.instead, out) else None


_TORCHS = Torchs()
_answers: dict[Key, Torchs | OnPieces | None] = {}
plans.on_forget(_answers.clear)


def linear(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    precision: str,
    pack_use: str,
    *,
    strict: bool = False,
) -> Tensor:
    """D = epilogue(x @ weight.T) on a GPU, where nobody has to see the call. Arguments as of `execution`'s.

    The arguments are checked by the operators. Only where they do not fit are they checked in Python, which takes
    longer, but says more.
    """
    key = None
    try:
        if not strict:
            key = key_of(epilogue, x, weight, bias, operands, precision, pack_use)
            answer = None if key is None else _answers.get(key)
            if answer is not None:
                result = answer.run(epilogue, x, weight, bias, operands, scalars, precision, pack_use)
                if result is not None:
                    return result
        call = (epilogue, x, weight, bias, operands, scalars, precision)
        if x.dtype is not torch.float32:
            result = _linear_once(*call, pack_use, strict)
            remember(key, *call, result)
            return result
    except (RuntimeError, IndexError):
        checks.linear(epilogue, x, weight, bias, operands, scalars, precision, None)
        raise
    checks.linear(*call, None)
    result = execution.linear_forward(*call, None, pack_use=pack_use, strict=strict)
    remember(key, *call, result)
    return result


def _linear_once(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    precision: str,
    pack_use: str,
    strict: bool,
) -> Tensor:
    """A call in no choice of arithmetics: the operator sees for itself whether the arguments fit."""
    call = (epilogue, x, weight, bias, operands, scalars)
    out = torch_gemm.new_output(x, weight)
    if execution.fused_once(*call, _precision.IEEE, out):
        return out
    return execution.unfused(*call, precision, out, pack_use, strict=strict)


def key_of(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    precision: str,
    pack_use: str,
) -> Key | None:
    """All that decides how a call runs, but for the state of the weight's pack; None where nothing is remembered."""
    dtype, setting, alignment = x.dtype, "", 0
    if dtype is torch.float32:
        if not x.is_cuda:
            return None
        setting = _precision.torch_setting("cuda")
        alignment = (x.data_ptr() | weight.data_ptr()) % _TMA_BYTES
    elif bias is None or epilogue not in _EPILOGUES or not x.is_cuda:
        return None
    layouts: tuple[Any, ...] = (x.layout, weight.layout)
    if bias is not None:
        layouts += (bias.layout, bias.shape, bias.is_contiguous())
    for operand in operands:
        if not operand.is_contiguous():
            return None
    return (
        epilogue.name,
        dtype,
        x.shape,
        weight.shape,
        layouts,
        x.stride(),
        weight.stride(),
        alignment,
        precision,
        setting,
        pack_use,
        x.get_device(),
    )


def answer_for(key: Key | None) -> Torchs | OnPieces | None:
    """What is remembered of such calls."""
    return None if key is None else _answers.get(key)


def remember(
    key: Key | None,
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    precision: str,
    out: Tensor,
) -> None:
    """Judge a call that has just been answered, unless it was judged before."""
    if key is None or key in _answers:
        return
    if len(_answers) >= _REMEMBERED:
        _answers.clear()
    if bias is not None and _is_torchs(epilogue, x, weight, bias, precision, out):
        _answers[key] = _TORCHS
    else:
        _answers[key] = _on_pieces(epilogue, x, weight, bias, operands, scalars, precision, out)


def _is_torchs(
    epilogue: Epilogue, x: Tensor, weight: Tensor, bias: Tensor, precision: str, out: Tensor
) -> bool:
    """Whether torch takes one kernel and dispatch expects it to be the faster one, at these sizes."""
    n, k = weight.shape
    m = out.numel() // n if n else 0
    strided = x.layout is _STRIDED and weight.layout is _STRIDED and bias.layout is _STRIDED
    one_kernel = torch_gemm.adds_bias(epilogue, x, weight, bias, precision) or torch_gemm.adds_relu(
        epilogue, x, weight, bias, precision, out
    )
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


def _on_pieces(
    epilogue: Epilogue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    scalars: Sequence[float],
    precision: str,
    out: Tensor,
) -> OnPieces | None:
    """How calls at these sizes run on fp16 pieces, where that is the first thing they are tried on."""
    vectors = [tensor for tensor in (bias, *operands) if tensor is not None]
    if (
        x.dtype is not torch.float32
        or not all(tensor.layout is _STRIDED for tensor in (x, weight, *vectors))
        or not all(vector.is_contiguous() for vector in vectors)
        or not (x.dim() == 2 or x.is_contiguous())
        or not plans.has_gpu_kernels(x)
        or not out.numel()
        or not x.numel()
    ):
        return None
    roads = execution.linear_roads(x, precision)
    arithmetic = roads.fused[0]
    if arithmetic not in packs.PIECES:
        return None
    n, k = weight.shape
    m, pieces = out.numel() // n, packs.PIECES[arithmetic]
    sizes = {True: packs.pack_bytes(m, k, pieces)}
    sizes[False] = sizes[True] + packs.pack_bytes(n, k, pieces)
    forms: dict[bool, Form | None] = {}
    for packed, workspace in sizes.items():
        problem = (epilogue.name, m, n, k, packed, arithmetic, roads.tf32_allowed)
        plan = plans.split_plan(*problem, x.get_device(), bias is not None)
        why_not, padded = split.why_not_here(plan, epilogue, x, weight, (bias, *operands), arithmetic, out)
        if padded and not why_not:
            return None  # the long road copies the result
        forms[packed] = None if why_not else Form(plan.numbers, workspace)
    instead = ""
    if None in forms.values():
        others = [other for other in roads.fused[1:] if other != _precision.IEEE]
        if not others:
            instead = SECOND_PATH
        elif others == [_precision.TF32]:
            answer = execution.fused_plan(epilogue, x, weight, bias, operands, scalars, _precision.TF32, out)
            instead = _precision.TF32 if answer["fused"] else SECOND_PATH
    if not instead and not any(forms.values()):
        return None
    return OnPieces(arithmetic, pieces, (m, n, k), forms[True], forms[False], instead)
