"""The alternatives: ours, and what else a PyTorch user can run for the same result.

Besides them the yardsticks, which compute something else: the bare product, a copy; and for fp32 products the
fp16 product of the same size and one pass over x, which together say what a call on fp16 pieces may take.

A :class:`Peer` says where it is absent or does not apply, and prepares an :class:`Alternative` bound to the
tensors of one case. All imports of third-party packages happen when a peer is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from benchmarks import peers_quack
from benchmarks.cases import Case, Data, train_batch_norm
from benchmarks.pieces import plan_split, why_not_on_pieces
from benchmarks.records import EAGER, FP16_PRODUCT, MAX_AUTOTUNE, OURS, PASS, PLAIN, TRITON
from epigemm.timing import Run

# Eager PyTorch stores at most this many results before the final one: the product, then two elementwise
# steps.
_EAGER_ROUNDINGS = 3
COMPILE = "compile"
_QUACK_TITLE = "QuACK gemm_act, tuned"
_PLAIN_TITLE = "epigemm, weight split per call"


@dataclass(frozen=True)
class Alternative:
    """Something to run on one case.

    Attributes:
        name, title: the peer's.
        run: one call; returns the result.
        intermediate_roundings: roundings to the output dtype before the final one, for the error bound.
        checked: False for what computes something else (the bare product, the copy).
        close: frees what ``run`` holds beyond its tensors.
    """

    name: str
    title: str
    run: Run
    intermediate_roundings: int = _EAGER_ROUNDINGS
    checked: bool = True
    close: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Peer:
    """A kind of alternative.

    Attributes:
        name: what ``--peers`` and ``--exclude`` take.
        title: what tables show.
        prepare: binds it to the tensors of a case; ``out`` may be written by every alternative.
        applies: why it takes no part in a case ("" when it does).
        packages: the modules it imports and the command that installs them.
        slow_on: device types on which preparing it takes many seconds, so that it is measured after all
            others.
    """

    name: str
    title: str
    prepare: Callable[[Case, Data, Tensor], Alternative]
    applies: Callable[[Case, torch.device], str] = lambda case, device: ""
    packages: tuple[tuple[str, str], ...] = ()
    slow_on: tuple[str, ...] = ()

    def absent(self) -> str:
        """Why it cannot be used on this machine at all, or ""."""
        for module, install in self.packages:
            try:
                if importlib.util.find_spec(module.partition(".")[0]) is None:
                    return f"{module.partition('.')[0]} is not installed ({install})"
                importlib.import_module(module)
            except Exception as error:  # a broken installation must not end the run
                return f"{module} does not import: {type(error).__name__}: {error}"
        return ""


def native_plan(case: Case, data: Data, out: Tensor, *, packed: bool = True) -> dict[str, Any]:
    """What our dispatcher would run for a linear case and why; empty for elementwise ones.

    ``packed`` says whether an fp32 weight's pieces are kept.
    """
    if data.weight is None:
        return {}
    if not case.on_pieces:
        return explain_linear(case, data, out)
    why_not = why_not_on_pieces(case, data, out, packed=packed)
    if not why_not:
        return plan_split(case, data.x.device, packed=packed) | {"arithmetic": case.setting.pieces}
    plan = explain_linear(case, data, out) | {"arithmetic": case.setting.arithmetic}
    return plan if plan["fused"] else plan | {"why_not": why_not}


def explain_linear(case: Case, data: Data, out: Tensor) -> dict[str, Any]:
    """What the dispatcher of the kernels without pieces says."""
    native = case.problem.formula.native(data.x, data.parameters)
    text = torch.ops.epigemm._explain_linear(
        case.problem.formula.epilogue,
        data.x,
        data.weight,
        native.bias,
        native.operands,
        native.scalars,
        case.setting.arithmetic,
        out,
    )
    plan: dict[str, Any] = json.loads(text)
    return plan


def _function(case: Case, data: Data, out: Tensor) -> Run:
    """Our public function on plain tensors."""
    formula, p = case.problem.formula, data.parameters
    x, weight = data.x, data.weight

    def linear() -> Tensor:
        assert weight is not None
        formula.linear(x, weight, p, out)
        return out

    def training() -> Tensor:
        assert weight is not None
        scale = p.vectors["scale"]
        return train_batch_norm(epigemm.linear_scale(x, weight, p.linear_bias, scale), p)

    def elementwise() -> Tensor:
        formula.elementwise(x, p, out)
        return out

    return elementwise if weight is None else training if case.problem.training else linear


def _module(case: Case, data: Data) -> Run:
    """Our module, as users of fp32 have it: it keeps the weight's pieces after its first call."""
    assert data.weight is not None
    x, module = data.x, case.problem.formula.module(data.weight, data.parameters)
    module.train(case.problem.training)

    def run() -> Tensor:
        result: Tensor = module(x)
        return result

    return run


def _roundings(plan: dict[str, Any]) -> int:
    """Only the second path rounds the product to the output dtype before the epilogue."""
    return 0 if plan.get("fused", True) else 1


