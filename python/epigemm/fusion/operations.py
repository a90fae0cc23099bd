"""What the nodes of a graph compute, whatever their spelling: modules, functions, operators, methods.

The tables here are all that fusion knows about spellings. A node that is in none of them is left alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

RELU, SIGMOID, IDENTITY = "relu", "sigmoid", "identity"
ADD, SUB, MUL, DIV = "add", "sub", "mul", "div"
BATCH_NORM = "batch_norm"
LINEAR, MATMUL, MM, ADDMM = "linear", "matmul", "mm", "addmm"
PRODUCTS = (LINEAR, MATMUL, MM, ADDMM)
OF_MATRICES = (MM, ADDMM)  # they refuse operands that are not two-dimensional
TRANSPOSE = "transpose"

# Python's augmented assignments, by the functions of `operator` that do the same.
AUGMENTED = {
    "iadd": "+=",
    "isub": "-=",
    "imul": "*=",
    "itruediv": "/=",
    "ifloordiv": "//=",
    "imod": "%=",
    "ipow": "**=",
    "imatmul": "@=",
    "iand": "&=",
    "ior": "|=",
    "ixor": "^=",
    "ilshift": "<<=",
    "irshift": ">>=",
}

_LARGEST_SCALAR = 2.0**60

_MODULES: dict[type[nn.Module], str] = {
    nn.Linear: LINEAR,
    nn.ReLU: RELU,
    nn.Sigmoid: SIGMOID,
    nn.Identity: IDENTITY,
    nn.BatchNorm1d: BATCH_NORM,
}
_FORWARDS = {kind: kind.forward for kind in _MODULES}
# The second entry of each: whether the first argument is written in place.
_FUNCTIONS: dict[Any, tuple[str, bool]] = {
    F.linear: (LINEAR, False),
    torch.addmm: (ADDMM, False),
    operator.matmul: (MATMUL, False),
    torch.matmul: (MATMUL, False),
    torch.mm: (MM, False),
    torch.t: (TRANSPOSE, False),
    torch.transpose: (TRANSPOSE, False),
    torch.swapaxes: (TRANSPOSE, False),
    getattr: (TRANSPOSE, False),
    torch.relu: (RELU, False),
    torch.relu_: (RELU, True),
    F.relu: (RELU, False),
    F.relu_: (RELU, True),
    torch.sigmoid: (SIGMOID, False),
    torch.sigmoid_: (SIGMOID, True),
    torch.special.expit: (SIGMOID, False),
    F.sigmoid: (SIGMOID, False),
    operator.add: (ADD, False),
    operator.iadd: (ADD, True),
    torch.add: (ADD, False),
    operator.sub: (SUB, False),
    operator.isub: (SUB, True),
    torch.sub: (SUB, False),
    torch.subtract: (SUB, False),
    operator.mul: (MUL, False),
    operator.imul: (MUL, True),
    torch.mul: (MUL, False),
    torch.multiply: (MUL, False),
    operator.truediv: (DIV, False),
    operator.itruediv: (DIV, True),
    torch.div: (DIV, False),
    torch.divide: (DIV, False),
    torch.true_divide: (DIV, False),
    F.batch_norm: (BATCH_NORM, False),
}
_METHODS: dict[str, tuple[str, bool]] = {
    "matmul": (MATMUL, False),
    "mm": (MM, False),
    "addmm": (ADDMM, False),
    "t": (TRANSPOSE, False),
    "transpose": (TRANSPOSE, False),
    "swapaxes": (TRANSPOSE, False),
}
for _name, _kind in {
    "relu": RELU,
    "sigmoid": SIGMOID,
    "add": ADD,
    "sub": SUB,
    "subtract": SUB,
    "mul": MUL,
    "multiply": MUL,
    "div": DIV,
    "divide": DIV,
    "true_divide": DIV,
}.items():
    _METHODS[_name] = (_kind, False)
    _METHODS[f"{_name}_"] = (_kind, True)


class Values(Protocol):
    """What is known about the values behind a graph's nodes."""

    def module(self, node: Node) -> nn.Module | None:
        """The module that a `call_module` node calls."""

    def tensor(self, node: Node) -> Tensor | None:
        """The tensor that a node stands for, real or fake; None where that is not known."""

    def is_parameter(self, node: Node) -> bool | None:
        """Whether the node's tensor is an `nn.Parameter` at every call; None where only the call knows."""


