"""The signature and docstring of an epilogue's calls, for `inspect.signature` and `help`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from epigemm.epilogues.kinds import KINDS, SCALAR, Operand
from epigemm.epilogues.tracer.results import Results, written

_OF_8_BITS = {"x_scale": None, "weight_scale": None, "out_dtype": None, "accumulate": "promoted"}


def call_signature(operands: Sequence[Operand], *, takes_out: bool = True) -> inspect.Signature:
    """The signature of an epilogue's calls, as `help` shows it.

    Scalars with a default that come last are shown as keywords. A call also takes them by position.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    given = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in first_names(operands)]
    last = max((place for place, each in enumerate(operands, 1) if not _is_setting(each)), default=0)
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


def _is_setting(operand: Operand) -> bool:
    return operand.kind == SCALAR and operand.default is not None


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
