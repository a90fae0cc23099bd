"""In place of the entry's module: csrc/call decides as for a GPU, and kernels written in PyTorch run on a CPU.

It is for testing everything around the kernels: which pack a call reads, what is copied, where the result goes. The
stand-in multiplies what is *in* the pack, so that a stale one gives a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm._native import ops
from epigemm.arguments.calls import LinearCall, tensors_of
from epigemm.arguments.precision import ORDERS
from epigemm.calls import entry
from epigemm.epilogues.registry import EPILOGUES, LINKED, Epilogue, fold_batch_norm_reference
from epigemm.linker import loader
from epigemm.packs import weight_packs
from epigemm.planner import dry_runs, plans
from epigemm.planner.dry_runs import DryRun
from epigemm.planner.gpus import KNOWN
from epigemm.planner.reasons import Reason
from tests.support.packs import decode

MODULE: Any = entry._module
H200 = KNOWN["H200"].numbers[:4]
HOPPER = (90, 132)


def describe(
    patch: pytest.MonkeyPatch, gpu: Sequence[int] = H200, *, kernels: bool = False, linked: bool = False
) -> None:
    """CPU tensors count as lying on this GPU. `kernels`: epigemm's run there; `linked`: all are there."""
    patch.setattr(plans, "gpu_numbers", lambda device: gpu)
    if kernels:
        patch.setattr(plans, "has_gpu_kernels", lambda tensor: True)
    if linked:
        patch.setattr(loader, "would_link", lambda *call: "")


def pretend_gpu(
    patch: pytest.MonkeyPatch,
    index: int,
    module: Any = None,
    capturing: Callable[[], bool] = lambda: False,
    gpu: Sequence[int] = HOPPER,
    linking: Mapping[str, Any] | None = None,
) -> None:
    """Have a CPU stand for a GPU wherever Python asks, with `module` in place of the entry's.

    `linking`: functions in place of the loader's; without them all kernels are there.
    """
    describe(patch, gpu, linked=linking is None)
    patch.setattr(plans, "has_gpu_kernels", lambda tensor: tensor.is_cpu)
    patch.setattr(plans, "no_gemm_kernels", lambda: "")
    patch.setattr(Tensor, "get_device", lambda tensor: index)
    if module is not None:
        patch.setattr(entry, "_module", module)
        patch.setattr(weight_packs, "capturing", lambda device: capturing())
    all_there = {
        "link": lambda *call: "",
        "link_each": lambda epilogue, missing, device: ["" for _ in missing],
    }
    for name, function in (all_there if linking is None else linking).items():
        patch.setattr(loader, name, function)


@dataclass
class Launch:
    """One call on fp16 slices."""

    packed: bool
    arithmetic: str
    pack: int | None  # address of the pack
    out: int
    shape: tuple[int, int, int]


def epilogue_at(number: int) -> Epilogue:
    return next(each for each in (*EPILOGUES.values(), *LINKED.values()) if each.number == number)


def allocate(size: int) -> Tensor:
    """A workspace; tests have it fail."""
    return torch.empty(size, dtype=torch.uint8)


@contextmanager
def another_empty(module: Any, empty: Callable[..., Tensor]) -> Iterator[None]:
    """Have the entry's module take its memory from another function than `torch.empty`."""
    exchange: Any = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    module.init(exchange, ops._call_functions(), entry.members() | {"empty": empty})
    try:
        yield
    finally:
        module.init(exchange, ops._call_functions(), entry.members())


