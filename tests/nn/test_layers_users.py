"""`epigemm.nn.Linear`: a layer with an epilogue of the user's, whose bias is the layer's."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import epigemm
from epigemm import Matrix, PerColumn, Scalar

K, N, M = 24, 16, 7
x, residual = torch.randn(M, K), torch.randn(M, N)


@epigemm.epilogue
def clamped(acc: Tensor, bias: PerColumn, residual: Matrix, limit: Scalar = 1.0) -> Tensor:
    return torch.clamp(acc + bias, -limit, limit) + residual


@epigemm.epilogue
def doubled(acc: Tensor) -> Tensor:
    return acc * 2.0


def expected(layer: nn.Module, limit: float) -> Tensor:
    z = nn.functional.linear(x, layer.weight, layer.bias)  # type: ignore[arg-type]
    return torch.clamp(z, -limit, limit) + residual


def test_operands_by_place_and_by_name() -> None:
    layer = epigemm.nn.Linear(K, N, epilogue=clamped)
    torch.testing.assert_close(layer(x, residual), expected(layer, 1.0))
    torch.testing.assert_close(layer(x, residual, 0.25), expected(layer, 0.25))
    torch.testing.assert_close(layer(x, limit=0.25, residual=residual), expected(layer, 0.25))
    for operands, named, words in (
        ((residual, 0.5, 1.0), {}, "operands: got 3"),
        ((residual,), {"bias": torch.ones(N)}, "accepted are .*beside the layer's bias"),
        ((residual,), {"residual": residual}, r"operands: got \['residual'\] twice"),
    ):
        with pytest.raises(TypeError, match=words):
            layer(x, *operands, **named)


def test_without_an_epilogue_it_is_a_linear_layer() -> None:
    layer, plain = epigemm.nn.Linear(K, N), nn.Linear(K, N)
    layer.load_state_dict(plain.state_dict())
    torch.testing.assert_close(layer(x), plain(x))
    with pytest.raises(TypeError, match="epilogue: got function"):
        epigemm.nn.Linear(K, N, epilogue=nn.functional.relu)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="operands: got some for a layer without an epilogue"):
        layer(x, residual)


def test_copies_and_what_is_printed() -> None:
    layer = epigemm.nn.Linear(K, N, epilogue=clamped)
    again = copy.deepcopy(layer)
    assert again.weight is not layer.weight
    assert torch.equal(again(x, residual), layer(x, residual))
    assert again.epilogue is pickle.loads(pickle.dumps(layer)).epilogue is clamped
    assert "epilogue=clamped" in repr(layer) and "epilogue=None" in repr(epigemm.nn.Linear(K, N))
