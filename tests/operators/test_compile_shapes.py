"""How often a call is compiled, and that compiled calls can be saved, loaded and packaged.

Graph breaks, dynamic=True, numbers: tests/ops/test_compile.py.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor

import epigemm
from tests.support.untyped import torch as untyped


def counting(call: Any, dynamic: bool | None = None) -> tuple[Any, Any]:
    """`call` compiled without graph breaks, and the count of its compilations."""
    torch.compiler.reset()
    counter: Any = CompileCounterWithBackend("aot_eager")
    return torch.compile(call, fullgraph=True, dynamic=dynamic, backend=counter), counter


OF_ROWS = {"sqrt": math.sqrt, "int": lambda m: m}


@pytest.mark.parametrize("of_rows", OF_ROWS.values(), ids=OF_ROWS)
def test_a_scale_made_of_a_size_recompiles_once(of_rows: Any, rng: torch.Generator) -> None:
    weight = torch.randn(3, 5, generator=rng)
    compiled, counter = counting(lambda x: epigemm.linear_relu_div(x, weight, None, of_rows(x.shape[0])))
    for rows in range(2, 14):
        x = torch.randn(rows, 5, generator=rng)
        torch.testing.assert_close(compiled(x), torch.relu(x @ weight.T) / of_rows(rows))
    assert counter.frame_count == 2


def test_an_integer_scale_under_vmap_recompiles_once(rng: torch.Generator) -> None:
    weight = torch.randn(3, 5, generator=rng)
    compiled, counter = counting(
        lambda x, scale: torch.vmap(lambda row: epigemm.linear_relu_div(row, weight, None, scale))(x)
    )
    x = torch.randn(4, 5, generator=rng)
    for scale in (1, 2, 3, 4):
        torch.testing.assert_close(compiled(x, scale), torch.relu(x @ weight.T) / scale)
    assert counter.frame_count == 2


@pytest.mark.parametrize("value", [np.float32(2), np.int64(3)], ids=repr)
def test_modules_take_numbers_of_numpy(value: Any, rng: torch.Generator) -> None:
    module = epigemm.nn.LinearReLUDiv(16, 8, divisor=value)
    x = torch.randn(4, 16, generator=rng)
    expected = torch.relu(nn.functional.linear(x, module.weight, module.bias)) / float(value)
    compiled, _ = counting(module)
    torch.testing.assert_close(compiled(x), expected)
    for strict in (False, True):
        torch.testing.assert_close(torch.export.export(module, (x,), strict=strict).module()(x), expected)


class Model(nn.Module):
    """One layer of each kind, with numbers and tensors for scales, and torch's operators between."""

    def __init__(self, tensor_operands: bool = False) -> None:
        super().__init__()
        scale = torch.tensor(2.0)
        self.first = epigemm.nn.LinearSigmoidScaleResidual(24, 16, scale=scale)
        self.norm = epigemm.nn.LinearScaleBatchNorm1d(16, 8)
        self.last = epigemm.nn.LinearReLUDiv(8, 8, divisor=scale if tensor_operands else 2.0)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.norm(self.first(x)).tanh()) + 1
        return result


def exported(model: nn.Module) -> Any:
    rows = untyped.export.Dim("rows", min=2, max=4096)
    with torch.no_grad():
        return untyped.export.export(model, (torch.randn(9, 24),), dynamic_shapes=({0: rows},))


def test_exported_programs_are_saved_and_loaded(tmp_path: Path) -> None:
    model = Model().eval()
    untyped.export.save(exported(model), tmp_path / "model.pt2")
    loaded = untyped.export.load(tmp_path / "model.pt2").module()
    for rows in (9, 2, 100):
        x = torch.randn(rows, 24)
        torch.testing.assert_close(loaded(x), model(x))


def packaged(model: nn.Module, path: Path) -> Any:
    with inductor.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):
        made = untyped._inductor.aoti_compile_and_package(exported(model), package_path=str(path))
    return untyped._inductor.aoti_load_package(made)


@pytest.mark.slow
def test_packages_of_aotinductor(tmp_path: Path) -> None:
    """They call the operators of the process that loads them, which has to import epigemm.

    AOTInductor hands the empty list of an epilogue without tensor operands over as None.
    """
    model = nn.Sequential(epigemm.nn.LinearReLU(24, 24), Model(tensor_operands=True)).eval()
    loaded = packaged(model, tmp_path / "model.pt2")
    for rows in (9, 100):
        x = torch.randn(rows, 24)
        with torch.no_grad():
            torch.testing.assert_close(loaded(x), model(x))
