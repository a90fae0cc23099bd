"""The arithmetics under test, and the constants of their rounding errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gradings import bounds


@dataclass(frozen=True)
class Arithmetic:
    """One way in which a call may compute: the tensors' dtype, and what an fp32 product may be rounded to."""

    name: str
    dtype: torch.dtype
    precision: str | None = None  # `precision=` of the call
    input_rounding: float = 0.0  # relative error made by rounding one operand of the product on its way in
    tensor_cores: bool = False  # sums of products may be truncated instead of rounded
    product_bound: Callable[[int], float] | None = None  # |error| / |A||B| of K, if it has its own derivation

    @property
    def op_precision(self) -> str:
        """The `precision` of the op schema, where "default" stands for None."""
        return self.precision or "default"

    @property
    def schema_arithmetic(self) -> str:
        """What the planner calls it."""
        return "tf32" if self.name == "tf32" else "ieee"

    @property
    def vector_dtype(self) -> torch.dtype:
        """Element type of folded vectors and of 0-d scale tensors."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    @property
    def output_unit(self) -> float:
        """Relative error of one rounding to the output dtype."""
        return torch.finfo(self.dtype).eps / 2

    @property
    def output_floor(self) -> float:
        """Absolute error of one rounding of a subnormal: fp16 keeps them; fp32 intermediates may flush to zero."""
        info = torch.finfo(self.dtype)
        return info.smallest_normal * info.eps if self.dtype is torch.float16 else info.smallest_normal

    @property
    def epilogue_unit(self) -> float:
        """Relative error of one operation of the epilogue: fp32, or fp64 for fp64 tensors."""
        return torch.finfo(self.vector_dtype).eps / 2

    @property
    def accumulation_unit(self) -> float:
        """Relative error of one addition inside the product: tensor cores truncate, which doubles it."""
        return self.epilogue_unit * (2 if self.tensor_cores else 1)


FP16 = Arithmetic("fp16", torch.float16, tensor_cores=True)
BF16 = Arithmetic("bf16", torch.bfloat16, tensor_cores=True)
FP32 = Arithmetic("ieee", torch.float32, "ieee")
TF32 = Arithmetic("tf32", torch.float32, "tf32", input_rounding=2.0**-10, tensor_cores=True)
SPLIT = Arithmetic("split", torch.float32, "highest", tensor_cores=True, product_bound=bounds.split)
SCALED = Arithmetic("scaled", torch.float32, "high", tensor_cores=True, product_bound=bounds.scaled)
FP64 = Arithmetic("fp64", torch.float64)

ARITHMETICS = [FP16, BF16, FP32, TF32, FP64]
FUSED_ARITHMETICS = [FP16, BF16, TF32]  # what the Hopper kernels cover
SPLIT_ARITHMETICS = [SPLIT, SCALED]  # fp32 from fp16 slices: computed by kernels of their own
STORAGE = [FP16, BF16, FP32, FP64]  # one for each dtype: where the product's arithmetic plays no part
