"""What a row of the table is: a public call, the PyTorch program that it replaces, and random arguments of both."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

Arguments = dict[str, Any]

X, Z = "x", "z"  # [..., K] of a product, [..., N] of an elementwise call
WEIGHT, TWO_WEIGHTS = "weight", "two weights"  # [N, K], [2N, K]
COLUMN, TWO_COLUMNS, VARIANCE = "column", "two columns", "variance"  # [N], [2N], [N] and positive
ROW, MATRIX = "row", "matrix"  # [...], [..., N]
NUMBER, COUNT = "number", "count"  # a number or a 0-d tensor; BatchNorm's counter


@dataclass(frozen=True)
class Result:
    """The shape of one result, and its dtype: x's, that of sums (fp32, fp64 beside fp64), or fp32 beside all."""

    of: str = MATRIX  # or ROW, COLUMN
    is_wide: bool = False
    is_fp32: bool = False

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Beside tensors of this dtype."""
        is_narrow = self.is_fp32 or (self.is_wide and dtype is not torch.float64)
        return torch.float32 if is_narrow else dtype


@dataclass(frozen=True)
class Op:
    """`reference(**arguments)` is what `call(**arguments)` promises to compute.

    Args:
        name: in the ids of tests.
        reference: PyTorch operators, with the same arguments.
        operands: kinds of the arguments by name, in the order of the signature.
        function: the public one, or
        optional: arguments that may be None.
        shared: matrices that may have a row for each batch, `[B, 1, N]` beside `[B, L, N]`.
        fixed: other arguments of both, such as an activation's name.
        results: one, or those of a tuple.
        layer: makes the layer that holds the tensors but for the inputs, of out_features, in_features, a dtype and
            whether it has a bias.
        names: of the layer's tensors, where they are not those of the arguments.
        takes_any_lead: x may have any number of dimensions, not two alone.
        takes_out, takes_precision: whether there are such arguments. `takes_precision` is `takes_strict`.
        is_row_by_row: a row of the results depends on its row of x and of operands alone.
        is_vmappable: as PyTorch's program is.
        is_exported: `torch.export` takes it.
        differentiable: arguments with a gradient; () means all tensors.
    """

    name: str
    reference: Callable[..., Any]
    operands: dict[str, str]
    function: Callable[..., Any] | None = None
    optional: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    fixed: tuple[tuple[str, Any], ...] = ()
    results: tuple[Result, ...] = (Result(),)
    layer: Callable[[int, int, torch.dtype, bool], nn.Module] | None = None
    names: tuple[tuple[str, str], ...] = ()  # of the layer's tensors where they are not the arguments'
    takes_any_lead: bool = True
    takes_out: bool = True
    takes_precision: bool = True
    is_row_by_row: bool = True
    is_vmappable: bool = True
    is_exported: bool = True
    differentiable: tuple[str, ...] = ()

    @property
    def is_linear(self) -> bool:
        return X in self.operands.values()

    @property
    def input(self) -> str:
        """The name of its first argument."""
        return next(iter(self.operands))

    def of_kind(self, *kinds: str) -> list[str]:
        """Names of the operands of these kinds."""
        return [name for name, kind in self.operands.items() if kind in kinds]

    def inputs(self) -> list[str]:
        """Names of the tensors with a row for each row of x: what a layer's forward takes."""
        return self.of_kind(X, Z, ROW, MATRIX)

    def wide_beside_16_bits(self) -> list[str]:
        """Names of the operands that may be fp32 beside a 16-bit x: all but a bias that stands beside a weight."""
        is_users = self.name.startswith("@")
        taken = self.of_kind(COLUMN, VARIANCE, ROW, MATRIX)
        return [name for name in taken if is_users or "bias" not in name or name == "bn_bias"]

    def shape(self, name: str, lead: Sequence[int], n: int, k: int) -> tuple[int, ...]:
        """Of an argument."""
        return {
            X: (*lead, k),
            Z: (*lead, n),
            MATRIX: (*lead, n),
            ROW: tuple(lead),
            WEIGHT: (n, k),
            TWO_WEIGHTS: (2 * n, k),
            TWO_COLUMNS: (2 * n,),
            NUMBER: (),
            COUNT: (),
        }.get(self.operands[name], (n,))

    def draw(
        self,
        rng: torch.Generator,
        lead: Sequence[int] = (9,),
        n: int = 16,
        k: int = 24,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        without: Sequence[str] = (),
        tensor_numbers: bool = False,
        shares_rows: bool = False,
    ) -> Arguments:
        """Random arguments with results of about one.

        `without`: arguments that are None. `shares_rows`: matrices that may have one row for each batch do, the first
        of them one for all.
        """
        drawn: Arguments = dict(self.fixed)
        for name, kind in self.operands.items():
            shape = self.shape(name, lead, n, k)
            if shares_rows and name in self.shared and lead:
                kept = 0 if name == self.shared[0] and len(self.shared) > 1 else len(lead) - 1
                shape = (*lead[:kept], *(1,) * (len(lead) - kept), n)
            value = torch.randn(shape, generator=rng, dtype=torch.float64)
            if kind in (WEIGHT, TWO_WEIGHTS):
                value = value / math.sqrt(max(k, 1))
            elif kind == VARIANCE:
                value = value.abs() + 0.5
            elif kind == COUNT:
                drawn[name] = torch.tensor(3, device=device)
                continue
            elif kind == NUMBER:
                drawn[name] = -1.75
                if tensor_numbers:
                    wide = torch.float64 if dtype is torch.float64 else torch.float32
                    drawn[name] = torch.tensor(-1.75, device=device, dtype=wide)
                continue
            drawn[name] = None if name in without else value.to(device, dtype)
        return {name: drawn[name] for name in (*self.operands, *dict(self.fixed))}

    def variants(self) -> Iterator[dict[str, Any]]:
        """Options of `draw`: all given; rows shared; numbers as tensors; each optional argument absent, and all."""
        yield {}
        if self.shared:
            yield {"shares_rows": True}
        if self.of_kind(NUMBER):
            yield {"tensor_numbers": True}
        for name in self.optional:
            yield {"without": (name,)}
        if len(self.optional) > 1:
            yield {"without": self.optional}

    def leaves(self, arguments: Arguments) -> list[str]:
        """Names of the tensors that may have a gradient."""
        chosen = self.differentiable or tuple(self.operands)
        return [name for name in self.operands if name in chosen and isinstance(arguments.get(name), Tensor)]

    def in_order(self, arguments: Arguments) -> tuple[list[Any], Arguments]:
        """What the function takes by position, and by name: an epilogue takes the product's tensors by position."""
        first = ("x", "weight", "z") if self.name.startswith("@") else ()
        named = {name: value for name, value in arguments.items() if name not in first}
        return [arguments[name] for name in first if name in arguments], named

    def call(self, *args: Any, **arguments: Any) -> Any:
        """The function, or the layer as a function of all its tensors: those that it writes are results, too."""
        if self.function is not None:
            first, named = self.in_order(arguments)
            return self.function(*args, *first, **named)
        made, held = self.made(arguments)
        counted = bool(self.of_kind(COUNT))
        kept = {
            name: value.clone() if counted and "running" in name else value for name, value in held.items()
        }
        names = dict(self.names)
        if counted:
            kept[names["count"]] = arguments["count"].clone()
        made.train(counted)
        result = functional_call(made, kept, tuple(arguments[name] for name in self.inputs()))
        return (result, *(kept[names[name]] for name in STATISTICS)) if counted else result

    def module(self, arguments: Arguments) -> tuple[nn.Module, list[Tensor]]:
        """A module with these tensors, and what its forward takes: the layer itself, of a row that is one."""
        inputs = [arguments[name] for name in self.inputs()]
        if self.layer is None:
            return Holder(self, arguments), inputs
        made, held = self.made(arguments)
        made = copy.deepcopy(made)
        made.load_state_dict(held, strict=False)
        return made.train(bool(self.of_kind(COUNT))), inputs

    def made(self, arguments: Arguments) -> tuple[nn.Module, dict[str, Tensor]]:
        """A layer of these sizes, and its tensors by its own names."""
        assert self.layer is not None
        names = dict(self.names)
        held = {
            names.get(name, name): value
            for name, value in arguments.items()
            if name not in self.inputs() and isinstance(value, Tensor)
        }
        weight = arguments[self.of_kind(WEIGHT, TWO_WEIGHTS)[0]]
        rows = weight.shape[0] // (2 if self.of_kind(TWO_WEIGHTS) else 1)
        has_bias = arguments.get("bias") is not None
        sizes = (rows, weight.shape[1], weight.dtype, has_bias)
        key = (self.name, *sizes, weight.device)
        if key not in _LAYERS:
            _LAYERS[key] = self.layer(*sizes).to(weight.device)
        return _LAYERS[key], held


