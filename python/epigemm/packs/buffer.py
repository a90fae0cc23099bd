"""The fp16 slices of one weight: the buffer, the weight's state when they were made, and who may read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from epigemm._native import operator
from epigemm.compilers import capturing

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


def _mark(weight: Tensor) -> _Mark:
    place = weight.untyped_storage()._cdata, weight.data_ptr()
    return *place, weight._version, weight.shape, weight.stride()
