"""What a node of Dynamo's graph does besides its result. The node is run again on tensors without data, and watched.

The schemas of the operators that PyTorch then dispatches say what they write. A node that cannot be run in this way may
do anything.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Set
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from epigemm.fusion.matmuls import is_product
from epigemm.fusion.values import storage_of, tensor_of, tensors_of, value_of

# Operators whose schemas do not say that they write running statistics, or repack weights.
_UNDECLARED = ("batch_norm", "instance_norm", "flatten_weight")
_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size)
_COUNT_USE = torch._C._log_api_usage_once  # called for each class, for torch's usage statistics
_CLONE = torch.ops.aten.clone.default
_WITH_A_MODE = ("train", "training", "use_input_stats")

# An operator, its arguments, and its result.
_Called = tuple[Any, tuple[Any, ...], dict[str, Any], Any]


@dataclass(frozen=True)
class Effects:
    """What a node does.

    Attributes:
        known: whether the node could be watched, and changes no mode (gradients, autocast) for later nodes.
        writes: the memory that it writes, by `values.storage_of`.
        returns: memory of its inputs that its result shares; for a dropout in eval mode Dynamo does not note that.
        changes_shapes: whether an existing tensor has another shape afterwards.
        is_pointwise: whether it runs only operators that PyTorch marks as pointwise, and views; not if it only copies.
        is_view: whether it runs only views, or nothing, as a dropout in eval mode or a cast to the same type.
    """

    known: bool
    writes: frozenset[int] = frozenset()
    returns: frozenset[int] = frozenset()
    changes_shapes: bool = False
    is_pointwise: bool = False
    is_view: bool = False


_NOTHING, _ANYTHING = Effects(True), Effects(False)


def effects_of(node: fx.Node) -> Effects:
    """What a node does besides its result."""
    if node.op in ("placeholder", "get_attr", "output") or node.target is _COUNT_USE:
        return _NOTHING
    if node.target is operator.getitem and isinstance(value_of(node.args[0]), (tuple, list)):  # type: ignore[arg-type]
        return _NOTHING  # one of several results
    # Nodes without a value: those that change a mode, and calls whose value Dynamo did not note.
    runs_graphs = node.op == "call_module" or isinstance(node.target, torch._ops.HigherOrderOperator)
    if "example_value" not in node.meta or runs_graphs:
        return _ANYTHING
    if isinstance(value_of(node), _NUMBERS):
        return _NOTHING  # a size, or the result of `item`
    if any(isinstance(value_of(n), Tensor) and tensor_of(n) is None for n in (node, *node.all_input_nodes)):
        return _ANYTHING  # sparse, or made by a transform, which may share memory with others
    fakes: dict[int, int] = {}  # memory of the replacement tensors -> memory of the originals
    inputs = [tensor_of(n) for n in node.all_input_nodes]
    modes = {value.fake_mode for value in inputs if isinstance(value, FakeTensor)}
    if not modes:  # a node without tensors among its arguments
        is_plain = isinstance(value_of(node), (*_NUMBERS, tuple, list, Tensor))
        return _NOTHING if is_plain and all(tensor is None for tensor in inputs) else _ANYTHING
    if len(modes) > 1:
        return _ANYTHING
    try:
        result, calls = run_again(node, lambda n: _stand_in(n, fakes))
        parts = [part for part in tree_leaves(result) if isinstance(part, Tensor)]
        returns = frozenset(fakes[storage_of(part)] for part in parts if storage_of(part) in fakes)
    except Exception:  # any error of the function with such tensors
        return _ANYTHING
    memories = (storage_of(tensor) for each in calls for tensor in written(*each[:3]))
    writes = frozenset(fakes[memory] for memory in memories if memory in fakes)  # others were new
    functions = [each[0] for each in calls]
    changes_shapes = any(torch.Tag.inplace_view in function.tags for function in functions)
    marks = [torch.Tag.pointwise in function.tags for function in functions if not function.is_view]
    computes = any(not function.is_view and function is not _CLONE for function in functions)
    return Effects(True, writes, returns, changes_shapes, computes and all(marks), not marks)


def is_quiet(first: fx.Node, last: fx.Node, memories: Set[int] | None = None) -> bool:
    """Whether no node from `first` to the one before `last` changes a mode, or writes memory: these, or any."""
    node = first
    while node is not last:
        effects = effects_of(node)
        if not effects.known or (effects.writes if memories is None else effects.writes & memories):
            return False
        node = node.next
    return True


def _stand_in(node: fx.Node, fakes: dict[int, int]) -> Any:
    """A new tensor like that of a node, which a function may write; other values unchanged."""
    value = value_of(node)
    if isinstance(value, Tensor):
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        fakes[storage_of(made)] = storage_of(value)
        return made
    if isinstance(value, (list, tuple)) and any(isinstance(part, Tensor) for part in value):
        raise TypeError("several tensors")
    return value


def run_again(node: fx.Node, value: Callable[[fx.Node], Any]) -> tuple[Any, list[_Called]]:
    """A node's result for other values of what it reads, tensors without data; and the operators that ran."""
    inputs = [tensor for each in node.all_input_nodes for tensor in tensors_of(each)]
    mode = next(tensor.fake_mode for tensor in inputs if isinstance(tensor, FakeTensor))
    fresh = nullcontext() if mode.shape_env is None else mode.shape_env.ignore_fresh_unbacked_symbols()
    # Without this, products without a bias fail on symbols in torch 2.10 and 2.11.
    python = enable_python_dispatcher() if is_product(node) else nullcontext()
    recorder = _Recorder()
    with fresh, mode, torch.no_grad(), python, recorder:
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        recorder.calls.clear()
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs), recorder.calls
        return node.target(*args, **kwargs), recorder.calls  # type: ignore[operator]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Called] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Without this, some kernels that are written in Python fail on symbols.
        with enable_python_dispatcher():
            result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":  # prim operators only ask for properties such as a device
            self.calls.append((func, args, kwargs or {}, result))
        return result


def written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among an operator's arguments that it writes."""
    arguments = function._schema.arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    undeclared = any(part in function._schema.name for part in _UNDECLARED)
    training = undeclared and any(given.get(name, False) for name in _WITH_A_MODE)
    everything = training or "flatten_weight" in function._schema.name
    found: list[Tensor] = []
    for argument in arguments:
        declared = argument.alias_info is not None and argument.alias_info.is_write
        # The schema does not say whether a script object is changed.
        if str(argument.type).startswith("__torch__"):
            raise TypeError("an object of TorchScript")
        if declared or everything:
            value = given.get(argument.name)
            several = value if isinstance(value, (list, tuple)) else [value]
            found += [part for part in several if isinstance(part, Tensor)]
    return found
