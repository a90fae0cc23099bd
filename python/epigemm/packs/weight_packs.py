"""The table of packs, by the identity of the weight's tensor object: finds, makes, makes again and frees them.

One exception: each call of `linear_glu` makes views of the halves of a Parameter. Their packs belong to the Parameter.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from epigemm._native import operator, ops
from epigemm.arguments import checks
from epigemm.arguments import precision as _precision
from epigemm.arguments.calls import LinearCall
from epigemm.compilers import capturing as capturing
from epigemm.compilers import outside_of_graphs
from epigemm.epilogues.library import BIAS
from epigemm.planner import dry_runs, plans

SLICES = {_precision.SPLIT: 2, _precision.SCALED: 1}
"""The arithmetics on fp16 slices, with the number of slices of each. They do not share packs."""

look_in_python: Callable[[], None] = ops._look_in_python.default
"""From now on, C++ operators on fp16 slices ask Python, which has the table of packs and of memory shortages."""

_SECTION = 256
_INTERLEAVE = 64
_MANY_ROWS = 8192  # `pack` asks the planner at this many rows of x whether slices of the weight would be used


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@functools.lru_cache(maxsize=8192)
def pack_bytes(rows: int, columns: int, slices: int) -> int:
    """Bytes of a [rows, columns] matrix in slices, as csrc/gemm/fp16_slices/layout.h lays it out.

    Scales, statistics and counts of the rows, then the slices. Each section is rounded up to 256 bytes.
    """
    padded = _round_up(columns, _INTERLEAVE if slices == 2 else 8)
    return 3 * _round_up(4 * rows, _SECTION) + _round_up(2 * slices * rows * padded, _SECTION)


class _Owner:
    """A weak reference to a weight, and its packs by number of slices and by `_place`."""

    def __init__(self, weight: Tensor) -> None:
        key = id(weight)
        self.weight = weakref.ref(weight, lambda reference: _forget(key, reference))
        self.packs: dict[tuple[int, int], KeptPack] = {}


# By id: a weakref dictionary would cost microseconds a call. An id is reused only after `_forget` ran.
owners: dict[int, _Owner] = {}
"""The packs that there are; empty: no call has any to read, or to make stale."""
_lock = threading.RLock()
_watching_optimisers = False
_WHOLE = -1


def _forget(key: int, reference: Any) -> None:
    # Without the lock: the garbage collector may call this at any moment. Each step is one operation of a dictionary.
    owner = owners.get(key)
    if owner is not None and owner.weight is reference:
        owners.pop(key, None)


def _place(weight: Tensor) -> tuple[Tensor, int]:
    """The tensor that a weight's packs belong to, and where in it the weight begins: `_WHOLE` if it is that itself.

    A half has packs of its own, because in a pack of the whole weight the scales of all rows come before the slices.
    """
    base = weight._base
    if type(base) is not Parameter or base.dim() != 2 or weight.stride() != base.stride():
        return weight, _WHOLE
    if 2 * weight.shape[0] != base.shape[0] or weight.shape[1] != base.shape[1]:
        return weight, _WHOLE
    return base, int(weight.storage_offset() - base.storage_offset())


def _owner_at(weight: Tensor) -> _Owner | None:
    owner = owners.get(id(weight))
    return owner if owner is not None and owner.weight() is weight else None


def kept(weight: Tensor) -> dict[int, KeptPack]:
    """The weight's packs by number of slices, current or not."""
    if not owners:
        return {}
    of, place = _place(weight)
    owner = _owner_at(of)
    packs = () if owner is None else [*owner.packs.items()]  # another thread may make one
    return {slices: pack for (slices, at), pack in packs if at == place}


def buffers(weight: Tensor) -> tuple[Tensor | None, ...] | None:
    """Those that are current, as the entry takes them: in the order of `SLICES`. None if there are none."""
    packs = kept(weight) if owners and isinstance(weight, Tensor) else None
    if not packs:
        return None
    found = (packs.get(slices) for slices in SLICES.values())
    return tuple([pack.read() if pack is not None and pack.is_current(weight) else None for pack in found])


def keep(weight: Tensor, slices: int) -> KeptPack:
    """Make the weight's pack, or make it again in the same memory, which captured graphs may read.

    Raises:
        torch.OutOfMemoryError: no memory for a new pack.
    """
    with _lock, torch.no_grad():
        of, place = _place(weight)
        packs = _owner_of(of).packs
        found = packs.get((slices, place))
        size = pack_bytes(weight.shape[0], weight.shape[1], slices)
        if found is not None and (found.buffer.shape[0] != size or found.buffer.device != weight.device):
            found = None
            del packs[slices, place]  # frees its memory before the new one is allocated
        if found is None:
            with torch.inference_mode(False):  # it will be written again outside of that mode
                found = KeptPack(torch.empty(size, dtype=torch.uint8, device=weight.device), slices)
        found.write(weight)
        packs[slices, place] = found
        return found


