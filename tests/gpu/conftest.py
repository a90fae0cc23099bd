"""Kernels as parameters of tests: those of the class."""

from __future__ import annotations

import pytest

from tests.support.cases import mma_unavailable


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of a class of kernels runs with each of them."""
    if "kernel" in metafunc.fixturenames and metafunc.cls is not None:
        metafunc.parametrize("kernel", metafunc.cls.kernels, ids=str)


@pytest.fixture
def mma_kernels() -> None:
    """Skip a test of the mma.sync kernels where not all of their tiles run."""
    if reason := mma_unavailable():
        pytest.skip(f"gpu: {reason}")
