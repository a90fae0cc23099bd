"""Rows of `tests/ops/table.py`, a few that differ in which kernels run them."""

from __future__ import annotations

from tests.ops.table import FUNCTIONS

_LINEAR = (
    "linear linear_relu linear_sigmoid_scale_residual linear_scale linear_scale_batch_norm linear_relu_div"
)
_ELEMENTWISE = "sigmoid bias_relu sigmoid_scale_residual scale_batch_norm relu_div"
_ROWS = {op.name: op for op in FUNCTIONS}
PUBLIC_LINEAR = [_ROWS[name] for name in _LINEAR.split()]
PUBLIC_ELEMENTWISE = [_ROWS[name] for name in _ELEMENTWISE.split()]
PUBLIC = [*PUBLIC_LINEAR, *PUBLIC_ELEMENTWISE]
