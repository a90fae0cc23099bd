"""What a node does beside its result: whether it writes to memory, and whether it leaves the modes as they are.

Both questions are answered by what is known: a node that is in none of the tables, and has no schema, may do anything.
"""

from __future__ import annotations

import inspect
import math
import operator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Node

from epigemm.fusion import operations as ops
from epigemm.fusion.operations import Values


def _named(namespace: Any, names: str) -> set[Any]:
    return {getattr(namespace, name) for name in names.split()}


_OPERATORS = _named(
    operator,
    "abs add and_ contains eq floordiv ge getitem gt index inv invert is_ is_not le lshift lt matmul mod mul ne neg "
    "not_ or_ pos pow rshift sub truediv truth xor",
)
_PYTHON: set[Any] = {getattr, len, abs, min, max, sum, round, int, float, bool, list, tuple, slice, range}
_OF_TORCH = _named(
    torch, "broadcast_tensors cdist einsum split sym_float sym_int sym_ite sym_max sym_min sym_not"
)
# Written in Python; pure unless told to work in place.
_FUNCTIONALS = _named(
    F,
    "alpha_dropout binary_cross_entropy binary_cross_entropy_with_logits celu cross_entropy dropout elu embedding "
    "embedding_bag gaussian_nll_loss glu group_norm hardsigmoid hardswish hardtanh huber_loss interpolate kl_div "
    "l1_loss layer_norm leaky_relu log_softmax mish mse_loss nll_loss normalize pad relu relu6 rms_norm selu sigmoid "
    "silu smooth_l1_loss softmax softmin softsign tanh tanhshrink threshold",
)
_WRITING_ARGUMENTS = ("inplace", "out", "max_norm")
_C: Any = torch._C
_NAMESPACES: tuple[Any, ...] = (torch, _C._nn, _C._special, _C._linalg, _C._fft)
# Methods that are written in Python, or have no operator of their name.
_METHODS = frozenset(
    "bfloat16 bool byte cpu cuda dim double float get_device half int is_complex is_contiguous is_floating_point "  # noqa: SIM905
    "long ndimension numel reshape short size split storage_offset stride to type type_as".split()
)
# Their schemas do not say that they write running statistics, or repack weights.
_UNDECLARED = ("batch_norm", "instance_norm", "flatten_weight")


def is_pure(node: Node, values: Values) -> bool:
    """Whether a node surely writes nothing that was there before it."""
    if node.op in ("get_attr", "placeholder"):
        return True
    if node.op not in ("call_function", "call_method") or node.kwargs.get("out") is not None:
        return False
    operation = ops.understand(node, values)
    if operation is not None:
        if operation.kind == ops.BATCH_NORM:
            return operation.args[5] is False
        return not operation.in_place
    if node.op == "call_method":
        return _is_pure_method(str(node.target))
    return _is_pure_function(node)


def keeps_modes(node: Node, values: Values) -> bool:
    """Whether later nodes surely compute in the mode (gradients, autocast, ...) that earlier ones did."""
    if node.op in ("get_attr", "placeholder", "output"):
        return True
    if node.op == "call_method":
        return hasattr(Tensor, str(node.target))
    if node.op == "call_module":
        module = values.module(node)
        return module is not None and all(
            type(part).__module__.startswith("torch.nn.modules.") for part in module.modules()
        )
    target: Any = node.target
    if isinstance(target, HigherOrderOperator) or is_pure(node, values):
        return True
    if isinstance(target, OpOverload):
        return bool(target._schema.is_mutable)
    if isinstance(target, OpOverloadPacket):
        return all(getattr(target, name)._schema.is_mutable for name in target._overload_names)
    # Functions of torch give something back, those that write too; others are called for what they switch.
    in_operator = getattr(operator, getattr(target, "__name__", ""), None) is target
    return in_operator or bool(_returning_overloads(_operator_of(target)))


def _is_pure_method(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None) if hasattr(Tensor, name) else None
    return name in _METHODS or _never_writes(packet)


def _is_pure_function(node: Node) -> bool:
    target: Any = node.target
    if isinstance(target, OpOverload):
        return not _may_write(target) and not target._schema.is_mutable
    if isinstance(target, OpOverloadPacket):
        return _never_writes(target)
    if isinstance(target, HigherOrderOperator) or not ops.hashable(target):
        return False
    if target in _FUNCTIONALS:
        return _writes_no_argument(node)
    if target in _OPERATORS or target in _PYTHON or target in _OF_TORCH:
        return True
    if getattr(math, getattr(target, "__name__", ""), None) is target:
        return True
    return _never_writes(_operator_of(target))


def _writes_no_argument(node: Node) -> bool:
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except TypeError:
        return False
    return all(bound.arguments.get(name) in (None, False) for name in _WRITING_ARGUMENTS)


def _operator_of(target: Any) -> OpOverloadPacket | None:
    """The operator behind a function of torch or an unbound method of tensors."""
    name = getattr(target, "__name__", "")
    builtin = any(getattr(namespace, name, None) is target for namespace in _NAMESPACES)
    if not name or isinstance(target, (type, ModuleType)) or inspect.isfunction(target):
        return None
    if not builtin and getattr(Tensor, name, None) is not target:
        return None
    found = getattr(torch.ops.aten, name, None)
    return found if isinstance(found, OpOverloadPacket) else None


def _returning_overloads(packet: OpOverloadPacket | None) -> list[OpOverload]:
    """The overloads of an operator; none where one gives nothing back, for it is called for its effect."""
    if not isinstance(packet, OpOverloadPacket):
        return []
    overloads = [getattr(packet, name) for name in packet._overload_names]
    return overloads if all(overload._schema.returns for overload in overloads) else []


def _never_writes(packet: OpOverloadPacket | None) -> bool:
    overloads = _returning_overloads(packet)
    return bool(overloads) and not any(_may_write(overload) for overload in overloads)


def _may_write(overload: OpOverload) -> bool:
    """Whether it writes to an argument other than `out`, which has been looked for already."""
    schema = overload._schema
    if not schema.returns or any(part in schema.name for part in _UNDECLARED):
        return True
    for argument in schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        # An object of a class may be changed without a word in the schema.
        if (written and not argument.is_out) or str(argument.type).startswith("__torch__"):
            return True
    return False
