"""A graph of ATen operators -> the steps of a functor. Operators without an entry here are refused by name."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from epigemm.epilogues.tracer import aten
from epigemm.epilogues.tracer import program as programs
from epigemm.epilogues.tracer.aten import ON_SCALARS, SUPPORTED, Refusal
from epigemm.epilogues.tracer.program import BFLOAT16, BOOL, FLOAT, HALF, REAL, Program, Ref, Step, Value
from epigemm.epilogues.tracer.results import ACCEPTED, Result, Results, Structure

ROUNDED = {HALF: torch.float16, BFLOAT16: torch.bfloat16, FLOAT: torch.float32}
"""The kinds of numbers that are rounded to another type than the arithmetic's."""


class Builder:
    """Translates the nodes of a graph in their order, and keeps each node's value."""

    def __init__(
        self, module: fx.GraphModule, sizes: tuple[int, int], location: Callable[[fx.Node], str]
    ) -> None:
        self.module = module
        self.location = location
        rows, columns = sizes
        self.shapes = {(), (1,), (columns,), (1, 1), (1, columns), (rows, 1), (rows, columns)}
        self.operands = -1
        self.steps: list[Step] = []
        self.values: dict[fx.Node, Value] = {}
        self.reduced: dict[fx.Node, tuple[Result, ...]] = {}
        self.whole = sizes
        self.python_operators = aten.PYTHON_OPERATORS | aten.symbolic_functions()
        self.node: fx.Node | None = None
        self.is_of_several = False
        self.known: dict[str, Ref] = {}  # the steps by their text: 0 is -0 to a dictionary

    def build(self, structure: Structure = 0) -> Results:
        """What the whole graph returns, in this form. Raises `Refusal` with `self.node` at the node in question."""
        self.is_of_several = structure != 0
        placeholders = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        self.operands = len(placeholders) - 1
        for number, node in enumerate(placeholders):
            self.values[node] = Ref(number)
        results: list[Result] = []
        for node in self.module.graph.nodes:
            self.node = node
            if node.op == "call_function":
                self._call(node)
            elif node.op == "get_attr":
                constant = getattr(self.module, str(node.target))
                if not isinstance(constant, torch.Tensor) or constant.dim() != 0:
                    raise Refusal(
                        "a constant tensor must hold one number; give a tensor as an operand instead"
                    )
                self.values[node] = self._value(constant.item())
            elif node.op == "output":
                results = [self._result(each) for each in node.args[0]]
        return Results(self.operands, tuple(self.steps), tuple(results), structure)

    def _result(self, given: Any) -> Result:
        if given in self.reduced:
            return self.reduced[given][0]
        value = given.meta.get("val") if isinstance(given, fx.Node) else None
        is_fp32 = isinstance(value, torch.Tensor) and value.dtype is torch.float32
        return self._in_its_type(Result(self._value(given), is_fp32=is_fp32))

    def _in_its_type(self, result: Result) -> Result:
        """fp32 is asked for beside fp64 alone; what rounds to it at the end is left to the result."""
        if not result.is_fp32 or self.dtype is not torch.float64:
            return replace(result, is_fp32=False)
        value = result.value
        if isinstance(value, Ref) and value.number > self.operands:
            step = self.steps[value.number - self.operands - 1]
            if step.op == "copy" and step.kind == FLOAT:
                return replace(result, value=step.inputs[0])
        return result

    def _reduce(self, node: fx.Node) -> None:
        """A reduction, or one of the two of a pair."""
        if node.target is operator.getitem:
            source, place = node.args
            self.reduced[node] = (self.reduced[source][place],)  # type: ignore[index]
            return
        arguments = _arguments(node)
        found = aten.reduced(node, arguments, self.whole, self.hints)
        value = self._value(arguments[0])
        self.reduced[node] = tuple(self._in_its_type(replace(each, value=value)) for each in found)

    def _value(self, given: Any) -> Value:
        if isinstance(given, fx.Node):
            if given in self.reduced:
                raise Refusal(
                    f"{aten.name_of(given)} is a reduction, and its result is read; supported are {ACCEPTED}: read it "
                    "in a second call"
                )
            if given not in self.values:
                raise Refusal("the size of a tensor is used as a number")
            return self.values[given]
        if isinstance(given, bool):
            return given
        if isinstance(given, (int, float)):
            return float(given)
        raise Refusal(f"an argument of type {type(given).__name__} is not supported")

    def _kind(self, value: Value) -> str:
        return Program(self.operands, tuple(self.steps), value).kind(value)

    def step(self, op: str, *inputs: Value, kind: str = REAL) -> Ref:
        """One more step; its result. Of several results each step once: (z * z).sum(0), (z * z).sum(1) are of one."""
        assert self.node is not None
        key = repr((op, inputs, kind))
        if self.is_of_several and key in self.known:
            return self.known[key]
        self.steps.append(Step(op, inputs, kind, self.location(self.node)))
        made = self.known[key] = Ref(self.operands + len(self.steps))
        return made

    def _real(self, value: Value) -> Value:
        """A boolean as 0 or 1."""
        if isinstance(value, bool):
            return float(value)
        return self.step("where", value, 1.0, 0.0) if self._kind(value) == BOOL else value

    def _bool(self, value: Value) -> Value:
        """A number as a boolean: whether it is not 0 (a NaN is not 0)."""
        if self._kind(value) == BOOL:
            return value
        return self.step("ne", value, 0.0, kind=BOOL)

    def _result_kind(self, node: fx.Node) -> str:
        """The kind of a node's result; refuses types and shapes that no functor has."""
        result = node.meta.get("val")
        if not isinstance(result, torch.Tensor):
            return REAL  # a scalar operand, or a value that is computed from scalars
        if tuple(self.hints(result)) not in self.shapes:
            raise Refusal(
                f"its result has the shape {self.shape_in_words(result)}; supported are {SUPPORTED}"
            )
        if result.dtype == torch.bool:
            return BOOL
        rounded = self.rounded_kind(result.dtype)
        if rounded is not None:
            return rounded
        if result.dtype == self.dtype:
            return REAL
        if not (result.is_floating_point() or result.is_complex()):
            raise Refusal(
                f"its result is of {result.dtype}; integers would be computed in floating point, where large ones are "
                "rounded; write numbers as 1.0, not 1, and torch.trunc, floor or round for a cast"
            )
        raise Refusal(
            f"its result is of {result.dtype}; an epilogue computes in the type of its arithmetic (fp32; fp64 for fp64 "
            "tensors) and may round to torch.float16 or torch.bfloat16"
        )

    @property
    def dtype(self) -> torch.dtype:
        """The type that the graph was traced with."""
        first = next(iter(self.module.graph.nodes))
        dtype = first.meta["val"].dtype
        assert isinstance(dtype, torch.dtype)
        return dtype

    def rounded_kind(self, dtype: torch.dtype) -> str | None:
        """The kind of a number of this type, unless it is the arithmetic's."""
        kinds = (kind for kind, of in ROUNDED.items() if of == dtype and dtype != self.dtype)
        return next(kinds, None)

    @staticmethod
    def hints(tensor: torch.Tensor) -> list[int]:
        """The sizes that a tensor was traced with."""
        return [size.node.hint if isinstance(size, torch.SymInt) else size for size in tensor.shape]

    def shape_in_words(self, tensor: torch.Tensor) -> str:
        """The shape by M and N."""
        rows, columns = max(self.shapes, key=lambda shape: (len(shape), shape))
        words = {rows: "M", columns: "N"}
        return "[" + ", ".join(words.get(size, str(size)) for size in self.hints(tensor)) + "]"

    def _call(self, node: fx.Node) -> None:
        target = node.target
        if aten.name_of(node) in aten.OPERATORS:
            self._reduce(node)
            return
        if target in self.python_operators:
            values = [self._real(self._value(argument)) for argument in node.args]
            self.values[node] = self.step(self.python_operators[target], *values)
            return
        if target is torch.sym_float:
            self.values[node] = self._value(node.args[0])
            return
        name = str(getattr(target, "__name__", target)).split(".")[0]
        if not isinstance(target, torch._ops.OpOverload):
            of_sizes = not any(argument in self.values for argument in node.all_input_nodes)
            if of_sizes and isinstance(node.meta.get("val"), (torch.SymInt, int)):
                return  # refused if it is read as a number
            raise Refusal(f"{name} is not supported on a Scalar; {ON_SCALARS}")
        if name in ("sym_size", "sym_numel"):
            return
        self._refuse_what_no_functor_is(target, name)
        kind = self._result_kind(node)
        before = len(self.steps)
        value = self._operator(node, name, _arguments(node), kind)
        if kind in ROUNDED and not self._is_of(value, kind):
            if len(self.steps) > before and value == Ref(self.operands + len(self.steps)):
                step = self.steps.pop()
                self.known.pop(repr((step.op, step.inputs, step.kind)))
                # With fp32 tensors numbers are fp32. With 16-bit tensors they are fp32 in products, too.
                inputs = [self.rounded(each, FLOAT) for each in step.inputs] if kind == FLOAT else step.inputs
                value = self.step(step.op, *inputs, kind=kind)
            else:
                value = self.rounded(value, kind)
        self.values[node] = value

    def _refuse_what_no_functor_is(self, target: Any, name: str) -> None:
        if target._schema.is_mutable:
            raise Refusal(f"{name} writes in place; use {name.rstrip('_')} and a new name")
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise Refusal(f"{name} draws random numbers; an epilogue is a function of its operands")
        if name == "_local_scalar_dense":
            raise Refusal(
                "reading a tensor's value (item, bool, float) is data-dependent control flow; use torch.where"
            )
        if name in aten.REDUCTIONS:
            raise Refusal(f"{name.lstrip('_')} is a reduction; supported are {ACCEPTED}")

    def _operator(self, node: fx.Node, name: str, args: list[Any], kind: str) -> Value:
        if name in ("scalar_tensor", "full", "full_like"):
            value = self._value(args[0 if name == "scalar_tensor" else 1])
            if node.meta["val"].dtype != torch.bool:
                return value
            return self._bool(value) if isinstance(value, Ref) else bool(value)
        is_whole_slice = (
            name == "slice" and args[2] in (0, None) and args[3] in (2**63 - 1, None) and args[4] == 1
        )
        if name in aten.SAME_VALUES or is_whole_slice:
            return self._value(args[0])
        if name in aten.INDEXING:
            raise Refusal(
                f"{name} is an index; an epilogue sees one element at a time; supported are {SUPPORTED}"
            )
        if name == "_to_copy":
            value = self._value(args[0])
            if kind == BOOL:
                return self._bool(value)
            # A cast to a rounded type is a rounding. A cast from one to the arithmetic's type changes nothing.
            return self.rounded(self._real(value), kind if kind in ROUNDED else None)
        if name in aten.BITWISE:
            if kind != BOOL:
                raise Refusal(f"{name} is supported on booleans alone")
            name = aten.BITWISE[name]
        if name in aten.PREDICATES:
            values = [self._value(argument) for argument in args[: aten.PREDICATES[name]]]
            if name.startswith("logical"):
                return self.step(name, *(self._bool(value) for value in values), kind=BOOL)
            return self.step(name, *self._of_one_type(args[: len(values)]), kind=BOOL)
        if name == "where":
            condition, chosen, other = (self._value(argument) for argument in args)
            return self._where(self._bool(condition), chosen, other, kind)
        if kind == BOOL:
            on_booleans = {
                "mul": "logical_and",
                "add": "logical_or",
                "maximum": "logical_or",
                "minimum": "logical_and",
            }
            if name not in on_booleans:
                raise Refusal(f"{name} of booleans is not supported; supported are & | ^ ~ and torch.where")
            return self.step(on_booleans[name], *(self._bool(self._value(a)) for a in args[:2]), kind=BOOL)
        return self._numbers(node, name, args)

    def _where(self, condition: Value, chosen: Value, other: Value, kind: str) -> Value:
        if kind == BOOL:
            return self.step("where", condition, self._bool(chosen), self._bool(other), kind=BOOL)
        return self.step("where", condition, self._real(chosen), self._real(other))

    def _numbers(self, node: fx.Node, name: str, args: list[Any]) -> Value:
        """Functions from numbers to a number."""
        if name in HANDLERS:
            return HANDLERS[name](self, args)
        if name in _WITH_NUMBERS:
            return self.step(name, *self.numbers(args))
        arity = 1 if name in aten.UNARY else 2 if name in aten.BINARY else 0
        if arity == 0 or len(args) < arity or node.kwargs:
            raise Refusal(f"{name} is not supported; supported are {SUPPORTED}")
        return self.step(name, *(self._of_one_type(args[:2]) if arity == 2 else self.numbers(args[:1])))

    def _of_one_type(self, args: Sequence[Any]) -> list[Value]:
        """Arguments in the type that torch computes in: with a 16-bit tensor all are rounded to its type."""
        given = [_meta(argument) for argument in args]
        kind = self.rounded_kind(torch.result_type(*given)) if len(given) == 2 else None
        return [self.rounded(value, kind) for value in self.numbers(args)]

    def rounded(self, value: Value, kind: str | None) -> Value:
        """A number, rounded to a kind of `ROUNDED` if it is not of that kind; `kind` None: unchanged."""
        if kind is None or self._is_of(value, kind):
            return value
        if isinstance(value, Ref):
            return self.step("copy", value, kind=kind)
        return float(torch.tensor(value, dtype=torch.float32, device="cpu").to(ROUNDED[kind]))

    def _is_of(self, value: Value, kind: str) -> bool:
        """Whether rounding to the kind changes nothing."""
        found = self._kind(value)
        return found in (kind, BOOL) or (kind == FLOAT and found in ROUNDED)

    def numbers(self, given: Sequence[Any]) -> list[Value]:
        """Arguments as numbers, booleans among them as 0 and 1."""
        return [self._real(self._value(argument)) for argument in given]


