"""From a chain to its site: the object, and the text that makes it.

torch.compile guards whatever it reads off an object that was there before: a hundred checks a call for each site. Of
one that is made before its eyes it guards nothing. So the forward that it is shown makes its sites itself, from
constants (`forward_for_compilers`), and asks about hooks where it takes the answer for a constant, as it does itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import nn
from torch.fx import Graph, Node
from torch.fx.graph import PythonCode

from epigemm.fusion import codegen
from epigemm.fusion import site as _site
from epigemm.fusion.chains import Chain, Operand
from epigemm.fusion.operations import Values
from epigemm.fusion.site import NormRefs, Ref, Site
from epigemm.fusion.state import why_not_callable


class BuiltSite(Site):
    """A site of a chain.

    Attributes:
        origins: what its arguments are: nodes, or targets of modules, of the graph that it was matched in.
        recipe: what it was made of.
    """

    def __init__(self, recipe: Recipe, origins: list[Node | str]) -> None:
        before = None if recipe.before_norm is None else BuiltSite(recipe.before_norm, origins)
        replays: dict[str, Any] = {name: codegen.of_code(code, name) for name, code in recipe.replays.items()}
        super().__init__(**recipe.arguments, **replays, before_norm=before)
        self.get_ready()
        self.origins, self.recipe = origins, recipe
        # fx writes these two into the generated code.
        self.__name__ = f"fused_{self.function}"
        self.__module__ = _site.__name__


@dataclass(frozen=True)
class Recipe:
    """What a site is made of.

    Attributes:
        arguments: those of `Site` that are constants, made of constants, or classes of modules.
        replays: the replaced nodes as text, by the name of the argument.
        before_norm: of the site without its BatchNorm.
        modules: targets of the called modules.
    """

    arguments: dict[str, Any]
    replays: dict[str, PythonCode]
    before_norm: Recipe | None
    modules: tuple[str, ...]

    def lines(self, name: str, scope: dict[str, Any], number: int) -> Iterator[str]:
        """Text that makes the site under a name; what it refers to is put into `scope`.

        Raises:
            ValueError: two things have the same name there.
        """
        given = {argument: _text(value, scope) for argument, value in self.arguments.items()}
        for argument, code in self.replays.items():
            for other, value in code.globals.items():
                _put(scope, other, value)
            text = code.src.strip("\n").replace("def forward(", f"def {name}_{argument}(", 1)
            yield from text.splitlines()
            given[argument] = f"{name}_{argument}"
        if self.before_norm is not None:
            yield from self.before_norm.lines(f"{name}_before_norm", scope, number)
            given["before_norm"] = f"{name}_before_norm"
        kind = _put(scope, "epigemm_CompiledSite", CompiledSite)
        yield f"{name} = {kind}({number}, {', '.join(f'{key}={value}' for key, value in given.items())})"


class CompiledSite(Site):
    """A site that is made while torch.compile looks, in a module that was registered under a number."""

    def __init__(self, number: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._number = number

    def _why_not_modules(self, inputs: Sequence[Any]) -> str:
        return why_not_modules(self._number)


_numbers = count()
_modules: dict[int, tuple[weakref.ref[nn.Module], tuple[str, ...]]] = {}


def why_not_modules(number: int) -> str:
    """Why the modules of a site are more than their mathematics while they are compiled; empty where they are not."""
    known = _modules.get(number)
    root = None if known is None else known[0]()
    if known is None or root is None:
        return "the model is gone"
    for target in known[1]:
        module: Any = root
        for part in target.split("."):
            module = getattr(module, part)
        if reason := why_not_callable(module):
            return reason
    return ""


# As in `worth`: Dynamo takes the answer for a constant, and guards nothing.
why_not_modules._dynamo_marked_constant = True  # type: ignore[attr-defined]


def build(chain: Chain, values: Values, name: str, *, keep_packs: bool = False) -> BuiltSite:
    """The site of a chain.

    Args:
        chain: the chain.
        values: what is known about its values.
        name: where it is, for people.
        keep_packs: whether its weight, if it is a parameter, may keep its fp16 pieces between calls.
    """
    origins = list(_origins(chain))
    return BuiltSite(_recipe(chain, values, name, origins, keep_packs), origins)


def forward_for_compilers(graph: Graph, root: nn.Module, title: str) -> Callable[..., Any] | None:
    """The function of a graph with sites, for torch.compile; None where there is no such text.

    Args:
        graph: of `root`'s forward.
        root: the module.
        title: what tracebacks call the function's file.
    """
    code = codegen.text_of(graph)
    scope = dict(code.globals)
    made: list[str] = []
    registered: dict[int, tuple[weakref.ref[nn.Module], tuple[str, ...]]] = {}
    try:
        for name, value in code.globals.items():
            if isinstance(value, BuiltSite):
                del scope[name]
                number = next(_numbers)
                registered[number] = (weakref.ref(root), value.recipe.modules)
                made += value.recipe.lines(name, scope, number)
    except ValueError:
        return None
    lines = code.src.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("def forward(")) + 1
    lines[start:start] = [f"    {line}" for line in made]
    forward = codegen.compiled("\n".join(lines), "forward", f"{title}, compiled", scope)
    _modules.update(registered)
    weakref.finalize(forward, _forget, list(registered)).atexit = False
    return forward


def _forget(numbers: list[int]) -> None:
    for number in numbers:
        _modules.pop(number, None)


def _text(value: Any, scope: dict[str, Any]) -> str:
    """A constant, or something made of constants, as Python."""
    if isinstance(value, Ref):
        return f"{_put(scope, 'epigemm_Ref', Ref)}({value.position}, {value.attribute!r})"
    if isinstance(value, NormRefs):
        vectors, eps = _text(value.vectors, scope), _text(value.eps, scope)
        return f"{_put(scope, 'epigemm_NormRefs', NormRefs)}({vectors}, {eps}, {value.index!r})"
    if isinstance(value, tuple):
        return f"({''.join(f'{_text(part, scope)}, ' for part in value)})"
    if isinstance(value, type):
        return _put(scope, f"epigemm_{value.__name__}", value)
    return repr(value)


def _put(scope: dict[str, Any], name: str, value: Any) -> str:
    if scope.setdefault(name, value) is not value:
        raise ValueError(f"two things are called {name}")
    return name


# --- from chains to recipes -------------------------------------------------------------------------------------------


def _recipe(chain: Chain, values: Values, name: str, origins: list[Node | str], keep_packs: bool) -> Recipe:
    def ref(operand: Operand | None) -> Ref | None:
        return None if operand is None else Ref(origins.index(operand.origin), operand.attribute)

    weight, scalar, before = chain.weight, chain.scalar, chain.before_norm
    is_parameter = values.is_parameter(weight.origin) if isinstance(weight.origin, Node) else None
    arguments = {
        "name": name,
        "function": chain.function,
        "x": ref(chain.x),
        "weight": ref(weight),
        "bias": ref(chain.bias),
        "no_bias": ref(chain.no_bias),
        "scale": ref(chain.scale),
        "scalar": ref(scalar) if isinstance(scalar, Operand) else scalar,
        "norm": _norm_refs(chain, origins, ref),
        "weight_is_kn": chain.weight_is_kn,
        "added_bias": chain.added_bias,
        "of_matrices": chain.of_matrices,
        "is_parameter": is_parameter if keep_packs and not chain.weight_is_kn else False,
        "modules": tuple(
            (origins.index(target), _class_of(values, chain, target)) for target in chain.modules
        ),
    }
    replays = {
        "unfused": codegen.code_of(_replay(chain, origins, forwards=False)),
        "of_forwards": codegen.code_of(_replay(chain, origins, forwards=True)),
    }
    without = None if before is None else _recipe(before, values, name, origins, keep_packs)
    return Recipe(arguments, replays, without, tuple(chain.modules))


def _norm_refs(
    chain: Chain, origins: list[Node | str], ref: Callable[[Operand | None], Ref | None]
) -> NormRefs | None:
    norm = chain.norm
    if norm is None:
        return None
    vectors = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    eps = ref(norm.eps) if isinstance(norm.eps, Operand) else norm.eps
    assert eps is not None
    index = origins.index(norm.module) if norm.module else None
    return NormRefs(tuple(ref(vector) for vector in vectors), eps, index)


def _class_of(values: Values, chain: Chain, target: str) -> type[nn.Module]:
    """The class of a module that a chain calls."""
    node = next(node for node in chain.nodes if node.op == "call_module" and node.target == target)
    kind = type(values.module(node))
    assert issubclass(kind, nn.Module)
    return kind


def _origins(chain: Chain) -> Iterator[Node | str]:
    """What a chain is computed from: outside nodes and the targets of called modules, each once."""
    inside = {*chain.nodes, *chain.helpers}
    seen: set[Node | str] = set()
    for node in (*chain.helpers, *chain.nodes):
        found: list[Node | str] = [str(node.target)] if node.op == "call_module" else []
        found += [source for source in node.all_input_nodes if source not in inside]
        for origin in found:
            if origin not in seen:
                seen.add(origin)
                yield origin


def _replay(chain: Chain, origins: Sequence[Node | str], *, forwards: bool) -> Graph:
    """The replaced nodes as a function of `origins`.

    `forwards`: of modules of which it is known that they have no hooks. What a call costs beside the forward is saved.
    """
    graph = Graph()
    inputs = {origin: graph.placeholder(f"input_{index}") for index, origin in enumerate(origins)}
    env: dict[Node, Node] = {origin: node for origin, node in inputs.items() if isinstance(origin, Node)}
    for node in (*chain.helpers, *chain.nodes):
        if node.op == "call_module":
            args = [graph_argument(argument, env) for argument in node.args]
            kwargs = {name: graph_argument(argument, env) for name, argument in node.kwargs.items()}
            call = (inputs[str(node.target)], *args)
            if forwards:
                env[node] = graph.call_method("forward", call, kwargs)
            else:
                env[node] = graph.call_function(_site.call, call, kwargs)
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(env[chain.tail])
    return graph


def graph_argument(argument: Any, env: dict[Node, Node]) -> Any:
    """An argument of a node, in another graph."""
    return env[argument] if isinstance(argument, Node) else argument
