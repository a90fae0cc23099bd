"""The calls that a function or a module makes, each as an `Explanation`: what `epigemm.calls.log` is told.

A function of ours gets zeros in place of results. All else runs, and so does all of a module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epigemm import batch_statistics, functional, glu, results_epilogue
from epigemm.arguments.calls import ElementwiseCall, FoldCall, LinearCall
from epigemm.autograd import batch_norm, gradients, nodes
from epigemm.autograd.batch_norm import BatchNormCall
from epigemm.calls import elementwise_kernels, reductions, resolve, resolve_elementwise
from epigemm.calls.by_reference import unfolded
from epigemm.calls.log import Log, current
from epigemm.decorator import UserEpilogue
from epigemm.epilogues.registry import Epilogue, compute_dtype
from epigemm.epilogues.tracer.results import VAR
from epigemm.explain import explanation, norms
from epigemm.explain.answer import ELEMENTWISE, GEMM_ELEMENTWISE, REFERENCE, Explanation, Product
from epigemm.explain.explanation import dtype_name
from epigemm.planner.reasons import Reason
from epigemm.results_epilogue import ResultsEpilogue

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    name: getattr(module, name) for module in (functional, glu) for name in module.__all__
}
COPY = "torch copy"
_COPIES = (Tensor.copy_, Tensor.to, Tensor.float, Tensor.clone, torch.batch_norm)
_APART = {ELEMENTWISE: GEMM_ELEMENTWISE, REFERENCE: REFERENCE}


_NOWHERE = Product("")


class Launch(NamedTuple):
    """What is launched beside the calls: a cast, a fold, a copy, a reduction."""

    kernels: list[str]  # in order
    results: tuple[Tensor, ...] = ()  # what stands for those of the last one
    source: Tensor | None = None


@dataclass(eq=False)
class Call:
    """One call of a public function, as it is told.

    Attributes:
        call: as it was asked for.
        found: what it runs.
        differentiates: whether its derivative is recorded.
        norm: BatchNorm by the batch's own statistics that PyTorch's operators compute behind it, and why they do.
        function: the name of what it computes.
        is_apart: whether the epilogue is a kernel of its own behind the product.
        results: as of `Launch`.
        place: of a module's call: what is known of its product by where in the module it is.
    """

    call: LinearCall | ElementwiseCall
    found: Explanation
    differentiates: bool
    norm: tuple[BatchNormCall, str] | None
    function: str
    is_apart: bool = False
    results: tuple[Tensor, ...] = ()
    place: Product = _NOWHERE


class CallLog(Log):
    """The calls of a function, or of a module.

    Args:
        runs: whether calls are also made. If not, their results are zeros.
        is_single: whether each product is told as a call of one result, as for tuning.

    Attributes:
        told: the calls and the launches beside them, in order; of a module PyTorch's own products, too.
        calls: the calls alone.
        returned: what a function has returned.
        noted: PyTorch's functions that are told, too.
    """

    noted: Container[Any] = ()
    _last: Call | None = None  # of the function that has been called
    _norm: tuple[BatchNormCall, str] | None = None
    _recorded: LinearCall | None = None

    def __init__(self, *, runs: bool = False, is_single: bool = False) -> None:
        super().__init__()
        self.told: list[Launch | Call | Product] = []
        self.calls: list[Call] = []
        self.returned: Any = None
        self._runs, self._is_single = runs, is_single
        self._wants_gradients = torch.is_grad_enabled()  # not so within a node of autograd

    def begin(self, recorded: LinearCall | None = None) -> None:
        """As of `Log`."""
        self._last, self._recorded = None, recorded
        self._wants_gradients = torch.is_grad_enabled()

    def made(self, function: Callable[..., Any], *args: Any) -> Any:
        """As of `Log`."""
        if not self._runs:
            return self.note(function, *args)
        with self.closed():
            result = function(*args)
        if result is not None and not isinstance(result, int):
            self.note(function, *args)
        return result

    def note(self, function: Callable[..., Any], *args: Any) -> Any:
        """As of `Log`. Returns what stands for the result; None if the call is several calls."""
        with self.closed():
            return _TELL[function](self, *args)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(func).startswith("epigemm."):
            return func(*args, **kwargs)
        if func in _COPIES and args:
            found = self._copy(func, args, str(sys._getframe(1).f_globals.get("__name__", "")))
            if found is not None:
                return found
        elif func in self.noted:
            self._note_product(func, args, kwargs)
        current.log = None  # what one function of PyTorch's calls is its own
        try:
            return func(*args, **kwargs)
        finally:
            current.log = self

    def _note_product(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A function of `noted` is called."""

    def _copy(self, function: Any, args: tuple[Any, ...], module: str) -> Tensor | None:
        """A cast or a copy that a module makes, in place of which zeros are returned; None: it runs."""
        source: Tensor = args[0]
        dtype: Any = source.dtype
        if function is Tensor.copy_:
            return None if self._runs else source
        if function is torch.batch_norm and module == unfolded.__module__:
            text = "torch batch_norm"
        elif function is Tensor.clone and module == results_epilogue.__name__:
            text = COPY
        else:
            dtype = torch.float32 if function is Tensor.float else args[1] if len(args) == 2 else None
            is_cast = isinstance(dtype, torch.dtype) and dtype != source.dtype
            if function not in (Tensor.to, Tensor.float) or not is_cast or not module.startswith("epigemm."):
                return None
            types = f"from {dtype_name(source.dtype)} to {dtype_name(dtype)}"
            text = f"torch cast of {list(source.shape)} {types}"
        if self._runs:
            self.told += [Launch([text])] if function is Tensor.to else []
            return None
        found = torch.zeros_like(source, dtype=dtype, requires_grad=source.requires_grad)
        self.told.append(Launch([text], (found,), source))
        return found

    def _add(self, call: LinearCall | ElementwiseCall, found: Explanation, function: str = "") -> Call:
        if not function:
            is_product = isinstance(call, LinearCall) and call.epilogue.is_bias
            function = "linear" if is_product else call.epilogue.name.partition(".")[0]
        function = function if self._norm is None else norms.function_of(self._norm[0])
        self._last = Call(call, found, self._differentiates(call), self._norm, function)
        self.told.append(self._last)
        self.calls.append(self._last)
        self._norm = self._recorded = None
        return self._last

    def _differentiates(self, call: LinearCall | ElementwiseCall | BatchNormCall) -> bool:
        if not self._wants_gradients:
            return False
        return True in [each is not None and each.requires_grad for each in call.inputs]

    def _zeros(self, told: Call) -> Tensor | None:
        """What stands for a call's result."""
        call = told.call
        if self._runs or call.out is not None:
            return call.out
        if isinstance(call, LinearCall):
            dtype = call.x.dtype if call.eight_bits is None else call.dtype
            found = call.x.new_zeros((*call.x.shape[:-1], call.weight.shape[0]), dtype=dtype)
        else:
            found = torch.zeros_like(call.x)
        told.results = (found,)
        return found

    def _linear(self, call: LinearCall, plan: object = None) -> Tensor | None:
        return self._zeros(self._add(call.described() if call.fold else call, explanation.of_linear(call)))

    def _by_torch(self, epilogue: Epilogue, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        self.begin()
        call = LinearCall(epilogue, x, weight, (bias,), uses_pack=not weight.requires_grad)
        found = self._zeros(self._add(call, explanation.recorded_by_torch(call)))
        return None if found is None else found.requires_grad_()

    def _elementwise(self, call: ElementwiseCall) -> Tensor | None:
        last = self._last
        if last is None or not isinstance(last.call, LinearCall):
            return self._zeros(self._add(call, explanation.of_elementwise(call)))
        epilogue, operands, product = call.epilogue, [*call.operands], last.call
        if epilogue.bias_place:
            operands[epilogue.bias_place - 1] = product.bias
        last.call = product._replace(epilogue=epilogue, operands=operands, out=call.out)
        last.function = epilogue.name.partition(".")[0]
        last.differentiates |= self._differentiates(call)
        last.is_apart = True
        at = self.told.index(last) + 1
        behind, self.told[at:] = self.told[at:], []
        last.found = explanation.apart(
            last.found, last.call, texts_of(behind), is_recorded=last.differentiates
        )
        return self._zeros(last)

    def _fold(self, call: FoldCall) -> Tensor:
        self.told.append(Launch([explanation.of_fold(call)]))
        return call.like.new_zeros((2, call.columns), dtype=compute_dtype(call.like.dtype))

    def _one_kernel(self, call: LinearCall, beside: resolve.Beside) -> Tensor | Reason | None:
        """A call that is one kernel, of which the caller makes several if there is none."""
        found = None if self._is_single else explanation.of_one_kernel(call)
        if found is None:
            return Reason.NOT_FUSED
        recorded, stored = self._recorded, beside.stored
        if recorded is not None:
            call, found = recorded, replace(found, reasons=[explanation.KEPT, *found.reasons])
        elif stored is not None:
            found = replace(found, backward="each matrix by a kernel of its own")
        told = self._add(call, found)
        result = self._zeros(told)
        if result is not None and stored is not None:
            stored.zero_()
            told.results = (result, stored) if recorded is None else (result,)
        return result

    def _batch_norm(self, call: BatchNormCall) -> None:
        told = self._add(call.product, norms.explained(call), norms.function_of(call))
        told.differentiates = self._differentiates(call)

    def _norm_by_torch(self, call: BatchNormCall, why: str) -> None:
        self._norm = call, why

    def _reduce(
        self, matrix: Tensor, kind: str, axis: int, correction: float, invariant: bool
    ) -> tuple[Tensor, Tensor | None] | None:
        if self._runs:
            return None
        names = reductions.launches(kind, matrix.dtype, invariant=invariant and axis == 1)
        *before, last = [f"torch {each}" for each in names]
        like: Any = {"dtype": compute_dtype(matrix.dtype), "device": matrix.device}
        count = 2 if kind == VAR else 1
        found = tuple([torch.zeros(matrix.shape[1 - axis], **like) for _ in range(count)])
        self.told.append(Launch([*before, f"{last} of each {'row' if axis else 'column'}"], found))
        return found if len(found) == 2 else (found[0], None)


_TELL: dict[Any, Callable[..., Any]] = {
    resolve.linear: CallLog._linear,
    nodes.linear_by_torch: CallLog._by_torch,
    resolve_elementwise.elementwise: CallLog._elementwise,
    elementwise_kernels.fold_batch_norm: CallLog._fold,
    resolve.one_kernel: CallLog._one_kernel,
    batch_norm.forward: CallLog._batch_norm,
    batch_statistics.linear_batch_norm: CallLog._norm_by_torch,
    reductions.reduce: CallLog._reduce,
}


def logged(
    fn_or_name: Callable[..., Any] | str, /, *args: Any, is_single: bool = False, **kwargs: Any
) -> tuple[str, CallLog]:
    """The name of a public function, and the calls that it would make; nothing is launched.

    Raises:
        ValueError: `fn_or_name` is no public function of epigemm.
        Exception: whatever the call itself raises for these arguments.
    """
    made = getattr(fn_or_name, "__self__", fn_or_name)
    function: Callable[..., Any] | None
    if isinstance(made, UserEpilogue | ResultsEpilogue) and fn_or_name in (made, made.elementwise):
        name, function = made.traced.name, fn_or_name
    else:
        name = fn_or_name if isinstance(fn_or_name, str) else getattr(fn_or_name, "__name__", "")
        function = _FUNCTIONS.get(name)
        if callable(fn_or_name) and fn_or_name is not function:
            function = None
    if function is None:
        accepted = ", ".join(_FUNCTIONS)
        raise ValueError(
            f"fn_or_name: got {fn_or_name!r}; accepted are what epigemm.epilogue makes, its `elementwise`, and "
            f"epigemm's functions or their names: {accepted}"
        )
    opened = CallLog(is_single=is_single)
    with opened:
        opened.returned = function(*args, **kwargs)
    return name, opened


def explain(fn_or_name: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> Explanation:
    """`epigemm.explain` of a function with one result."""
    name, opened = logged(fn_or_name, *args, **kwargs)
    if opened.calls:
        return explained(name, opened.told)
    launches = texts_of(opened.told)
    return replace(by_torch(opened.returned), op=f"{name}: PyTorch's operators", kernels=launches)


def by_torch(result: Tensor) -> Explanation:
    """What no kernel of epigemm's computes, and no product is in."""
    arithmetic, backward = dtype_name(compute_dtype(result.dtype)), "by PyTorch's own operators"
    return Explanation("z", REFERENCE, "PyTorch's operators", arithmetic, [], backward=backward)


def texts_of(told: Sequence[Launch | Call | Product]) -> list[str]:
    """Every launch, in order."""
    found = list[str]()
    for each in told:
        if not isinstance(each, Product):
            found += each.found.kernels if isinstance(each, Call) else each.kernels
    return found


def explained(function: str, told: Sequence[Launch | Call | Product]) -> Explanation:
    """The explanation of a function's calls, of which the last gives the result, and of what is beside them."""
    *earlier, last = [each for each in told if isinstance(each, Call)]
    call, found = last.call, last.found
    op = "linear" if isinstance(call, LinearCall) else "elementwise"
    op = f"epigemm::{op if call.out is None else f'{op}_out'}, epilogue {call.epilogue.name}"
    if earlier and isinstance(call, ElementwiseCall):  # a product in autocast's type
        found = replace(found, path=_APART[found.path], reasons=[explanation.PROMOTED])
    op = f"{function}: {found.op or f'{op}: {call.epilogue.formula}'}"
    found = replace(found, op=op, backward=backward_of(last, earlier), kernels=texts_of(told))
    for each in earlier:
        reasons = [*found.reasons, f"it reads another product: {'; '.join(each.found.kernels)}"]
        us = None if each.found.us is None or found.us is None else each.found.us + found.us
        is_measured = each.found.is_measured and found.is_measured
        found = replace(found, reasons=reasons, us=us, is_measured=is_measured)
    return found if last.norm is None else norms.behind(found, call.epilogue, *last.norm)


def backward_of(last: Call, earlier: Sequence[Call] = ()) -> str:
    """What the first derivative of these calls runs."""
    call = last.call
    if call.out is not None:
        return "none: a call with out= has no derivative"
    if last.found.backward:
        backward = last.found.backward
    elif isinstance(call, LinearCall) and not (last.is_apart and not gradients.keeps_product(call)):
        backward = explanation.backward_linear(call)
    else:
        what = f"product; {explanation.PRODUCTS}" if earlier or isinstance(call, LinearCall) else "x"
        backward = f"{explanation.derivative(call)} on the saved {what}"
    if True in [each.differentiates for each in (*earlier, last)]:
        return backward
    return f"not needed: no argument requires grad (otherwise: {backward})"