def drop(weight: Tensor) -> None:
    """Forget the weight's packs, of a whole weight also those of its halves, and free their memory."""
    of, place = _place(weight)
    owner = _owner_at(of)
    if owner is not None:
        with _lock:
            owner.packs = {key: pack for key, pack in owner.packs.items() if place not in (key[1], _WHOLE)}


def expire(weight: Tensor) -> None:
    """Make the weight's packs and those of its halves stale, and of a half those of the whole weight."""
    owner = _owner_at(_place(weight)[0]) if owners else None
    if owner is not None:
        for pack in [*owner.packs.values()]:  # another thread may make one
            pack.expire()


def _owner_of(weight: Tensor) -> _Owner:
    global _watching_optimisers
    owner = _owner_at(weight)
    if owner is None:
        owner = owners[id(weight)] = _Owner(weight)
        look_in_python()  # compiled graphs then ask Python for the pack of their weight
    if not _watching_optimisers:
        # Before and after: a step may write and then raise, and a closure may make a pack.
        register_optimizer_step_pre_hook(_at_optimiser_step)
        register_optimizer_step_post_hook(_at_optimiser_step)
        _watching_optimisers = True
    return owner


def _at_optimiser_step(optimiser: Any, args: Any, kwargs: Any) -> None:
    # Fused optimisers write parameters without increasing the version counter, also that of views and aliases.
    groups = optimiser.param_groups if owners else ()
    written = {_storage_of(parameter) for group in groups for parameter in group["params"]}
    for owner in [*owners.values()] if written else ():
        weight = owner.weight()
        if weight is not None and _storage_of(weight) in written:
            expire(weight)


def _storage_of(tensor: Tensor) -> int:
    """A number for the tensor's storage; 0 for tensors without one."""
    try:
        found: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors, and some subclasses
        return 0
    return found


def _slices_for(weight: Tensor, precision: str) -> int:
    """The number of slices that calls with this weight would run on at `precision`; 0 if none would."""
    if plans.no_gemm_kernels():
        return 0
    n, k = weight.shape
    x, like = torch.empty(_MANY_ROWS, k, device="meta"), torch.empty(n, k, device="meta")
    call = LinearCall(BIAS, x, like, precision=precision)
    found = dry_runs.dry_run(call, dry_runs.ALL_KEPT, weight)
    return SLICES[found.arithmetic] if found.on_slices else 0


def _repack(weight: Tensor, precision: str) -> None:
    """Split the weight into all its kept packs, and into the one that `precision` asks for."""
    is_matrix = weight.dtype == torch.float32 and weight.dim() == 2 and weight.layout == torch.strided
    # Changes of an inference tensor are not noticed.
    if not is_matrix or weight.is_inference() or not plans.has_gpu_kernels(weight):
        drop(weight)
        return
    slices = {*kept(weight), _slices_for(weight, precision)} - {0}
    if slices and capturing(weight.device):
        raise RuntimeError("repack: got a call under CUDA graph capture; accepted is one before it")
    for count in sorted(slices):
        keep(weight, count)


class PackedWeight:
    """A weight together with its fp16 slices: accepted wherever a linear function takes a weight.

    The slices are kept as long as the weight exists. All calls with the same tensor object read them, those of layers
    and fused models, too, whether they are given this object or the weight. A call with `requires_grad` and gradients
    switched on does not. When the weight has changed, calls read the weight itself until `repack()`; see
    `epigemm.packs` for CUDA graphs, and for the changes that torch does not count. Where fp32 products do not run on
    fp16 slices (CPUs, most GeForce GPUs, small K), no slices are kept, and calls run as with the weight itself. Copies
    and pickles contain a weight and make a pack of their own.

    `linear_glu` and its layer read the slices of each half of a weight of 2N rows:
    `for half in layer.weight.chunk(2): epigemm.pack(half)`.

    Args:
        weight: fp32 `[N, K]`, a `torch.nn.Parameter` or any other strided tensor.
        precision: that of the calls to come; None follows torch's setting.

    Raises:
        TypeError: `weight` is no tensor, or `precision` no string.
        ValueError: unknown precision.
        RuntimeError: `weight` is not fp32, not two-dimensional or not strided.
        torch.OutOfMemoryError: no memory for the pack.

    Example:
        >>> packed = epigemm.PackedWeight(torch.randn(32, 64))
        >>> epigemm.linear_relu(torch.randn(8, 64), packed).shape
        torch.Size([8, 32])
    """

    def __init__(self, weight: Tensor, precision: str | None = None) -> None:
        _check(weight)
        self._weight = weight
        self._precision = None if precision is None else checks.precision(precision)
        self.repack()

    @property
    def weight(self) -> Tensor:
        """The tensor object that was given."""
        return self._weight

    @property
    def nbytes(self) -> int:
        """Bytes that are kept for the weight's slices: about as many as the weight has; 0 if no slices are kept."""
        return sum(pack.buffer.nbytes for pack in kept(self._weight).values())

    def repack(self) -> None:
        """Split the weight again, into the same memory. CUDA graphs that read the pack see the new slices.

        The pack is freed if the weight has a dtype or a device now for which no kernel runs.

        Raises:
            RuntimeError: the current stream is being captured into a CUDA graph.
            torch.OutOfMemoryError: no memory for a pack that does not exist any more.
        """
        precision = _precision.DEFAULT if self._precision is None else self._precision
        outside_of_graphs(_repack)(self._weight, precision)

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedWeight, (self._weight, self._precision)

    def __repr__(self) -> str:
        return f"PackedWeight(shape={list(self._weight.shape)}, device={self._weight.device}, nbytes={self.nbytes})"


