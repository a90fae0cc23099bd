"""Which layouts kernels can read: matrices by rows and vectors without gaps, whatever strides of size-1 axes say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from epigemm.calls.layouts import flattens, readable, unflattened

BASE = torch.arange(48.0)
ALREADY: dict[str, Tensor] = {
    "a number": torch.tensor(2.0),
    "a vector": BASE[:7],
    "rows with gaps": BASE.view(4, 12)[:, :5],
    "a column": BASE[:6].view(6, 1),
    "batches of rows": BASE.view(2, 4, 6),
}
COPIED: dict[str, Tensor] = {
    "a vector with gaps": BASE[::3],
    "one element for all": BASE[:1].expand(5),
    "one element with a stride": BASE[5::43],
    "columns": BASE.view(6, 8).t(),
    "a column with gaps": BASE.view(6, 8)[:, 2:3],
    "one row for all": BASE[:8].expand(4, 8).t(),
    "leading axes that are no rows": BASE.view(4, 2, 6).transpose(0, 1),
}


@pytest.mark.parametrize("name", ALREADY)
def test_what_can_be_read_is_not_copied(name: str) -> None:
    assert readable(ALREADY[name]) is ALREADY[name]


@pytest.mark.parametrize("name", COPIED)
def test_what_cannot_is(name: str) -> None:
    given = COPIED[name]
    found = readable(given)
    assert torch.equal(found, given) and readable(found) is found
    assert found.stride() == torch.empty(given.shape).stride()


def test_leading_axes() -> None:
    x = BASE.view(4, 2, 6)
    assert flattens(x) and flattens(x[:, :, :3]) and not flattens(x.transpose(0, 1))
    assert flattens(BASE.view(6, 8).t()), "two axes have no leading ones to merge"
    result = unflattened(torch.zeros(8, 5), (*x.shape[:-1], 5))
    assert result.shape == (4, 2, 5) and result._base is None
    result.add_(1.0)
    assert bool((result == 1.0).all())
