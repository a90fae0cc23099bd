"""Compiled graphs under settings and modes: what is decided at trace time, and what at run time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm.arguments import precision as _precision
from epigemm.operators import graphs
from tests.support.compiling import Graphs, recorded
from tests.support.untyped import backends
from tests.support.untyped import torch as untyped

pytestmark = pytest.mark.usefixtures("fresh_compiler")


SETTINGS: dict[str, Callable[[bool], None]] = {
    "set_float32_matmul_precision": lambda on: torch.set_float32_matmul_precision(
        "high" if on else "highest"
    ),
    "allow_tf32": lambda on: setattr(torch.backends.cuda.matmul, "allow_tf32", on),
    "fp32_precision": lambda on: setattr(backends.cuda.matmul, "fp32_precision", "tf32" if on else "ieee"),
}


@pytest.fixture
def settings() -> Iterator[None]:
    """torch's fp32 settings as they are when it starts, before the test and behind it."""

    def clear() -> None:
        for owner in (backends, backends.cuda.matmul, backends.mkldnn.matmul):
            owner.fp32_precision = "none"

    clear()
    yield
    torch.set_float32_matmul_precision("highest")
    clear()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.usefixtures("settings")
def test_the_setting_for_cuda_is_read_at_trace_time(setting: str) -> None:
    """Dynamo compiles again when it changes, by whichever of torch's names: no operator looks at it later."""

    def trace(x: Tensor) -> Tensor:
        return x + (1 if graphs._precision_now("cuda") == "high" else 0)

    call = torch.compile(trace, backend="eager", fullgraph=True)
    for on in (False, True, False, True):
        SETTINGS[setting](on)
        assert _precision.order(None, "cuda").name == ("high" if on else "highest")
        assert call(torch.zeros(1)).item() == on


@pytest.mark.parametrize("precision", [None, "ieee", "highest", "high", "tf32"])
@pytest.mark.usefixtures("settings")
def test_the_setting_for_cpus_is_read_at_run_time(precision: Any) -> None:
    """Dynamo does not guard it: a call that it may be too coarse for goes by the operator that can switch it."""
    x, weight = torch.randn(3, 24), torch.randn(8, 24)
    graphs = Graphs()
    call = torch.compile(lambda x: epigemm.linear(x, weight, None, precision=precision), backend=graphs)
    for setting in ("ieee", "bf16"):
        backends.mkldnn.matmul.fp32_precision = setting
        torch.testing.assert_close(call(x), epigemm.linear(x, weight, None, precision=precision))
    assert graphs.count == 1
    assert graphs.names == ["linear" if precision in ("ieee", "highest") else "_into"]


@pytest.mark.usefixtures("settings")
def test_exported_programs_keep_the_setting() -> None:
    layer = epigemm.nn.LinearReLU(24, 8).eval()
    for setting, name in (("ieee", "highest"), ("bf16", "high")):
        backends.mkldnn.matmul.fp32_precision = setting
        with torch.no_grad():
            program = untyped.export.export(layer, (torch.randn(3, 24),))
        (node,) = (node for node in program.graph.nodes if "epigemm" in str(node.target))
        assert name in node.args


def test_batch_invariance_goes_by_the_operator() -> None:
    x, weight, bias = torch.randn(3, 24), torch.randn(8, 24), torch.randn(8)

    with epigemm.batch_invariant():
        assert recorded(lambda x: epigemm.linear_relu(x, weight, bias), x).names == ["linear"]
