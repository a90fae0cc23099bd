"""Whether replaying a CUDA graph of one of Dynamo's graphs would do the same as a call.

The graph is run once on tensors without data, and its operators are watched. It cannot be replayed if the host decides
something in between, if memory from before the call is written, or if random numbers are drawn.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from epigemm.fusion.effects import call, written
from epigemm.fusion.matmuls import is_product
from epigemm.fusion.values import storage_of, tensor_of, tensors_of, value_of

RECORDED = "autograd records it: CUDA graphs serve inference alone"
RANDOM = "draws random numbers"
NUMBER = "an argument is a float that differs between calls, which a graph cannot read: pass a tensor"
_TRANSFORMS = ("_increment_nesting", "_enter_dual_level")
_FROM_THE_HOST = (torch.tensor, torch.as_tensor, torch.from_numpy)
_COPIES = ("_to_copy", "copy_", "copy", "_copy_from")
_INDEXES = ("index", "index_put", "index_put_", "_index_put_impl_")
# Arguments by which an operator draws random numbers: none if one of them is zero or False.
_IDLE = ("dropout_p", "dropout", "train", "training")


def device_of(graph: fx.Graph) -> torch.device | str:
    """The device on which the whole graph runs, or why it has to be launched kernel by kernel."""
    devices: set[torch.device] = set()
    for node in graph.nodes:
        if node.op == "call_module":
            return f"{node} calls a module"
        if node.op in ("placeholder", "get_attr"):
            value = value_of(node)
            if node.op == "placeholder" and isinstance(value, (int, torch.SymInt)):
                continue
            if _is_number(node):
                return NUMBER
            if tensor_of(node) is None:
                return f"{node} is no plain tensor"
            # The copy of such an input would be recorded by autograd. A parameter is not copied.
            if value.requires_grad and torch.is_grad_enabled() and not isinstance(value, torch.nn.Parameter):
                return RECORDED
            devices.add(value.device)
        elif any(tensor.grad_fn is not None for tensor in tensors_of(node)):
            return RECORDED
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices)))
        return (
            f"its inputs are on several devices: {names}" if devices else "it has no tensors among its inputs"
        )
    device = devices.pop()
    return _why_not(graph, device) or device


def _is_number(node: fx.Node) -> bool:
    """Whether an input stands for a Python float: Dynamo passes it as a tensor, and the graph reads that first."""
    value = value_of(node)
    is_item = {user.op == "call_method" and user.target == "item" for user in node.users} == {True}
    is_scalar = isinstance(value, Tensor) and value.dtype is torch.float64 and value.dim() == 0
    return node.op == "placeholder" and is_item and is_scalar and value.device.type == "cpu"


def _why_not(graph: fx.Graph, device: torch.device) -> str:
    fakes = [value for node in graph.nodes for value in tensors_of(node) if isinstance(value, FakeTensor)]
    modes = {value.fake_mode for value in fakes}
    if len(modes) != 1:
        return "it cannot be watched"
    mode = modes.pop()
    fresh = nullcontext() if mode.shape_env is None else mode.shape_env.ignore_fresh_unbacked_symbols()
    watch = _Watch(device)
    try:
        with fresh, mode, torch.no_grad(), watch:
            _run(graph, watch)
    except Exception as error:  # any error of its functions with such tensors
        text = str(error).strip().split("\n")[0]
        return watch.reason or f"it cannot be watched: {type(error).__name__}: {text}"
    return watch.reason


def _run(graph: fx.Graph, watch: _Watch) -> None:
    values: dict[fx.Node, Any] = {}
    entered: list[Any] = []  # open blocks of autocast
    try:
        for node in graph.nodes:
            if node.op == "output" or watch.reason:
                return
            if node.op in ("placeholder", "get_attr"):
                values[node] = watch.given(node, value_of(node))
                continue
            name = getattr(node.target, "__name__", "")
            if name.endswith(_TRANSFORMS):
                watch.reason = "a transform of torch.func is within"
                return
            if node.target in _FROM_THE_HOST and any(
                value.device.type != "cpu" for value in tensors_of(node)
            ):
                watch.reason = f"{node} copies numbers of the host's"
                return
            watch.node = node
            # Without this, products fail on symbols in torch 2.11. For operators that write in place it would hide the
            # write.
            with enable_python_dispatcher() if is_product(node) else nullcontext():
                result = call(node, *fx.map_arg((node.args, node.kwargs), values.__getitem__))
            if node.target is _enter_autocast:
                entered.append(result)
            elif node.target is _exit_autocast:
                entered.pop()
            values[node] = result
    finally:
        while entered:
            _exit_autocast(entered.pop())  # type: ignore[no-untyped-call]


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches every operator, and notes one that a CUDA graph cannot repeat."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reason = ""
        self.node: fx.Node | None = None
        self._device = device
        self._given: set[int] = set()

    def given(self, node: fx.Node, value: Any) -> Any:
        """The tensor without data for an input."""
        self.node = None
        if isinstance(value, Tensor):
            value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            self._given.add(storage_of(value))
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with enable_python_dispatcher():
            result = func(*args, **kwargs)
        if self.node is not None and not self.reason and func.namespace != "prim":
            found = self._look(func, args, kwargs, result)
            self.reason = f"{self.node} {found}" if found else ""
        return result

    def _look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> str:
        if any(storage_of(tensor) in self._given for tensor in written(func, args, kwargs)):
            return "writes to memory that is there before the call"
        if torch.Tag.nondeterministic_seeded in func.tags and not _is_idle(func, args, kwargs):
            return RANDOM
        results = [part for part in tree_leaves(result) if isinstance(part, Tensor)]
        if torch.Tag.data_dependent_output in func.tags or any(map(_has_unknown_sizes, results)):
            return "has the host wait for a number"
        name = func._schema.name.partition("::")[2]
        if name.startswith("as_strided") and storage_of(args[0]) in self._given:
            return "looks at memory around an input, of which a graph has a copy"
        if name in _INDEXES and any(
            isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)
            for part in tree_leaves(args[1])
        ):
            return "has the host wait for a number"
        tensors = [part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)]
        others = [tensor for tensor in (*tensors, *results) if tensor.device != self._device]
        is_constant = len(others) == len(tensors) + len(results)  # the host computes it from constants
        if others and not is_constant and (name in _COPIES or any(each.dim() for each in others)):
            return f"copies between {self._device} and {others[0].device}"
        return ""


def _is_idle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    defaults = {each.name: each.default_value for each in func._schema.arguments if each.has_default_value()}
    given = defaults | dict(zip(names, args, strict=False)) | kwargs
    return any(name in given and not given[name] for name in _IDLE)


def _has_unknown_sizes(tensor: Tensor) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(tensor))
