"""A chain as a function of the product and its operands, and the epilogue that is made of it.

The function calls the chain's nodes again, with the tensors that an epilogue gets: the accumulator `[M, N]`, vectors,
matrices, all in fp32. It is traced like a user's function: `declaring.traced`.
"""

from __future__ import annotations

import inspect
import operator
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from epigemm.decorator import UserEpilogue
from epigemm.epilogues import declaration
from epigemm.epilogues.kinds import KINDS, SCALAR, Operand
from epigemm.epilogues.tracer.aten import Refusal
from epigemm.epilogues.tracer.program import Ref, words

_LONGEST_NAME, _LONGEST_TEXT = 40, 160


@dataclass(frozen=True)
class ChainFormula:
    """A chain as a graph of its own.

    Attributes:
        kinds: of its operands.
        graph: its inputs are the product, then the operands. The `meta` of a call has the line where the model makes it
            ("line"), and the result's type ("dtype") if it is rounded to another type than the product's; else None.
    """

    kinds: tuple[str, ...]
    graph: fx.Graph

    @property
    def steps(self) -> list[fx.Node]:
        """The calls, in order; the last one gives the result."""
        return [node for node in self.graph.nodes if node.op.startswith("call")]

    def __call__(self, acc: Tensor, *operands: Any) -> Tensor:
        """Apply the chain to the product."""
        # The chain's graph has a tensor in place of a number, which some functions refuse.
        pairs = zip(self.kinds, operands, strict=True)
        read = [torch.full_like(acc, each) if kind == SCALAR else each for kind, each in pairs]
        values: dict[Any, Any] = dict(zip(self.inputs, [acc, *read], strict=True))
        for node in self.steps:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = result = out_of_place(node.target, args, kwargs)
            if not isinstance(result, Tensor):
                raise Refusal(f"{name_of(node)} gives no tensor")
            # In an fp64 trace the operands are fp64, too.
            if node.meta["dtype"] not in (None, result.dtype) and acc.dtype != torch.float64:
                raise Refusal(f"{name_of(node)} rounds to the type of another tensor")
        found: Tensor = values[self.graph.output_node().args[0]]
        return found

    @property
    def inputs(self) -> list[fx.Node]:
        """The product and the operands."""
        return self.graph.find_nodes(op="placeholder")

    @property
    def key(self) -> Any:
        """Equal for formulas with one epilogue. Numbers are compared as text: 0.0 == -0.0 and NaN != NaN."""
        return self.kinds, *((node.target, node.meta["dtype"]) for node in self.steps), str(self.graph)


def composed(first: ChainFormula, place: int, second: ChainFormula) -> ChainFormula:
    """`first`, with `second` applied to one of its operands; the operands and steps of `second` come first."""
    graph, kinds = fx.Graph(), (*second.kinds, *first.kinds)
    inputs: list[Any] = [graph.placeholder(name) for name in ("acc", *kinds)]
    acc, others, own = inputs[0], inputs[1 : len(second.inputs)], inputs[len(second.inputs) :]
    own[place] = graph.graph_copy(second.graph, dict(zip(second.inputs, [own[place], *others], strict=True)))
    graph.output(graph.graph_copy(first.graph, dict(zip(first.inputs, [acc, *own], strict=True))))
    return ChainFormula(kinds, graph)


def name_of(*steps: fx.Node) -> str:
    """An identifier for an epilogue of some steps."""
    names = [
        step.target if isinstance(step.target, str) else getattr(step.target, "__name__", "call")
        for step in steps
    ]
    found = "_".join(dict.fromkeys([each.strip("_") for each in names if each.isidentifier()]))
    return found[:_LONGEST_NAME].strip("_") or "pointwise"


# --- in place, out of place ------------------------------------------------------------------------------------------


def out_of_place(target: Any, args: Any, kwargs: Any) -> Any:
    """A call of a function or method of PyTorch; for one that writes in place, the out-of-place form."""
    if inspect.isfunction(target):
        bound = inspect.signature(target).bind(*args, **kwargs)
        if bound.arguments.get("inplace"):
            bound.arguments["inplace"] = False
            args, kwargs = bound.args, bound.kwargs
    if isinstance(target, str):
        name = target[:-1] if target.endswith("_") and not target.endswith("__") else target
        return getattr(args[0], name)(*args[1:], **kwargs)
    name = getattr(target, "__name__", "")
    of_torch = name.removesuffix("_")
    places = (operator, name.removeprefix("i")), (torch, of_torch), (torch.nn.functional, of_torch)
    for place, plain in places:
        if getattr(place, name, None) is target and hasattr(place, plain):
            return getattr(place, plain)(*args, **kwargs)
    return target(*args, **kwargs)


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """PReLU with a slope for each column, or one; PyTorch's refuses the tensors that stand for one number."""
    return torch.where(input > 0, input, weight * input)


# --- epilogues -------------------------------------------------------------------------------------------------------

_made: dict[Any, UserEpilogue | str] = {}


def epilogue_of(formula: ChainFormula) -> UserEpilogue | str:
    """The epilogue of a formula, or why there is none. Equal formulas share one epilogue in all graphs."""
    found = _made.get(formula.key)
    if found is None:
        found = _made[formula.key] = _make(formula)
    return found


def _make(formula: ChainFormula) -> UserEpilogue | str:
    seen: dict[str, int] = {}
    specs = []
    for kind in formula.kinds:
        seen[kind] = seen.get(kind, 0) + 1
        specs.append(Operand(kind, f"{KINDS[kind].letter}{seen[kind]}"))
    line = formula.steps[-1].meta["line"] or "graph:1"
    try:
        return UserEpilogue(declaration.traced(formula, tuple(specs), name_of(*formula.steps), line))
    except Exception as error:  # any error of the function with such tensors
        text = re.sub(r"^\w+ \([^)]*\): |; supported .*", "", str(error).split("\n")[0])
        return "it is not pointwise" if text.startswith("it fails while it is traced") else text


_INFIX = dict(zip(words("add sub mul div eq gt lt ge le"), words("+ - * / == > < >= <="), strict=True))


def text_of(epilogue: UserEpilogue) -> str:
    """The formula as text: `relu(acc + c1)`."""
    traced = epilogue.traced
    texts = ["acc", *(spec.name for spec in traced.operands)]
    compound: set[int] = set()  # the texts that need parentheses next to an operator

    def text(value: Any, *, beside: bool = False) -> str:
        if not isinstance(value, Ref):
            return f"{value:g}" if isinstance(value, float) else str(value)
        found = texts[value.number]
        return f"({found})" if beside and value.number in compound else found

    for step in traced.program.steps:
        if step.op in _INFIX and len(step.inputs) == 2:
            left, right = (text(part, beside=True) for part in step.inputs)
            compound.add(len(texts))
            made = f"{left} {_INFIX[step.op]} {right}"
        else:
            made = f"{step.op}({', '.join(map(text, step.inputs))})"
        texts.append(made[:_LONGEST_TEXT])
    found = text(traced.program.result)
    return found if len(found) < _LONGEST_TEXT else f"{found}..."
