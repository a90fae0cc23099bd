"""Compiled graphs hold the native operators, and run no Python of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm._native import ops
from epigemm.arguments import precision as _precision
from epigemm.operators import graphs
from tests.support.compiling import Graphs, recorded
from tests.support.untyped import backends
from tests.support.untyped import torch as untyped

pytestmark = pytest.mark.usefixtures("fresh_compiler")


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "vector": lambda: torch.randn(24),
    "batches": lambda: torch.randn(2, 3, 24),
    "slice of a batch": lambda: torch.randn(4, 3, 24)[1:3],
    "rows of a wider matrix": lambda: torch.randn(5, 40)[:, 3:27],
    "transposed": lambda: torch.randn(24, 5).t(),
    "one row everywhere": lambda: torch.randn(1, 24).expand(5, 24),
    "overlapping rows": lambda: torch.randn(60).as_strided((5, 24), (4, 1)),
    "every other column": lambda: torch.randn(5, 48)[:, ::2],
    "axes swapped": lambda: torch.randn(3, 2, 24).transpose(0, 1),
    "transposed in a batch": lambda: torch.randn(3, 24, 5).transpose(1, 2),
    "one row of each": lambda: torch.randn(3, 5, 24)[:, -1:],
    "no rows": lambda: torch.randn(0, 24),
    "a batch of nothing": lambda: torch.randn(2, 0, 24),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_x(layout: str, rng: torch.Generator) -> None:
    """Where the native operator does not answer, it asks Python: the same result as of eager calls."""
    weight, bias = torch.randn(8, 24, generator=rng), torch.randn(8, generator=rng)
    vectors: Any = [torch.rand(8, generator=rng) + 0.5 for _ in range(5)]
    x = LAYOUTS[layout]()

    def chain(x: Tensor) -> tuple[Tensor, ...]:
        return (
            epigemm.linear(x, weight, bias),
            epigemm.linear_scale_batch_norm(x, weight, bias, *vectors),
            epigemm.sigmoid(x),
        )

    for got, expected in zip(torch.compile(chain, fullgraph=True, backend="eager")(x), chain(x), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert got.stride() == expected.stride()
        assert got.dim() != 2 or got.is_contiguous() or not expected.is_contiguous()
    given = recorded(lambda x: epigemm.linear(x, weight, bias), x).nodes[0].args[2]
    has_no_rows = layout in ("axes swapped", "transposed in a batch")
    assert (given.target == "contiguous") == has_no_rows, "the graph copies x, for no kernel reads it"


def test_other_operands_are_the_operators() -> None:
    """An `out`, a gradient, a transform: somebody has to see the call."""
    x, weight, bias = torch.randn(3, 24), torch.randn(8, 24), torch.randn(8)

    def names(call: Callable[..., Any], *args: Any) -> list[str]:
        return recorded(call, *args).names

    def into(x: Tensor, out: Tensor) -> Tensor:
        return epigemm.linear_relu(x, weight, bias, out=out)

    assert names(into, x, torch.empty(3, 8)) == ["linear_out"]

    def call(x: Tensor) -> Tensor:
        return epigemm.linear_relu(x, weight, bias)

    needs = x.clone().requires_grad_()
    assert names(call, needs) == ["linear"]
    with torch.no_grad():
        assert names(call, needs) == ["_into"]
    with torch.inference_mode():
        assert names(call, x) == ["_into"]
    batched: Any = torch.vmap(call)
    assert names(batched, torch.randn(2, 3, 24)) != ["_into"]

    def inside(x: Tensor) -> Tensor:
        with torch.no_grad():
            frozen = epigemm.linear_relu(x, weight, bias)
        return frozen + epigemm.linear_relu(x, weight, bias)

    assert names(inside, needs) == ["_into", "linear"]


def test_errors_of_the_operator_itself() -> None:
    x, weight, out, digest = (
        torch.randn(3, 24),
        torch.randn(8, 24),
        torch.empty(3, 8),
        graphs.digest_of("bias"),
    )
    cases: list[tuple[int, Tensor, bool, Tensor, str]] = [
        (digest, x[:, :5], False, out, "x: got shape"),
        (digest, x, True, out, "strict: got True"),
        (12345, x, False, out, "epilogue: got the digest"),
        (digest, x, False, x.view(9, 8)[:3], "out"),
    ]
    for named, given, is_strict, result, words in cases:
        options = 32 + 64 * is_strict  # as csrc/torch/compiled.cpp has them
        with pytest.raises(RuntimeError, match=words):
            ops._into(0, named, given, weight, None, None, None, 0.0, options, result, None)


@pytest.mark.gpu
def test_out_of_memory_keeps_its_type() -> None:
    weight = torch.randn(1 << 16, 64, device="cuda", dtype=torch.bfloat16)

    def layer(x: Tensor) -> Tensor:
        return epigemm.linear_relu(x, weight, None)

    call = torch.compile(layer, fullgraph=True)
    call(torch.randn(8, 64, device="cuda", dtype=torch.bfloat16))
    rows = torch.cuda.get_device_properties(0).total_memory // (2 * (1 << 16)) + 1
    with pytest.raises(torch.OutOfMemoryError):
        call(torch.zeros(1, 64, device="cuda", dtype=torch.bfloat16).expand(rows, 64))


# --- settings and modes: what is decided at trace time, and what at run time ------------------------------------------

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
