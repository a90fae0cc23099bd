"""`epigemm.fuse(model)`: calls of the model run Dynamo's graphs, in which chains are fused; `unfuse` goes back.

The model keeps its class, its parameters and its forward. Only its call changes, in the same way as by
`nn.Module.compile`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch import fx, nn

from epigemm.arguments import checks
from epigemm.explain.state import kept
from epigemm.fusion.copies import copied, copied_apart
from epigemm.fusion.model_call import ModelCall
from epigemm.fusion.report import FusionReport
from epigemm.fusion.rewrite import warn_once
from epigemm.fusion.trials import Decide, measures

Model = TypeVar("Model", bound=nn.Module)

# Wrappers that move, shard or replace the parameters of the model inside, by the names of their classes and base
# classes.
_WRAPPERS = {
    *("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")
}
_CALL, _REPORT, _IGNORED = "_compiled_call_impl", "fusion_report", "__jit_ignored_attributes__"


@overload
def fuse(
    model: Model,
    *,
    inplace: bool = ...,
    dry_run: Literal[False] = ...,
    keep_packs: bool = ...,
    strict: bool = ...,
    cuda_graphs: bool = ...,
    decide: Decide = ...,
    example_inputs: None = ...,
) -> Model: ...


@overload
def fuse(
    model: nn.Module,
    *,
    inplace: bool = ...,
    dry_run: Literal[True],
    keep_packs: bool = ...,
    strict: bool = ...,
    cuda_graphs: bool = ...,
    decide: Decide = ...,
    example_inputs: Sequence[Any] | Mapping[str, Any],
) -> FusionReport: ...


def fuse(
    model: Any,
    *,
    inplace: bool = False,
    dry_run: bool = False,
    keep_packs: bool = False,
    strict: bool = False,
    cuda_graphs: bool = False,
    decide: Decide = "measure",
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
) -> Any:
    """Fuse the linear layers of a model with the pointwise operators that follow them.

    The first call traces the model with Dynamo, which takes seconds. `model.fusion_report` then says what was fused.
    Only calls of the model itself, `model(...)`, run fused: `model.forward(...)` and other methods do not. Copies and
    pickles of a fused model are plain models.

    Args:
        model: the model.
        inplace: change `model` itself. Otherwise the result is a copy that shares its parameters and buffers.
        dry_run: change nothing, and return a `FusionReport` of a call with `example_inputs`.
        keep_packs: keep the fp16 slices of fp32 parameters between calls. The caller must then call
            `epigemm.pack(weight).repack()` after writes that torch does not count (those through `.data`).
        strict: raise errors of epigemm's rewriting of a graph. Otherwise there is a warning, the report names the
            error, and the original graph runs.
        cuda_graphs: without gradients, calls on a GPU are replayed as CUDA graphs, one for each size of the inputs and
            at most 32: the host then launches one graph instead of many kernels. Inputs and results are copied. Calls
            that cannot be captured run kernel by kernel, and `fusion_report.cuda_graphs` says why.
        decide: "measure": if it is not sure that fused calls are faster, the first calls without gradients run the
            fused graph and the original model in turn, and the faster one is used from then on. "predict": estimates
            alone decide.
        example_inputs: for a dry run: the arguments of a call, as a sequence, or by name as a mapping.

    Returns:
        The fused model, or the report.

    Raises:
        TypeError: an argument of another type.
        ValueError: another word for `decide`.
        RuntimeError: at a call: rewriting a graph failed, and `strict` is True. The original error is its cause.

    Example:
        >>> fused = epigemm.fuse(model)
        >>> y = fused(x)
        >>> print(fused.fusion_report)
    """
    _check_model(model)
    settings = {"keep_packs": keep_packs, "strict": strict, "cuda_graphs": cuda_graphs}
    for name, value in {"inplace": inplace, "dry_run": dry_run, **settings}.items():
        checks.flag(name, value)
    settings["measures"] = measures(decide)
    if dry_run:
        return _dry_run(model, example_inputs, **settings)
    if example_inputs is not None:
        raise TypeError("example_inputs: got some without dry_run=True; accepted is None")
    reason = _why_not(model)
    target = model
    if not reason and not inplace:
        made = copied(model)
        if isinstance(made, str):
            reason = f"{made}; fuse(model, inplace=True) needs no copy"
        else:
            target = made
    if reason:
        target.__dict__[_REPORT] = FusionReport(notes=[f"left alone: {reason}"])
        return target
    _install(target, **settings)
    return target


def unfuse(model: Model) -> Model:
    """Undo `fuse`, in place, also for modules inside the model. Modules that are not fused do not change.

    Raises:
        TypeError: `model` is no module.

    Example:
        >>> epigemm.unfuse(model)
    """
    _check_model(model)
    for module in model.modules():
        own = vars(module)
        if isinstance(call := own.get(_CALL), ModelCall):
            call.part()
            del own[_CALL]
            own[_IGNORED] = [name for name in own.get(_IGNORED, ()) if name not in (_CALL, _REPORT)]
            if own[_IGNORED] == [*getattr(type(module), _IGNORED, ())]:
                del own[_IGNORED]
        own.pop(_REPORT, None)
    return model


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}; accepted is a torch.nn.Module")


def _why_not(model: nn.Module) -> str:
    """Why a model cannot be fused as a whole; empty where it can be tried."""
    if os.environ.get("TORCHDYNAMO_DISABLE", "") == "1" or torch._dynamo.config.disable:
        warn_once("Dynamo is turned off (TORCHDYNAMO_DISABLE), and the model runs as it was")
        return "Dynamo is turned off (TORCHDYNAMO_DISABLE)"
    own = model.__dict__.get(_CALL)
    if own is not None and not isinstance(own, ModelCall):
        return "it has been compiled already, by model.compile()"
    for module in model.modules():
        names = {kind.__name__ for kind in type(module).__mro__}
        if found := names & _WRAPPERS:
            return f"it holds a {min(found)}, inside of which parameters move"
        if isinstance(module, (torch.jit.ScriptModule, fx.GraphModule)) and module is model:
            return f"it is a {type(module).__name__}"
    return ""


def _install(model: nn.Module, **settings: bool) -> ModelCall:
    # TorchScript would treat these attributes as data, and fail.
    own = [*dict.fromkeys([*getattr(model, _IGNORED, ()), _CALL, _REPORT])]
    call = ModelCall(model, own, **settings)
    if isinstance(before := model.__dict__.get(_CALL), ModelCall):
        before.part()
    model.__dict__.update({_IGNORED: own, _CALL: call, _REPORT: call.report})
    return call


def _dry_run(model: nn.Module, inputs: Any, **settings: bool) -> FusionReport:
    if not isinstance(inputs, (Sequence, Mapping)) or isinstance(inputs, str):
        raise TypeError(
            f"example_inputs: got {type(inputs).__name__}; accepted with dry_run=True is a sequence of the model's "
            "arguments, or a mapping of them by name"
        )
    if reason := _why_not(model):
        return FusionReport(notes=[f"left alone: {reason}"])
    try:
        made, given = copied_apart((model, inputs))
    except Exception as error:  # any error of the model's attributes
        return FusionReport(notes=[f"left alone: it cannot be copied ({type(error).__name__}: {error})"])
    report = _install(made, **settings).report
    with kept(made):
        made(**given) if isinstance(given, Mapping) else made(*given)
    return report


def trial_copy(model: nn.Module, **settings: bool) -> nn.Module | str:
    """A fused copy to try calls with, which shares parameters and buffers; or why there is none."""
    made = _why_not(model) or copied(model)
    if not isinstance(made, str):
        _install(
            made, **{"keep_packs": False, "strict": False, "cuda_graphs": False, "measures": True, **settings}
        )
    return made


def is_fused(model: nn.Module) -> bool:
    """Whether a model, or a module inside of it, is fused."""
    return any(isinstance(vars(module).get(_CALL), ModelCall) for module in model.modules())