def pack(weight: Tensor, *, precision: str | None = None) -> PackedWeight:
    """Split an fp32 weight into fp16 slices, once, for the calls to come.

    Matches the weight itself in every linear function: `epigemm.linear(x, epigemm.pack(weight))` is
    `epigemm.linear(x, weight)`, without splitting the weight at each call.

    Arguments and errors are those of `PackedWeight`.

    Example:
        >>> packed = epigemm.pack(torch.randn(32, 64))
        >>> epigemm.linear(torch.randn(8, 64), packed).shape
        torch.Size([8, 32])
    """
    return PackedWeight(weight, precision)


# --- the fp16 slices of one weight ------------------------------------------------------------------------------------


_Mark = tuple[Any, ...]
_split_rows_out = operator("_split_rows_out")


class KeptPack:
    """The slices of one weight: the buffer, and the weight's state when they were made.

    Attributes:
        buffer: uint8, `pack_bytes` long.
    """

    def __init__(self, buffer: Tensor, slices: int) -> None:
        self.buffer = buffer
        self._slices = slices
        self._mark: _Mark | None = None
        # Keeps the storage's object alive, not its memory, so that no later storage gets the same id.
        self._storage: StorageWeakRef | None = None
        self._written: Any = None  # the event recorded after the kernel that wrote the buffer
        self._ready: set[int] = set()  # streams that have waited for it

    def is_current(self, weight: Tensor) -> bool:
        """Whether the weight has not changed since the buffer was written."""
        return self._mark == _mark(weight)

    def expire(self) -> None:
        """Make the pack stale: the weight was or will be written, perhaps without a new version number."""
        self._mark = None

    def write(self, weight: Tensor) -> None:
        """Split the weight into the buffer, on the current stream.

        This does not wait for kernels that still read the old slices. If the weight was written in place, its writer
        has waited for the kernels that read the weight, and these are the ones that read the pack. If it did not
        change, the same bits are written again. If it is at another address now, the caller has to wait.
        """
        self._mark = None
        mark = _mark(weight)
        storage = StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]
        _split_rows_out(weight, self._slices, self.buffer)
        if weight.is_cuda:
            stream = torch.cuda.current_stream(weight.device)
            if stream.cuda_stream not in self._ready:
                self.buffer.record_stream(stream)
            self._written = stream.record_event()
            self._ready = {stream.cuda_stream}
        self._storage, self._mark = storage, mark

    def read(self) -> Tensor:
        """The buffer, for a kernel that is launched next on the current stream."""
        if self._written is not None:
            device = self.buffer.device
            if torch._C._cuda_getCurrentRawStream(device.index) not in self._ready:
                self._join(device)
        return self.buffer

    def _join(self, device: torch.device) -> None:
        # A capture cannot wait for an event from outside of it. It need not, because torch.cuda.graph synchronises
        # first, and replays come later.
        if capturing(device):
            return
        stream = torch.cuda.current_stream(device)
        stream.wait_event(self._written)
        self.buffer.record_stream(stream)
        self._ready.add(stream.cuda_stream)


def _check(weight: object) -> None:
    """TypeError unless a tensor, RuntimeError unless an fp32 matrix."""
    checks.tensors(weight=weight)
    assert isinstance(weight, Tensor)
    checks.strided("weight", weight)
    if weight.dtype != torch.float32:
        raise RuntimeError(f"weight: got dtype {weight.dtype}; accepted is torch.float32")
    if weight.dim() != 2:
        raise RuntimeError(
            f"weight: got shape {[*weight.shape]}; accepted is [out_features, in_features] (2 dimensions)"
        )


def _mark(weight: Tensor) -> _Mark:
    place = weight.untyped_storage()._cdata, weight.data_ptr()
    return *place, weight._version, weight.shape, weight.stride()
