"""Who traces the code that runs: a question about this thread, whatever other threads do. What is used of Dynamo."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import epigemm
from epigemm.calls import entry
from epigemm.compilers import is_exporting, is_traced
from tests.support.formulas import formula
from tests.support.other_threads import compile_until, export_until, others

X, WEIGHT, BIAS = torch.randn(6, 8), torch.randn(4, 8), torch.randn(4)


own = epigemm.epilogue(formula("acc, bias: PerColumn -> torch.tanh(acc + bias)"))


@epigemm.epilogue
def sums(acc: Tensor, bias: epigemm.PerColumn) -> Any:
    z = acc + bias
    return z, z.sum(0)


def run_in_the_mode(inside: Callable[[], None]) -> None:
    with epigemm.batch_invariant():
        inside()


CALLS: dict[str, Callable[[], Any]] = {
    "linear_relu": lambda: epigemm.linear_relu(X, WEIGHT, BIAS),
    "linear_relu_div": lambda: epigemm.linear_relu_div(X, WEIGHT, BIAS, divisor=2),
    "linear_glu": lambda: epigemm.linear_glu(X.half(), WEIGHT.half(), BIAS.half()),
    "own": lambda: own(X, WEIGHT, BIAS),
    "sums": lambda: sums(X, WEIGHT, BIAS),
    "recorded": lambda: epigemm.linear_silu(X.clone().requires_grad_(), WEIGHT, BIAS),
    "batch_norm": lambda: epigemm.nn.LinearBatchNormReLU(8, 4)(X).shape,
    "mode": lambda: epigemm.is_batch_invariant(),
}
OTHERS = {
    "compiles": (compile_until,),
    "exports": (export_until,),
    "compiles, another in the mode": (compile_until, run_in_the_mode),
    "exports, another in the mode": (export_until, run_in_the_mode),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_other_threads_do_is_not_asked(what: str) -> None:
    alone = {name: call() for name, call in CALLS.items()}
    with others(*OTHERS[what]):
        assert not is_traced() and not is_exporting()
        assert entry.sees(X) is None
        for name, call in CALLS.items():
            torch.testing.assert_close(call(), alone[name], rtol=0, atol=0, msg=name)


class Asks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 2 * is_exporting() + 1 * is_traced()


@pytest.mark.parametrize(
    ("trace", "expected"),
    {
        "none": (lambda ask: ask, 0),
        "compile": (lambda ask: torch.compile(ask, backend="eager", fullgraph=True), 1),
        "make_fx": (lambda ask: make_fx(ask)(X), 0),
        "export": (lambda ask: torch.export.export(ask, (X,)).module(), 2),
        "strict export": (lambda ask: torch.export.export(ask, (X,), strict=True).module(), 3),
    }.values(),
    ids=["none", "compile", "make_fx", "export", "strict export"],
)
def test_this_thread(trace: Callable[[Asks], Callable[[Tensor], Tensor]], expected: int) -> None:
    torch._dynamo.reset()
    assert torch.equal(trace(Asks())(torch.zeros(6, 8)), torch.full((6, 8), float(expected)))


def test_scalars_that_are_symbols_of_any_tracer() -> None:
    """A size as a scalar is no constant of the program, whoever traces."""

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return epigemm.linear_relu_div(x, WEIGHT, BIAS, divisor=x.shape[0] * 0.5)

    def check(program: Callable[[Tensor], Tensor]) -> None:
        for rows in (5, 9):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(program(x), F.linear(x, WEIGHT, BIAS).relu() / (rows * 0.5))

    batch = torch.export.Dim("batch", min=2)
    check(torch.export.export(Scaled(), (X,), dynamic_shapes={"x": {0: batch}}).module())
    check(make_fx(Scaled(), tracing_mode="symbolic", _allow_non_fake_inputs=True)(X))


# --- names that torch does not document ------------------------------------------------------------------------------

ROOT = Path(epigemm.__file__).parent
PRIVATE = re.compile(r"torch\._(dynamo|inductor|functorch)\.[\w.]+|torch\._TorchCompile\w+|_dynamo_\w+")


def private_names(text: str) -> list[str]:
    """The uses of Dynamo's, Inductor's and AOTAutograd's own names in a source, imports and attributes alike."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Import):
            found += [each.name for each in node.names]
        elif isinstance(node, ast.Attribute):
            found += [ast.unparse(node), node.attr]
    names = {name for name in found if PRIVATE.fullmatch(name)}
    return sorted(name for name in names if not any(other.startswith(f"{name}.") for other in names))


def test_few_private_names_are_used_in_one_file() -> None:
    """And each stands on the page of internals. `import torch._dynamo` itself, as of `torch.compiler`, is none."""
    used = {
        file.name: names for file in ROOT.rglob("*.py") if (names := private_names(file.read_text("utf-8")))
    }
    assert list(used) == ["compilers.py"] and len(used["compilers.py"]) <= 8, used
    page = (Path(__file__).parents[1] / "docs" / "internals.md").read_text("utf-8")
    assert [name for name in used["compilers.py"] if f"`{name}`" not in page] == []


def test_what_threads_may_not_do_at_once_is_done_when_dynamo_is_imported() -> None:
    """sympy makes a number at its first use, in a way in which a second thread gets a KeyError."""
    program = textwrap.dedent("""
        import sys
        from epigemm import compilers
        assert "torch._dynamo" not in sys.modules
        compilers.import_dynamo()
        assert "torch._dynamo" in sys.modules
        import sympy
        assert not {"IntInfinity", "NegativeIntInfinity"} & set(sympy.S._classes_to_install)
    """)
    subprocess.run([sys.executable, "-c", program], check=True)
