"""`epigemm.precompile`: links the kernels that calls will need, before the first call."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epigemm import progress
from epigemm._native import build_info
from epigemm.arguments import checks
from epigemm.arguments.calls import LinearCall
from epigemm.arguments.precision import DEFAULT
from epigemm.calls import elementwise_kernels, one_kernel
from epigemm.decorator import UserEpilogue
from epigemm.epilogues.declaration import Traced
from epigemm.epilogues.kinds import KINDS, SCALAR
from epigemm.epilogues.registry import Epilogue, compute_dtype, typed
from epigemm.linker import loader
from epigemm.planner import dry_runs
from epigemm.planner.gpus import GPU, KNOWN
from epigemm.results_epilogue import ResultsEpilogue

_Types = tuple[torch.dtype, torch.dtype]  # of x and of operands
_FIXUP = "epigemm_open_sm80_fixup"  # behind every product on fp16 slices


class _Wanted(NamedTuple):
    """An epilogue whose calls need kernels: behind a product, of a matrix alone, or either."""

    traced: Traced
    types: _Types
    has_product: bool = True
    is_pair: bool = False  # of matrices: of GEMMs that store both, and of no other kernels
    keeps_product: bool = False  # whether the second matrix is the product, which the derivative reads

    @property
    def called(self) -> Epilogue:
        """The epilogue of a call with operands of these types; scalars are fp32."""
        dtype, of_operands = self.types
        specs = self.traced.operands
        folded = [spec.kind == SCALAR or of_operands is not dtype for spec in specs]
        return typed(self.traced, folded)

    @property
    def linked(self) -> Epilogue:
        """What is linked into its kernels."""
        return self.called.with_product if self.keeps_product else self.called


def precompile(
    function: UserEpilogue | ResultsEpilogue,
    shapes: Iterable[tuple[int, int, int]] = (),
    *,
    dtype: torch.dtype = torch.bfloat16,
    precision: str | None = None,
    device: torch.device | str | None = None,
    operand_dtype: torch.dtype | None = None,
    training: bool = False,
    arch: str | None = None,
) -> list[str]:
    """Link an epilogue into the kernels that calls of these sizes need, so that no call waits for that.

    Use it when a server starts, and before the capture of a CUDA graph, during which nothing is compiled. Kernels are
    kept on disk, in the cache's folder, which may be copied to other machines. For a function with optional operands,
    each combination is linked. For a function with several results, the kernels of each matrix are linked. A function
    that only adds a bias, or a bias and a ReLU, runs as the built-in one: on kernels of the package, which need no
    linking. On other GPUs than Hopper those of its product are linked by its first call, and for `shapes` not here.

    Args:
        function: what `epigemm.epilogue` made.
        shapes: sizes of the products, (M, N, K) each; `elementwise` of results of these sizes is linked as well.
        dtype: of x and the weight.
        precision: of fp32 products, as for `epigemm.linear`; with a packed weight and without one.
        device: the GPU; None: the current one.
        operand_dtype: of the operands: None or dtype itself; with 16 bits also fp32.
        training: whether to link the derivative's kernel, too, and on Hopper the one that stores the product beside
            the result.
        arch: in place of `device`, an architecture that no GPU of this machine need have, as "sm_90" or "sm_120". No
            driver is needed. With shapes: what calls of these take by the cost models' choice on GPUs of this
            architecture, "sm_90": on H100 and H200. Without: all kernels that exist for every GPU since Ampere, which
            are `elementwise`, which also follows PyTorch's GEMM, and the mma.sync kernels (in 16 bits; of fp32 in TF32,
            fp16x3 and fp16x1).

    Returns:
        The names of the kernels that were linked now.

    Raises:
        TypeError: `function` was not made by `epigemm.epilogue`, `shapes` are not triples, or a dtype does not fit.
        ValueError: `arch` is not such an architecture, or `device` is given, too; or it is given beside shapes, and the
            figures of no GPU of this architecture are known.
        RuntimeError: there is no GPU with epigemm's kernels, or an epilogue cannot be linked; the message says why.

    Example:
        >>> epigemm.precompile(swish_clamp, [(1, 4096, 4096), (2048, 4096, 4096)])  # doctest: +SKIP
        >>> epigemm.precompile(swish_clamp, [(2048, 4096, 4096)], arch="sm_80")  # doctest: +SKIP
        ['epigemm_open_elementwise_bfloat16']
    """
    if not isinstance(function, (UserEpilogue, ResultsEpilogue)):
        raise TypeError(
            f"function: got {type(function).__name__}; accepted is what epigemm.epilogue makes of a function"
        )
    sizes = _sizes(shapes)
    precision = DEFAULT if precision is None else checks.precision(precision)
    checks.flag("training", training)
    forms = list(_forms(function, (dtype, _operand_dtype(dtype, operand_dtype)), training))
    place, capability, gpus = torch.device("meta"), None, list[GPU | None]([None])
    if arch is None:
        place = elementwise_kernels.gpu(device)
    else:
        capability = _capability(arch, device)
        gpus = [*_known(capability, arch)] if sizes else []
    linked, name = list[str](), function.traced.name
    with progress.doing(f"precompiling {name} for {len(forms) * len(sizes)} calls"):
        for form in forms if sizes or arch else []:
            products = _chosen(form, sizes, precision, place, gpus) if sizes else _of_any_gpu(form)
            names = list(dict.fromkeys([*_alone(form, training, place), *products]))
            if capability is None:
                reason = loader.link(form.linked, ",".join(names), place)
            else:
                name = form.traced.name
                names, reason = loader.link_for(form.linked, names, capability) if names else ([], "")
            if reason:
                raise RuntimeError(f"{name}: {reason}")
            linked += names
    return linked


def _forms(function: UserEpilogue | ResultsEpilogue, types: _Types, training: bool) -> Iterator[_Wanted]:
    """With its optional operands, and without; of several results each matrix that has a kernel."""
    dtype, _ = types
    wide = compute_dtype(dtype)
    for form in function.without.values():
        matrices: list[tuple[Traced | None, bool]] = [(form, False)] if isinstance(form, Traced) else []
        pair = None
        if not isinstance(form, Traced):
            parts = form.parts(dtype)
            matrices, pair = [(each.traced, each.is_wide) for each in parts.matrices], parts.pair
        for number, (traced, is_wide) in enumerate(matrices):
            if traced is None:
                continue
            yield _Wanted(traced, (wide, wide) if is_wide else types, number == 0)
            every = frozenset(range(1 + traced.program.operands))
            if training and number == 0 and 0 in traced.program.read_by_derivative(every):
                yield _Wanted(traced, types, is_pair=True, keeps_product=True)
        if pair is not None:
            yield _Wanted(pair.traced, types, is_pair=True)


def _sizes(shapes: object) -> list[tuple[int, int, int]]:
    sizes: list[Any] = list(shapes) if isinstance(shapes, Iterable) else [shapes]
    for size in sizes:
        is_triple = isinstance(size, (tuple, list)) and len(size) == 3
        if not is_triple or not all(isinstance(length, int) and length > 0 for length in size):
            raise TypeError(f"shapes: got {size!r}; accepted are triples (M, N, K) of positive integers")
    return sizes


def _operand_dtype(dtype: torch.dtype, given: torch.dtype | None) -> torch.dtype:
    if dtype not in checks.DTYPES:
        raise TypeError(f"dtype: got {dtype}; accepted are {', '.join(sorted(map(str, checks.DTYPES)))}")
    if given is None or given in (dtype, compute_dtype(dtype)):
        return given or dtype
    raise TypeError(
        f"operand_dtype: got {given}; accepted is None, {dtype} or {compute_dtype(dtype)}, as x has {dtype}"
    )


def _capability(arch: str, device: object) -> tuple[int, int]:
    """The compute capability of an architecture's name."""
    found = re.fullmatch(r"sm_(\d+)(\d)a?", arch) if isinstance(arch, str) else None
    capability = (int(found[1]), int(found[2])) if found else (0, 0)
    if capability < (8, 0):
        raise ValueError(f"arch: got {arch!r}; accepted are sm_80 and later, such as 'sm_86'")
    if device is not None:
        raise ValueError(f"arch: got {arch!r} beside device; it takes the place of that")
    return capability


