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
    LACKS_PACK = 9
    NO_MEMORY = 10
    NOT_FUSED = 11
    OTHER_SETTING = 12
    NOT_LINKED = 13
    RECORDED = 14
    BY_REFERENCE = 15
    RECORDED_BY_TORCH = 16
    NO_PAIR = 17
