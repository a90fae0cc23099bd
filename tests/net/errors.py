"""What bad calls of public names raise, as text: each message, and below it the calls that raise it.

Three kinds of calls: every function, layer and epilogue with each of its arguments replaced by values that do not fit
(`_of_arguments`); programs in `programs.txt`; functions that are no epilogues, in `refused.txt`. And what the report of
the compiler's backend says of the models in `models.txt`.
"""

from __future__ import annotations

import inspect
import math  # noqa: F401 # of functions in refused.txt, as os and random
import os  # noqa: F401
import random  # noqa: F401
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import epigemm
from epigemm import Matrix, PerColumn, PerRow, Scalar

HERE = Path(__file__).parent
M, N, K = 4, 5, 8
_X, _WEIGHT, _ROW, _COLUMN, _MATRIX = (torch.ones(*size) for size in ((M, K), (N, K), (N,), (M,), (M, N)))


def lines() -> list[str]:
    """Messages with the calls that raise them, sorted."""
    calls: dict[str, list[str]] = defaultdict(list)
    for call, message in (*_of_arguments(), *_of_programs(), *_of_decorations(), *_of_models()):
        calls[message].append(call)
    found: list[str] = []
    for message in sorted(calls):
        found += [message, *(f"    {call}" for call in _together(calls[message]))]
    return found


