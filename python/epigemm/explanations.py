"""`epigemm.explain`: of a call of a function, or of a call of a module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, overload

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from epigemm.compilers import outside_of_graphs
from epigemm.explain.answer import BY_TORCH, Explanation, ModuleExplanation
from epigemm.explain.log import Log
from epigemm.explain.state import kept
from epigemm.explain.summary import of_function, products_of

_FUSION = "epigemm.fusion.model"


@overload
def explain(fn_or_module: nn.Module, /, *args: Any, **kwargs: Any) -> ModuleExplanation: ...


@overload
def explain(fn_or_module: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> Explanation: ...


def explain(fn_or_module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Say which kernels a call of a function or a module would launch, and why.

    Of a function no kernel of epigemm's runs, no product, cast or reduction: zeros stand for their results. Neither is
    `out` written nor a pack made. A module is called, because what it does may depend on values, and each of its
    products is explained as a function's call would be. A fused model is explained as it is. For any other module the
    layers and functions of epigemm in it are explained. If it has none, the explanation is of what `epigemm.fuse` would
    make of it, tried with a copy. `ModuleExplanation.about` says which.

    Afterwards the module's buffers, attributes and training flags, and torch's random generators, are restored, and no
    gradients or packs have been made. Not restored is what a call writes elsewhere: into parameters in place, into its
    arguments, into lists and other objects of the module, by hooks (which run), or with generators that are not
    torch's.

    Args:
        fn_or_module: a public function of epigemm, or its name; what `epigemm.epilogue` made, or its `elementwise`; or
            an `nn.Module`: a layer, a model, a fused model.
        args: its arguments.
        kwargs: its keyword arguments, `out=` and `precision=` of a function included.

    Returns:
        An `Explanation` of a function's call. For this, the memory of its results is allocated. Or a
        `ModuleExplanation` of a module's call: it prints one line for each product, and has each in full by its number
        or by the name of its layer.

    Raises:
        ValueError: `fn_or_module` is neither a public function of epigemm nor a module; or the module was compiled by
            torch.compile, is TorchScript, or has parameters that its first call makes.
        RuntimeError: under a transform of `torch.func`, `torch.export` or `make_fx`. A function that torch.compile
            traces breaks its graph for the call.
        Exception: whatever the call itself raises for these arguments.

    Example:
        >>> print(epigemm.explain("linear_relu", torch.randn(8, 64), torch.randn(32, 64)))  # doctest: +SKIP
        >>> explanation = epigemm.explain(model, x)  # doctest: +SKIP
        >>> print(explanation, explanation["layers.3"])  # doctest: +SKIP
    """
    return outside_of_graphs(_explain)(fn_or_module, *args, **kwargs)


def _explain(fn_or_module: Any, /, *args: Any, **kwargs: Any) -> Any:
    _refuse_inside()
    if not isinstance(fn_or_module, nn.Module):
        return of_function(fn_or_module, *args, **kwargs)
    module, name = fn_or_module, type(fn_or_module).__name__
    _refuse(module)
    if any(map(_is_fused, module.modules())):
        return _called(f"{name}, fused by epigemm.fuse", module, args, kwargs, fused=True)
    found = _called(f"{name} as it is, not fused", module, args, kwargs)
    are_torchs = [each.runs == BY_TORCH for each in found]
    if are_torchs and all(are_torchs):
        return _if_fused(module, found, args, kwargs)
    if any(are_torchs):
        found.notes.append("epigemm.explain(epigemm.fuse(model), ...) tells what fuse makes of the others")
    return found


def _called(
    about: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, fused: bool = False
) -> ModuleExplanation:
    """What a call of a module tells; `fused`: of the graphs that fused modules in it, or `fuse`, make."""
    log = Log(module)
    with ExitStack() as stack:
        stack.enter_context(kept(module))
        if fused:
            from epigemm.fusion.model import interpreted

            stack.enter_context(interpreted(module, log))
        else:  # functions in it that torch.compile has compiled run as they are written
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(log)
        module(*args, **kwargs)
    notes = [f"{log.graphs} graphs: what runs between them is not listed"] if log.graphs > 1 else []
    return ModuleExplanation(about, products_of(log), [*log.notes, *notes])


def _if_fused(
    module: nn.Module, found: ModuleExplanation, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ModuleExplanation:
    """What `fuse` would make of a module that uses nothing of epigemm; `found`: what it is without."""
    from epigemm.fusion.model import why_not

    about = f"{type(module).__name__} is not fused; what epigemm.fuse(model) would run"
    if reason := why_not(module):
        return replace(found, about=about, notes=[f"fuse would leave it alone: {reason}"])
    try:
        tried = _called(about, module, args, kwargs, fused=True)
    except Exception as error:  # the module itself has run
        failed = f"a call of what epigemm.fuse(model) gives raises {type(error).__name__}"
        return replace(found, about=about, notes=[failed])
    if tried.products:
        return tried
    # as of nn.LSTM, which Dynamo leaves to PyTorch
    notes = ["none of these products is in a graph that fuse sees", *tried.notes]
    return replace(found, about=about, notes=notes)


def _refuse_inside() -> None:
    """RuntimeError where tensors stand for others: what would run for those is not known."""
    key = torch._C._TorchDispatchModeKey.PROXY
    before_autograd: Any = torch._ops._get_dispatch_mode_pre_dispatch
    if torch._C._get_dispatch_mode(key) is not None or before_autograd(key) is not None:
        where = "while it is traced by torch.export or make_fx"
    elif torch._C._functorch.peek_interpreter_stack() is not None:
        where = "under a transform of torch.func (grad, jvp, vmap and so on)"
    else:
        return
    raise RuntimeError(f"explain: got a call {where}; accepted is a call outside of it")


def _is_fused(module: nn.Module) -> bool:
    return _FUSION in sys.modules and bool(sys.modules[_FUSION].is_fused(module))


def _refuse(module: nn.Module) -> None:
    """ValueError for a module whose calls cannot be watched, or would change it permanently."""
    for each in module.modules():
        kind = type(each).__name__
        if isinstance(each, torch.jit.ScriptModule):
            raise ValueError(
                f"module: got a {kind}, whose calls cannot be watched; accepted are modules in Python"
            )
        if any(is_lazy(parameter) for parameter in each._parameters.values() if parameter is not None):
            raise ValueError(
                f"module: got a {kind} whose first call makes its parameters; accepted is one that was called"
            )
        own = vars(each).get("_compiled_call_impl")
        if hasattr(each, "_orig_mod") or (own is not None and not _is_fused(each)):
            raise ValueError(
                f"module: got a {kind} that torch.compile has compiled; accepted are the model itself "
                "(`_orig_mod` of it) and fused ones. options={'report': print} of the backend tells of compiled graphs"
            )
