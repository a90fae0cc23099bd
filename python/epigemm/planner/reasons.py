"""The reasons why csrc/call gives no result for a call."""

from __future__ import annotations

import enum


class Reason(enum.IntEnum):
    """Why there is no result: `call::Answer`. csrc/call/torch.h explains each of them."""

    NOT_PLAIN = 2
    DOES_NOT_FIT = 3
    IS_EMPTY = 4
    NOT_READY = 5
    MAY_OVERLAP = 6
    NOT_STORABLE = 7
    NOT_READABLE = 8
    NO_MEMORY = 9
    NOT_FUSED = 10
    OTHER_SETTING = 11
    NOT_LINKED = 12
    RECORDED = 13
    BY_REFERENCE = 14
    RECORDED_BY_TORCH = 15
    NO_PAIR = 16