def raised(call: Callable[[], object]) -> str:
    """The type and the text of what a call raises; empty if it returns. Paths and addresses are left out."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except Exception as error:
        text = re.sub(r"0x[0-9a-f]+", "0x", str(error)).split("\n\n")[0]
        return f"{type(error).__name__}: {' '.join(text.split())}"
    return ""


def written(name: str) -> list[str]:
    """The lines of a file of this folder, without comments."""
    return [line for line in (HERE / f"{name}.txt").read_text().splitlines() if line and line[0] != "#"]


def _together(calls: list[str]) -> list[str]:
    """Calls that differ in the name of the function alone in one line."""
    names: dict[str, list[str]] = defaultdict(list)
    for call in calls:
        name, _, rest = call.partition("(")
        names[rest].append(name)
    return [f"{', '.join(each)}{'(' if rest else ''}{rest}" for rest, each in names.items()]


# Values of arguments that do not fit, by a name that the text has. Each takes the value that does.
_OF_TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "None": lambda t: None,
    "3": lambda t: 3,
    "int32": lambda t: t.int(),
    "float64": lambda t: t.double(),
    "complex": lambda t: t.to(torch.complex64),
    "0-d": lambda t: t.new_ones(()),
    "longer": lambda t: t.new_ones(*t.shape[:-1], t.shape[-1] + 1),
    "more rows": lambda t: t.new_ones(t.shape[0] + 1, *t.shape[1:]),
    "one dimension more": lambda t: t[None],
    "one dimension less": lambda t: t[0],
    "on another device": lambda t: torch.empty_like(t, device="cpu" if t.is_meta else "meta"),
    "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor([t, t[:1]]),
}
_OF_SCALARS: dict[str, Callable[[Any], Any]] = {
    "None": lambda s: None,
    "'text'": lambda s: "text",
    "10**400": lambda s: 10**400,
    "complex": lambda s: 1j,
    "a vector": lambda s: torch.ones(3),
    "int32": lambda s: torch.ones((), dtype=torch.int32),
    "on another device": lambda s: torch.empty((), device="meta"),
}
_OF_OUT: dict[str, Callable[[Tensor], Any]] = {
    **{name: _OF_TENSORS[name] for name in ("3", "float64", "longer", "0-d", "on another device")},
    "expanded": lambda t: t[:1].expand_as(t),
    "negated": lambda t: torch._neg_view(t),
    "sparse": lambda t: t.to_sparse(),
}
_OF_OPTIONS: dict[str, tuple[Any, ...]] = {
    "precision": (3, "best"),
    "strict": (1, True),
    "approximate": (3, "erf"),
    "activation": (3, "softplus"),
    "eps": (-1.0, float("nan"), "text"),
    "epilogue": (3, "swish"),
}


@epigemm.epilogue
def user(acc: Tensor, bias: PerColumn, r: PerRow, m: Matrix, s: Scalar = 2.0) -> Tensor:
    """Of one result, with an operand of each kind."""
    return torch.tanh(acc + bias) * r + m * s


@epigemm.epilogue
def results(acc: Tensor, bias: PerColumn, m: Matrix) -> tuple[Tensor, Tensor]:
    """Of two results."""
    z = acc + bias
    return torch.relu(z) + m, z.float().amax(-1)


_ITEMS = [2.0]  # of functions in refused.txt
_COUNT = 1.0
_MARKED = type("_Marked", (float,), {"scale": 2.0})(1.0)
_look_up = {"limit": 2.0}.get
_LEAKY, _HIDDEN = nn.LeakyReLU(0.1), type("_Hidden", (), {"weight": torch.ones(())})
_GROUPS: dict[str, Any] = {
    **dict.fromkeys(("weight", "weight2"), torch.ones(3, N, K)),
    **dict.fromkeys(("bias", "bias2"), torch.ones(3, N)),
    "offs": torch.tensor((2, 2, M), dtype=torch.int32),
}
_VALUES: dict[str, Any] = {
    "x": _X,
    "z": _MATRIX,
    "weight": _WEIGHT,
    "weight2": _WEIGHT,
    **dict.fromkeys(("gate", "residual", "m"), _MATRIX),
    **dict.fromkeys(("bias", "bias2", "scale", "layer_scale", "running_mean", "running_var"), _ROW),
    **dict.fromkeys(("bn_weight", "bn_bias"), _ROW),
    "r": _COLUMN,
    "s": 2.0,
    "divisor": 2.0,
}


def _functions() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """Functions and layers with arguments that fit: whatever is public and takes x first."""
    for name in epigemm.__all__:
        function = getattr(epigemm, name)
        if inspect.isfunction(function) and next(iter(inspect.signature(function).parameters), "") == "x":
            names = [each for each in inspect.signature(function).parameters if each in _VALUES]
            given = {each: _VALUES[each] for each in names}
            if "weight" not in names:
                given["x"] = _MATRIX
            if name.endswith("sigmoid_scale_residual"):
                given["scale"] = 2.0
            if name.startswith("grouped"):
                given |= {
                    each: _GROUPS[each] for each in _GROUPS if each in inspect.signature(function).parameters
                }
            yield name, function, given
    operands = {name: _VALUES[name] for name in ("bias", "m", "r", "s")}
    for name, made, count in (("user", user, 4), ("results", results, 2)):
        given = dict(list(operands.items())[:count])
        yield name, made, {"x": _X, "weight": _WEIGHT, **given}
        yield f"{name}.elementwise", made.elementwise, {"z": _MATRIX, **given}
    for name in epigemm.nn.__all__:
        kind: Any = getattr(epigemm.nn, name)
        if isinstance(kind, type) and name != "Experts":  # tests/nn/test_experts.py
            layer: Any = kind() if name == "Sigmoid" else kind(K, N)
            names = [each for each in inspect.signature(layer.forward).parameters if each in _VALUES]
            yield f"nn.{name}", layer.eval(), {each: _VALUES[each] for each in names}


_SLOW = ("on another device", "sparse", "nested")  # a C++ exception each, with its stack
_ON_META = ("linear_relu", "linear_gated", "linear_glu", "bias_relu", "user", "user.elementwise")
_ROADS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[str, str], bool]]] = {
    "": (lambda t: t, lambda name, value: value != "nested" or name[:2] != "nn"),
    "recorded": (lambda t: t.clone().requires_grad_(), lambda name, value: value not in _SLOW),
    "in float16": (Tensor.half, lambda name, value: value in ("int32", "float64") and name[:2] != "nn"),
    "on meta tensors": (lambda t: t.to("meta"), lambda name, value: name in _ON_META),
}
"""How a call's tensors are, and for which functions and values it is tried."""


