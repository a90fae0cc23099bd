"""Finds out which operators a public function calls, without running them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from epigemm import formula_functions, functional, glu
from epigemm._native import ops
from epigemm.arguments.calls import ElementwiseCall, LinearCall
from epigemm.batch_statistics import Asked
from epigemm.epilogues.registry import compute_dtype
from epigemm.explain.pairs import noting
from epigemm.operators.registration import elementwise_call, linear_call, linear_out_call
from epigemm.user_epilogue import UserEpilogue

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    name: getattr(module, name) for module in (functional, formula_functions, glu) for name in module.__all__
}


def record(fn_or_name: Callable[..., Tensor] | str, /, *args: Any, **kwargs: Any) -> tuple[str, Recorder]:
    """The name of a public function, and the operators that the call would run.

    Raises:
        ValueError: `fn_or_name` is no public function of epigemm.
        Exception: whatever the call itself raises for these arguments.
    """
    is_elementwise = getattr(fn_or_name, "__func__", None) is UserEpilogue.elementwise
    made = fn_or_name.__self__ if is_elementwise else fn_or_name  # type: ignore[union-attr]
    function: Callable[..., Tensor] | None
    if isinstance(made, UserEpilogue):
        name, function = made.traced.name, made.elementwise if is_elementwise else made
    else:
        name = fn_or_name if isinstance(fn_or_name, str) else getattr(fn_or_name, "__name__", "")
        function = _FUNCTIONS.get(name)
    if function is None or (not isinstance(made, UserEpilogue) and callable(made) and made is not function):
        accepted = ", ".join(_FUNCTIONS)
        raise ValueError(
            f"fn_or_name: got {fn_or_name!r}; accepted are what epigemm.epilogue makes, its `elementwise`, and "
            f"epigemm's functions or their names: {accepted}"
        )
    recorder = Recorder()
    with torch.no_grad(), noting() as asked, recorder:
        function(*args, **kwargs)
    recorder.pair = asked[-1] if asked else None
    return name, recorder


class Recorded:
    """The operators that a call of a public function has called."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: list[str] = []
        self.folds: list[str] = []
        self.folded_bias: Tensor | None = None
        self.call: tuple[str, tuple[Any, ...]] | None = None
        self.earlier: list[LinearCall] = []  # product calls whose results the last call reads
        self.between: list[str] = []  # casts of such a result
        self.pair: LinearCall | None = None  # one kernel for the last two products
        self.norm: Asked | None = None  # BatchNorm by batch statistics behind the product
        self._gradients_of_operands = False

    def note_fold(self, args: tuple[Any, ...]) -> int:
        """A fold of vectors: how many columns it has."""
        _, *vectors, _ = args
        self.folded_bias = vectors[0]
        columns: int = next(vector.shape[0] for vector in vectors if vector is not None)
        self._gradients_of_operands |= any(v is not None and v.requires_grad for v in vectors)
        self.folds.append(f"fold of {columns} columns into multiplier and offset (fold_batch_norm)")
        return columns

    def note_cast(self, source: Tensor, dtype: torch.dtype, *, of_product: bool = False) -> None:
        """A cast ahead of the call."""
        (self.between if of_product else self.casts).append(
            f"torch cast of {list(source.shape)} from {dtype_name(source.dtype)} to {dtype_name(dtype)}"
        )

    def note_earlier(self, other: Recorded) -> None:
        """A product call whose result the last call reads as an operand."""
        assert other.call is not None
        self.earlier.append(linear_call(*other.call[1]))

    def join(self, args: tuple[Any, ...]) -> None:
        """Join a product with the layer's bias and a folded BatchNorm behind it, which a plain call runs as one."""
        assert self.call is not None
        _, (_, x, weight, self.folded_bias, _, _, *options) = self.call
        epilogue, _, _, operands, scalars, *out = args
        precision, *others = options
        product = (epilogue, x, weight, None, operands, scalars, precision)
        self.call = ("linear_out" if out else "linear", (*product, *out, *others))

    def taken_apart(self) -> tuple[str, LinearCall | ElementwiseCall]:
        """The operator that was called, and the call.

        Its operands require a gradient if a vector that they were folded from does. (Calls are recorded under
        `no_grad`, where the result of a fold requires none.)
        """
        assert self.call is not None
        operator, args = self.call
        call = _CALLS[operator](*args)
        if self._gradients_of_operands:
            operands = [_learning(each) for each in call.operands]
            call = call._replace(operands=operands)
        return operator, call


def _learning(operand: Tensor | float | None) -> Tensor | float | None:
    return operand.detach().requires_grad_() if isinstance(operand, Tensor) else operand


class Recorder(Recorded, TorchFunctionMode):
    """Catches the operators that a public function calls, in place of running them."""

    _product: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = operator_name(func)
        if name == "fold_batch_norm":
            like, columns = args[0], self.note_fold(args)
            return torch.empty((2, columns), dtype=compute_dtype(like.dtype), device=like.device)
        if name is not None:
            if self.call is not None and args[1] is self._product:
                self.join(args)
                return self._product
            if self.call is not None:
                self.note_earlier(self)
            self.call = (name, args)
            x, weight = args[1], args[2]
            if name != "linear" or x.dim() == 0 or weight.dim() != 2:
                return x
            self._product = x.new_empty((*x.shape[:-1], weight.shape[0]))
            return self._product
        if is_cast(func, args):
            source, dtype = args
            self.note_cast(source, dtype, of_product=source is self._product)
            return torch.empty_like(source, dtype=dtype, requires_grad=source.requires_grad)
        return func(*args, **(kwargs or {}))


_CALLS: dict[str, Callable[..., LinearCall | ElementwiseCall]] = {
    "linear": linear_call,
    "linear_out": linear_out_call,
    "elementwise": elementwise_call,
    "elementwise_out": elementwise_call,
}


def is_cast(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator casts a tensor to another type, as autocast does."""
    return (
        func is Tensor.to and len(args) == 2 and isinstance(args[1], torch.dtype) and args[0].dtype != args[1]
    )


def operator_name(func: Any) -> str | None:
    """The name of an operator of epigemm that public functions call; None for other operators."""
    for name in (*_CALLS, "fold_batch_norm"):
        packet = getattr(ops, name)
        if func is packet or func is packet.default:
            return name
    return None


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype: "bfloat16"."""
    return str(dtype).removeprefix("torch.")