def _ours(case: Case, data: Data, out: Tensor) -> Alternative:
    run = _module(case, data) if case.on_pieces else _function(case, data, out)
    return Alternative(OURS, "epigemm", run, intermediate_roundings=_roundings(native_plan(case, data, out)))


def _ours_plain(case: Case, data: Data, out: Tensor) -> Alternative:
    roundings = _roundings(native_plan(case, data, out, packed=False))
    return Alternative(PLAIN, _PLAIN_TITLE, _function(case, data, out), intermediate_roundings=roundings)


def _plain_forward(case: Case, data: Data) -> Callable[[Tensor], Tensor]:
    problem, p, weight = case.problem, data.parameters, data.weight
    if weight is None:
        return lambda x: problem.finish(x, p)
    return lambda x: problem.finish(F.linear(x, weight, p.linear_bias), p)


def _eager(case: Case, data: Data, out: Tensor) -> Alternative:
    forward, x = _plain_forward(case, data), data.x
    return Alternative(EAGER, "eager", lambda: forward(x))


def _compiled(name: str, title: str, mode: str) -> Callable[[Case, Data, Tensor], Alternative]:
    def prepare(case: Case, data: Data, out: Tensor) -> Alternative:
        # Dynamo keeps its cache by code object, which all cases share: without a reset it stops compiling
        # after eight.
        torch.compiler.reset()
        compiled: Callable[[Tensor], Tensor] = torch.compile(
            _plain_forward(case, data), dynamic=False, mode=mode
        )
        return Alternative(name, title, lambda: compiled(data.x))

    return prepare


def _bare_product(case: Case, data: Data, out: Tensor) -> Alternative:
    assert data.weight is not None
    x, transposed = data.x, data.weight.t()
    return Alternative("mm", "torch.mm alone", lambda: torch.mm(x, transposed, out=out), checked=False)


def _copy(case: Case, data: Data, out: Tensor) -> Alternative:
    return Alternative("copy", "copy x to out", lambda: out.copy_(data.x), checked=False)


def _fp16_product(case: Case, data: Data, out: Tensor) -> Alternative:
    assert data.weight is not None
    x, transposed = data.x.half(), data.weight.half().t()
    result = torch.empty_like(out, dtype=torch.float16)
    return Alternative(
        FP16_PRODUCT, "torch.mm on fp16", lambda: torch.mm(x, transposed, out=result), checked=False
    )


def _pass(case: Case, data: Data, out: Tensor) -> Alternative:
    target = torch.empty_like(data.x)
    return Alternative(PASS, "one pass over x (copy)", lambda: target.copy_(data.x), checked=False)


def _addmm_activation(case: Case, data: Data, out: Tensor) -> Alternative:
    assert data.weight is not None
    x, transposed, bias = data.x, data.weight.t(), data.parameters.vectors["bias"]

    def run() -> Tensor:
        return torch._addmm_activation(bias, x, transposed, beta=1, alpha=1, use_gelu=False)

    return Alternative("addmm_activation", "torch._addmm_activation", run)


def _nvmath(case: Case, data: Data, out: Tensor) -> Alternative:
    """CuBLASLt with its epilogue, over all algorithms that its heuristics offer.

    D^T = W x^T, because cuBLASLt adds a bias along the rows of a column-major result: the transpose is our
    layout.
    """
    advanced: Any = importlib.import_module("nvmath.linalg.advanced")
    compute_type: Any = importlib.import_module("nvmath.bindings.cublas").ComputeType
    tf32 = case.setting.arithmetic == "tf32"
    options = {"compute_type": compute_type.COMPUTE_32F_FAST_TF32 if tf32 else compute_type.COMPUTE_32F}
    relu = case.problem.formula.epilogue == "bias_relu"
    epilog = advanced.MatmulEpilog.RELU_BIAS if relu else advanced.MatmulEpilog.BIAS
    bias = data.parameters.vectors.get("bias", data.parameters.linear_bias)
    product: Any = advanced.Matmul(data.weight, data.x.t(), options=options)
    product.plan(epilog=epilog, epilog_inputs={"bias": bias})
    product.autotune(iterations=5)

    def run() -> Tensor:
        result: Tensor = product.execute()
        return result.t()

    return Alternative("nvmath", "cuBLASLt autotuned (nvmath)", run, close=product.free)


def _quack(case: Case, data: Data, out: Tensor) -> Alternative:
    return Alternative(peers_quack.NAME, _QUACK_TITLE, peers_quack.act(data, out, "relu"))


def _triton_tf32x3(case: Case, data: Data, out: Tensor) -> Alternative:
    assert data.weight is not None
    kernel: Any = importlib.import_module("benchmarks.peers_triton").LinearReLU()
    weight, bias = data.weight, data.parameters.vectors["bias"]
    return Alternative(TRITON, "Triton tf32x3", lambda: kernel(data.x, weight, bias, out))


def _only_linear(case: Case, device: torch.device) -> str:
    return "" if case.shape.k else "there is no matrix product"


