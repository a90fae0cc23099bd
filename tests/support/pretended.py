"""In place of the entry's module: csrc/call decides as for a GPU, and kernels written in PyTorch run on a CPU.

It is for testing everything around the kernels: which pack a call reads, what is copied, where the result goes. The
stand-in multiplies what is *in* the pack, so that a stale one gives a wrong result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from epigemm import batch_statistics
from epigemm._native import ops
from epigemm.arguments.calls import LinearCall, tensors_of
from epigemm.arguments.precision import ORDERS
from epigemm.calls import elementwise_kernels, entry, weight_slices
from epigemm.epilogues.kinds import MATRIX
from epigemm.epilogues.registry import EPILOGUES, LINKED, Epilogue, fold_batch_norm_reference
from epigemm.fusion import profit
from epigemm.linker import loader
from epigemm.operators import graphs
from epigemm.packs import weight_packs
from epigemm.planner import dry_runs, plans
from epigemm.planner.dry_runs import DryRun
from epigemm.planner.gpus import KNOWN
from epigemm.planner.reasons import Reason
from epigemm.tuner import tuner
from tests.support.packs import decode

MODULE: Any = entry._module
H200 = KNOWN["H200"].numbers[:4]
HOPPER = (90, 132)


def describe(
    patch: pytest.MonkeyPatch,
    gpu: Sequence[int] = H200,
    *,
    kernels: bool = False,
    linked: bool | Callable[..., str] = False,
    index: int | None = None,
    name: str = "",
) -> None:
    """CPU tensors count as lying on this GPU, of this index and name.

    `kernels`: epigemm's run there; `linked`: all are there, or why one could not be linked.
    """
    patch.setattr(plans, "gpu_numbers", lambda device: gpu)
    if kernels:
        patch.setattr(plans, "has_gpu_kernels", lambda tensor: True)
    if linked:
        patch.setattr(loader, "would_link", (lambda *call: "") if linked is True else linked)
    if index is not None:
        patch.setattr(Tensor, "get_device", lambda tensor: index)
    if name:
        patch.setattr(torch.cuda, "get_device_name", lambda device: name)


def serve_statistics(patch: pytest.MonkeyPatch) -> None:
    """BatchNorm's own passes run on CPU tensors (`norm_calls` has their kernels)."""
    patch.setattr(batch_statistics, "is_served", lambda x: True)


def compile_natively(patch: pytest.MonkeyPatch, *, for_h200: bool = False) -> None:
    """In graphs that Inductor compiles, calls of CPU tensors become the native operator, as planned for an H200."""
    patch.setattr(graphs, "NATIVE_ON", ("cpu",))
    if for_h200:
        patch.setattr(plans, "has_gpu_kernels", lambda tensor: True)
        patch.setattr(dry_runs, "dry_run", functools.partial(dry_runs.dry_run, gpu=H200))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """An H200 that is described, with all kernels at hand; and a tensor that stands for one there."""
    describe(monkeypatch, linked=True)
    monkeypatch.setattr(elementwise_kernels, "missing", lambda epilogue, x, kind: kind.name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    place = torch.empty(0)
    monkeypatch.setattr(profit, "place_of", lambda chain: place)
    return place


def replace_entry(
    patch: pytest.MonkeyPatch,
    module: Any,
    capturing: Callable[[], bool] = lambda: False,
    link: Callable[..., str] | None = None,
) -> None:
    """Have a module in place of the entry's; `capturing`: whether a CUDA graph is captured, besides where one is.

    `link`: in place of the loader's.
    """
    patch.setattr(entry, "_module", module)
    if link is not None:
        patch.setattr(loader, "link", link)
    is_captured, free_bytes = weight_packs.capturing, weight_slices._free_bytes
    patch.setattr(weight_packs, "capturing", lambda device: capturing() or is_captured(device))

    def free(device: torch.device) -> int:
        told: int | None = getattr(module, "free", None)
        return free_bytes(device) if told is None else told

    patch.setattr(weight_slices, "_free_bytes", free)


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
    describe(patch, gpu, linked=linking is None, index=index)
    patch.setattr(plans, "has_gpu_kernels", lambda tensor: tensor.is_cpu)
    patch.setattr(plans, "no_gemm_kernels", lambda: "")
    if module is not None:
        replace_entry(patch, module, capturing)
    all_there = {
        "link": lambda *call: "",
        "link_each": lambda epilogue, missing, device: ["" for _ in missing],
    }
    for name, function in (all_there if linking is None else linking).items():
        patch.setattr(loader, name, function)


def pretend_times(patch: pytest.MonkeyPatch, timer: Callable[[torch.device], Any]) -> None:
    """Have the tuner take its times from `timer`, for an H200."""
    patch.setattr(tuner, "Timer", timer)
    patch.setattr(torch.cuda, "device", lambda device: nullcontext())
    patch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")


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
        pairs, stores: how many of these multiplied by two weights, or stored a second matrix.
        allocate: makes workspaces.
        free: the bytes that the device tells to be free; None: what it has.
    """

    def __init__(self, native: Any = None) -> None:
        self.native = native  # the module itself; None: the kernels are written in PyTorch
        self.launches: list[Launch] = []
        self.ran: list[tuple[str, tuple[int, ...]]] = []
        self.pairs = self.stores = 0
        self.allocate: Callable[[int], Tensor] = allocate
        self.free: int | None = None
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
        stored: Tensor | None,
        *others: Any,
    ) -> Any:
        """As the module's."""
        *statistics, group_ends = others
        if not circumstances & dry_runs.ROUTED or any(each is not None for each in statistics):
            return int(Reason.NOT_PLAIN)
        epilogue = epilogue_at(number)
        if fold is not None:
            folded = fold_batch_norm_reference(x, fold[:-1], fold[-1])
            given = tuple(folded.unbind(0))
        call = LinearCall(epilogue, x, weight, given, "default", True, strict, invariant, out, weight2)
        call = call._replace(group_ends=group_ends)
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
            result = self._compute(call, found, packs, circumstances, stored)
        else:
            arguments = (number, x, weight, given if fold is None else (), fold, out, order, packs, slices)
            with self._allocating():
                further = (strict, invariant, circumstances, plan, weight2)
                result = self.native.linear(*arguments, *further, stored, *others)
        if isinstance(result, Tensor) and found.fused:
            self.ran.append((found.arithmetic, plan[1:] if plan else ()))
            self.pairs, self.stores = self.pairs + (weight2 is not None), self.stores + (stored is not None)
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
        stored: Tensor | None,
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
        if call.weight2 is not None or stored is not None or call.group_ends is not None:
            return out.copy_(_with_more(call, stored))
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


def _with_more(call: LinearCall, stored: Tensor | None) -> Tensor:
    """The result of products in float64: of a pair, of rows in groups, or with the product, which is stored."""
    x, operands = (
        call.x.double(),
        [each.double() if isinstance(each, Tensor) else each for each in call.operands],
    )

    def product(weight: Tensor) -> Tensor:
        if call.group_ends is None:
            return x @ weight.double().mT
        begins = [0, *call.group_ends.tolist()]
        parts = [x[i:j] @ each.mT for i, j, each in zip(begins, begins[1:], weight.double(), strict=False)]
        return torch.cat([*parts, x.new_zeros(len(x) - begins[-1], weight.shape[-2])])

    if call.weight2 is not None:
        operands[[each.kind for each in call.epilogue.operands].index(MATRIX)] = product(call.weight2)
    acc = product(call.weight)
    if stored is not None:
        stored.copy_(acc if call.bias is None else acc + call.bias.double())
    return call.epilogue.reference(acc, operands)


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
