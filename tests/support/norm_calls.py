"""BatchNorm by the batch's own statistics in epigemm's passes, on a CPU: how often they are called."""

from __future__ import annotations

from typing import Any

import pytest

from epigemm import batch_statistics
from epigemm.autograd import batch_norm as nodes


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each call from now on. The passes run on the CPU, too."""
    calls: list[int] = []
    forward = nodes.forward

    def count(*given: Any) -> Any:
        calls.append(1)
        return forward(*given)

    monkeypatch.setattr(batch_statistics, "is_served", lambda x: True)
    monkeypatch.setattr(nodes, "forward", count)
    return calls
