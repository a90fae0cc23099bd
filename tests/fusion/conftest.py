"""Each test begins with a compiler that has seen nothing. A GPU that is described to the planner."""

from __future__ import annotations

import pytest

from tests.support.pretended import hopper

__all__ = ["hopper"]


@pytest.fixture(autouse=True)
def _fresh(fresh_compiler: None) -> None:
    """Each test is the first one that compiles."""
