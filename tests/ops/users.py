"""Rows of the table: functions of users, with operands of every kind, of one result and of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

import epigemm
from epigemm import Matrix, PerColumn, PerRow, Scalar
from tests.ops.op import COLUMN, MATRIX, NUMBER, ROW, WEIGHT, Op, Result, X, Z

Formula = Callable[..., Any]


def gelu_bias(acc: Tensor, bias: PerColumn) -> Tensor:
    return F.gelu(acc + bias)


def dequantised(acc: Tensor, of_row: PerRow, of_column: PerColumn) -> Tensor:
    return acc * of_row * of_column


def clamped(acc: Tensor, low: Scalar, high: Scalar = 0.75) -> Tensor:
    result: Tensor = torch.clamp(acc, low) * high
    return result


def without_operands(acc: Tensor) -> Tensor:
    return acc * torch.sigmoid(acc) + 1.0


def optional(acc: Tensor, bias: PerColumn | None = None, other: Matrix | None = None) -> Tensor:
    z = acc if bias is None else acc + bias
    return torch.tanh(z if other is None else z * other)


def everything(
    acc: Tensor, a: PerColumn, b: PerColumn, r: PerRow, q: PerRow, m: Matrix, n: Matrix, s: Scalar, t: Scalar
) -> Tensor:
    result: Tensor = (acc + a) * torch.tanh(b) + r * s + q * t + m * torch.sigmoid(n)
    return result


def of_operands_alone(acc: Tensor, row: PerRow, other: Matrix) -> Tensor:
    return torch.sigmoid(other) * row


def the_product(acc: Tensor) -> Tensor:
    return acc


def an_operand(acc: Tensor, other: Matrix) -> Tensor:
    return other


ONE: list[tuple[Formula, dict[str, str], dict[str, Any]]] = [
    (gelu_bias, {"bias": COLUMN}, {}),
    (dequantised, {"of_row": ROW, "of_column": COLUMN}, {}),
    (clamped, {"low": NUMBER}, {}),
    (without_operands, {}, {}),
    (optional, {"bias": COLUMN, "other": MATRIX}, {"optional": ("bias", "other"), "shared": ("other",)}),
    (
        everything,
        {"a": COLUMN, "b": COLUMN, "r": ROW, "q": ROW, "m": MATRIX, "n": MATRIX, "s": NUMBER, "t": NUMBER},
        {"shared": ("m", "n")},
    ),
    (of_operands_alone, {"row": ROW, "other": MATRIX}, {"differentiable": ("row", "other"), "shared": ("other",)}),
    (the_product, {}, {}),
    (an_operand, {"other": MATRIX}, {"differentiable": ("other",), "shared": ("other",)}),
]  # fmt: skip


def pair(acc: Tensor, bias: PerColumn | None = None) -> Any:
    z = acc if bias is None else acc + bias
    return F.gelu(z), z


def sums(acc: Tensor, bias: PerColumn) -> Any:
    z = acc + bias
    y = torch.tanh(z)
    return y, z.sum(0), (z * z).sum(0), z.sum(1), z.mean(0), z.mean(-1), z.amax(0), z.amin(1)


def statistics(acc: Tensor, bias: PerColumn, scale: PerColumn) -> Any:
    z = (acc + bias) * scale
    variance, mean = torch.var_mean(z, 0, correction=0)
    return z, (variance, mean), [z.var(1)]


def squares(acc: Tensor) -> Any:
    return (acc * acc).sum(0)


def of_rows(acc: Tensor, bias: PerColumn, gain: PerRow) -> Any:
    z = acc + bias
    y = F.silu(z) * gain
    return y, z, y.sum(1), z.amax(1), (y * z).mean(1)


def ended(acc: Tensor, bias: PerColumn) -> Any:
    z = acc + bias
    return z * 2, z.detach() + 1, bias.expand_as(acc) * 1.0, z.sum(1)


def in_fp32(acc: Tensor, bias: PerColumn, residual: Matrix) -> Any:
    z = acc + bias
    y = F.silu(z) + residual
    return y, z.float(), y.float().sum(1)


def of_every_operand(
    acc: Tensor, bias: PerColumn, row: PerRow, other: Matrix, gate: Matrix, limit: Scalar = 0.75
) -> Any:
    z = acc * limit + bias
    return z * row + other, torch.sigmoid(gate), z * gate, (z * limit).sum(0), (other * row).amax(1)


ELEMENT, BY_ROW, BY_COLUMN = Result(), Result(ROW, is_wide=True), Result(COLUMN, is_wide=True)
FP32, FP32_ROW = Result(is_fp32=True), Result(ROW, is_fp32=True)
SEVERAL: list[tuple[Formula, dict[str, str], tuple[Result, ...], dict[str, Any]]] = [
    (pair, {"bias": COLUMN}, (ELEMENT, ELEMENT), {"optional": ("bias",)}),
    (
        sums,
        {"bias": COLUMN},
        (ELEMENT, BY_COLUMN, BY_COLUMN, BY_ROW, BY_COLUMN, BY_ROW, BY_COLUMN, BY_ROW),
        {"is_row_by_row": False},
    ),
    (
        statistics,
        {"bias": COLUMN, "scale": COLUMN},
        (ELEMENT, BY_COLUMN, BY_COLUMN, BY_ROW),
        {"is_row_by_row": False},
    ),
    (squares, {}, (BY_COLUMN,), {"is_row_by_row": False}),
    (of_rows, {"bias": COLUMN, "gain": ROW}, (ELEMENT, ELEMENT, BY_ROW, BY_ROW, BY_ROW), {}),
    (ended, {"bias": COLUMN}, (ELEMENT, ELEMENT, ELEMENT, BY_ROW), {}),
    (in_fp32, {"bias": COLUMN, "residual": MATRIX}, (ELEMENT, FP32, FP32_ROW), {"shared": ("residual",)}),
    (
        of_every_operand,
        {"bias": COLUMN, "row": ROW, "other": MATRIX, "gate": MATRIX, "limit": NUMBER},
        (ELEMENT, ELEMENT, ELEMENT, BY_COLUMN, BY_ROW),
        {"is_row_by_row": False, "shared": ("other", "gate")},
    ),
]


def program(
    formula: Formula, kinds: dict[str, str], results: tuple[Result, ...], *, is_linear: bool
) -> Formula:
    """The formula in PyTorch: of a product, or of z, with operands as it sees them beside a result `[M, N]`."""

    def run(**given: Any) -> Any:
        acc = F.linear(given["x"], given["weight"]) if is_linear else given["z"]
        lead, columns = acc.shape[:-1], acc.shape[-1]
        rows = lead.numel()
        operands = {}
        for name, kind in kinds.items():
            value = given[name]
            if kind == ROW:
                value = value.reshape(rows, 1)
            elif kind == MATRIX and value is not None:
                value = value.expand(*lead, columns).reshape(rows, columns)
            operands[name] = value
        found = formula(acc.reshape(rows, columns), **operands)
        several, structure = tree_flatten(found)
        shaped = [
            each if result.of == COLUMN else each.reshape(lead if result.of == ROW else (*lead, columns))
            for each, result in zip(several, results, strict=True)
        ]
        return tree_unflatten(shaped, structure)

    return run


def both_forms(
    formula: Formula, kinds: dict[str, str], results: tuple[Result, ...], facts: dict[str, Any]
) -> list[Op]:
    """A row of the product's epilogue, and one of `.elementwise`."""
    made: Any = epigemm.epilogue(formula)
    name, common = formula.__name__, facts | {"results": results, "is_exported": False}
    if results != (ELEMENT,):
        common["takes_out"] = False
    linear = {"x": X, "weight": WEIGHT} | kinds
    of_inputs = facts.get("differentiable", ())
    return [
        Op(f"@{name}", program(formula, kinds, results, is_linear=True), linear, made, **common),
        Op(
            f"@{name}.elementwise",
            program(formula, kinds, results, is_linear=False),
            {"z": Z} | kinds,
            made.elementwise,
            **common | {"takes_precision": False, "differentiable": of_inputs},
        ),
    ]


USERS = [
    *(row for formula, kinds, facts in ONE for row in both_forms(formula, kinds, (ELEMENT,), facts)),
    *(
        row
        for formula, kinds, results, facts in SEVERAL
        for row in both_forms(formula, kinds, results, facts)
    ),
]
