"""The alternatives: ours, and what else a PyTorch user can run for the same result; beside them the bare product.

A `Baseline` says where it is absent or does not apply, and binds an `Alternative` to the tensors of a case. Third-party
packages are imported when one is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import epigemm
from benchmarks.cases import COUNTER, CUSTOM, EPS, GLU, LINEAR, MATRIX, MOMENTUM, Case, Data
from benchmarks.cases.custom import decorated
from benchmarks.harness.records import (
    ADDMM,
    BUILTIN,
    COMPILE,
    COPY,
    EAGER,
    MAX_AUTOTUNE,
    MM,
    OURS,
    PLAIN,
    QUACK,
)
from epigemm.tuner.timing import Run

# Eager PyTorch stores at most this many results before the final one: the product, then two elementwise steps.
_EAGER_ROUNDINGS = 3
_FUSED = ("fused", "elementwise")


@dataclass(frozen=True)
class Alternative:
    """Something to run on one case.

    Attributes:
        run: one call; returns the result.
        roundings: intermediate ones to the output dtype, for the error bound.
        checked: False for what computes something else (the bare product, the copy).
        kernel: of ours: what the call launches; "torch" where PyTorch's GEMM does the work.
    """

    run: Run
    roundings: int = _EAGER_ROUNDINGS
    checked: bool = True
    kernel: str = ""


Prepare = Callable[[Case, Data, Tensor], Alternative]
FALLBACK = "torch"


@dataclass(frozen=True)
class Baseline:
    """A kind of alternative.

    Attributes:
        name: what ``--peers`` and ``--exclude`` take.
        title: what tables show.
        prepare: binds it to the tensors of a case; ``out`` may be written by every alternative.
        needs: what must hold of a case, names in `_NEEDS`.
        module: what it imports beyond torch.
        slow_on: device types on which preparing it takes many seconds: left out once the time budget is spent.
        if_named: it takes part only where ``--peers`` names it.
    """

    name: str
    title: str
    prepare: Prepare
    needs: tuple[str, ...] = ()
    module: str = ""
    slow_on: tuple[str, ...] = ()
    if_named: bool = False

    def applies(self, case: Case, device: torch.device) -> str:
        """Why it takes no part in a case; empty where it does."""
        reasons = (why for holds, why in map(_NEEDS.__getitem__, self.needs) if not holds(case, device))
        return next(reasons, "")

    def absent(self) -> str:
        """Why it cannot be used on this machine at all, or ""."""
        try:
            importlib.import_module(self.module or "torch")
        except Exception as error:  # a broken installation must not end the run
            return f"{self.module} does not import: {type(error).__name__}: {error}"
        return ""


_NEEDS: dict[str, tuple[Callable[[Case, torch.device], object], str]] = {
    "product": (lambda case, device: case.shape.k, "there is no matrix product"),
    "no product": (lambda case, device: not case.shape.k, "there is a matrix product"),
    "GPU": (lambda case, device: device.type == "cuda", "needs a GPU"),
    "fp32": (lambda case, device: case.is_fp32_product, "fp32 only"),
    "16 bits": (lambda case, device: case.setting.dtype_name != "fp32", "16-bit only"),
    "bias_relu": (lambda case, device: case.problem.epilogue == "bias_relu", "computes bias and ReLU alone"),
    "in QuACK": (lambda case, device: case.problem.quack, "no function of QuACK's computes it"),
    "built in": (
        lambda case, device: case.problem.kind == CUSTOM and case.problem.ours,
        "no other function of epigemm's computes it",
    ),
}


# --- ours --------------------------------------------------------------------------------------------------------


def our_call(
    case: Case, data: Data, *, packed: bool = True
) -> tuple[Callable[..., Tensor], list[Any], dict[str, Any]]:
    """Our function and its arguments; an fp32 weight packed or as it is. Of training: the product's."""
    p, problem = data.parameters, case.problem
    weights = [] if data.weight is None else [*data.weight.chunk(2 if problem.kind == GLU else 1)]
    given = [data.x, *(epigemm.pack(each) if packed and case.is_fp32_product else each for each in weights)]
    if problem.kind == GLU:
        *given, second = given
        return epigemm.linear_glu, given, {"weight2": second, "activation": problem.epilogue}
    if problem.kind == CUSTOM:
        return decorated(problem.epilogue), given, problem.given(p)
    if problem.training:
        return epigemm.linear, [*given, p.vectors["bias"]], {}
    assert problem.ours is not None
    return problem.ours, [*given, *problem.given(p).values()], {}