def _only_on_pieces(case: Case, device: torch.device) -> str:
    if not case.on_pieces:
        return _only_linear(case, device) or "fp32 only"
    return "" if device.type == "cuda" else "needs a GPU: nothing runs on fp16 pieces elsewhere"


def _only_elementwise(case: Case, device: torch.device) -> str:
    return "there is a matrix product" if case.shape.k else ""


def _fuses(
    epilogues: Sequence[str],
    who: str,
    *,
    settings: Callable[[Case], bool] = lambda case: True,
    only: str = "",
) -> Callable[[Case, torch.device], str]:
    """Applies to linear cases of some epilogues on CUDA, in evaluation mode."""

    def applies(case: Case, device: torch.device) -> str:
        if device.type != "cuda":
            return "needs a GPU"
        if not case.shape.k:
            return "there is no matrix product"
        if case.problem.training or case.problem.formula.epilogue not in epilogues:
            return f"{who} cannot fuse {case.problem.formula.formula}"
        return "" if settings(case) else only

    return applies


def _autotuned_products(case: Case, device: torch.device) -> str:
    """Max-autotune chooses among matrix products; without one it is plain ``torch.compile``."""
    return _only_linear(case, device) or ("" if device.type == "cuda" else "needs a GPU")


def all_peers() -> list[Peer]:
    """Every alternative, ours first."""
    return [
        Peer(OURS, "epigemm", _ours),
        Peer(PLAIN, _PLAIN_TITLE, _ours_plain, _only_on_pieces),
        Peer(EAGER, "eager", _eager),
        Peer("mm", "torch.mm alone", _bare_product, _only_linear),
        Peer("copy", "copy x to out", _copy, _only_elementwise),
        Peer(FP16_PRODUCT, "torch.mm on fp16", _fp16_product, _only_on_pieces),
        Peer(PASS, "one pass over x (copy)", _pass, _only_on_pieces),
        Peer(
            "addmm_activation",
            "torch._addmm_activation",
            _addmm_activation,
            _fuses(("bias_relu",), "torch._addmm_activation"),
        ),
        Peer(
            "nvmath",
            "cuBLASLt autotuned (nvmath)",
            _nvmath,
            _fuses(("bias_relu", "bias"), "cuBLASLt"),
            packages=(
                ("nvmath.linalg.advanced", "pip install nvmath-python[cu13]"),
                ("nvmath.bindings.cublas", "pip install nvmath-python[cu13]"),
            ),
        ),
        Peer(
            TRITON,
            "Triton tf32x3",
            _triton_tf32x3,
            _fuses(
                ("bias_relu",),
                "this kernel",
                settings=lambda case: (
                    case.setting.dtype_name == "fp32" and case.setting.precision == "highest"
                ),
                only="for fp32 at highest",
            ),
            packages=(("triton", "comes with CUDA builds of torch"),),
        ),
        Peer(
            COMPILE,
            "torch.compile",
            _compiled(COMPILE, "torch.compile", "default"),
            slow_on=("cpu",),
        ),
        Peer(
            peers_quack.NAME,
            _QUACK_TITLE,
            _quack,
            _fuses(
                ("bias_relu",),
                "QuACK's gemm_act",
                settings=lambda case: case.setting.dtype_name != "fp32",
                only="16-bit only",
            ),
            packages=peers_quack.PACKAGES,
            slow_on=("cuda",),
        ),
        Peer(
            MAX_AUTOTUNE,
            "torch.compile max-autotune",
            # Without CUDA graphs, which would hide launch cost from this alternative alone.
            _compiled(MAX_AUTOTUNE, "torch.compile max-autotune", "max-autotune-no-cudagraphs"),
            _autotuned_products,
            slow_on=("cuda",),
        ),
    ]


def select_peers(
    wanted: Sequence[str], excluded: Sequence[str], *, only_ours: bool, among: Sequence[Peer] = ()
) -> list[Peer]:
    """The peers of a run, of all or of those given, ours first; ours always takes part.

    Raises:
        ValueError: a name is not a peer's.
    """
    peers = list(among) or all_peers()
    names = [peer.name for peer in peers]
    for name in (*wanted, *excluded):
        if name not in names:
            raise ValueError(f"peers: got {name!r}; accepted are {', '.join(names)}")
    if only_ours:
        return peers[:1]
    chosen = [p for p in peers if p.name == OURS or not wanted or p.name in wanted]
    return [p for p in chosen if p.name == OURS or p.name not in excluded]


def present(peers: Sequence[Peer]) -> tuple[list[Peer], dict[str, str]]:
    """Split into those that this machine has, and the absent ones with the reason."""
    reasons = {peer.name: peer.absent() for peer in peers}
    return [p for p in peers if not reasons[p.name]], {name: why for name, why in reasons.items() if why}


def poisoned(alternative: Alternative, out: Tensor) -> Alternative:
    """The same, with ``out`` filled with NaN first: whatever a call does not write then shows.

    So is what the allocator is likely to hand out for a result of the same size.
    """

    def run() -> Tensor:
        out.fill_(float("nan"))
        torch.full_like(out, float("nan"))
        return alternative.run()

    return replace(alternative, run=run)
