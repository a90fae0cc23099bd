"""The table itself: it has every public function and layer, and its programs are PyTorch's own."""

from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F
from torch import nn

import epigemm
from tests.ops.op import results_of
from tests.ops.table import OPS, PENDING, normal, trained

NO_OPERATORS = {
    *("build_info", "epilogue", "explain", "fuse", "is_batch_invariant", "pack", "precompile"),
    *("set_batch_invariant", "tune", "unfuse"),
}
"""Public functions that compute nothing from tensors."""
GROUPED = {"grouped_linear", "grouped_linear_glu", "nn.Experts"}
"""Those of weights with three dimensions, which no property's draws have: tests/test_groups.py, nn/test_experts.py."""


def test_every_public_function_and_layer_has_a_row() -> None:
    names = {op.name.split("-")[0] for op in OPS}
    functions = {name for name in epigemm.__all__ if inspect.isfunction(getattr(epigemm, name))}
    assert functions - NO_OPERATORS - GROUPED <= names and functions >= NO_OPERATORS
    layers = {f"nn.{name}" for name in epigemm.nn.__all__ if inspect.isclass(getattr(epigemm.nn, name))}
    assert layers - GROUPED <= names
    assert len({op.name for op in OPS}) == len(OPS)


def test_what_is_pending_is_in_the_table() -> None:
    names = {op.name for op in OPS}
    assert all(set(pending) <= names for pending in PENDING.values())


def test_every_function_is_documented() -> None:
    functions = [op.function for op in OPS if op.name in epigemm.__all__]
    assert len(functions) > 10
    for function in functions:
        doc = inspect.getdoc(function) or ""
        for word in ("D = ", "Matches", "Args:", "Returns:", "Raises:", "Example"):
            assert word in doc, f"{function}: no {word!r} in its docstring"


def test_batch_norm_is_pytorchs(rng: torch.Generator) -> None:
    """Evaluated, with and without its parameters, and in training with its buffers."""
    x, mean, weight, bias = (
        torch.randn(size, generator=rng, dtype=torch.float64) for size in ((9, 4), 4, 4, 4)
    )
    var = weight.abs() + 0.5
    for affine in ((weight, bias), (None, bias), (weight, None), (None, None)):
        torch.testing.assert_close(normal(x, mean, var, *affine), F.batch_norm(x, mean, var, *affine))
    layer = nn.BatchNorm1d(4, dtype=torch.float64)
    with torch.no_grad():
        for tensor, value in zip(
            (*layer.parameters(), *layer.buffers()), (weight, bias, mean, var), strict=False
        ):
            tensor.copy_(value)
    eye, count = torch.eye(4, dtype=torch.float64), torch.zeros((), dtype=torch.long)
    got = results_of(trained(torch.relu)(x, eye, None, mean, var, weight, bias, count))
    want = [layer(x).relu(), layer.running_mean, layer.running_var, layer.num_batches_tracked]
    torch.testing.assert_close(got, want)