def _meta(argument: Any) -> Any:
    """An argument for `torch.result_type`: a tensor, or a number."""
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
    return value if isinstance(value, (torch.Tensor, bool, int, float)) else 1.0


def _arguments(node: fx.Node) -> list[Any]:
    """The arguments of an operator's call by its schema, with the defaults that the call leaves out."""
    names = node.target._schema.arguments[len(node.args) :]  # type: ignore[union-attr]
    return [*node.args, *(node.kwargs.get(each.name, each.default_value) for each in names)]


def _scaled_sum(op: str, build: Builder, first: Any, second: Any, alpha: Any) -> Value:
    first, second, alpha = build.numbers([first, second, alpha])
    return build.step(op, first, second if alpha == 1.0 else build.step("mul", alpha, second))


def _multiply(build: Builder, args: list[Any]) -> Value:
    first, second = build.numbers(args)
    # A scalar that stands alone appears as a product with one.
    return second if first == 1.0 else first if second == 1.0 else build.step("mul", first, second)


def _divide(build: Builder, args: list[Any]) -> Value:
    mode = args[2] if len(args) > 2 else None
    names = {None: "div", "floor": "floor_div", "trunc": "trunc_div", "floor_divide": "floor_divide"}
    name = names[mode]
    first, second = build.numbers(args[:2])
    # torch rounds a number that is divided by a 16-bit tensor, but not one that divides a 16-bit tensor.
    kind = build.rounded_kind(torch.result_type(*map(_meta, args[:2]))) if mode else None
    return build.step(name, build.rounded(first, kind), second)


