"""Which arithmetic an fp32 matrix product gets, following torch's own settings.

`precision=` on a call overrides them; None follows them at the moment the call runs, compiled graphs
included.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

DEFAULT = "default"
"""The operators' spelling of `precision=None`: follow torch's setting when the operator runs."""

IEEE = "ieee"
"""Every product and sum in fp32: torch's own GEMM."""
TF32 = "tf32"
"""Products of 10-bit mantissas on the tensor cores."""
SPLIT = "split"
"""Three products of two fp16 pieces: fp32's accuracy on the tensor cores, where that holds and is faster."""
SCALED = "scaled"
"""One product of fp16 numbers, each row scaled to fp16's range: TF32's mantissas at twice its rate."""

ARITHMETIC = {"highest": SPLIT, "ieee": IEEE, "high": SCALED, "medium": SCALED, "tf32": TF32}
"""Accepted values of `precision=` and the arithmetic that each asks for."""

INSTEAD = {SPLIT: IEEE, SCALED: TF32}
"""What takes over where the kernels on fp16 pieces do not cover a call, or are not the fastest."""

# The new settings API alone: reading the legacy flags raises once the new ones were written (torch 2.9+).
_SETTINGS: dict[str, Any] = {
    "cuda": torch.backends.cuda.matmul,
    "cpu": torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]  # set on the module object itself
}
_LOCK = threading.RLock()


def unknown_precision(precision: object) -> ValueError:
    """The error for a `precision` that is not in `ARITHMETIC`."""
    accepted = ", ".join(repr(name) for name in ARITHMETIC)
    return ValueError(
        f"precision: got {precision!r}; accepted are None (follow torch's settings), {accepted}"
    )


def torch_setting(device_type: str) -> str:
    """torch's fp32 matmul setting for a device type: "none", "ieee", "tf32" or "bf16"."""
    setting = _SETTINGS.get(device_type)
    return "none" if setting is None else str(setting.fp32_precision)


def resolve(precision: str, device_type: str) -> str:
    """The arithmetic that an fp32 call on `device_type` asks for: "split", "ieee", "scaled" or "tf32".

    The first and third hold where dispatch takes them; `INSTEAD` says what runs elsewhere.

    Args:
        precision: a key of `ARITHMETIC`, or `DEFAULT`.
        device_type: whose setting `DEFAULT` follows.

    Raises:
        ValueError: `precision` is none of them.
    """
    if precision == DEFAULT:
        return SCALED if torch_setting(device_type) in (TF32, "bf16") else SPLIT
    try:
        return ARITHMETIC[precision]
    except KeyError:
        raise unknown_precision(precision) from None


def needs_override(precision: str, device_type: str) -> bool:
    """Whether torch's own GEMM would be less accurate than the call asked for.

    The other way round, a setting more accurate than the call's, needs nothing.
    """
    return ARITHMETIC.get(precision) in (IEEE, SPLIT) and torch_setting(device_type) not in ("none", IEEE)


@contextmanager
def full_fp32(device_type: str) -> Iterator[None]:
    """Run torch's fp32 GEMMs in full fp32, whatever the setting says.

    torch has no per-call choice, so the process-wide setting is switched and put back; the lock keeps two
    such calls from restoring each other's value. A GEMM that another thread launches meanwhile is at worst
    more accurate.
    """
    setting = _SETTINGS[device_type]
    with _LOCK:
        before = setting.fp32_precision
        # A setting that is only inherited from a wider one reads the same after it was cleared: leave it
        # cleared then, so that it goes on following the wider one.
        setting.fp32_precision = "none"
        inherited = setting.fp32_precision == before
        setting.fp32_precision = IEEE
        try:
            yield
        finally:
            setting.fp32_precision = "none" if inherited else before
