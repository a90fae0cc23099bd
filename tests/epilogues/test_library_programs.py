"""The library's programs: under which names they are exported, and that a trace makes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import epigemm
from epigemm.epilogues import library, registry
from epigemm.epilogues.library import FUNCTIONS
from epigemm.epilogues.registry import typed

M, N, K = 12, 24, 40
ROW = torch.rand(N) + 0.5
OPERANDS = {"residual.00": (ROW, torch.randn(M, N)), "scale_relu.000": (ROW, ROW, ROW)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stem", "function"),
    [*zip(OPERANDS, (epigemm.linear_residual, epigemm.linear_batch_norm_relu), strict=True)],
)
def test_exported_under_a_name_that_stays(stem: str, function: Any) -> None:
    class Layer(torch.nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            result: Tensor = function(*given)
            return result

    tensors = (torch.randn(M, K), torch.randn(N, K), *OPERANDS[stem])
    with torch.no_grad():
        program = torch.export.export(Layer(), tensors).module()
    assert repr(stem) in program.code
    del registry.LINKED[stem]  # as in another process
    FUNCTIONS[stem.partition(".")[0]].forms.clear()
    torch.testing.assert_close(program(*tensors), function(*tensors))
    assert library.named(f"{stem}0") is library.named("residual.") is library.named("x.00") is None


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_a_program_is_what_a_trace_would_make(name: str) -> None:
    """So that a copy of the user's is the same kernel: at most the order of a sum's two sides differs."""
    traced = library.traced(name)
    assert traced.digest == FUNCTIONS[name].digest and traced.name == name
    acc = torch.randn(M, N)
    sizes = {"per_column": (N,), "per_row": (M, 1), "matrix": (M, N)}
    given = [torch.randn(sizes[operand.kind]) for operand in traced.operands]
    assert traced.reference(acc, *given).shape == (M, N)


def test_the_package_has_kernels_of_a_users_copy() -> None:
    @epigemm.epilogue
    def add(acc: Tensor, bias: epigemm.PerColumn, other: epigemm.Matrix) -> Tensor:
        return acc + bias + other

    assert typed(add.traced, [False, False]).prelinked == "residual"
    assert typed(add.traced, [False, True]).prelinked == "", "these read operands of x's type"
    assert typed(FUNCTIONS["residual"], [False, False]).prelinked == "residual"
