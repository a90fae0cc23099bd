"""BatchNorm by the batch's own statistics in epigemm's passes, on a CPU: how often they are called."""

from __future__ import annotations

from typing import Any

import pytest

from epigemm import batch_statistics
from epigemm.calls import batch_norm


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each call from now on. The passes run on the CPU, too."""
    calls: list[int] = []
    normalise = batch_norm.normalise

    def count(*given: Any) -> Any:
        calls.append(1)
        return normalise(*given)

    monkeypatch.setattr(batch_statistics, "is_served", lambda x: True)
    monkeypatch.setattr(batch_norm, "normalise", count)
    return calls
