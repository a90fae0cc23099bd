"""Recorded calls save what a derivative reads, no more than PyTorch's operators, and have derivatives where those do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from epigemm import Matrix, PerColumn
from tests.support.every_function import CASES, Given, draw

# One matrix more than the operators, which keep the result of the relu or of the tanh: the product is kept for every
# function, and beside it the factor.
KEEPS_PRODUCT = {"gated_relu", "gated_tanh", "gated_sigmoid"}
ONE_EACH = 64  # bytes: of an operand that is not read, an element may be saved for its size


@epigemm.epilogue
def halved(acc: Tensor, r: Matrix) -> Any:
    return acc * 0.5 - r / 3.0


@epigemm.epilogue
def gelu_and_sum(acc: Tensor, b: PerColumn, r: Matrix, s: Matrix) -> Any:
    return F.gelu(acc + b) + r * 2.0 - s


@epigemm.epilogue
def product_apart(acc: Tensor, r: Matrix, s: Matrix) -> Any:
    return acc + torch.tanh(r) * s


def saved_bytes(call: Callable[[], Any], inputs: list[Tensor]) -> int:
    """What autograd saves beside the inputs, each storage once."""
    own = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()
    del result
    return sum(each.untyped_storage().nbytes() for place, each in seen.items() if place not in own)
