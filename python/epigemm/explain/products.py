"""PyTorch's own matrix products in a module's call: their sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from epigemm.explain.answer import Product
from epigemm.explain.explanation import dtype_name

_Size = tuple[tuple[int, ...], int]  # M, N and K, and the number of products


def _of_matmul(input: Tensor, other: Tensor, *_: Any) -> _Size:
    k, columns = input.shape[-1], other.shape[-1] if other.dim() > 1 else 1
    if other.dim() <= 2:
        return (prod(input.shape[:-1]), columns, k), 1
    rows = input.shape[-2] if input.dim() > 1 else 1
    batch = prod(torch.broadcast_shapes(input.shape[:-2], other.shape[:-2]))  # type: ignore[no-untyped-call]
    return (rows, columns, k), batch


SIZES: dict[Any, Callable[..., _Size] | None] = {
    F.linear: lambda input, weight, *_: _of_matmul(input, weight.t()),
    **dict.fromkeys((torch.matmul, torch.linalg.matmul, torch.mm, torch.bmm, torch.mv), _of_matmul),
    **dict.fromkeys((Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm, Tensor.mv), _of_matmul),
    Tensor.__rmatmul__: lambda input, other: _of_matmul(other, input),
    **dict.fromkeys(
        (torch.addmm, torch.baddbmm, Tensor.addmm, Tensor.baddbmm),
        lambda _, *factors: _of_matmul(*factors),
    ),
    **dict.fromkeys((F.bilinear, torch.einsum, torch.tensordot, torch.inner, torch.chain_matmul)),
    **dict.fromkeys((torch.linalg.multi_dot, torch.addbmm, torch.addmv)),
    **dict.fromkeys((F.multi_head_attention_forward, torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)),
    **dict.fromkeys((torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)),
}
"""PyTorch's functions that multiply matrices, and their sizes; None: its products are inside of one operator."""
_NAMES = ("input", "mat1", "batch1", "weight", "other", "mat2", "batch2", "vec")
"""Of what these functions multiply, in their order."""


def of_torch(place: Product, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product:
    """A product by one of these functions; `place`: what is known of it by where it is."""
    named = [kwargs[name] for name in _NAMES if name in kwargs]
    size_of = SIZES[function]
    size, batch = size_of(*args, *named) if size_of else ((), 1)
    dtype = next(each.dtype for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
    why = place.why or ("" if size else "its products are inside of one function of PyTorch's")
    about: Any = {"function": function.__name__, "size": size, "dtype": dtype_name(dtype)}
    return replace(place, **about, batch=batch, why=why)