@dataclass(frozen=True)
class Operation:
    """One node, understood.

    Attributes:
        kind: one of the constants of this page.
        args: what it is applied to, in the order of the plainest spelling: (x, weight, bias) of a linear layer,
            (a, b) of a sum, (x,) of a ReLU, all of `F.batch_norm`'s. The weight of a module is not among them.
        in_place: whether the first of them is overwritten with the result.
        alpha: the factor of b in a sum or a difference.
    """

    kind: str
    args: tuple[Any, ...]
    in_place: bool = False
    alpha: Any = 1


def understand(node: Node, values: Values) -> Operation | None:
    """What a node computes; None where it is none of the operations that fusion knows."""
    if node.op == "call_module":
        return _module_operation(node, values.module(node))
    if node.op == "call_function":
        known = _FUNCTIONS.get(node.target) if hashable(node.target) else None
    else:
        known = _METHODS.get(str(node.target)) if node.op == "call_method" else None
    if known is None:
        return None
    return _READERS.get(known[0], _read_unary)(node, *known)


def is_known_method(name: str) -> bool:
    """Whether a method of tensors is one of the table."""
    return name in _METHODS


def describe(node: Node, values: Values) -> str:
    """A node for people: `fc1 (nn.Linear)`, `relu (torch.relu)`."""
    if node.op == "call_module":
        module = values.module(node)
        return f"{node.target} ({_type_name(module)})"
    if node.op == "call_method":
        return f"{node.name} (.{node.target}())"
    if node.op != "call_function":
        return f"{node.name} ({node.op})"
    return f"{node.name} ({_function_name(node)})"


def hoistable(node: Node) -> bool:
    """Whether a node only names a tensor or a module: it can be repeated anywhere."""
    return node.op == "get_attr"


def transposed(node: Any, values: Values) -> Node | None:
    """The matrix that a node is the transpose of."""
    operation = understand(node, values) if isinstance(node, Node) else None
    return operation.args[0] if operation is not None and operation.kind == TRANSPOSE else None


def computes_as_known(kind: type[nn.Module]) -> bool:
    """Whether the forward of a class of the table is torch's own, and nobody put another in its place."""
    return kind.forward is _FORWARDS[kind]


def _module_operation(node: Node, module: nn.Module | None) -> Operation | None:
    kind = None if module is None else _MODULES.get(type(module))
    if (
        module is None
        or kind is None
        or not computes_as_known(type(module))
        or len(node.args) + len(node.kwargs) != 1
    ):
        return None
    x = node.args[0] if node.args else node.kwargs.get("input")
    in_place = bool(getattr(module, "inplace", False))
    return Operation(kind, (x,), in_place) if isinstance(x, Node) else None


def _bind(node: Node, names: str) -> dict[str, Any] | None:
    """A node's arguments by name; None if there are others, or a name is given twice."""
    order = names.split()
    if len(node.args) > len(order):
        return None
    bound = dict(zip(order, node.args, strict=False))
    if any(name not in order or name in bound for name in node.kwargs):
        return None
    return {**bound, **node.kwargs}


def _read_unary(node: Node, kind: str, in_place: bool) -> Operation | None:
    bound = _bind(node, "input inplace")
    if (
        bound is None
        or not isinstance(bound.get("input"), Node)
        or not isinstance(bound.get("inplace", False), bool)
    ):
        return None
    return Operation(kind, (bound["input"],), in_place or bound.get("inplace", False))


