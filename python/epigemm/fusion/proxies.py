"""Stand-ins for tensors, which write down what is done to them and refuse every question about their values."""

from __future__ import annotations

import dis
import math
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx
from torch.fx.proxy import TraceError
from torch.overrides import TorchFunctionMode

from epigemm.fusion import allowed
from epigemm.fusion.operations import AUGMENTED

_TRANSPARENT = (str(Path(fx.__file__).parent), str(Path(torch.overrides.__file__)), __file__)
# Attributes of tensors that are never None.
_ATTRIBUTES = {
    *("T", "mT", "H", "mH", "shape", "dtype", "device", "layout", "ndim", "data", "real", "imag"),
    *("requires_grad", "is_cuda", "is_leaf", "itemsize", "nbytes"),
}
_MAYBE_NONE = "epigemm_maybe_none"
_RETURN_NOTHING = {"backward", "retain_grad", "storage_type", "__call__"}

Refuse = Callable[[str], TraceError]


class Stand(fx.Proxy):
    """A stand-in for a tensor, or for anything that is made of one."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # isinstance() comes here. In fx it must see a Proxy; in a forward the answer would be baked into the graph.
        if _asked_by_fx():
            return Stand
        raise _refuse(self, "forward asks for the type of a tensor")

    def __getattr__(self, name: str) -> Any:
        return _Attribute(self, name)

    def __iter__(self) -> Iterator[Any]:
        count = _unpacked_parts(sys._getframe(1))
        if count is None:
            raise _refuse(self, "forward iterates over a tensor")
        parts = cast(Any, self.tracer.create_proxy("call_function", unpacked, (self, count), {}))
        return iter([parts[index] for index in range(count)])

    def __setitem__(self, key: Any, value: Any) -> None:
        raise _refuse(self, "forward assigns items of a tensor")

    def __delitem__(self, key: Any) -> None:
        raise _refuse(self, "forward deletes items of a tensor")

    def __bool__(self) -> bool:
        raise _refuse(self, "forward decides by a tensor's value; proxies cannot be used in control flow")

    def __len__(self) -> int:
        raise _refuse(self, "forward asks for the length of a tensor")

    def __repr__(self) -> str:
        return self._text()

    def __str__(self) -> str:
        return self._text()

    def __format__(self, spec: str) -> str:
        raise _refuse(self, "forward makes text of a tensor")

    def _text(self) -> str:
        if not _asked_by_fx(3):
            raise _refuse(self, "forward makes text of a tensor")
        return f"Proxy({self.node.name})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A call of what it stands for."""
        return self.tracer.create_proxy("call_method", "__call__", (self, *args), kwargs)

    def __hash__(self) -> int:
        # A tensor is the key that it is; a number that is computed from one would be looked up by its value.
        if not is_given(self) and not _asked_by_fx():
            raise _refuse(self, "forward looks up something that is computed from a tensor")
        return id(self)


def _augmented(operation: Callable[[Any, Any], Any]) -> Callable[[Stand, Any], Any]:
    def write(self: Stand, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operation, (self, other), {})

    return write


# Without them Python takes `a += b` for `a = a + b`, which leaves all that shares memory with `a` as it was. That is
# right for `@=`, which tensors do not do in place.
for _name in AUGMENTED:
    if hasattr(torch.Tensor, f"__{_name}__"):
        setattr(Stand, f"__{_name}__", _augmented(getattr(operator, _name)))


class _Attribute(Stand):
    """An attribute that was read; a node, unless it is a method and called right away."""

    def __init__(self, root: Stand, name: str) -> None:
        self.root, self.attribute, self.tracer = root, name, root.tracer
        self._node: fx.Node | None = None
        if callable(getattr(torch.Tensor, name, None)):
            return
        if name not in _ATTRIBUTES:
            note: Callable[[str], None] = root.tracer.note_maybe_none  # type: ignore[attr-defined]
            note(f".{name}")
        if not allowed.is_dunder(name):
            self._node = self._read()  # now: what is done to the tensor later may change it

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        """The node that reads it."""
        if self._node is None:
            self._node = self._read()
        return self._node

    def _read(self) -> fx.Node:
        return self.tracer.create_proxy("call_function", getattr, (self.root, self.attribute), {}).node

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._node is not None and not self._node.users:  # it was read to be called
            self._node.graph.erase_node(self._node)
            self._node = None
        return self.tracer.create_proxy("call_method", self.attribute, (self.root, *args), kwargs)