def _clamp(build: Builder, value: Any, low: Any, high: Any) -> Value:
    name = "clamp_min" if high is None else "clamp_max" if low is None else "clamp"
    return build.step(name, *build.numbers([each for each in (value, low, high) if each is not None]))


def _nan_to_num(build: Builder, args: list[Any]) -> Value:
    """By default the infinities become the largest numbers of the value's type: in fp64 those of fp64."""
    (value,) = build.numbers(args[:1])
    nan, posinf, neginf = (None if each is None else build.numbers([each])[0] for each in args[1:])
    value_or = build._where(build.step("isnan", value, kind=BOOL), 0.0 if nan is None else nan, value, REAL)
    infinity = float("inf")
    dtype = _meta(args[0]).dtype
    is_rounded = build.rounded_kind(dtype) is not None
    most: Value = torch.finfo(dtype).max if is_rounded else build.step("highest", value)
    high = most if posinf is None else posinf
    value_or = build._where(build.step("eq", value, infinity, kind=BOOL), high, value_or, REAL)
    low = build.step("neg", most) if neginf is None else neginf
    return build._where(build.step("eq", value, -infinity, kind=BOOL), low, value_or, REAL)


HANDLERS: dict[str, Callable[[Builder, list[Any]], Value]] = {
    "add": lambda build, args: _scaled_sum("add", build, *args),
    "sub": lambda build, args: _scaled_sum("sub", build, *args),
    "rsub": lambda build, args: _scaled_sum("sub", build, args[1], args[0], args[2]),
    "mul": _multiply,
    "div": _divide,
    "floor_divide": lambda build, args: _divide(build, [*args[:2], "floor_divide"]),
    "clamp": lambda build, args: _clamp(build, args[0], args[1], args[2]),
    "clamp_min": lambda build, args: _clamp(build, args[0], args[1], None),
    "clamp_max": lambda build, args: _clamp(build, args[0], None, args[1]),
    "gelu": lambda build, args: build.step(
        "gelu_tanh" if args[1] == "tanh" else "gelu", *build.numbers(args[:1])
    ),
    "nan_to_num": _nan_to_num,
}
# Among their arguments, in this order.
_WITH_NUMBERS = programs.words("hardtanh leaky_relu elu softplus softshrink")
KEPT = {*HANDLERS, *_WITH_NUMBERS, *aten.UNARY, *aten.BINARY, *aten.PREDICATES, "where"} - {"rsub"}
"""Operators that the trace does not decompose, although torch has a decomposition for some."""