def _of_arguments() -> Iterator[tuple[str, str]]:
    """Calls with one argument that does not fit; on other roads than the plain one where their error is another."""
    for name, function, fitting in _functions():
        plain: dict[str, str] = {}
        for road, (moved, is_tried) in _ROADS.items():
            given = {key: moved(each) if _is_float(each) else each for key, each in fitting.items()}
            for argument, value, bad in _replaced(function, given):
                call = f"{argument}={value}"
                found = raised(_call(function, {**given, argument: bad})) if is_tried(name, value) else ""
                if found and found != plain.get(call):
                    yield f"{name}({call}) {road}".rstrip(), found
                if not road:
                    plain[call] = found


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _call(function: Callable[..., Any], given: dict[str, Any]) -> Callable[[], Any]:
    parameters = inspect.signature(function).parameters.values()
    first = [each.name for each in parameters if each.kind is each.POSITIONAL_ONLY]
    named = {name: value for name, value in given.items() if name not in first}
    return partial(function, *(given[name] for name in first), **named)


def _replaced(function: Callable[..., Any], given: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Arguments, each with the name of a value that does not fit, and the value."""
    called = function.forward if isinstance(function, nn.Module) else function
    parameters = inspect.signature(called).parameters
    changes = [
        (argument, value, name, change)
        for argument, value in given.items()
        for name, change in (_OF_TENSORS if isinstance(value, Tensor) else _OF_SCALARS).items()
    ]
    if "out" in parameters:
        first = next(iter(given.values())).detach()
        out = first.new_ones(*first.shape[:-1], N)
        changes += [("out", out, name, change) for name, change in _OF_OUT.items()]
        yield "out", "the first argument", first
    for argument, value, name, change in changes:
        try:
            yield argument, name, change(value.detach() if isinstance(value, Tensor) else value)
        except (RuntimeError, NotImplementedError):  # there is no such tensor, as of meta tensors
            continue
    for argument in (each for each in _OF_OPTIONS if each in parameters):
        yield from ((argument, repr(value), value) for value in _OF_OPTIONS[argument])


def _of_programs() -> Iterator[tuple[str, str]]:
    """Each line of `programs.txt` is an expression, or statements whose last one raises."""
    for program in written("programs"):
        given = {"x": _X, "weight": _WEIGHT, "row": _ROW, "matrix": _MATRIX, "model": nn.Linear(K, N)}
        given |= {"weights": _GROUPS["weight"], "rows": _GROUPS["bias"], "ends": _GROUPS["offs"]}
        code = compile(program, "<program>", "exec")
        yield program, raised(partial(exec, code, {**globals(), **given}))
        torch.set_float32_matmul_precision("highest")


def _of_decorations() -> Iterator[tuple[str, str]]:
    """Each line of `refused.txt` is `parameters: body` of a function."""
    for line in written("refused"):
        parameters, _, body = line.partition(" -> ")
        text = f"def refused({parameters}):\n    {body}"
        namespace = dict(globals())
        exec(compile(text, "<epilogue>", "exec"), namespace)
        yield line, raised(partial(epigemm.epilogue, namespace["refused"]))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.other, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout()


def _of_models() -> Iterator[tuple[str, str]]:
    """Each line of `models.txt` is the body of a forward."""
    for line in written("models"):
        namespace: dict[str, Any] = {"torch": torch, "F": nn.functional}
        exec(compile(f"def forward(self, x):\n    {line}", "<model>", "exec"), namespace)
        model = type("Model", (_Model,), {"forward": namespace["forward"]})().eval()
        reports: list[Any] = []
        options: dict[str, Any] = {"backend": "eager", "report": reports.append}
        compiled: Any = torch.compile(model, backend="epigemm", options=options)
        with torch.no_grad():
            compiled(torch.ones(4, 8))
        text = " / ".join(" ".join(str(each).split()) for each in reports)
        yield line, f"report: {re.sub(r'; compiled in [0-9.]+ s', '', text)}"
