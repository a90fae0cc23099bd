"""Which arithmetic an fp32 matrix product gets, following torch's settings.

`precision=` on a call overrides them; None follows them at the moment the call runs. Graphs are compiled again when the
setting for CUDA has changed. Exported programs keep the setting of their export.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

DEFAULT = "default"
"""The operators' spelling of `precision=None`: follow torch's setting when the operator runs."""

IEEE = "ieee"
"""Every product and sum in fp32: computed by torch's GEMM."""
TF32 = "tf32"
"""Products of numbers with 10-bit mantissas on the tensor cores. torch's GEMM computes in TF32 only if its setting
allows it."""
SPLIT = "split"
"""Three products of two fp16 slices: fp32's accuracy on the tensor cores. Used where it is that accurate and faster."""
SCALED = "scaled"
"""One product of fp16 numbers, each row scaled to fp16's range: TF32's mantissas at twice its rate."""

PROMOTED = "promoted"
"""Of 8-bit numbers: the tensor cores' sums of 128 products are added in fp32."""
FAST = "fast"
"""Of 8-bit numbers: the tensor cores add all products."""

ARITHMETIC = {"highest": SPLIT, "ieee": IEEE, "high": SCALED, "medium": SCALED, "tf32": TF32}
"""Accepted values of `precision=` and the arithmetic that each asks for."""

_REDUCED = (TF32, "bf16")  # torch's settings under which its own fp32 GEMM rounds the operands


class Order(NamedTuple):
    """The arithmetics that an fp32 call may run in, in the order in which they are tried."""

    number: int  # its row in csrc/call's table
    name: str  # a `precision` that asks for it
    # the arithmetics whose kernels are tried, in this order; torch's GEMM comes after the last
    fused: tuple[str, ...]
    tf32_allowed: bool  # whether torch's GEMM may use TF32 there
    slices: int = 0  # of an element in the first arithmetic; 0: that is none on fp16 slices
    # whether torch's setting has to be switched for its GEMM to be as accurate as the call asks for
    overrides: bool = False


ORDERS = (
    Order(0, "ieee", (IEEE,), False),
    Order(1, "highest", (SPLIT, IEEE), False, 2),
    Order(2, "high", (SCALED, TF32), True, 1),
    Order(3, "high", (SCALED, TF32, SPLIT), False, 1),
    Order(4, "tf32", (TF32,), False),
    Order(5, "tf32", (TF32,), True),
    Order(6, PROMOTED, (PROMOTED,), False),
    Order(7, FAST, (FAST,), False),
)
"""The rows of csrc/call's table. The first is that of tensors of other dtypes, too, but for the last two: of 8 bits."""
_IEEE, _HIGHEST, _HIGH, _HIGH_BESIDE_SGEMM, _TF32_BESIDE_SGEMM, _TF32, _PROMOTED, _FAST = ORDERS
# By precision, for a setting of torch's that keeps its GEMM in fp32 and for one that allows it TF32. Under the first,
# torch's GEMM (SGEMM) is the slow last resort of a call that allows TF32. So `SPLIT` is tried before it, which is
# faster and as accurate.
_BY_PRECISION: dict[str | None, tuple[Order, Order]] = {
    None: (_HIGHEST, _HIGH),
    DEFAULT: (_HIGHEST, _HIGH),
    "highest": (_HIGHEST, _HIGHEST._replace(overrides=True)),
    "ieee": (_IEEE, _IEEE._replace(overrides=True)),
    "high": (_HIGH_BESIDE_SGEMM, _HIGH),
    "medium": (_HIGH_BESIDE_SGEMM, _HIGH),
    "tf32": (_TF32_BESIDE_SGEMM, _TF32),
}

OF_8_BITS = {PROMOTED: _PROMOTED, FAST: _FAST}
"""By `accumulate=`."""

# The new settings API alone: reading the legacy flags raises once the new ones were written (torch 2.9+).
_SETTINGS: dict[str, Any] = {
    "cuda": torch.backends.cuda.matmul,
    "cpu": torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]  # set on the module object itself
}
_LOCK = threading.RLock()
# Reading them through the objects above takes several times as long.
BACKENDS = {"cuda": "cuda", "cpu": "mkldnn"}
"""By device type, the backend's name for `read_setting`."""
read_setting: Any = torch._C._get_fp32_precision_getter
"""Reads a setting: of a backend and an operation."""

callers: dict[str, str] = {}
"""By device type, while `switched` has replaced a setting: the original one, which holds for all code outside its
block."""
_switches = 0


def unknown_precision(precision: object) -> ValueError:
    """The error for a `precision` that is not in `ARITHMETIC`."""
    accepted = ", ".join(repr(name) for name in ARITHMETIC)
    return ValueError(
        f"precision: got {precision!r}; accepted are None (follow torch's settings), {accepted}"
    )


def torch_setting(device_type: str) -> str:
    """torch's fp32 matmul setting for a device type: "none", "ieee", "tf32" or "bf16"."""
    backend = BACKENDS.get(device_type)
    if backend is None:
        return "none"
    while True:
        before = _switches
        setting = callers.get(device_type) or str(read_setting(backend, "matmul"))
        if before == _switches:  # no other thread has switched it meanwhile
            return setting


def order(precision: str | None, device_type: str) -> Order:
    """What an fp32 call may run in under torch's present setting; ValueError for an unknown `precision`."""
    try:
        in_fp32, in_tf32 = _BY_PRECISION[precision]
    except KeyError:
        raise unknown_precision(precision) from None
    return in_fp32 if torch_setting(device_type) not in _REDUCED else in_tf32


@contextmanager
def switched(device_type: str, value: str) -> Iterator[None]:
    """Run torch's fp32 GEMMs under a setting, and put the old one back: torch's is that of the process.

    Under `IEEE` a GEMM that another thread launches in the meantime is at least as accurate as it asked for. The lock
    keeps two such calls from restoring each other's value.
    """
    global _switches
    setting = _SETTINGS[device_type]
    with _LOCK:
        before = setting.fp32_precision
        outer = callers.get(device_type)
        callers[device_type] = before if outer is None else outer
        _switches += 1
        # If a setting is only inherited from a wider one, it reads the same after it was cleared. It is left cleared
        # then, so that it still follows the wider one.
        setting.fp32_precision = "none"
        inherited = setting.fp32_precision == before
        setting.fp32_precision = value
        try:
            yield
        finally:
            setting.fp32_precision = "none" if inherited else before
            if outer is None:
                callers.pop(device_type, None)
            _switches += 1
