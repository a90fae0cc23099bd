"""Whether torch is as it was when this package was loaded: Dynamo does not look whether its functions were replaced."""

from __future__ import annotations

import inspect
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as _module

from epigemm.functor_program import words

_METHODS = words(
    "__add__ __iadd__ __radd__ __sub__ __mul__ __imul__ __rmul__ __truediv__ __matmul__ relu relu_ sigmoid tanh add "
    "add_ sub mul mul_ div div_ matmul mm addmm bmm view reshape to float half"
)
_FUNCTIONS = words(
    "add sub mul div matmul mm addmm bmm relu relu_ sigmoid tanh exp clamp where softmax maximum minimum batch_norm "
    "layer_norm dropout"
)
_LAYERS = words(
    "Linear Sequential ReLU ReLU6 GELU SiLU Sigmoid Tanh LeakyReLU ELU Hardswish Mish Softplus Dropout Identity "
    "BatchNorm1d LayerNorm Module"
)


def _namespaces() -> list[tuple[Any, Any]]:
    """Where to look, and what for."""
    functional = [name for name, value in vars(F).items() if callable(value) and not inspect.isclass(value)]
    found: list[tuple[Any, Any]] = [(vars(F), itemgetter(*functional))]
    found.append((vars(torch), itemgetter(*(name for name in _FUNCTIONS if name in vars(torch)))))
    for name in _LAYERS:
        kind = getattr(nn, name)
        own = [
            each for each in ("__call__", "forward", "_call_impl", "_wrapped_call_impl") if each in vars(kind)
        ]
        if own:
            found.append((vars(kind), itemgetter(*own)))
    return found


_WATCHED = _namespaces()
_WAS = [look(place) for place, look in _WATCHED]
_CODES = [
    (value, value.__code__) for value in (nn.Linear.forward, F.relu, F.batch_norm, nn.Module._call_impl)
]
_of_tensors = vars(Tensor).get
_OF_TENSORS = [_of_tensors(name) for name in _METHODS]  # None where the base class has it
_of_linear = vars(nn.Linear)


def is_torch_patched() -> bool:
    """Whether somebody put others in the place of torch's functions, or of what its layers run."""
    for (place, look), was in zip(_WATCHED, _WAS, strict=True):
        if look(place) != was:
            return True
    if any(function.__code__ is not code for function, code in _CODES):
        return True
    return [_of_tensors(name) for name in _METHODS] != _OF_TENSORS or "__call__" in _of_linear


class Classes:
    """The classes of a model's modules as they were: Dynamo does not look again at methods, or at what they hold.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        kinds = {kind: kind.__mro__ for module in model.modules() for kind in type(module).__mro__}
        # Those of torch are looked at above.
        own = {
            kind: order
            for kind, order in kinds.items()
            if not kind.__module__.startswith(("torch.nn", "builtins"))
        }
        self._orders = list(own.items())
        self._members = [
            (vars(kind), [*vars(kind).values()]) for kind in own
        ]  # which keeps them: ids stay theirs
        self._was = [_ids(namespace) for namespace, _ in self._members]

    def have_changed(self) -> bool:
        """Whether some class has got another method, attribute or ancestor since."""
        for (namespace, _), was in zip(self._members, self._was, strict=True):
            if _ids(namespace) != was:
                return True
        return any(kind.__mro__ is not order for kind, order in self._orders)


def _ids(namespace: Any) -> list[int]:
    return [id(getattr(value, "__code__", value)) for value in namespace.values()]


def has_global_hooks() -> bool:
    """Whether `torch.nn.modules.module.register_module_*_hook` was called: such hooks see every module's call."""
    return bool(
        _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )
