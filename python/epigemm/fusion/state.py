"""What a module's state says about replacing a call of it by its mathematics."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as _module

_HOOKS = (
    ("_forward_pre_hooks", "forward pre-hook"),
    ("_forward_hooks", "forward hook"),
    ("_backward_pre_hooks", "backward pre-hook"),
    ("_backward_hooks", "backward hook"),
)


def why_not_callable(module: nn.Module) -> str:
    """Why a call of this module is more than its class's forward; empty where it is not.

    A fused chain calls no module: hooks would not fire, and a `forward` set on the instance would not run.
    """
    own = module.__dict__
    for name, text in _HOOKS:
        if own[name]:
            return f"{type(module).__name__} has a {text}"
    return f"{type(module).__name__} has a forward of its own" if "forward" in own else ""


def has_global_hooks() -> bool:
    """Whether `torch.nn.modules.module.register_module_*_hook` was called: such hooks see every module's call."""
    return bool(
        _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )
