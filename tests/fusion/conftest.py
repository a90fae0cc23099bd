"""Fusion of products of any size: those of the tests are small."""

from __future__ import annotations

import pytest

from epigemm.fusion import worth

Limits = dict[tuple[str, str, bool], float]


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """Takes the limits away; returns them."""
    limits = dict(worth.LIMITS)
    monkeypatch.setattr(worth, "LIMITS", {})
    return limits