def planned(function: Callable[..., Tensor], *given: Any, **named: Any) -> str:
    """The kernel of ours that a call launches, or `FALLBACK`."""
    explained = epigemm.explain(function, *given, **named)
    return explained.kernel if explained.path in _FUSED else FALLBACK


def _ours(case: Case, data: Data, out: Tensor, *, packed: bool = True) -> Alternative:
    function, given, named = our_call(case, data, packed=packed)

    def run() -> Tensor:
        return function(*given, **named, out=out)

    kernel = planned(function, *given, **named)
    # A fused kernel rounds once, at the end; of a pair of products the second one, too. cuBLAS may split K and round
    # each part's sums to 16 bits: the fallback has the bound of eager.
    roundings = _EAGER_ROUNDINGS if kernel == FALLBACK else int(case.problem.kind in (CUSTOM, GLU))
    if not case.problem.training:
        return Alternative(run, roundings, kernel=kernel)
    module = training_module(data, packed=packed)
    return Alternative(lambda: module(data.x), roundings + 1, kernel=kernel)  # its product is rounded, too


def training_module(data: Data, *, packed: bool) -> epigemm.nn.LinearScaleBatchNorm1d:
    """Our layer over the tensors of a case that trains; an fp32 weight packed or as it is."""
    v, device = data.parameters.vectors, data.x.device
    assert data.weight is not None
    norm = nn.BatchNorm1d(data.weight.shape[0], EPS, MOMENTUM, device=device)
    for name, own in (("weight", "weight"), ("bias", "bn_bias")):
        setattr(norm, name, nn.Parameter(v[own], requires_grad=False))
    for name in ("running_mean", "running_var", COUNTER):
        setattr(norm, name, v[name])
    linear = nn.Linear(1, 1, device=device)
    linear.bias = nn.Parameter(v["bias"], requires_grad=False)
    linear.weight = nn.Parameter(data.weight, requires_grad=False)
    module = epigemm.nn.LinearScaleBatchNorm1d.from_layers(linear, v["scale"], norm)
    if packed and data.x.dtype == torch.float32:
        epigemm.pack(linear.weight)
    return module


def _plain(case: Case, data: Data, out: Tensor) -> Alternative:
    return _ours(case, data, out, packed=False)


def _built_in(case: Case, data: Data, out: Tensor) -> Alternative:
    return _ours(replace(case, problem=replace(case.problem, kind=LINEAR)), data, out)


# --- PyTorch -----------------------------------------------------------------------------------------------------


def _eager(case: Case, data: Data, out: Tensor) -> Alternative:
    return Alternative(lambda: case.problem.eager(data.x, data.weight, data.parameters))


def _compiled(mode: str) -> Prepare:
    def prepare(case: Case, data: Data, out: Tensor) -> Alternative:
        # Dynamo keeps its cache by code object, which all cases share: without a reset it stops compiling after eight.
        torch.compiler.reset()
        problem, weight, p = case.problem, data.weight, data.parameters

        def forward(x: Tensor) -> Tensor:
            return problem.eager(x, weight, p)

        compiled: Any = torch.compile(forward, dynamic=False, mode=mode)

        def run() -> Tensor:
            result: Tensor = compiled(data.x)
            return result

        return Alternative(run)

    return prepare


