"""Copies of a model that share its tensors, and the reasons why a model has none."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from epigemm.fusion.model import copied, copied_apart
from tests.fusion.eager import fuse_eagerly, report_of


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.tied = self.fc
        self.layers = [nn.Linear(4, 4)]  # not registered
        self.table = {"scale": torch.ones(4)}

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.layers[0](self.tied(self.fc(x)))) * self.table["scale"]


def test_a_copy_shares_every_tensor() -> None:
    model = Model().eval()
    found = copied(model)
    assert isinstance(found, Model) and found is not model and found.fc is not model.fc
    assert found.tied is found.fc and not found.training
    for mine, other in zip(
        [*model.parameters(), *model.buffers()], [*found.parameters(), *found.buffers()], strict=True
    ):
        assert mine is other
    assert found.layers[0] is not model.layers[0] and found.layers[0].weight is model.layers[0].weight
    assert found.table is not model.table and found.table["scale"] is model.table["scale"]
    x = torch.randn(3, 4)
    with torch.no_grad():
        model.layers[0].weight.mul_(2)
    assert torch.equal(found(x), model(x))


def test_a_copy_has_attributes_of_its_own() -> None:
    model = Model()
    found: Any = copied(model)
    found.train(False)
    found.table["scale"] = torch.zeros(4)
    assert model.training and model.norm.training and bool(model.table["scale"].all())


TRAIN = object()


def test_an_object_without_state_is_the_same_in_a_copy() -> None:
    """A forward may ask whether an attribute is a certain object."""
    model = Model()
    model.modes = [TRAIN]  # type: ignore[assignment]
    several: list[Any] = [copied(model), copied_apart(model)]
    for made in several:
        assert made.modes[0] is TRAIN and made.modes is not model.modes


class Raises(Model):
    def __deepcopy__(self, memo: Any) -> Any:
        raise ValueError("never")


class Itself(Model):
    def __deepcopy__(self, memo: Any) -> Any:
        return self


class Anew(Model):
    def __deepcopy__(self, memo: Any) -> Any:
        return type(self)()


class Another(Model):
    def __deepcopy__(self, memo: Any) -> Any:
        return Model()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Raises, r"it cannot be copied \(ValueError: never\)"),
        (Itself, "its copy shares, or has other, modules"),
        (Anew, "its copy does not share parameters"),
        (Another, "its copy is a Model"),
    ],
)
def test_why_there_is_none(kind: type[nn.Module], reason: str) -> None:
    found = copied(kind())
    assert isinstance(found, str)
    assert re.fullmatch(reason, found)
    model = kind()
    fused = fuse_eagerly(model)
    assert fused is model and "inplace=True" in report_of(fused).notes[0]
