"""Where a chain becomes an epilogue: a matrix product and the pointwise nodes after it, matched to one function.

    linear -> + vector -> relu -> / scalar                linear_relu, linear_relu_div
    linear -> * vector -> batch_norm                      linear_scale, linear_scale_batch_norm
    linear -> z, sigmoid(z) -> * scalar -> + z            linear_sigmoid_scale_residual

A chain ends where a value has a second user, or at a node that no built-in epilogue covers; what was matched so far
is used. A chain is computed where its product stood: what it reads must be there, and unchanged, at that place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.fx import Graph, Node

from epigemm.fusion import effects
from epigemm.fusion import operations as ops
from epigemm.fusion.operations import Operation, Values
from epigemm.fusion.state import why_not_callable

LINEAR, RELU, RELU_DIV = "linear", "linear_relu", "linear_relu_div"
SCALE, BATCH_NORM = "linear_scale", "linear_scale_batch_norm"
RESIDUAL = "linear_sigmoid_scale_residual"


@dataclass(frozen=True)
class Operand:
    """What a chain reads: a node's tensor, or an attribute of a module that it calls."""

    origin: Node | str
    attribute: str = ""


@dataclass(frozen=True)
class Norm:
    """An inference BatchNorm: its four vectors and eps; `module` is the target of a called one."""

    running_mean: Operand
    running_var: Operand
    weight: Operand | None
    bias: Operand | None
    eps: Operand | float
    module: str = ""


@dataclass(frozen=True)
class Chain:
    """What one fused call replaces.

    Attributes:
        function: the public function that computes it.
        nodes: the replaced nodes in the order of the graph; the product is the first.
        tail: the node whose value is the chain's.
        x: the product's left side.
        weight: its right side, `[N, K]`, or `[K, N]` where `weight_is_kn`.
        weight_is_kn: see there.
        helpers: nodes that only prepare its weight (a transpose).
        of_matrices: the product refuses an x that is not two-dimensional.
        bias: added to the product.
        added_bias: the bias is a term of its own, which type promotion may widen.
        no_bias: the product's own bias where that was None, and must still be for `bias` to be the only one.
        scale: per column.
        scalar: scale or divisor.
        norm: the BatchNorm at its end.
        before_norm: the chain without that.
        modules: targets of the called modules.
        notes: why it ends where it ends.
    """

    function: str
    nodes: tuple[Node, ...]
    tail: Node
    x: Operand
    weight: Operand
    weight_is_kn: bool = False
    helpers: tuple[Node, ...] = ()
    of_matrices: bool = False
    bias: Operand | None = None
    added_bias: bool = False
    no_bias: Operand | None = None
    scale: Operand | None = None
    scalar: Operand | float | None = None
    norm: Norm | None = None
    before_norm: Chain | None = None
    modules: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Node:
        """The product's node."""
        return self.nodes[0]


@dataclass
class Match:
    """Everything found in one graph: chains, and products that were left alone with the reason."""

    chains: list[Chain] = field(default_factory=list)
    left_alone: list[tuple[Node, str]] = field(default_factory=list)


def find(graph: Graph, values: Values) -> Match:
    """Every chain of a graph, in its order."""
    finder = _Finder(graph, values)
    found = Match()
    for node in graph.nodes:
        start = finder.start(node)
        if isinstance(start, str):
            found.left_alone.append((node, start))
        elif start is not None:
            found.chains.append(finder.extended(start))
    return found


class _Stop(Exception):
    """A node cannot join a chain; the text says why."""