def _known(capability: tuple[int, int], arch: str) -> list[GPU]:
    """The GPUs of an architecture that the planner can be asked about."""
    found = [each for each in KNOWN.values() if each.capability == capability]
    if not found:
        known = ", ".join(
            f"sm_{major}{minor}" for major, minor in sorted({each.capability for each in KNOWN.values()})
        )
        raise ValueError(f"arch: got {arch!r} beside shapes; accepted are {known}, or arch alone")
    return found


def _of_any_gpu(form: _Wanted) -> list[str]:
    """The kernels that multiply, of those that are compiled for every GPU since Ampere; those of a pair are not."""
    dtype, _ = form.types
    if form.is_pair or dtype == torch.float64 or not form.has_product:
        return []
    counts = build_info()["families"]["sm80_mma"]  # of tiles, by what the kernels multiply
    names = {each: each for each in ("tf32", "split", "scaled")}
    if dtype != torch.float32:
        names = {str(dtype).removeprefix("torch."): "16_bits"}
    tiles = [f"epigemm_open_sm80_mma_{name}_{tile}" for name in names for tile in range(counts[names[name]])]
    return [*tiles, *([_FIXUP] if dtype == torch.float32 else [])]


def _alone(form: _Wanted, training: bool, place: torch.device) -> list[str]:
    """The kernels of the epilogue without a product: those that are missing here, or all that the package lacks."""
    if form.is_pair:
        return []
    # Where a bias is added, derivatives may want sums of columns.
    kinds = list(elementwise_kernels.Kind)[: 1 if not training else 3 if form.called.bias_place else 2]
    if place.type != "meta":
        like = torch.empty(0, dtype=form.types[0], device=place)
        return [*filter(None, [elementwise_kernels.missing(form.called, like, kind) for kind in kinds])]
    element = str(form.types[0]).removeprefix("torch.")
    names = [f"epigemm_open_{each.name.lower()}_{element}" for each in kinds]
    return [] if form.called.is_compiled else names


