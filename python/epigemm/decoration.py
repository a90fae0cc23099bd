"""What `epigemm.epilogue` puts in a function's place: how it takes operands, and what it is to Python."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from epigemm.compilers import is_exporting, is_traced
from epigemm.epilogues.declaration import Declared
from epigemm.epilogues.kinds import KINDS, PER_COLUMN

_tracing_state = torch._C._get_tracing_state
_may_be_exporting = torch.compiler.is_exporting  # of any thread

if TYPE_CHECKING:
    from typing_extensions import Self

# Dynamo before torch 2.13: an object's attribute that has `__get__`, such as `self.activation = swish_clamp` in a
# module, is looked for in its class, and breaks the graph.
_TAKES_ATTRIBUTES_FOR_METHODS = torch.torch_version.TorchVersion(torch.__version__) < "2.13"


class Decorated:
    """A user's function as an epilogue, of one result or of several.

    `traced`: what was made of the function; `without`: by the places of operands that are None, what computes a call.
    """

    traced: Declared
    without: Mapping[tuple[int, ...], Any]

    def __init__(self, traced: Declared) -> None:
        self.traced = traced
        self.takes_bias = any(each.name == "bias" and each.kind == PER_COLUMN for each in traced.operands)
        self._names = {operand.name: place for place, operand in enumerate(traced.operands)}
        self._defaults = tuple(operand.default for operand in traced.operands)

    if not _TAKES_ATTRIBUTES_FOR_METHODS:

        def __get__(self, instance: object, owner: type | None = None) -> Self:
            # As a class attribute it is not a method. With this method `help` shows it as a function, with its call.
            return self

    def __repr__(self) -> str:
        return f"epigemm.epilogue({self.traced.name})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        # By its own name if it has replaced its function under that name; else by the function's name.
        name = str(vars(self)["__qualname__"])
        found: object = sys.modules.get(vars(self)["__module__"])
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (vars(self)["_decorator"], (vars(self)["__wrapped__"],))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def form(
        self, operands: Sequence[Any], named: Mapping[str, Tensor | float | None]
    ) -> tuple[Any, Sequence[Any]]:
        """What computes a call with these operands, of `without`, and its operands in order, one for each."""
        specs = self.traced.operands
        if _may_be_exporting() and is_exporting():
            self._refuse_to_be_saved("torch.export")
        if not is_traced() and _tracing_state() is not None:
            self._refuse_to_be_saved("torch.jit.trace")
        if not named and len(operands) == len(specs) and len(self.without) == 1:
            return self.without[()], operands
        if len(operands) > len(specs):
            raise TypeError(
                f"{self.traced.name}: got {len(operands)} operands; accepted are {[spec.name for spec in specs]}"
            )
        values: list[Any] = [*operands, *self._defaults[len(operands) :]]
        for name, value in named.items():
            place = self._names.get(name)
            if place is None:
                raise TypeError(
                    f"{self.traced.name}: got an operand {name!r}; accepted are {[spec.name for spec in specs]}"
                )
            if place < len(operands):
                raise TypeError(f"{self.traced.name}: got the operand {name!r} twice; accepted is one value")
            values[place] = value
        for spec, value in zip(specs, values, strict=True):
            if value is None and not spec.is_optional:
                accepted = KINDS[spec.kind].accepted
                raise TypeError(f"{spec.name}: got None, or was not given; accepted is {accepted}")
        if len(self.without) == 1:
            return self.without[()], values
        absent = tuple([place for place, value in enumerate(values) if value is None])
        return self.without[absent], [value for value in values if value is not None]

    def _refuse_to_be_saved(self, under: str) -> None:
        if self.traced.is_own:
            return
        raise NotImplementedError(
            f"{self.traced.name}: got a call under {under}, whose programs cannot hold an epilogue that is made at run "
            "time; accepted there are epigemm's own functions"
        )
