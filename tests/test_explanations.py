"""`epigemm.explain` of a module: which it is about."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import epigemm
from tests.net.explanations import Calls
from tests.support.formulas import formula


class Mixed(nn.Module):
    """A plain layer, one of epigemm's, and a function of epigemm's."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.ours = nn.Linear(8, 8), epigemm.nn.LinearReLU(8, 8)

    def forward(self, x: Tensor, *, scale: float = 2.0) -> Tensor:
        return epigemm.linear_scale(self.ours(self.plain(x)), torch.eye(8), None, torch.full((8,), scale))


x = torch.randn(4, 8)


def test_a_model_with_layers_of_epigemms_is_told_as_it_is() -> None:
    found = epigemm.explain(Mixed(), x, scale=3.0)
    assert found.about == "Mixed as it is, not fused"
    assert [(each.name, each.runs) for each in found] == [
        ("plain", "PyTorch's own"),
        ("ours", "fallback"),
        ("Mixed", "fallback"),
    ]
    assert found.notes == ["epigemm.explain(epigemm.fuse(model), ...) tells what fuse makes of the others"]


def test_any_other_model_is_told_as_fuse_would_make_it() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes, generator = copy.copy(vars(model)), torch.get_rng_state()
    found = epigemm.explain(model, x)
    assert found.about == "Sequential is not fused; what epigemm.fuse(model) would run"
    assert [each.name for each in found] == ["0", "4"] and found["0"].notes
    fused = epigemm.explain(epigemm.fuse(model), x)
    assert [replace_op(each) for each in fused] == [replace_op(each) for each in found]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert vars(model) == attributes and torch.equal(torch.get_rng_state(), generator)


def replace_op(product: Any) -> tuple[Any, ...]:
    return (product.columns, product.notes)


def test_a_model_without_products_and_one_that_cannot_be_fused() -> None:
    assert str(epigemm.explain(nn.ReLU(), x)).startswith(
        "ReLU as it is, not fused:\n  no matrix product is listed"
    )

    wrapped = nn.DataParallel(nn.Linear(8, 8))
    found = epigemm.explain(wrapped, x)
    assert found.notes[0].startswith("fuse would leave it alone: it holds a DataParallel")
    assert [each.runs for each in found] == ["PyTorch's own"]

    found = epigemm.explain(nn.LSTM(8, 8), x)  # which Dynamo leaves alone
    assert found.notes[0] == "none of these products is in a graph that fuse sees"
    assert [(each.function, each.runs) for each in found] == [("lstm", "PyTorch's own")]


def test_a_layer_that_would_change_for_good_is_refused() -> None:
    lazy = nn.LazyLinear(8)
    with pytest.raises(ValueError, match="module: got a LazyLinear whose first call makes its parameters"):
        epigemm.explain(nn.Sequential(lazy), x)
    assert type(lazy) is nn.LazyLinear and lazy(x).shape == (4, 8)


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_tensors_without_data(kind: str) -> None:
    """Nothing is computed; on meta there are no kernels, a fake tensor stands for one of its device."""
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        found = epigemm.explain(Mixed(), torch.empty(4, 8))
    assert [each.size for each in found] == [(4, 8, 8)] * 3
    assert found["ours"].runs == ("fallback" if kind == "fake" else "PyTorch's operators")


def test_a_model_that_runs_is_explained_where_its_fused_form_raises() -> None:
    """As with a function of epigemm that a compiler cannot trace where it is."""

    def total(x: Tensor) -> Tensor:
        return epigemm.linear_relu(x, torch.eye(8)).sum()

    derived = Calls(torch.func.grad(total))
    found = epigemm.explain(nn.Sequential(nn.Linear(8, 8), derived), x)
    assert [each.runs for each in found] == ["PyTorch's own"] * 2
    assert found.notes[0].startswith("a call of what epigemm.fuse(model) gives raises ")


of_two_results = epigemm.epilogue(formula("acc, bias: PerColumn -> (torch.tanh(acc + bias), acc.sum(0))"))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [epigemm.linear_relu, of_two_results, nn.functional.linear])
def test_a_function_that_is_compiled_in_a_model(function: Callable[..., Any], backend: str) -> None:
    """Its products are told once, as without a compiler."""
    torch._dynamo.reset()
    given = (x, torch.eye(8), x[0])
    wanted = epigemm.explain(Calls(function), *given)
    found = epigemm.explain(Calls(torch.compile(function, backend=backend)), *given)
    assert str(found) == str(wanted) and len(found) > 0