def unpacked(value: Any, count: int) -> tuple[Any, ...]:
    """The parts of `a, b = value`; ValueError where it has another number of them."""
    parts = tuple(value)
    if len(parts) < count:
        raise ValueError(f"not enough values to unpack (expected {count}, got {len(parts)})")
    if len(parts) > count:
        raise ValueError(f"too many values to unpack (expected {count})")
    return parts


def is_stand(value: Any) -> bool:
    """Whether a value stands for a tensor; isinstance() would be taken for a question of the forward's."""
    return issubclass(type(value), Stand)


def is_given(stand: Any) -> bool:
    """Whether a stand-in is for an input or a parameter, which are tensors at every call."""
    return stand.node.op in ("placeholder", "get_attr")


def may_be_none(node: fx.Node) -> bool:
    """Whether the value of a node might be None."""
    return bool(node.meta.get(_MAYBE_NONE))


def mark(node: fx.Node, loud_module: bool) -> None:
    """Remember whether a node's value may be None: results of people's modules, and parts of those."""
    source = node.args[0] if node.args else None
    inherits = isinstance(source, fx.Node) and bool(source.meta.get(_MAYBE_NONE))
    maybe = loud_module
    if node.op == "call_method":
        maybe = inherits or str(node.target) in _RETURN_NOTHING
    elif node.target is getattr:
        maybe = inherits or node.args[1] not in _ATTRIBUTES
    elif node.target is operator.getitem or node.target is unpacked:
        maybe = inherits
    elif node.op == "call_function":
        maybe = getattr(node.target, "__name__", "") == "multi_head_attention_forward"
    if maybe:
        node.meta[_MAYBE_NONE] = True


def _refuse(stand: Stand, reason: str) -> TraceError:
    refuse: Refuse = stand.tracer.refuse  # type: ignore[attr-defined]
    return refuse(reason)


def _asked_by_fx(depth: int = 2) -> bool:
    return sys._getframe(depth).f_code.co_filename.startswith(_TRANSPARENT)


def _unpacked_parts(frame: Any) -> int | None:
    """How many names the instruction that a frame is at unpacks to; None: it is another one."""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset == frame.f_lasti:
            return instruction.arg if instruction.opname == "UNPACK_SEQUENCE" else None
    return None


class OnlyStandIns(TorchFunctionMode):
    """Refuses every function of torch that is called with no stand-in: its result would be baked into the graph."""

    def __init__(self, refuse: Refuse) -> None:
        super().__init__()
        self._refuse = refuse

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(issubclass(kind, fx.Proxy) for kind in types):
            name = getattr(func, "__name__", repr(func))
            raise self._refuse(f"forward calls {name} on a tensor that depends on none of its inputs")
        return func(*args, **(kwargs or {}))


@contextmanager
def recorded_math(tracer: fx.Tracer) -> Iterator[None]:
    """Makes `math.sqrt(x.shape[0])` a node; the functions of math would ask the stand-in for its value."""
    originals = {name: value for name, value in vars(math).items() if callable(value) and name[0] != "_"}

    def recorder(function: Any) -> Any:
        @wraps(function)
        def call(*args: Any) -> Any:
            if any(is_stand(value) for value in args):
                return tracer.create_proxy("call_function", function, args, {})
            return function(*args)

        call._epigemm_original = function  # type: ignore[attr-defined]
        return call

    try:
        for name, function in originals.items():
            setattr(math, name, recorder(function))
        yield
    finally:
        for name, function in originals.items():
            setattr(math, name, function)
