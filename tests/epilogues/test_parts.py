"""Names of what a function with several results is taken apart into. What is computed: tests/ops, random functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epigemm.epilogues.declaration import TracedResults, trace
from epigemm.epilogues.parts import take_apart


def test_long_names_are_cut() -> None:
    def a_function_with_a_name_that_is_longer_than_all_names_that_kernels_have(acc: Tensor) -> Any:
        return torch.tanh(acc), acc * 2.0

    traced = trace(a_function_with_a_name_that_is_longer_than_all_names_that_kernels_have)
    assert isinstance(traced, TracedResults)
    found = take_apart(traced, is_exact=True)
    assert [len(each.traced.name) for each in found.matrices if each.traced] == [56, 56]
