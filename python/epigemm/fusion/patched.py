"""Whether torch and a model's classes are as they were: Dynamo does not look whether their functions were replaced.

A call looks at few of them: at those whose names are in the code that Dynamo has traced.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as _module

from epigemm.functor_program import words

_code, _order = attrgetter("__code__"), attrgetter("__mro__")
_CODED = (nn.Linear.forward, F.relu, F.batch_norm, nn.Module._call_impl)
_CODES = [*map(_code, _CODED)]
_SPACES: dict[Any, dict[str, Any]] = {space: dict(vars(space)) for space in (torch, F, Tensor, nn.Module)}
PATCHED = "a function of torch's was replaced"
# What Dynamo wraps itself, when it compiles first.
_OF_DYNAMO = {"__init__", "__setstate__", "manual_seed", "seed"}
# What runs without its name.
_UNNAMED = words(
    "__call__ forward _call_impl _wrapped_call_impl __getattr__ __torch_function__ __add__ __iadd__ __radd__ __sub__ "
    "__isub__ __rsub__ __mul__ __imul__ __rmul__ __truediv__ __itruediv__ __rtruediv__ __matmul__ __rmatmul__ __neg__ "
    "__pow__ __getitem__"
)


def is_torch_patched() -> bool:
    """Whether somebody put others in the place of torch's functions: all are looked at."""
    for space, was in _SPACES.items():
        now = vars(space)
        for name, value in was.items():
            if callable(value) and name not in _OF_DYNAMO and now.get(name) is not value:
                return True
    return any(name in vars(torch._C.TensorBase) for name in vars(Tensor).keys() - _SPACES[Tensor].keys())


class Watched:
    """What the graphs of a model were made of: functions of torch's, and the classes of the model's modules.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        kinds = {kind for module in model.modules() for kind in type(module).__mro__} - {object}
        self._kinds = [*kinds]
        self._orders = [*map(_order, self._kinds)]
        self._spaces = dict(_SPACES)
        own = []
        for kind in kinds:
            if kind.__module__.startswith("torch.nn."):
                self._spaces.setdefault(kind, dict(vars(kind)))
            else:
                own.append(vars(kind))
        # The values are kept, too: so their ids stay theirs.
        self._members = [(space.values(), [*map(id, space.values())], [*space.values()]) for space in own]
        functions = [value for _, _, values in self._members for value in values]
        self._coded = [*_CODED, *(value for value in functions if isinstance(value, FunctionType))]
        self._codes = [*_CODES, *map(_code, self._coded[len(_CODED) :])]
        self._names = set(_UNNAMED)
        self.note(())

    def note(self, codes: Iterable[CodeType]) -> None:
        """Look also at what has a name in `codes`."""
        self._names.update(name for code in codes for name in code.co_names)
        self._looks = []
        for space, was in self._spaces.items():
            names = [name for name in self._names - _OF_DYNAMO if callable(getattr(space, name, None))]
            if names:
                self._looks.append((vars(space).get, names, [was.get(name) for name in names]))

    def why_not(self) -> str:
        """What has changed since; empty where nothing has."""
        for get, names, was in self._looks:
            if [*map(get, names)] != was:
                return PATCHED
        for values, ids, _ in self._members:
            if [*map(id, values)] != ids:
                return "a class of the model has changed since"
        if [*map(_order, self._kinds)] != self._orders:
            return "a class of the model has changed since"
        return "" if [*map(_code, self._coded)] == self._codes else "a function has other code since"


def has_global_hooks() -> bool:
    """Whether `torch.nn.modules.module.register_module_*_hook` was called: such hooks see every module's call."""
    return bool(
        _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )
