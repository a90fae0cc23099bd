"""Fusion of products of any size: those of the tests are small."""

from __future__ import annotations

import pytest

from epigemm.fusion import worth


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, bool, bool], int]:
    """Takes the limits away; returns them."""
    limits = dict(worth.SMALLEST)
    monkeypatch.setattr(worth, "SMALLEST", {})
    return limits
