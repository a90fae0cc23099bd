"""The signature and docstring of an epilogue's calls, for `inspect.signature` and `help`."""

from __future__ import annotations

import inspect
import re
import sys
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, UnionType
from typing import Any, Union, get_args, get_origin

from torch import Tensor

from epigemm.epilogues import constants
from epigemm.epilogues.kinds import ANNOTATIONS, KINDS, SCALAR, Operand
from epigemm.epilogues.tracer.results import Results, written

_OF_8_BITS = {"x_scale": None, "weight_scale": None, "out_dtype": None, "accumulate": "promoted"}


def call_signature(operands: Sequence[Operand], *, takes_out: bool = True) -> inspect.Signature:
    """The signature of an epilogue's calls, as `help` shows it.

    Scalars with a default that come last are shown as keywords. A call also takes them by position.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    given = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in first_names(operands)]
    settings = [each.kind == SCALAR and each.default is not None for each in operands]
    last = max((place for place, is_setting in enumerate(settings, 1) if not is_setting), default=0)
    given += [_parameter(each, kind) for each in operands[:last]]
    given += [_parameter(each, inspect.Parameter.KEYWORD_ONLY) for each in operands[last:]]
    options: dict[str, Any] = {"precision": None, "strict": False}
    if takes_out:
        options = {"out": None, **options, **_OF_8_BITS}
    given += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in options.items()
    ]
    return inspect.Signature(given)


def first_names(operands: Sequence[Operand]) -> list[str]:
    """How the two tensors of the product are shown: another name than that of any operand."""
    taken = {each.name for each in operands}

    def free(name: str) -> str:
        return free(f"{name}_") if name in taken else name

    return [free("x"), free("weight")]


def _parameter(operand: Operand, kind: Any) -> inspect.Parameter:
    default = None if operand.is_optional else operand.default
    if default is None and not operand.is_optional:
        return inspect.Parameter(operand.name, kind)
    return inspect.Parameter(operand.name, kind, default=default)


def call_doc(doc: str | None, name: str, operands: Sequence[Operand], results: Results | None = None) -> str:
    """The docstring of an epilogue: its function's, what a call takes, and what it returns if that is no matrix."""
    what = f"D = {name}(x @ weight.T, ...), in one kernel where there is one."
    if results is not None:
        what = f"The results of {name}(x @ weight.T, ...); the product and what they share are one kernel."
    lines = [inspect.cleandoc(doc) if doc else what]
    x, weight = first_names(operands)
    lines += ["", "Args:", f"    {x}: `[..., K]`.", f"    {weight}: `[N, K]`, or an `epigemm.PackedWeight`."]
    for each in operands:
        lines.append(f"    {each.name}: {KINDS[each.kind].accepted}{' or None' if each.is_optional else ''}.")
    options = (
        "precision, strict" if results is not None else ", ".join(["out, precision, strict", *_OF_8_BITS])
    )
    lines += [f"    {options}: as of `epigemm.linear`."]
    if results is not None:
        names = [f"r{number}" for number in range(len(results.results))]
        lines += ["", "Returns:", f"    {written(results.structure, names)}"]
        lines += [f"    {name}: {each}." for name, each in zip(names, results.results, strict=True)]
    return "\n".join(lines)


# --- annotations that are strings, as under from __future__ import annotations ----------------------------------------


_OURS: dict[str, Any] = {kind.__name__: kind for kind in ANNOTATIONS} | {"Tensor": Tensor}
_AROUND_A_KIND = ("Optional", "Union", "None")


class UnknownError(Exception):
    """An annotation that is a string and names nothing."""


def evaluated(function: FunctionType, annotation: object) -> object:
    """The value of an annotation that may be a string; of `PerColumn | None`, the kind alone.

    Names are looked up in the function's cells, in the enclosing functions and classes that are being executed, and in
    its module. What is imported under `TYPE_CHECKING` is in none of them: it is recognised by its own name, as in
    `PerColumn`, `epigemm.PerColumn` or `Optional[PerColumn]`.

    Raises:
        UnknownError: a string that cannot be evaluated. It says why.
    """
    if isinstance(annotation, str):
        annotation = _evaluated_text(function, annotation)
    if get_origin(annotation) not in (Union, UnionType):
        return annotation
    choices = [choice for choice in get_args(annotation) if choice is not type(None)]
    return choices[0] if len(choices) == 1 else annotation


def _evaluated_text(function: FunctionType, annotation: str) -> object:
    values = map(constants.contents, function.__closure__ or ())
    cells = dict(zip(function.__code__.co_freevars, values, strict=True))
    found: object = annotation
    try:
        while isinstance(found, str):  # an annotation in quotes is a string within a string
            found = eval(found, function.__globals__, ChainMap(cells, *map(dict, _around(function))))
    except Exception as error:  # whatever it is
        names = {name for name in re.findall(r"(\w+)(?![\w.])", annotation) if name not in _AROUND_A_KIND}
        if len(names) != 1 or (named := _OURS.get(names.pop())) is None:
            raise UnknownError(f"{type(error).__name__}: {error}") from None
        return named
    return found


def _around(function: FunctionType) -> Iterator[Mapping[str, Any]]:
    """The local names of the enclosing functions and classes that are being executed, the innermost first."""
    names = function.__qualname__.split(".")[:-1]
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals is function.__globals__ and frame.f_code.co_name in names:
            yield frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]
