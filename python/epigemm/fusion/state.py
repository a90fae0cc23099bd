"""What a module's state says about replacing a call of it by its mathematics."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as _module

_HOOKS = (
    ("_forward_pre_hooks", "forward pre-hook"),
    ("_forward_hooks", "forward hook"),
    ("_backward_pre_hooks", "backward pre-hook"),
    ("_backward_hooks", "backward hook"),
)


# What these classes were when the package was loaded; a fused chain stands for that and nothing else.
_FORWARDS: dict[type, Any] = {
    kind: kind.forward
    for kind in (nn.Sequential, nn.Linear, nn.ReLU, nn.Sigmoid, nn.Identity, nn.BatchNorm1d)
}


def original_class(kind: Any) -> Any:
    """The class that a fused class was made of; any other class itself, even where it derives from a fused one."""
    original = getattr(kind, "_epigemm_original", None)
    return kind if original is None or kind._epigemm_fused[0] is not kind else original


def why_not_callable(module: nn.Module) -> str:
    """Why a call of this module is more than its class's forward; empty where it is not.

    A fused chain calls no module: hooks would not fire, and a `forward` set on the instance would not run.
    """
    own, kind = module.__dict__, type(module)
    # One by one: this runs for every layer of every fused call.
    if (
        own["_forward_pre_hooks"]
        or own["_forward_hooks"]
        or own["_backward_pre_hooks"]
        or own["_backward_hooks"]
    ):
        found = next(text for name, text in _HOOKS if own[name])
        return f"{kind.__name__} has a {found}"
    if "forward" in own:
        return f"{kind.__name__} has a forward of its own"
    known = _FORWARDS.get(kind)
    return f"{kind.__name__}.forward was replaced" if known is not None and kind.forward is not known else ""


# What the forwards of torch's layers call, and their own code.
_FUNCTIONS, _TORCH = vars(F), vars(torch)
_LINEAR, _RELU, _BATCH_NORM, _SIGMOID = F.linear, F.relu, F.batch_norm, torch.sigmoid
_CALL: Any = nn.Module.__call__
_Linear, _ReLU, _Sigmoid, _BatchNorm1d, _Sequential = (
    nn.Linear,
    nn.ReLU,
    nn.Sigmoid,
    nn.BatchNorm1d,
    nn.Sequential,
)
_OF_LINEAR, _OF_RELU, _OF_SIGMOID, _OF_NORM, _OF_SEQUENTIAL = (
    (kind.forward, kind.forward.__code__)
    for kind in (nn.Linear, nn.ReLU, nn.Sigmoid, nn.BatchNorm1d, nn.Sequential)
)


def is_torch_patched() -> bool:
    """Whether somebody put others in the place of the functions that torch's layers run, or that run them."""
    return (
        _FUNCTIONS["linear"] is not _LINEAR
        or _FUNCTIONS["relu"] is not _RELU
        or _FUNCTIONS["batch_norm"] is not _BATCH_NORM
        or _TORCH["sigmoid"] is not _SIGMOID
        or _Linear.__call__ is not _CALL
        or _ReLU.__call__ is not _CALL
        or _Sigmoid.__call__ is not _CALL
        or _BatchNorm1d.__call__ is not _CALL
        or _Sequential.__call__ is not _CALL
        or _OF_LINEAR[0].__code__ is not _OF_LINEAR[1]
        or _OF_RELU[0].__code__ is not _OF_RELU[1]
        or _OF_SIGMOID[0].__code__ is not _OF_SIGMOID[1]
        or _OF_NORM[0].__code__ is not _OF_NORM[1]
        or _OF_SEQUENTIAL[0].__code__ is not _OF_SEQUENTIAL[1]
    )


def has_global_hooks() -> bool:
    """Whether `torch.nn.modules.module.register_module_*_hook` was called: such hooks see every module's call."""
    return bool(
        _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )
