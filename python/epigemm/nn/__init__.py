"""Modules over `epigemm.functional`, made to stand where the layers that they replace stood.

Parameters are named and initialised as in `torch.nn.Linear` and `torch.nn.BatchNorm1d`; `from_linear` and
`from_layers` share the parameter objects of existing layers, so that optimisers and state dicts go on
working. The layers that they are given must be plain ones of torch's: a fused layer calls none of them, and would drop
hooks, parametrizations and the `forward` of a subclass. Hooks that the shared layers get afterwards do not fire.

Where fp32 products run on fp16 slices, a layer keeps those of its weight, if that is an `nn.Parameter`, between
calls that need no gradient of the weight. They follow the weight's changes and are in no copy, pickle or state dict;
`epigemm.packs` says which changes torch does not count: after those, call `repack()`.

Imports: `functional`, `formula_functions`, `glu`, `user_epilogue`, `route`, `packs`, `arguments`, `epilogues`.
Taken by nobody.
"""

from __future__ import annotations

from epigemm.nn.batch_norm import LinearBatchNormReLU, LinearScaleBatchNorm1d, linear_scale_batch_norm1d
from epigemm.nn.fused import (
    LinearGated,
    LinearGELU,
    LinearLayerScaleResidual,
    LinearReLU,
    LinearReLUDiv,
    LinearResidual,
    LinearSigmoidScaleResidual,
    LinearSiLU,
    LinearTanh,
    Sigmoid,
)
from epigemm.nn.glu import LinearGLU
from epigemm.nn.linear import Linear

__all__ = [
    "Linear",
    "LinearBatchNormReLU",
    "LinearGELU",
    "LinearGLU",
    "LinearGated",
    "LinearLayerScaleResidual",
    "LinearReLU",
    "LinearReLUDiv",
    "LinearResidual",
    "LinearScaleBatchNorm1d",
    "LinearSiLU",
    "LinearSigmoidScaleResidual",
    "LinearTanh",
    "Sigmoid",
    "linear_scale_batch_norm1d",
]
