"""Modules over `epigemm.functional`, which replace layers of PyTorch.

Parameters are named and initialised as in `torch.nn.Linear` and `torch.nn.BatchNorm1d`; `from_linear` and `from_layers`
share the parameter objects of existing layers, so that optimisers and state dicts still work. The given layers must be
plain layers of torch: a fused layer does not call them, so their hooks, parametrizations and a subclass's `forward`
would not run. Hooks that they get later do not fire.

Where fp32 products run on fp16 slices, `epigemm.pack(layer.weight)` keeps those of the weight for the layer's calls.

Imports: `functional`, `folds`, `glu`, `groups`, `results_epilogue`, `decorator`, `decoration`, `route`,
`batch_statistics`, `calls`, `arguments`, `autograd`, `epilogues`. Taken by `integrations`.
"""

from __future__ import annotations

from epigemm.nn.batch_norm import LinearBatchNormReLU, LinearScaleBatchNorm1d, linear_scale_batch_norm1d
from epigemm.nn.experts import Experts
from epigemm.nn.glu import LinearGLU
from epigemm.nn.layers import (
    Linear,
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
from epigemm.nn.quantisation import quantise

__all__ = [
    "Experts",
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
    "quantise",
]
