r"""Every result against float64, with a bound that is derived, not tuned.

Write u = 2^-24 for fp32's unit roundoff, u_out for the output dtype's (2^-24, 2^-11 for fp16, 2^-8 for bf16:
half the spacing after 1), and, entry by entry, |A||B| for ``|x| @ |W|^T``. All of it is computed in float64
from the operands *as stored*, so their own rounding to the dtype is no error.

**The product.** Its error is at most ``delta``, by the arithmetic used:

* IEEE fp32, rounded to nearest, in any order. A sum of K terms has ``|err| <= K u |A||B|`` in the worst case
  and ``lambda sqrt(K) u |A||B|`` with high probability when roundings are independent and of mean zero
  (Higham and Mary, 2019). We take ``delta = (min(K, 2 sqrt(K)) + 2) u |A||B|``: tight enough that TF32 in
  disguise fails it at K = 8192. fp32 on two fp16 slices promises no larger errors and is held to the same.
* Products of 16-bit operands are exact in fp32; tensor cores *truncate* when they accumulate. One instruction
  takes at least 8 terms, aligns them to the largest exponent and truncates twice by at most 2u |s|, where the
  partial sum |s| averages at most |A||B| / 2 over the K/8 instructions: ``delta = (K/4 + 2) u |A||B|``,
  deterministic because truncation has a bias that square roots do not know.
* TF32 adds the operands' rounding to 11 significant bits: at most v = 2^-10 each, truncated in the worst
  case. The relative error eta_k of a product p_k lies in an interval of width 2v within [-2v, 2v]. Its mean,
  at most 2v, scales the exact sum z; the fluctuation obeys Hoeffding's inequality: at most
  ``lambda v sqrt(sum p_k^2)`` except with probability ``2 exp(-lambda^2 / 2)``; lambda = 7 makes that 5e-11
  an entry. So ``delta`` grows by ``2v |z| + 7 v sqrt((x^2) @ (W^2)^T)``, far less than the worst case
  ``2v |A||B|`` would allow. One pass over scaled fp16 operands rounds them to the same 11 bits, to nearest.

**The epilogue** f is evaluated in fp32 on a perturbed argument. Its own operations are charged as a backward
error of 4 u (|acc| + |bias|) on the argument and of 4 u |v| on each per-column operand v (where operands
cancel, as in a BatchNorm's shift, an error relative to the result would be too strict), and as a forward
error of 16 u |f| on the result (16 u (|f| + |z|) where terms of the size of z cancel in f, as in GELU's
1 + erf(z) far left); then one rounding to the output dtype:

    |D - f(z)| <= (spread + 16 u |f|) (1 + u_out) + u_out |f|,
    spread = max |f(z +- delta') - f(z)| (1 + 1/8) + sum over v of |f(z; v (1 + 4 u)) - f(z)|,
    delta' = delta + 4 u (|acc| + |bias|).

The maximum over the two ends is exact for what is monotone or has one kink within so small an interval; the
eighth is for curvature. Every *intermediate* rounding to the output dtype (eager PyTorch rounds after each
operation, our fallback rounds the product once, the fused kernel never) adds u_out to the factors
4 u and 16 u. Where PyTorch's GEMM runs on 16 bits, cuBLAS may split K, and round the sum of each part to
the output dtype (``torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction``, on by default). A
part's sum may be much larger than z. By Hoeffding's inequality the parts' roundings add ``u_out (|z| +
lambda sqrt(sum p_k^2))`` to ``delta``.

**Training-mode BatchNorm** depends on the whole column: D = (y - mean) g / s + b, s = sqrt(var + eps). With
|err y| <= dy: |err mean| <= mean(dy), |err s| <= rms(dy) (a norm is 1-Lipschitz), so

    |err D| <= |g| / s * (dy + mean(dy)) + |D - b| * rms(dy) / s + the roundings above,

where dy holds the product's bound, the one rounding of y to the output dtype that even the fused kernel
makes, and 2 sqrt(M) u rms(y) for the statistics' own fp32 summation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.cases import EPS, Case, Data, Parameters
from benchmarks.harness.records import Accuracy

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST_STEP = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}
_U = 2.0**-24
_TF32_STEP = 2.0**-10
_HOEFFDING = 7.0
_SHORT_GELU = {torch.float16: 2.0**-15, torch.bfloat16: 2.0**-11.3}
"""The relative error of the functions of 16-bit results (docs/epilogues.md), which tests/csrc holds."""
# Elements of one float64 chunk, and float64 operations beyond which a random part of the columns is checked.
_CHUNK = {"cuda": 1 << 26, "cpu": 1 << 22}
_MAX_FLOPS = {"cuda": 2e13, "cpu": 4e10}
_MIN_COLUMNS = 256


@dataclass(frozen=True)
class _Chunk:
    """Some output columns: the exact product, the bound on the computed product's error, the size of its parts."""

    columns: Tensor | slice
    acc: Tensor
    delta: Tensor
    parts: Tensor | None = None  # in 16 bits, of a product whose K is split


