"""Notes the products of a module's call while it runs, each as if it were a plain call.

The call itself runs, because what a module does may depend on values. Before each operator, a dry run asks what epigemm
would launch, as `explain` of a function does. Packs are not made.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, overrides
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from epigemm import route
from epigemm.arguments.calls import FIND, KEEP, LinearCall
from epigemm.batch_statistics import Asked
from epigemm.epilogues.library import BIAS
from epigemm.explain import norms, pairs
from epigemm.explain.explanation import of_recorded
from epigemm.explain.products import BY_VMAP, Product, numbered
from epigemm.explain.recorder import Recorded, dtype_name, is_cast, operator_name

_PACK_USE = 7  # its position among the arguments of `linear`; in `linear_out` one later


class Place(NamedTuple):
    """The place of a call in the model."""

    layer: str
    why: str = ""  # for a node of a graph: why it is not fused
    function: str = ""  # for a fused node: its name in the report
    notes: tuple[str, ...] = ()  # for a fused node: the report's notes


class Listener(TorchFunctionMode):
    """Notes products while it is entered; see `current`.

    Attributes:
        notes: notes about all products.
        graphs: how many graphs of fused models ran.
        calls: how many calls of epigemm's operators there were.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.graphs = self.calls = 0
        self._products: list[Product] = []
        self._names = {id(module): name for name, module in reversed(list(root.named_modules()))}
        self._pending = Recorded()
        self._last: tuple[Recorded, Any] = (self._pending, None)
        self._node: Place | None = None
        self._model = ""  # the name of the fused model that runs
        self._asked: list[LinearCall] = []
        self._norms: list[Asked] = []
        self._noting = ExitStack()

    @property
    def products(self) -> list[Product]:
        """The noted products, with unique names."""
        return numbered(self._products)

    def __enter__(self) -> Listener:
        _current.listeners = (*_all(), self)
        self._asked = self._noting.enter_context(pairs.noting())
        self._norms = self._noting.enter_context(norms.noting())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *about: Any) -> None:
        super().__exit__(*about)  # type: ignore[no-untyped-call]
        _current.listeners = _all()[:-1]
        self._noting.close()

    @contextmanager
    def paused(self, model: nn.Module | None = None) -> Iterator[None]:
        """Remove this mode, so that a fused model's call runs as usual. Modes that were entered later stay.

        `model`: the model that is called. Nodes are named by its layers.
        """
        before, self._model = self._model, self._names.get(id(model), "")
        above = list(iter(_pop_mode, self))
        _push(above)
        try:
            yield
        finally:
            self._model = before
            above = [_pop_mode() for _ in above]
            _push([*above, self])

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Restore the mode inside `paused`, while a graph runs."""
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @contextmanager
    def at(self, place: Place) -> Iterator[None]:
        """Around a node of a graph."""
        layer = f"{self._model}.{place.layer}" if self._model else place.layer
        before, self._node = self._node, place._replace(layer=layer)
        try:
            yield
        finally:
            self._node = before

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = operator_name(func)
        if name == "fold_batch_norm":
            self._pending.note_fold(args)
        elif name is not None:
            return self._call(name, func, args)
        elif is_cast(func, args) and _module_of(sys._getframe(1)).startswith("epigemm."):
            self._pending.note_cast(*args)
        elif (take_apart := _PRODUCTS.get(func)) is not None:
            self._note_torchs(func, take_apart, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _call(self, name: str, func: Any, args: tuple[Any, ...]) -> Any:
        """A call of epigemm's operators."""
        recorded, self._pending = self._pending, Recorded()
        last, result = self._last
        if name.startswith("elementwise") and args[1] is result and _is_within_linear(sys._getframe(2)):
            # A folded BatchNorm in 16 bits: without this mode it would be one call.
            last.folds += recorded.folds
            self._products.pop()
            last.join(args)
            recorded = last
            recorded.folded_bias = last.folded_bias
        else:
            is_read = name.startswith("linear") and any(_share_memory(operand, result) for operand in args[4])
            if is_read and self._asked and self._asked[-1].weight is args[2]:
                # Both products of a pair. Without this mode they may be one call.
                self._products.pop()
                recorded.note_earlier(last)
                recorded.pair = self._asked.pop()
            recorded.call = (name, args)
            if name == "linear" and self._norms:
                recorded.norm = self._norms.pop()
            self.calls += 1
        self._note(recorded)
        if name in ("linear", "linear_out"):
            place = _PACK_USE + (name == "linear_out")
            args = (*args[:place], FIND if args[place] == KEEP else args[place], *args[place + 1 :])
        result = func(*args)
        self._last = (recorded, result)
        return result

    def _note(self, recorded: Recorded) -> None:
        place = self._place(sys._getframe(3))
        assert recorded.call is not None
        tensors = [each for each in tree_leaves(recorded.call[1]) if isinstance(each, Tensor)]
        wants_gradients = torch.is_grad_enabled()
        differentiates = wants_gradients and any(each.requires_grad for each in tensors)
        is_batched = torch._C._functorch.peek_interpreter_stack() is not None
        explanation = (
            None if is_batched else of_recorded(place.layer, recorded, differentiates, wants_gradients)
        )
        if recorded.norm is not None and explanation is not None:
            explanation = norms.explained(explanation, recorded, differentiates, wants_gradients)
        _, call = recorded.taken_apart()
        x = call.x
        size = (prod(x.shape[:-1]), x.shape[-1])
        if isinstance(call, LinearCall):
            size = (call.rows, *call.weight.shape)
        function = "linear" if call.epilogue is BIAS else call.epilogue.name.partition(".")[0]
        function = function if recorded.norm is None else norms.function_of(recorded.norm)
        named = (place.layer, place.function or function, size, dtype_name(x.dtype))
        why = _BATCHED if is_batched else ""
        about: Any = {"notes": place.notes, "otherwise": BY_VMAP}
        self._products.append(Product(*named, why=why, explanation=explanation, **about))

    def _note_torchs(
        self, func: Any, take_apart: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A product that PyTorch computes."""
        place = self._place(sys._getframe(2))
        size, batch, dtype = take_apart(*args, **kwargs)
        why = place.why or ("" if size else _OUT_OF_SIGHT)
        self._products.append(Product(place.layer, func.__name__, size, dtype, batch, why, notes=place.notes))

    def _place(self, frame: FrameType | None) -> Place:
        """The node that is running, or the innermost module whose method makes the call."""
        if self._node is not None:
            return self._node
        while frame is not None:
            name = self._names.get(id(frame.f_locals.get("self")))
            if name is not None:
                return Place(name or type(frame.f_locals["self"]).__name__)
            frame = frame.f_back
        return Place("")


_pop_mode: Callable[[], Any] = overrides._pop_mode
_push_mode: Callable[[Any], None] = overrides._push_mode


def _push(modes: list[Any]) -> None:
    """Restore modes, the last one first."""
    for mode in reversed(modes):
        _push_mode(mode)


_current = threading.local()


def _all() -> tuple[Listener, ...]:
    found: tuple[Listener, ...] = getattr(_current, "listeners", ())
    return found


def current() -> Listener | None:
    """The listener that this thread has entered, if there is one."""
    found = _all()
    return found[-1] if found else None


def _share_memory(operand: Tensor, result: Any) -> bool:
    """Whether an operand is the result of a call, or a view of it in another shape."""
    try:
        return (
            isinstance(result, Tensor) and operand.untyped_storage()._cdata == result.untyped_storage()._cdata
        )
    except NotImplementedError:  # it is inside a transform of torch.func, whose tensors have no memory
        return False


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_within_linear(frame: FrameType | None) -> bool:
    """Whether the calls come from one `route.linear`, not from a caller that calls two functions."""
    while frame is not None and _module_of(frame).startswith(("torch.", "epigemm.")):
        if frame.f_code is route.linear.__code__:
            return True
        frame = frame.f_back
    return False


# --- products of PyTorch's ---------------------------------------------------------------------------------------

_BATCHED = "vmap makes one call for all of its elements, of more rows; the size is that of one element"
_OUT_OF_SIGHT = "its products are inside of one function of PyTorch's"
_Sized = tuple[tuple[int, ...], int, str]


def _of_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Sized:
    rows, columns = prod(input.shape[:-1]), weight.shape[0] if weight.dim() == 2 else 1
    return (rows, columns, input.shape[-1]), 1, dtype_name(input.dtype)


def _of_matmul(input: Tensor, other: Tensor, **_: Any) -> _Sized:
    k, columns = input.shape[-1], other.shape[-1] if other.dim() > 1 else 1
    if other.dim() <= 2:
        return (prod(input.shape[:-1]), columns, k), 1, dtype_name(input.dtype)
    rows = input.shape[-2] if input.dim() > 1 else 1
    batch = prod(torch.broadcast_shapes(input.shape[:-2], other.shape[:-2]))  # type: ignore[no-untyped-call]
    return (rows, columns, k), batch, dtype_name(input.dtype)


def _swapped(input: Tensor, other: Tensor) -> _Sized:
    return _of_matmul(other, input)


def _added(_: Any, first: Tensor, second: Tensor, **__: Any) -> _Sized:
    return _of_matmul(first, second)


def _unknown(*args: Any, **kwargs: Any) -> _Sized:
    dtype = next(
        (dtype_name(each.dtype) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)), ""
    )
    return (), 1, dtype


_PRODUCTS: dict[Any, Callable[..., _Sized]] = {
    torch.nn.functional.linear: _of_linear,
    torch.nn.functional.bilinear: _unknown,
    torch.nn.functional.multi_head_attention_forward: _unknown,  # its products are inside one operator
    torch.einsum: _unknown,
    torch.tensordot: _unknown,
    **dict.fromkeys(
        (torch.inner, torch.chain_matmul, torch.linalg.multi_dot, torch.addbmm, torch.addmv), _unknown
    ),
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _unknown),
    **dict.fromkeys((torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell), _unknown),
    torch.matmul: _of_matmul,
    torch.linalg.matmul: _of_matmul,
    torch.mm: _of_matmul,
    torch.bmm: _of_matmul,
    torch.mv: _of_matmul,
    torch.addmm: _added,
    torch.baddbmm: _added,
    Tensor.matmul: _of_matmul,
    Tensor.__matmul__: _of_matmul,
    Tensor.__rmatmul__: _swapped,
    Tensor.mm: _of_matmul,
    Tensor.bmm: _of_matmul,
    Tensor.mv: _of_matmul,
    Tensor.addmm: _added,
    Tensor.baddbmm: _added,
}
