"""How the driver is asked for the CTAs of a multiprocessor."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.harness.occupancy import ctas_of_multiprocessor

THREADS, CTAS = 128, 3


class Driver:
    """Of a GPU that runs `ctas` CTAs; `fails`: the call that does not work."""

    def __init__(self, fails: str = "", ctas: int = CTAS) -> None:
        self.fails, self.ctas = fails, ctas
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> int:
            self.calls.append(name)
            if name == "cuFuncGetAttribute":
                assert given[1] == 0
                given[0]._obj.value = THREADS
            elif name == "cuFuncSetAttribute":
                assert given[1:] == (8, 49152)
            elif name == "cuOccupancyMaxActiveBlocksPerMultiprocessor":
                assert (given[2].value, given[3].value) == (THREADS, 49152)
                given[0]._obj.value = self.ctas
            return 200 * (name == self.fails)

        return call


def test_the_drivers_answer() -> None:
    driver = Driver()
    assert ctas_of_multiprocessor(b"code", "kernel", 49152, driver) == CTAS
    assert driver.calls[0] == "cuModuleLoadData" and driver.calls[-1] == "cuModuleUnload"


@pytest.mark.parametrize("fails", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"])
def test_an_error_is_raised(fails: str) -> None:
    driver = Driver(fails)
    with pytest.raises(RuntimeError, match=f"kernel: {fails} returned CUDA error 200"):
        ctas_of_multiprocessor(b"code", "kernel", 49152, driver)
    assert ("cuModuleUnload" in driver.calls) == (fails != "cuModuleLoadData")


def test_a_cta_that_does_not_fit() -> None:
    with pytest.raises(RuntimeError, match="kernel: a multiprocessor has no room for a CTA"):
        ctas_of_multiprocessor(b"code", "kernel", 49152, Driver(ctas=0))