class Pretended:
    """The module `epigemm._entry`, or one in its place; every call goes on in Python after the first answer.

    Attributes:
        launches: every call on fp16 slices since the last `take`.
        ran: what every fused call has run.
        allocate: makes workspaces.
    """

    def __init__(self, native: Any = None) -> None:
        self.native = native  # the module itself; None: the kernels are written in PyTorch
        self.launches: list[Launch] = []
        self.ran: list[tuple[str, tuple[int, ...]]] = []
        self.allocate: Callable[[int], Tensor] = allocate
        self.is_linked: Callable[[list[str]], bool] = lambda names: True  # whether these kernels are there

    def sees(self, *tensors: Tensor | None) -> int:
        """As the module's."""
        found: int = MODULE.sees(*tensors)
        return found

    def elementwise(self, *arguments: Any) -> int:
        """PyTorch's operators compute it."""
        return int(Reason.NOT_PLAIN)

    derivative = products = elementwise

    def linear(
        self,
        number: int,
        x: Tensor,
        weight: Tensor,
        given: tuple[Any, ...],
        fold: tuple[Any, ...] | None,
        out: Tensor | None,
        order: int,
        packs: tuple[Tensor | None, Tensor | None] | None,
        slices: int,
        strict: bool,
        invariant: bool,
        circumstances: int,
        plan: tuple[int, ...] | None,
        weight2: Tensor | None,
        *beside: Tensor | None,
    ) -> Any:
        """As the module's."""
        if not circumstances & dry_runs.ROUTED or any(each is not None for each in beside):
            return int(Reason.NOT_PLAIN)
        epilogue = epilogue_at(number)
        if fold is not None:
            folded = fold_batch_norm_reference(x, fold[:-1], fold[-1])
            given = tuple(folded.unbind(0))
        call = LinearCall(epilogue, x, weight, given, "default", True, strict, invariant, out, weight2)
        there = sum(
            dry_runs.THERE << shift
            for pack, shift in zip(packs or (None, None), dry_runs.SHIFTS.values(), strict=True)
            if pack is not None
        )
        wanted = ORDERS[order]._replace(overrides=bool(circumstances & dry_runs.OTHER_SETTING))
        found = dry_runs.dry_run(
            call, slices | there, order=wanted, circumstances=circumstances, plan=plan or ()
        )
        if self.native is None:
            result = self._compute(call, found, packs, circumstances)
        else:
            arguments = (number, x, weight, given if fold is None else (), fold, out, order, packs, slices)
            with self._allocating():
                further = (strict, invariant, circumstances, plan, weight2)
                result = self.native.linear(*arguments, *further, *beside)
        if isinstance(result, Tensor) and found.fused:
            self.ran.append((found.arithmetic, plan[1:] if plan else ()))
        if isinstance(result, Tensor) and found.on_slices:
            pack = _pack_of(found, packs)
            address = None if pack is None else pack.data_ptr()
            shape = (call.rows, weight.shape[0], weight.shape[1])
            self.launches.append(
                Launch(pack is not None, found.arithmetic, address, result.data_ptr(), shape)
            )
        return result

    @contextmanager
    def _allocating(self) -> Iterator[None]:
        """Have the module's workspaces come from `allocate`, if that is another one."""
        if self.allocate is allocate:
            yield
            return

        def empty(*sizes: int, **options: Any) -> Tensor:
            return (
                self.allocate(*sizes) if options["dtype"] is torch.uint8 else torch.empty(*sizes, **options)
            )

        with another_empty(self.native, empty):
            yield

    def _compute(
        self,
        call: LinearCall,
        found: DryRun,
        packs: tuple[Tensor | None, Tensor | None] | None,
        circumstances: int,
    ) -> Tensor | int:
        if found.refused:
            raise RuntimeError(f"plan: {found.refused}")
        if call.out is not None and not circumstances & dry_runs.OUT_APART:
            return int(Reason.MAY_OVERLAP)
        reasons = [
            each
            for each in found.reasons
            if each is not Reason.NOT_LINKED or not self.is_linked(found.missing)
        ]
        if reasons or found.answer:
            return int((*reasons, found.answer)[0])
        out = call.new_out() if call.out is None else call.out
        if found.on_slices:
            exact = self._on_slices(call, found, _pack_of(found, packs), circumstances)
            if exact is None:
                return int(Reason.NO_MEMORY)
            product = exact.float().view(*call.x.shape[:-1], exact.shape[1])
        elif not found.fused and found.gemm != dry_runs.PRODUCT:
            product = torch.nn.functional.linear(call.x, call.weight, call.bias)
            call = call._replace(operands=call.epilogue.without_bias(call.operands))
        else:
            product = torch.nn.functional.linear(call.x, call.weight)
        return out.copy_(call.epilogue.reference(product, call.operands))

    def _on_slices(
        self, call: LinearCall, found: DryRun, pack: Tensor | None, circumstances: int
    ) -> Tensor | None:
        pieces, m, (n, k) = weight_packs.SLICES[found.arithmetic], call.rows, call.weight.shape
        x_bytes, weight_bytes = weight_packs.pack_bytes(m, k, pieces), weight_packs.pack_bytes(n, k, pieces)
        try:
            workspace = self.allocate(x_bytes + (weight_bytes if pack is None else 0))
        except torch.OutOfMemoryError:
            if circumstances & dry_runs.RAISES_SHORTAGE:
                raise
            return None
        assert call.out is None or n % 4 == 0 or circumstances & dry_runs.OUT_PADDED
        assert all(each.is_contiguous() for each in tensors_of(call.operands))
        split = torch.ops.epigemm._split_rows_out
        split(call.x.reshape(m, k), pieces, workspace[:x_bytes])
        if pack is None:
            pack = workspace[x_bytes:]
            split(call.weight, pieces, pack)
        return decode(workspace[:x_bytes], m, k, pieces) @ decode(pack[:weight_bytes], n, k, pieces).t()


def _pack_of(found: DryRun, packs: tuple[Tensor | None, Tensor | None] | None) -> Tensor | None:
    if packs is None or not found.packed:
        return None
    return packs[tuple(dry_runs.SHIFTS).index(found.arithmetic)]


def explain_as_on(patch: pytest.MonkeyPatch, gpu: Sequence[int] = H200, *, elementwise: bool = False) -> None:
    """Dry runs of CPU tensors are as on this GPU, where all kernels are: those of products, or all."""
    describe(patch, gpu, kernels=True, linked=True)
    patch.setattr(plans, "no_gemm_kernels", lambda: "")
    for name, answer in (("why_none", ""), ("has_native", True)) if elementwise else ():
        patch.setattr(f"epigemm.calls.elementwise_kernels.{name}", lambda x, answer=answer: answer)


def without_gpu(patch: pytest.MonkeyPatch) -> None:
    """As on a machine without one."""
    patch.setattr(torch.cuda, "is_available", lambda: False)


_LINKING = {
    "made": "epigemm.linker.store.made",
    "functors": "epigemm.linker.cubins._functors",
    "failed": "epigemm.linker.loader._failed",
    "found": "epigemm.linker.libraries._found",
    "package": "epigemm.linker.cubins._FOLDER",
    "ir_path": "epigemm.linker.cubins.ir_path",
    "build_cubins": "epigemm.linker.cubins.build_cubins",
    "capturing": "epigemm.linker.loader.capturing",
    "add_kernel": "epigemm._native.ops._add_kernel",
    "capability": "torch.cuda.get_device_capability",
}


def pretend_linking(patch: pytest.MonkeyPatch, **given: Any) -> None:
    """Other functions and memory of linking. `found`: libraries, or why there are none; `package`: its folder."""
    for name, value in given.items():
        patch.setattr(_LINKING[name], value)
