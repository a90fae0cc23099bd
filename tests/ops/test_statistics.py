"""Rows in training by epigemm's own BatchNorm: properties that they also have where PyTorch's BatchNorm runs.

The kernels' formulas stand on a CPU in PyTorch's operators. tests/calls/test_batch_norm.py has the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.ops import test_autograd, test_saved_tensors, test_values
from tests.ops.op import COUNT, Op
from tests.ops.table import rows
from tests.support import norm_calls

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
CHECKS: dict[str, Callable[..., Any]] = {
    "values": partial(test_values.test_values, dtype=torch.float64, device=CPU),
    **{
        f"gradients-{dtype}": partial(test_autograd.test_gradients, dtype=dtype, device=CPU)
        for dtype in DTYPES
    },
    "inputs": partial(test_values.test_inputs_are_not_changed, device=CPU),
    "alone": test_autograd.test_each_operand_alone,
    "nothing recorded": partial(test_autograd.test_nothing_is_recorded_where_none_is_wanted, device=CPU),
    "retained": test_autograd.test_a_retained_graph,
    "hooks": test_saved_tensors.test_hooks_of_saved_tensors,
    "saved": test_saved_tensors.test_a_saved_input_changed_in_place_is_noticed,
    "double backward": test_autograd.test_double_backward,
    "layer": partial(test_autograd.test_a_layer_is_trained_as_pytorchs_program, device=CPU),
}


@pytest.mark.parametrize("check", CHECKS)
@rows("own statistics", lambda op: bool(op.of_kind(COUNT)))
def test_by_epigemms_passes(
    op: Op, check: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = norm_calls.counted(monkeypatch)
    CHECKS[check](op=op, rng=rng)
    assert calls