def _bare_product(case: Case, data: Data, out: Tensor) -> Alternative:
    assert data.weight is not None
    x, transposed = data.x, data.weight.t()
    product = out if case.columns == case.shape.n else out.new_empty(case.shape.m, case.shape.n)
    return Alternative(lambda: torch.mm(x, transposed, out=product), checked=False)


def _copy(case: Case, data: Data, out: Tensor) -> Alternative:
    return Alternative(lambda: out.copy_(data.x), checked=False)


def _addmm_activation(case: Case, data: Data, out: Tensor) -> Alternative:
    assert data.weight is not None
    x, transposed, bias = data.x, data.weight.t(), data.parameters.vectors["bias"]

    def run() -> Tensor:
        return torch._addmm_activation(bias, x, transposed, beta=1, alpha=1, use_gelu=False)

    return Alternative(run)


# --- others ------------------------------------------------------------------------------------------------------


def _quack(case: Case, data: Data, out: Tensor) -> Alternative:
    """QuACK's product with a bias if there is one, then an activation or a matrix."""
    assert data.weight is not None
    library: Any = importlib.import_module("quack.gemm_interface")
    problem, vectors, x, weight = case.problem, data.parameters.vectors, data.x, data.weight.t()
    bias = vectors.get("bias")
    matrices = [vectors[name] for name, operand in problem.operands.items() if operand.kind == MATRIX]

    def act() -> Tensor:
        given = {"postact_out": out, "bias": bias, "activation": problem.quack}
        library.gemm_act(x, weight, **given, store_preact=False, tuned=True)
        return out

    def add() -> Tensor:
        library.gemm_add(x, weight, matrices[0], out=out, bias=bias, tuned=True)
        return out

    return Alternative(add if problem.quack == "add" else act)


_ON_GPU = ("product", "GPU")
_ALL = (
    Baseline(OURS, "epigemm", _ours),
    Baseline(PLAIN, "epigemm, weight split per call", _plain, (*_ON_GPU, "fp32")),
    Baseline(BUILTIN, "epigemm's built-in", _built_in, ("built in",)),
    Baseline(EAGER, "eager", _eager),
    Baseline(MM, "torch.mm alone", _bare_product, ("product",)),
    Baseline(COPY, "copy x to out", _copy, ("no product",)),
    Baseline(ADDMM, "torch._addmm_activation", _addmm_activation, (*_ON_GPU, "bias_relu")),
    Baseline(COMPILE, "torch.compile", _compiled("default"), slow_on=("cpu",)),
    Baseline(
        QUACK,
        "QuACK, tuned",
        _quack,
        (*_ON_GPU, "16 bits", "in QuACK"),
        "quack.gemm_interface",
        slow_on=("cuda",),
        if_named=True,
    ),
    # Without CUDA graphs, which would hide launch cost from this alternative alone.
    Baseline(
        MAX_AUTOTUNE,
        "torch.compile max-autotune",
        _compiled("max-autotune-no-cudagraphs"),
        _ON_GPU,
        slow_on=("cuda",),
        if_named=True,
    ),
)
BASELINES = {baseline.name: baseline for baseline in _ALL}


def select(
    among: Sequence[Baseline], wanted: Sequence[str], excluded: Sequence[str] = ()
) -> tuple[list[Baseline], dict[str, str]]:
    """Those asked for that this machine has, and why others take no part; ours always does.

    Raises:
        ValueError: a name is not among them.
    """
    names = [baseline.name for baseline in among]
    for name in wanted:
        if name not in names:
            raise ValueError(f"peers: got {name!r}; accepted are {', '.join(names)}")
    found, absent = [], {}
    for b in among:
        asked = b.name in wanted if wanted else not (b.if_named or b.name in excluded)
        if why := b.absent() if asked or b.name == OURS else "takes no part unless --peers names it":
            absent[b.name] = why
        else:
            found.append(b)
    return found, absent
