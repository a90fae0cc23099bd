"""What is known about the values of Dynamo's graphs: a fake tensor for each node, and what is known of its sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor


def value_of(node: fx.Node) -> Any:
    """The value that Dynamo has computed for a node; None if there is none."""
    value = node.meta.get("example_value")
    if value is None and node.op == "get_attr":
        value = node.graph.owning_module
        for part in str(node.target).split("."):
            value = getattr(value, part, None)
    return value


def origin_of(node: fx.Node) -> dict[str, Any]:
    """What the `meta` of a node says of its place in the model, for nodes that replace it."""
    return {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}


def _plain(value: Any) -> Tensor | None:
    if not isinstance(value, FakeTensor) and type(value) not in (Tensor, torch.nn.Parameter):
        return None
    assert isinstance(value, Tensor)
    return value if value.layout is torch.strided and not _is_transformed(value) else None


def tensor_of(node: Any) -> Tensor | None:
    """The fake tensor of a node whose value is a plain strided tensor, not one of a transform (`torch.func`)."""
    return _plain(value_of(node)) if isinstance(node, fx.Node) else None


def tensors_of(node: fx.Node) -> list[Tensor]:
    """The fake tensors of a node: one, or those of a list."""
    value = value_of(node)
    parts = value if isinstance(value, (tuple, list)) else [value]
    return [tensor for part in parts if (tensor := _plain(part)) is not None]


def only_reader(node: fx.Node) -> fx.Node | None:
    """The node that alone reads another one, if it gives a plain tensor."""
    (reader,) = node.users if len(node.users) == 1 else (None,)
    return None if reader is None or tensor_of(reader) is None else reader


def value_at(node: fx.Node) -> Tensor:
    """The fake tensor of a node that has one."""
    value = tensor_of(node)
    assert value is not None
    return value


def known(condition: Any) -> bool:
    """Whether a comparison of sizes holds for all sizes of a graph. No guard is added."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def same_sizes(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two shapes are known to be equal."""
    return len(one) == len(other) and all(known(a == b) for a, b in zip(one, other, strict=True))


def lies_in_order(sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
    """Whether elements are known to be in the order of the axes, without gaps."""
    expected: Any = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if not known(size == 1) and not known(stride == expected):
            return False
        expected = expected * size
    return True


def is_contiguous(tensor: Tensor) -> bool:
    """Whether a tensor is known to be contiguous."""
    return lies_in_order(tensor.shape, tensor.stride())


def order_of(tensor: Tensor) -> tuple[int, ...] | None:
    """The order of the axes in which a tensor has no gaps; None if none is known."""
    if is_contiguous(tensor):
        return tuple(range(tensor.dim()))
    order = tuple(sorted(range(tensor.dim()), key=lambda axis: -hint(tensor.stride(axis))))
    sizes, strides = in_order(tensor.shape, order), in_order(tensor.stride(), order)
    return order if lies_in_order(sizes, strides) else None


def in_order(values: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """Sizes or strides of the axes in an order."""
    return [values[axis] for axis in order]


def same_layout(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are known to have one shape and one layout."""
    axes = zip(one.shape, one.stride(), other.stride(), strict=False)
    return same_sizes(one.shape, other.shape) and all(known(n == 1) or known(a == b) for n, a, b in axes)


def storage_of(tensor: Tensor) -> int:
    """A number that is equal for tensors that share memory."""
    return int(tensor.untyped_storage()._cdata)


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether both have the same elements in the same memory, without gaps; the axes may differ."""
    return (
        storage_of(one) == storage_of(other)
        and one.dtype == other.dtype
        and known(one.storage_offset() == other.storage_offset())
        and known(one.numel() == other.numel())
        and order_of(one) is not None
        and order_of(other) is not None
    )


def hint(size: Any) -> int:
    """A size; for a symbol that of the call that is being compiled. No guard is added."""
    if isinstance(size, int):
        return size
    found = size.node.hint
    return found if isinstance(found, int) else 1 << 20