class Reference:
    """The float64 result of a case for what its input tensors now hold, and the bound around it."""

    def __init__(self, case: Case, data: Data, seed: int) -> None:
        self._case, self._data = case, data
        self._device = data.x.device
        self._columns = self._choose_columns(seed)
        self._linear_chunks = list(self._products()) if case.shape.k else None

    @property
    def checked_columns(self) -> int:
        """How many output columns take part: all N, unless float64 products of them cost too much."""
        return self._case.shape.n if self._columns is None else len(self._columns)

    @property
    def products(self) -> list[_Chunk]:
        """The exact products and their bounds, some columns at a time."""
        assert self._linear_chunks is not None
        return self._linear_chunks

    def compare(self, out: Tensor, intermediate_roundings: int) -> Accuracy:
        """Hold one result against the reference.

        Args:
            out: the result [M, N], of the case's dtype.
            intermediate_roundings: how many times the alternative rounds to the output dtype before the final
                one.
        """
        shape = (self._case.shape.m, self._case.shape.n)
        if tuple(out.shape) != shape or out.dtype != self._case.setting.dtype:
            return Accuracy.wrong(f"result is {tuple(out.shape)} {out.dtype}, expected {shape}")
        worst = torch.zeros((), dtype=torch.float64, device=self._device)
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        bad = torch.zeros((), dtype=torch.long, device=self._device)
        for chunk in self._chunks():
            expected, bound = self._expected(chunk, intermediate_roundings)
            error = (out[:, chunk.columns].double() - expected).abs_()
            sums += torch.stack([error.square().sum(), expected.square().sum()])
            ratio = (error / bound).nan_to_num(nan=math.inf, posinf=math.inf)
            bad += (ratio > 1.0).sum()
            worst = torch.maximum(worst, ratio.max())
        square_error, square = sums.tolist()
        return Accuracy(
            ok=int(bad) == 0,
            wrong_elements=int(bad),
            fraction_of_bound=float(worst),
            relative_error=math.sqrt(square_error / square) if square > 0 else math.nan,
            checked_columns=self.checked_columns,
        )

    def _choose_columns(self, seed: int) -> Tensor | None:
        shape = self._case.shape
        if not shape.k:
            return None
        products = 3 if self._case.setting.arithmetic == "tf32" else 2
        affordable = int(_MAX_FLOPS[self._device.type] / (2.0 * products * shape.m * shape.k))
        if affordable >= shape.n:
            return None
        generator = torch.Generator().manual_seed(seed)
        count = min(shape.n, max(affordable, _MIN_COLUMNS))
        return torch.randperm(shape.n, generator=generator)[:count].to(self._device)

    def _slices(self) -> Iterator[Tensor | slice]:
        shape, limit = self._case.shape, _CHUNK[self._device.type]
        width = max(1, limit // max(shape.m, shape.k or 1))
        for start in range(0, self.checked_columns, width):
            part = slice(start, min(start + width, self.checked_columns))
            yield part if self._columns is None else self._columns[part]

    def _products(self) -> Iterator[_Chunk]:
        assert self._data.weight is not None
        x = self._data.x.double()
        for columns in self._slices():
            weight = self._data.weight[columns].double()
            acc = x @ weight.t()
            yield _Chunk(columns, acc, self._product_bound(x, weight, acc), self._parts(x, weight, acc))

    def _parts(self, x: Tensor, weight: Tensor, acc: Tensor) -> Tensor | None:
        if self._case.setting.dtype == torch.float32:
            return None
        return (x.square() @ weight.square().t()).sqrt_().mul_(_HOEFFDING).add_(acc.abs())

    def _product_bound(self, x: Tensor, weight: Tensor, acc: Tensor) -> Tensor:
        k = x.shape[1]
        magnitude = x.abs() @ weight.abs().t()
        rounded = (min(k, 2 * math.sqrt(k)) + 2) * _U
        truncated = max((k / 4 + 2) * _U, rounded)
        if self._case.setting.dtype != torch.float32:
            return magnitude.mul_(truncated)
        if self._case.setting.arithmetic == "ieee":
            return magnitude.mul_(rounded)
        spread = (x.square() @ weight.square().t()).sqrt_()
        return magnitude.mul_(truncated) + _TF32_STEP * (2 * acc.abs() + _HOEFFDING * spread)

    def _chunks(self) -> Iterator[_Chunk]:
        if self._linear_chunks is not None:
            yield from self._linear_chunks
            return
        for columns in self._slices():
            acc = self._data.x[:, columns].double()
            yield _Chunk(columns, acc, torch.zeros_like(acc))

    def _expected(self, chunk: _Chunk, intermediate: int) -> tuple[Tensor, Tensor]:
        """The exact result of a chunk and the bound on each entry's error."""
        parameters = _columns_in_double(self._data.parameters, chunk.columns)
        u_out = UNIT_ROUNDOFF[self._case.setting.dtype]
        bias = parameters.vectors.get("bias")
        size = chunk.acc.abs() if bias is None else chunk.acc.abs() + bias.abs()
        delta = chunk.delta + (4 * _U + intermediate * u_out) * size
        if intermediate and chunk.parts is not None:
            delta += u_out * chunk.parts
        linear_bias = self._case.problem.inner_bias(parameters)
        z = chunk.acc if linear_bias is None else chunk.acc + linear_bias
        if self._case.problem.training:
            expected, spread = _train_batch_norm_bound(z, delta, parameters, u_out)
        else:
            expected, spread = self._pointwise_bound(z, delta, parameters, 4 * _U + intermediate * u_out)
        size = expected.abs()
        # The last rounding is relative to the computed result, which may be larger than the exact one.
        before_rounding = spread + (16 * _U + intermediate * u_out) * size
        if self._case.problem.cancels:
            before_rounding += 16 * _U * z.abs() + _SHORT_GELU.get(self._case.setting.dtype, 0) * size
        return expected, before_rounding * (1 + u_out) + u_out * size + SMALLEST_STEP[
            self._case.setting.dtype
        ]

    def _pointwise_bound(
        self, z: Tensor, delta: Tensor, parameters: Parameters, operand_error: float
    ) -> tuple[Tensor, Tensor]:
        pointwise = self._case.problem.pointwise
        expected = pointwise(z, parameters)
        below = (pointwise(z - delta, parameters) - expected).abs_()
        above = (pointwise(z + delta, parameters) - expected).abs_()
        spread = torch.maximum(below, above).mul_(1.125)
        for name, vector in parameters.vectors.items():
            moved = replace(parameters, vectors=parameters.vectors | {name: vector * (1 + operand_error)})
            spread += (pointwise(z, moved) - expected).abs_()
        return expected, spread


def _columns_in_double(parameters: Parameters, columns: Tensor | slice) -> Parameters:
    """The operands of a chunk in float64; BatchNorm's counter is none and stays out."""
    vectors = {name: v for name, v in parameters.vectors.items() if v.dim()}
    return Parameters(vectors, parameters.scalars).columns(columns, torch.float64)


def _train_batch_norm_bound(
    z: Tensor, delta: Tensor, parameters: Parameters, u_out: float
) -> tuple[Tensor, Tensor]:
    scale, weight, bias = (parameters.vectors[name] for name in ("scale", "weight", "bn_bias"))
    y = z * scale
    rms = y.square().mean(0).sqrt_()
    dy = delta * scale.abs() + (u_out + 4 * _U) * y.abs() + 2 * math.sqrt(y.shape[0]) * _U * rms
    sigma = (y.var(0, correction=0) + EPS).sqrt_()
    centred = (y - y.mean(0)) / sigma * weight
    spread = weight.abs() / sigma * (dy + dy.mean(0)) + centred.abs() * dy.square().mean(0).sqrt() / sigma
    # Adding b cancels where the two are opposite: its rounding is relative to the larger of them.
    return centred + bias, spread + 4 * _U * (centred.abs() + bias.abs())
