"""The check of a large result by some of its rows and columns, against float64 and the derived bound.

A kernel's mistakes come by the tile: a tile not written, written twice, or at another place; a wrong slice of
K; a wrong operand of a column. So all columns are checked in one row of each of 128 bands, and a row of each of
up to 8192 bands in some columns, which visits every tile; an element that no call wrote is looked for
everywhere, because the result was filled with NaN before.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.cases import Case, Data, Shape
from benchmarks.harness.accuracy import Reference
from benchmarks.harness.records import Accuracy

_ROWS, _COLUMNS, _MANY_ROWS = 128, 32, 8192


def stratified(count: int, wanted: int, generator: torch.Generator) -> Tensor:
    """Sorted indices below ``count``: the first, the last, and a random one of each of ``wanted`` equal bands."""
    if wanted >= count:
        return torch.arange(count)
    edges = torch.arange(wanted + 1) * count // wanted
    lengths = edges[1:] - edges[:-1]
    picked = edges[:-1] + (torch.rand(wanted, generator=generator) * lengths).long()
    picked[0], picked[-1] = 0, count - 1
    return picked


class SampledReference:
    """The float64 result of a case in some rows and columns, and the bound around it."""

    def __init__(self, case: Case, data: Data, seed: int) -> None:
        self._case = case
        generator = torch.Generator().manual_seed(seed)
        m, n = case.shape.m, case.shape.n
        few, all_columns = stratified(m, _ROWS, generator), torch.arange(n)
        blocks = [(few, all_columns)]
        if len(few) < m:
            blocks.append((stratified(m, _MANY_ROWS, generator), stratified(n, _COLUMNS, generator)))
        self._parts = [
            (rows, columns, Reference(_block(case, rows, columns), _inputs(case, data, rows, columns), seed))
            for rows, columns in ((r.to(data.x.device), c.to(data.x.device)) for r, c in blocks)
        ]

    def compare(self, out: Tensor, intermediate_roundings: int) -> Accuracy:
        """Hold one result against the reference, see `benchmarks.harness.accuracy.Reference.compare`."""
        shape = (self._case.shape.m, self._case.shape.n)
        if tuple(out.shape) != shape or out.dtype != self._case.setting.dtype:
            return Accuracy.wrong(f"result is {tuple(out.shape)} {out.dtype}, expected {shape}")
        if bool(out.sum(dtype=torch.float32).isnan()):
            return Accuracy.wrong("an element of the result is NaN or was not written")
        found = [
            reference.compare(out[rows][:, columns], intermediate_roundings)
            for rows, columns, reference in self._parts
        ]
        worst = max(found, key=lambda accuracy: accuracy.fraction_of_bound)
        return replace(
            worst,
            ok=all(accuracy.ok for accuracy in found),
            wrong_elements=sum(accuracy.wrong_elements for accuracy in found),
            relative_error=max(accuracy.relative_error for accuracy in found),
            checked_columns=max(accuracy.checked_columns for accuracy in found),
        )


def _block(case: Case, rows: Tensor, columns: Tensor) -> Case:
    return replace(case, shape=Shape(len(rows), len(columns), case.shape.k))


def _inputs(case: Case, data: Data, rows: Tensor, columns: Tensor) -> Data:
    assert data.weight is not None
    parameters = data.parameters.columns(columns, case.setting.dtype)
    vectors = {name: v[rows] if v.dim() == 2 else v for name, v in parameters.vectors.items()}
    return Data(data.x[rows], data.weight[columns], replace(parameters, vectors=vectors))
