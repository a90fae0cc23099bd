"""The products of a module's call, each with its layer's name.

The call runs, because what a module does may depend on values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from epigemm.arguments.calls import ElementwiseCall, LinearCall
from epigemm.explain.answer import Explanation, Product, numbered
from epigemm.explain.explanation import dtype_name
from epigemm.explain.log import Call, CallLog, Launch, explained

_OUT_OF_SIGHT = "its products are inside of one function of PyTorch's"
_Size = tuple[tuple[int, ...], int]  # M, N and K, and the number of products


def _of_linear(input: Tensor, weight: Tensor, *_: Any) -> _Size:
    rows, columns = prod(input.shape[:-1]), weight.shape[0] if weight.dim() == 2 else 1
    return (rows, columns, input.shape[-1]), 1


def _of_matmul(input: Tensor, other: Tensor, *_: Any) -> _Size:
    k, columns = input.shape[-1], other.shape[-1] if other.dim() > 1 else 1
    if other.dim() <= 2:
        return (prod(input.shape[:-1]), columns, k), 1
    rows = input.shape[-2] if input.dim() > 1 else 1
    batch = prod(torch.broadcast_shapes(input.shape[:-2], other.shape[:-2]))  # type: ignore[no-untyped-call]
    return (rows, columns, k), batch


def _unknown(*_: Any) -> _Size:
    return (), 1


_PRODUCTS: dict[Any, Callable[..., _Size]] = {
    F.linear: _of_linear,
    **dict.fromkeys((torch.matmul, torch.linalg.matmul, torch.mm, torch.bmm, torch.mv), _of_matmul),
    **dict.fromkeys((Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm, Tensor.mv), _of_matmul),
    Tensor.__rmatmul__: lambda input, other: _of_matmul(other, input),
    **dict.fromkeys(
        (torch.addmm, torch.baddbmm, Tensor.addmm, Tensor.baddbmm),
        lambda _, *factors: _of_matmul(*factors),
    ),
    **dict.fromkeys((F.bilinear, torch.einsum, torch.tensordot, torch.inner, torch.chain_matmul), _unknown),
    **dict.fromkeys((torch.linalg.multi_dot, torch.addbmm, torch.addmv), _unknown),
    F.multi_head_attention_forward: _unknown,  # its products are inside one operator
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _unknown),
    **dict.fromkeys((torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell), _unknown),
}
_NAMES = ("input", "mat1", "batch1", "weight", "other", "mat2", "batch2", "vec")
"""Of what these functions multiply, in their order."""


class Listener(CallLog):
    """The calls of a module, and PyTorch's own products in it; open while it is entered.

    Attributes:
        notes: notes about all products.
        graphs: how many graphs of fused models ran.
    """

    noted = _PRODUCTS

    def __init__(self, root: nn.Module) -> None:
        super().__init__(runs=True)
        self.notes: list[str] = []
        self.graphs = 0
        named: list[tuple[str, nn.Module]] = [*root.named_modules()]
        self._names = {id(module): name for name, module in reversed(named)}
        self._node: Product | None = None

    @property
    def products(self) -> list[Product]:
        """The products, with unique names."""
        found, before = list[Product](), list[Launch]()
        for each in self.told:
            if isinstance(each, Launch):
                before.append(each)
            else:
                found.append(each if isinstance(each, Product) else _product(each, before))
                before = before if isinstance(each, Product) else []
        return numbered(found)

    def name_of(self, module: nn.Module) -> str:
        """As in `named_modules`; empty for the root, and for what is not in it."""
        return self._names.get(id(module), "")

    @contextmanager
    def at(self, node: Product) -> Iterator[None]:
        """Around a node of a graph. `node`: what is known of its product."""
        before, self._node = self._node, node
        try:
            yield
        finally:
            self._node = before

    def _note_product(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        place, named = self._place(sys._getframe(2)), [kwargs[name] for name in _NAMES if name in kwargs]
        size, batch = _PRODUCTS[function](*args, *named)
        dtype = next(each.dtype for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
        why = place.why or ("" if size else _OUT_OF_SIGHT)
        about: Any = {"function": function.__name__, "size": size, "dtype": dtype_name(dtype)}
        self.told.append(replace(place, **about, batch=batch, why=why))

    def _add(self, call: LinearCall | ElementwiseCall, found: Explanation, function: str = "") -> Call:
        told = super()._add(call, found, function)
        told.place = self._place(sys._getframe(1))
        return told

    def _place(self, frame: FrameType | None) -> Product:
        """The node that is running, or the innermost module whose method makes the call."""
        if self._node is not None:
            return self._node
        while frame is not None:
            name = self._names.get(id(frame.f_locals.get("self")))
            if name is not None:
                return Product(name or type(frame.f_locals["self"]).__name__)
            frame = frame.f_back
        return Product("")


def _product(told: Call, before: Sequence[Launch]) -> Product:
    """A call; `before`: what is launched ahead of it."""
    x, place = told.call.x, told.place
    size = (prod(x.shape[:-1]), x.shape[-1])
    if isinstance(told.call, LinearCall):
        size = (told.call.rows, *told.call.weight.shape)
    about: Any = {"function": place.function or told.function, "size": size, "dtype": dtype_name(x.dtype)}
    return replace(place, **about, why="", explanation=explained(place.name, [*before, told]))