def _chosen(
    form: _Wanted,
    sizes: Sequence[tuple[int, int, int]],
    precision: str,
    place: torch.device,
    gpus: Sequence[GPU | None],
) -> Iterator[str]:
    """The kernels of products of these sizes, without and with a packed weight.

    Those that are missing here, or all of GPUs elsewhere; none of calls on the package's own kernels.
    """
    if not form.has_product or form.called.is_compiled:
        return
    for size, gpu in itertools.product(sizes, gpus):
        call = _call(form, size, precision, place)
        if form.is_pair and not one_kernel.may_store(call):
            continue
        for slices in (0, dry_runs.ALL_KEPT) if call.x.dtype == torch.float32 else (0,):
            run = dry_runs.dry_run(call, slices, gpu=() if gpu is None else gpu.numbers)
            if form.is_pair and not run.fused:
                continue
            if gpu is not None:
                what = "a fused kernel" if run.fused else "PyTorch's GEMM and one elementwise kernel"
                packed = ", its weight packed," if run.packed else ""
                progress.note(
                    f"{form.traced.name}: {size} in {form.types[0]}{packed} on {gpu.name} is {what}"
                )
            yield from run.missing


def _call(form: _Wanted, size: tuple[int, int, int], precision: str, device: torch.device) -> LinearCall:
    """A call of this size with uninitialised tensors, for a dry run."""
    (m, n, k), (dtype, of_operands) = size, form.types

    def empty(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device=device)

    specs = form.traced.operands
    operands = [
        0.0 if spec.kind == SCALAR else empty(*KINDS[spec.kind].shape((m,), n), of=of_operands)
        for spec in specs
    ]
    return LinearCall(form.linked, empty(m, k), empty(n, k), operands, precision, out=empty(m, n))