class _Finder:
    def __init__(self, graph: Graph, values: Values) -> None:
        self._values = values
        self._order = list(graph.nodes)
        self._position = {node: index for index, node in enumerate(self._order)}

    # --- the product ---

    def start(self, node: Node) -> Chain | str | None:
        """The chain of a product alone; a reason where it is one that must be left alone; None: it is none."""
        operation = ops.understand(node, self._values)
        if node.op == "call_module":
            return self._module_start(node, operation)
        if operation is None or operation.kind not in ops.PRODUCTS:
            return None
        x, right, *bias = operation.args
        weight, is_kn = (right, False) if operation.kind == ops.LINEAR else self._right_side(right)
        if weight is None:
            return None
        helpers = () if weight is right else (right,)
        if any(self._is_barrier(other) for helper in helpers for other in self._between(helper, node)):
            return "what stands between its weight's transpose and the product may write the weight or change the mode"
        of_matrices = operation.kind in ops.OF_MATRICES
        chain = Chain(LINEAR, (node,), node, Operand(x), Operand(weight), is_kn, helpers, of_matrices)
        if not bias or bias[0] is None:
            return chain
        if not isinstance(bias[0], Node):
            return f"its bias is {bias[0]!r}"
        return replace(chain, bias=Operand(bias[0]), added_bias=False)

    def _module_start(self, node: Node, operation: Operation | None) -> Chain | str | None:
        module, target = self._values.module(node), str(node.target)
        if not isinstance(module, nn.Linear) and "Linear" not in type(module).__name__:
            return None
        if operation is None or operation.kind != ops.LINEAR:
            kind = type(module)
            return f"a {kind.__module__}.{kind.__qualname__} is no plain torch.nn.Linear"
        assert module is not None
        if reason := why_not_callable(module):
            return reason
        bias = Operand(target, "bias")
        parts = Operand(operation.args[0]), Operand(target, "weight")
        return Chain(LINEAR, (node,), node, *parts, bias=bias, modules=(target,))

    def _right_side(self, right: Node) -> tuple[Node | None, bool]:
        """The weight of `x @ right` and whether it is `[K, N]`; only tensors that the graph is given are weights."""
        inner = ops.transposed(right, self._values)
        weight = right if inner is None else inner
        tensor = self._values.tensor(weight)
        given = weight.op in ("get_attr", "placeholder")
        if not given or tensor is None or tensor.dim() != 2:
            return None, False
        return weight, inner is None

    # --- what follows it ---

    def extended(self, chain: Chain) -> Chain:
        """The longest chain that one function covers."""
        while True:
            try:
                longer = self._longer(chain)
            except _Stop as stop:
                return replace(chain, notes=(*chain.notes, str(stop)))
            if longer is None:
                return chain
            chain = longer

    def _longer(self, chain: Chain) -> Chain | None:
        users = list(chain.tail.users)
        if chain.function == LINEAR and len(users) == 2:
            residual = self._residual(chain, users)
            if residual is not None:
                return residual
        if len(users) > 1:
            names = ", ".join(_short(user, self._values) for user in users)
            raise _Stop(f"{chain.tail.name} has more than one user: {names}")
        if not users or users[0].op == "output":
            return None
        user = users[0]
        operation = ops.understand(user, self._values)
        name = ops.describe(user, self._values)
        step = None if operation is None else _STEPS.get((chain.function, operation.kind))
        if operation is None or (step is None and operation.kind != ops.IDENTITY):
            if operation is not None and operation.kind in ops.PRODUCTS:
                return None
            raise _Stop(f"followed by {name}: no built-in epilogue covers it after {chain.function}")
        self._check_place(chain, user, operation, name)
        longer = chain if step is None else step(self, chain, operation, name)
        return self._with_node(longer, user)

    def _with_node(self, chain: Chain, node: Node) -> Chain:
        modules = (*chain.modules, str(node.target)) if node.op == "call_module" else chain.modules
        return replace(chain, nodes=(*chain.nodes, node), tail=node, modules=modules)

    def _check_place(self, chain: Chain, node: Node, operation: Operation, name: str) -> None:
        if operation.in_place and operation.args[0] is not chain.tail:
            raise _Stop(f"followed by {name}, which writes another tensor")
        if node.op == "call_module":
            module = self._values.module(node)
            reason = "" if module is None else why_not_callable(module)
            if reason:
                raise _Stop(f"followed by {name}: {reason}")
        if not all(effects.keeps_modes(other, self._values) for other in self._between(chain.first, node)):
            raise _Stop(f"the mode (autocast, gradients) may change before {name}")

    def _between(self, first: Node, last: Node) -> list[Node]:
        return self._order[self._position[first] + 1 : self._position[last]]

    def _is_barrier(self, node: Node) -> bool:
        """Whether it matters on which side of `node` another one stands."""
        return not (effects.is_pure(node, self._values) and effects.keeps_modes(node, self._values))

    def _require_available(self, chain: Chain, node: Node, name: str, *operands: Any) -> None:
        """_Stop unless the operands can be read where the product stands, and hold there what they hold at `node`."""
        for operand in operands:
            if not isinstance(operand, Node) or operand.op in ("get_attr", "placeholder"):
                continue
            if self._position[operand] >= self._position[chain.first]:
                raise _Stop(f"followed by {name}, whose operand is computed after the product")
        others = (other for other in self._between(chain.first, node) if other not in chain.nodes)
        if not all(effects.is_pure(other, self._values) for other in others):
            raise _Stop(f"followed by {name}; what stands between may change its operand")

    def _vector(self, chain: Chain, user: Node, operand: Any, name: str) -> Operand:
        tensor = self._values.tensor(operand) if isinstance(operand, Node) else None
        if tensor is None or tensor.dim() != 1:
            raise _Stop(f"followed by {name}: its operand is not known to be one value per column")
        self._require_available(chain, user, name, operand)
        return Operand(operand)

    def _scalar(self, chain: Chain, user: Node, operand: Any, name: str) -> Operand | float:
        if ops.is_number(operand):
            if not ops.is_ordinary(operand):
                raise _Stop(
                    f"followed by {name}, whose number is 0, not finite, or out of fp32's usual range"
                )
            return float(operand)
        tensor = self._values.tensor(operand) if isinstance(operand, Node) else None
        if tensor is None or tensor.dim() != 0 or not tensor.is_floating_point():
            raise _Stop(f"followed by {name}: its operand is neither a number nor a 0-d tensor")
        self._require_available(chain, user, name, operand)
        return Operand(operand)

    # --- the steps of `_STEPS` ---

    def add_bias(self, chain: Chain, operation: Operation, name: str) -> Chain:
        lacks_bias = self._lacks_bias(chain)
        if chain.bias is not None and not lacks_bias:
            raise _Stop(f"followed by {name}: there is a bias already")
        if operation.alpha != 1:
            raise _Stop(f"followed by {name} with alpha={operation.alpha!r}")
        user = next(iter(chain.tail.users))
        bias = self._vector(chain, user, _other(operation, chain.tail), name)
        return replace(chain, bias=bias, added_bias=True, no_bias=chain.bias)

    def _lacks_bias(self, chain: Chain) -> bool:
        """Whether the bias is that of a module without one."""
        module = self._values.module(chain.first) if chain.first.op == "call_module" else None
        if module is None or chain.bias is None or chain.no_bias is not None:
            return False
        return chain.bias.attribute == "bias" and module.bias is None

    def relu(self, chain: Chain, operation: Operation, name: str) -> Chain:
        return replace(chain, function=RELU)

    def divide(self, chain: Chain, operation: Operation, name: str) -> Chain:
        value, divisor = operation.args
        if value is not chain.tail:
            raise _Stop(f"followed by {name}, which divides by it")
        user = next(iter(chain.tail.users))
        return replace(chain, function=RELU_DIV, scalar=self._scalar(chain, user, divisor, name))

    def multiply(self, chain: Chain, operation: Operation, name: str) -> Chain:
        factor = _other(operation, chain.tail)
        divisor = _exact_reciprocal(factor)
        if divisor is None:
            raise _Stop(f"followed by {name}: no built-in epilogue multiplies after relu by {_text(factor)}")
        return replace(chain, function=RELU_DIV, scalar=divisor)

    def scale(self, chain: Chain, operation: Operation, name: str) -> Chain:
        user = next(iter(chain.tail.users))
        vector = self._vector(chain, user, _other(operation, chain.tail), name)
        return replace(chain, function=SCALE, scale=vector)

    def batch_norm(self, chain: Chain, operation: Operation, name: str) -> Chain:
        if operation.args[0] is not chain.tail:
            raise _Stop(f"followed by {name}, which normalizes something else")
        user = next(iter(chain.tail.users))
        norm = self._module_norm(user) if user.op == "call_module" else self._function_norm(operation, name)
        vectors = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
        self._require_available(chain, user, name, *(vector.origin for vector in vectors if vector))
        return replace(chain, function=BATCH_NORM, norm=norm, before_norm=chain)

    def _module_norm(self, node: Node) -> Norm:
        target = str(node.target)
        names = ("running_mean", "running_var", "weight", "bias", "eps")
        mean, var, weight, bias, eps = (Operand(target, name) for name in names)
        return Norm(mean, var, weight, bias, eps, target)

    def _function_norm(self, operation: Operation, name: str) -> Norm:
        _, mean, var, weight, bias, training, eps = operation.args
        if training is not False:
            raise _Stop(f"followed by {name} in training mode, which needs the batch's statistics")
        given = [mean, var, weight, bias]
        if not all(isinstance(v, Node) or (v is None and i > 1) for i, v in enumerate(given)):
            raise _Stop(f"followed by {name}, whose arguments are not all tensors")
        if not ops.is_number(eps):
            raise _Stop(f"followed by {name}, whose eps is no number")
        operands = [None if value is None else Operand(value) for value in given]
        assert operands[0] is not None and operands[1] is not None
        return Norm(operands[0], operands[1], operands[2], operands[3], float(eps))

    # --- z + scale * sigmoid(z) ---

    def _residual(self, chain: Chain, users: list[Node]) -> Chain | None:
        z = chain.tail
        for sigmoid, total in (users, users[::-1]):
            found = ops.understand(sigmoid, self._values)
            if found is None or found.kind != ops.SIGMOID or found.in_place:
                continue
            term, scale, steps = self._scaled_sigmoid(chain, sigmoid, total)
            sign = self._sum(total, z, term)
            if sign is None or (sign != 1 and not isinstance(scale, float)):
                continue
            for step in (*steps, total):
                self._check_place_of(chain, step)
            scaled = scale * sign if isinstance(scale, float) else scale
            if isinstance(scaled, float) and not ops.is_ordinary(scaled):
                raise _Stop(
                    f"followed by sigmoid and {total.name}, whose factors are out of fp32's usual range"
                )
            longer = replace(chain, function=RESIDUAL, scalar=scaled)
            for step in (*steps, total):
                longer = self._with_node(longer, step)
            return longer
        return None

    def _check_place_of(self, chain: Chain, node: Node) -> None:
        operation = ops.understand(node, self._values)
        assert operation is not None
        checked = replace(operation, in_place=False)  # `_sum` and `_scaled_sigmoid` know what may be written
        self._check_place(chain, node, checked, ops.describe(node, self._values))

    def _scaled_sigmoid(self, chain: Chain, sigmoid: Node, total: Node) -> tuple[Node, Any, tuple[Node, ...]]:
        """The node of scale * sigmoid(z), the scale, and the nodes from the sigmoid to it."""
        name = ops.describe(sigmoid, self._values)
        if len(sigmoid.users) != 1:
            raise _Stop(f"{name} has more than one user")
        user = next(iter(sigmoid.users))
        if user is total:
            return sigmoid, 1.0, (sigmoid,)
        operation = ops.understand(user, self._values)
        name = ops.describe(user, self._values)
        if operation is None or operation.kind not in (ops.MUL, ops.DIV) or len(user.users) != 1:
            raise _Stop(f"followed by sigmoid and {name}, which is no scaled residual")
        if operation.in_place and operation.args[0] is not sigmoid:
            raise _Stop(f"followed by {name}, which writes another tensor")
        if operation.kind == ops.MUL:
            return user, self._scalar(chain, user, _other(operation, sigmoid), name), (sigmoid, user)
        factor = _exact_reciprocal(operation.args[1]) if operation.args[0] is sigmoid else None
        if factor is None:
            raise _Stop(f"followed by sigmoid and {name}, which is no scaled residual")
        return user, factor, (sigmoid, user)

    def _sum(self, node: Node, z: Node, term: Node) -> float | None:
        """The factor of `term` in a node that is z plus or minus `term`; None: it is none."""
        operation = ops.understand(node, self._values)
        if operation is None or operation.kind not in (ops.ADD, ops.SUB):
            return None
        if operation.args == (z, term) and ops.is_ordinary(operation.alpha):
            return float(operation.alpha) * (1.0 if operation.kind == ops.ADD else -1.0)
        return (
            1.0
            if operation.args == (term, z) and operation.kind == ops.ADD and operation.alpha == 1
            else None
        )


_STEPS: dict[tuple[str, str], Callable[[_Finder, Chain, Operation, str], Chain]] = {
    (LINEAR, ops.ADD): _Finder.add_bias,
    (LINEAR, ops.RELU): _Finder.relu,
    (LINEAR, ops.MUL): _Finder.scale,
    (LINEAR, ops.BATCH_NORM): _Finder.batch_norm,
    (SCALE, ops.BATCH_NORM): _Finder.batch_norm,
    (RELU, ops.DIV): _Finder.divide,
    (RELU, ops.MUL): _Finder.multiply,
}


def _other(operation: Operation, value: Node) -> Any:
    """The operand of a commutative operation that is not `value`."""
    a, b = operation.args
    return b if a is value else a


def _exact_reciprocal(factor: Any) -> float | None:
    """1 / factor, where dividing by that is multiplying by `factor` to the last bit."""
    if not ops.is_ordinary(factor) or abs(math.frexp(factor)[0]) != 0.5:
        return None
    return 1.0 / float(factor)


def _short(node: Node, values: Values) -> str:
    return "the result" if node.op == "output" else ops.describe(node, values)


def _text(value: Any) -> str:
    return "a tensor" if isinstance(value, Node) else repr(value)