_LAYERS: dict[tuple[Any, ...], nn.Module] = {}
"""Layers of every size: under `vmap` none can be made, as that takes random numbers."""


class Holder(nn.Module):
    """A function's call as a module, whose parameters are the weights and vectors."""

    def __init__(self, op: Op, arguments: Arguments) -> None:
        super().__init__()
        self.op = op
        self.rest = {}
        for name, value in arguments.items():
            if name in op.inputs():
                continue
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
                self.register_parameter(f"{name}_", nn.Parameter(value.detach().clone()))
            else:
                self.rest[name] = value

    def forward(self, *inputs: Tensor) -> Any:
        """The call."""
        given = dict(zip(self.op.inputs(), inputs, strict=True)) | self.rest
        given |= {name[:-1]: value for name, value in self.named_parameters()}
        return self.op.call(**{name: given[name] for name in (*self.op.operands, *dict(self.op.fixed))})


STATISTICS = ("running_mean", "running_var", "count")


def tensors_of(arguments: Arguments) -> dict[str, Tensor]:
    """The arguments that are tensors."""
    return {name: value for name, value in arguments.items() if isinstance(value, Tensor)}


def map_tensors(arguments: Arguments, change: Callable[[Tensor], Any]) -> Arguments:
    """The same arguments with every tensor changed."""
    return {name: change(value) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def wide(arguments: Arguments) -> Arguments:
    """In fp64, for the reference."""
    return map_tensors(
        arguments, lambda t: t.detach().double() if t.is_floating_point() else t.detach().clone()
    )


def results_of(result: Any) -> list[Tensor]:
    """One result or several, as a list."""
    return list(tree_leaves(result))
