"""epigemm: a linear layer and everything that follows it element by element in one kernel, for PyTorch."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from epigemm import compilers, nn, progress
from epigemm._native import build_info
from epigemm.arguments.invariance import batch_invariant, is_batch_invariant, set_batch_invariant
from epigemm.decorator import UserEpilogue, epilogue
from epigemm.epilogues.kinds import Matrix, PerColumn, PerRow, Scalar
from epigemm.explain.answer import Explanation, ModuleExplanation
from epigemm.explanations import explain
from epigemm.functional import (
    bias_relu,
    linear,
    linear_batch_norm_relu,
    linear_gated,
    linear_gelu,
    linear_layer_scale_residual,
    linear_relu,
    linear_relu_div,
    linear_residual,
    linear_scale,
    linear_scale_batch_norm,
    linear_sigmoid_scale_residual,
    linear_silu,
    linear_tanh,
    relu_div,
    scale_batch_norm,
    sigmoid,
    sigmoid_scale_residual,
)
from epigemm.glu import linear_glu
from epigemm.groups import grouped_linear, grouped_linear_glu
from epigemm.packs.weight_packs import PackedWeight, pack
from epigemm.precompilation import precompile
from epigemm.results_epilogue import ResultsEpilogue
from epigemm.tuner.tuner import Tuning, tune

if TYPE_CHECKING:
    from epigemm import fusion
    from epigemm.fusion import FusionReport, fuse, unfuse

try:
    __version__ = version("epigemm")
except PackageNotFoundError:  # Imported from a folder that was never installed.
    __version__ = str(build_info()["version"])

__all__ = [
    "Explanation",
    "FusionReport",
    "Matrix",
    "ModuleExplanation",
    "PackedWeight",
    "PerColumn",
    "PerRow",
    "ResultsEpilogue",
    "Scalar",
    "Tuning",
    "UserEpilogue",
    "__version__",
    "batch_invariant",
    "bias_relu",
    "build_info",
    "epilogue",
    "explain",
    "fuse",
    "fusion",
    "grouped_linear",
    "grouped_linear_glu",
    "is_batch_invariant",
    "linear",
    "linear_batch_norm_relu",
    "linear_gated",
    "linear_gelu",
    "linear_glu",
    "linear_layer_scale_residual",
    "linear_relu",
    "linear_relu_div",
    "linear_residual",
    "linear_scale",
    "linear_scale_batch_norm",
    "linear_sigmoid_scale_residual",
    "linear_silu",
    "linear_tanh",
    "nn",
    "pack",
    "precompile",
    "relu_div",
    "scale_batch_norm",
    "set_batch_invariant",
    "sigmoid",
    "sigmoid_scale_residual",
    "tune",
    "unfuse",
]

_OF_FUSION = ("FusionReport", "fuse", "unfuse")


def __getattr__(name: str) -> Any:
    """Import `fusion` at its first use: the parts of torch that it needs take longer to import than the rest."""
    if name != "fusion" and name not in _OF_FUSION:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with progress.doing("importing torch._dynamo"):
        compilers.import_dynamo()
        fusion = importlib.import_module("epigemm.fusion")
    return fusion if name == "fusion" else getattr(fusion, name)


def __dir__() -> list[str]:
    return __all__