def _read_binary(node: Node, kind: str, in_place: bool) -> Operation | None:
    bound = _bind(node, "input other")
    alpha: Any = 1
    if bound is None:
        bound = dict(node.kwargs)
        alpha = bound.pop("alpha", None)
        if kind not in (ADD, SUB) or not is_number(alpha) or len(node.args) + len(bound) != 2:
            return None
        bound = {**dict(zip(("input", "other"), node.args, strict=False)), **bound}
    if set(bound) != {"input", "other"}:
        return None
    return Operation(kind, (bound["input"], bound["other"]), in_place, alpha)


def _read_linear(node: Node, kind: str, in_place: bool) -> Operation | None:
    bound = _bind(node, "input weight bias")
    if bound is None or not all(isinstance(bound.get(name), Node) for name in ("input", "weight")):
        return None
    return Operation(kind, (bound["input"], bound["weight"], bound.get("bias")))


def _read_matmul(node: Node, kind: str, in_place: bool) -> Operation | None:
    if node.kwargs or len(node.args) != 2 or not all(isinstance(arg, Node) for arg in node.args):
        return None
    return Operation(kind, node.args)


def _read_addmm(node: Node, kind: str, in_place: bool) -> Operation | None:
    bound = _bind(node, "input mat1 mat2")
    if bound is None:  # beta and alpha other than 1 are not read
        return None
    args = (bound.get("mat1"), bound.get("mat2"), bound.get("input"))
    return Operation(kind, args) if all(isinstance(arg, Node) for arg in args) else None


def _read_transpose(node: Node, kind: str, in_place: bool) -> Operation | None:
    operand, *dims = node.args
    if node.kwargs or not isinstance(operand, Node):
        return None
    if node.target is getattr:
        right = dims in (["T"], ["mT"])
    elif node.target in (torch.t, "t"):
        right = not dims
    else:
        right = dims in ([0, 1], [1, 0], [-1, -2], [-2, -1])
    return Operation(kind, (operand,)) if right else None


def _read_batch_norm(node: Node, kind: str, in_place: bool) -> Operation | None:
    bound = _bind(node, "input running_mean running_var weight bias training momentum eps")
    if bound is None or not isinstance(bound.get("input"), Node):
        return None
    defaults = {"weight": None, "bias": None, "training": False, "eps": 1e-5}
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "eps")
    return Operation(kind, tuple(bound.get(name, defaults.get(name)) for name in names))


_READERS: dict[str, Callable[[Node, str, bool], Operation | None]] = {
    LINEAR: _read_linear,
    MATMUL: _read_matmul,
    MM: _read_matmul,
    ADDMM: _read_addmm,
    TRANSPOSE: _read_transpose,
    ADD: _read_binary,
    SUB: _read_binary,
    MUL: _read_binary,
    DIV: _read_binary,
    BATCH_NORM: _read_batch_norm,
}


def is_number(value: Any) -> bool:
    """A Python number, not one of another library nor a symbol."""
    return type(value) in (int, float)


def is_ordinary(value: Any) -> bool:
    """A number that an epilogue can take for its scalar: exact enough, and its reciprocal too, in fp32.

    Zeros, infinities, NaN, and what fp32 or an int64 cannot hold: what PyTorch makes of these is its own business.
    """
    return is_number(value) and 1 / _LARGEST_SCALAR < abs(value) < _LARGEST_SCALAR


def hashable(target: Any) -> bool:
    """Whether a function can be looked up in a table."""
    try:
        hash(target)
    except TypeError:
        return False
    return True


def _type_name(module: nn.Module | None) -> str:
    kind = type(module)
    return f"nn.{kind.__name__}" if kind.__module__.startswith("torch.nn.") else kind.__name__


def _function_name(node: Node) -> str:
    target: Any = node.target
    if target is getattr:
        return f".{node.args[1]}"
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__name__", repr(target))
    short = {"_operator": "operator", "torch.nn.functional": "F", "torch._C._nn": "F"}.get(module, module)
    return f"{short}.{name}" if short and not short.startswith("torch._C") else name
