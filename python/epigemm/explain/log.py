"""The log of a call, which `explain` and `tune` read: what `epigemm.calls.log` is told, each call as an `Explanation`.

A function of ours gets zeros in place of results. All else runs, and so does all of a module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn, overrides
from torch.overrides import TorchFunctionMode

from epigemm import functional, glu, groups, results_epilogue
from epigemm.arguments.calls import ElementwiseCall, FoldCall, LinearCall
from epigemm.autograd import batch_norm, nodes
from epigemm.autograd.batch_norm import BatchNormCall
from epigemm.calls import elementwise_kernels, reductions, resolve
from epigemm.calls.log import current
from epigemm.decorator import UserEpilogue
from epigemm.epilogues.registry import Epilogue, compute_dtype
from epigemm.epilogues.tracer.results import VAR
from epigemm.explain import explanation, norms, products
from epigemm.explain.answer import Explanation, Product
from epigemm.explain.explanation import dtype_name
from epigemm.planner.reasons import Reason
from epigemm.results_epilogue import ResultsEpilogue

_pop_mode: Callable[[], Any] = overrides._pop_mode
_push_mode: Callable[[Any], None] = overrides._push_mode
_modes: Callable[[], list[Any]] = overrides._get_current_function_mode_stack

COPY = "torch copy"
_CASTS = (Tensor.to, Tensor.float)
_COPIES = {
    **dict.fromkeys((Tensor.clone, Tensor.copy_), COPY),
    **dict.fromkeys(_CASTS, "torch cast"),
    torch.batch_norm: "torch batch_norm",
}


@dataclass(eq=False)
class Launch:
    """What is launched beside the calls: a cast, a fold, a copy, a reduction; or a product of PyTorch's own.

    Attributes:
        kernels: in order; none of a product of PyTorch's own.
        results: what stands for those of the last one.
        source: what it reads.
        product: of a module's call: what is known of a product, of a call by where in the module it is.
    """

    kernels: list[str]
    results: tuple[Tensor, ...] = ()
    source: Tensor | None = None
    product: Product | None = None


@dataclass(eq=False, kw_only=True)
class Call(Launch):
    """One call of a public function, as it is told.

    Attributes:
        call: as it was asked for.
        found: what it runs.
        function: the name of what it computes.
        differentiates: whether its derivative is recorded.
        norm: BatchNorm by the batch's own statistics that PyTorch's operators compute behind it, and why they do.
        is_apart: whether the epilogue is a kernel of its own behind the product.
    """

    call: LinearCall | ElementwiseCall
    found: Explanation
    function: str
    differentiates: bool
    norm: tuple[BatchNormCall, str] | None
    is_apart: bool = False


class Log(TorchFunctionMode):
    """The calls of a function, or of a module; open while it is entered.

    Args:
        root: the module. Calls are also made. None: of a function; results are zeros.
        is_single: whether each product is told as a call of one result, as for tuning.

    Attributes:
        told: the calls and the launches beside them, in order; of a module PyTorch's own products, too.
        calls: the calls alone.
        returned: what a function has returned.
        notes: of a fused model: about all products.
        graphs: of a fused model: how many graphs ran.
        node: of a graph that is running: what is known of the product of the node that is.
    """

    _outer: Sequence[Log | None] = ()
    _last: Call | None = None  # of the function that has been called
    _norm: tuple[BatchNormCall, str] | None = None
    _recorded: LinearCall | None = None

    def __init__(self, root: nn.Module | None = None, *, is_single: bool = False) -> None:
        super().__init__()
        self.told: list[Launch] = []
        self.calls: list[Call] = []
        self.returned: Any = None
        self.notes: list[str] = []
        self.graphs = 0
        self.node: Product | None = None
        self._runs, self._is_single = root is not None, is_single
        named: list[tuple[str, nn.Module]] = [] if root is None else [*root.named_modules()]
        self._names = {id(module): name for name, module in reversed(named)}
        self._wants_gradients = torch.is_grad_enabled()  # not so within a node of autograd

    # --- open and closed ---

    def __enter__(self) -> Log:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._outer, current.log = (*self._outer, current.log), self
        return self

    def __exit__(self, *about: Any) -> None:
        *self._outer, current.log = self._outer
        super().__exit__(*about)  # type: ignore[no-untyped-call]

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Without this log. Modes that were entered later stay."""
        is_there = self in _modes()  # not while it looks at a function
        above = list(iter(_pop_mode, self)) if is_there else []
        before, current.log = current.log, None
        for mode in reversed(above):
            _push_mode(mode)
        try:
            yield
        finally:
            current.log = before
            for _ in above:
                _pop_mode()
            for mode in reversed([*above, self] if is_there else []):
                _push_mode(mode)

    # --- places in a module ---

    def name_of(self, module: nn.Module) -> str:
        """As in `named_modules`; empty for the root, and for what is not in it."""
        return self._names.get(id(module), "")

    def _place(self) -> Product:
        """The node that is running, or the innermost module whose method makes the call."""
        if self.node is not None:
            return self.node
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            name = self._names.get(id(frame.f_locals.get("self")))
            if name is not None:
                return Product(name or type(frame.f_locals["self"]).__name__)
            frame = frame.f_back
        return Product("")

    # --- what is told ---

    def begin(self, recorded: LinearCall | None = None) -> None:
        """A public function has been called. What it makes is told next; `recorded`: for which call autograd has it."""
        self._last, self._recorded = None, recorded
        self._wants_gradients = torch.is_grad_enabled()

    def made(self, function: Callable[..., Any], *args: Any) -> Any:
        """What stands for `function(*args)`, a call that is made now."""
        with self.closed():
            if not self._runs:
                return _TELL[function](self, *args)
            result = function(*args)
            if result is not None and not isinstance(result, int):
                _TELL[function](self, *args)
        return result

    def without_values(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, of tensors that have none: zeros stand for the results of its calls."""
        before, self._runs = self._runs, False
        try:
            return function(*args)
        finally:
            self._runs = before

    def norm_by_torch(self, call: BatchNormCall, why: str) -> None:
        """The product that comes next is followed by a BatchNorm by PyTorch's operators."""
        self._norm = call, why

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(func).startswith("epigemm."):
            return func(*args, **kwargs)
        if func in _COPIES and args:
            found = self._copy(func, args)
            if found is not None:
                return found
        elif self._runs and func in products.SIZES:
            self.told.append(Launch([], product=products.of_torch(self._place(), func, args, kwargs)))
        current.log = None  # what one function of PyTorch's calls is its own
        try:
            return func(*args, **kwargs)
        finally:
            current.log = self

    def _copy(self, function: Any, args: tuple[Any, ...]) -> Tensor | None:
        """A cast or a copy: what stands for one that a function makes. None: it runs."""
        source: Tensor = args[0]
        dtype: Any = source.dtype
        text = _COPIES[function]
        caller = str(sys._getframe(2).f_globals.get("__name__"))
        if function is Tensor.copy_:
            return None if self._runs else source
        if function is Tensor.clone and caller != results_epilogue.__name__:
            return None
        if function in _CASTS:
            dtype = torch.float32 if function is Tensor.float else args[1] if len(args) == 2 else None
            if not isinstance(dtype, torch.dtype) or dtype == source.dtype:
                return None
            text += f" of {list(source.shape)} from {dtype_name(source.dtype)} to {dtype_name(dtype)}"
        if self._runs:
            is_told = function is Tensor.to and caller.startswith("epigemm.")
            self.told += [Launch([text])] if is_told else []
            return None
        found = torch.zeros_like(source, dtype=dtype, requires_grad=source.requires_grad)
        self.told.append(Launch([text], (found,), source))
        return found

    def _add(self, call: LinearCall | ElementwiseCall, found: Explanation, function: str = "") -> Call:
        if not function:
            is_product = isinstance(call, LinearCall) and call.epilogue.is_bias
            function = "linear" if is_product else call.epilogue.name.partition(".")[0]
        self._last = Call(
            found.kernels,
            call=call,
            found=found,
            function=function if self._norm is None else norms.function_of(self._norm[0]),
            differentiates=self._differentiates(call),
            norm=self._norm,
            product=self._place() if self._names else None,
        )
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
            found = call.x.new_zeros((*call.x.shape[:-1], call.weight.shape[-2]), dtype=dtype)
        else:
            found = torch.zeros_like(call.x)
        told.results = (found,)
        return found

    def _linear(self, call: LinearCall, plan: object = None) -> Tensor | None:
        return self._zeros(self._add(call.described() if call.fold else call, explanation.of_linear(call)))

    def _by_torch(self, epilogue: Epilogue, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
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
            last.found, last.call, kernels_of(behind), is_recorded=last.differentiates
        )
        last.kernels = last.found.kernels
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
    resolve.linear: Log._linear,
    nodes.linear_by_torch: Log._by_torch,
    resolve.elementwise: Log._elementwise,
    elementwise_kernels.fold_batch_norm: Log._fold,
    resolve.one_kernel: Log._one_kernel,
    batch_norm.forward: Log._batch_norm,
    reductions.reduce: Log._reduce,
}


def kernels_of(told: Sequence[Launch]) -> list[str]:
    """Every launch, in order."""
    return [kernel for each in told for kernel in each.kernels]


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    name: getattr(module, name) for module in (functional, glu, groups) for name in module.__all__
}


def logged(
    fn_or_name: Callable[..., Any] | str, /, *args: Any, is_single: bool = False, **kwargs: Any
) -> tuple[str, Log]:
    """The name of a public function, and the log of a call of it; nothing is launched.

    Raises:
        ValueError: `fn_or_name` is no public function of epigemm.
        Exception: whatever the call itself raises for these arguments.
    """
    function: Any = _FUNCTIONS.get(fn_or_name) if isinstance(fn_or_name, str) else fn_or_name
    made = getattr(function, "__self__", function)
    if isinstance(made, UserEpilogue | ResultsEpilogue) and function in (made, made.elementwise):
        name = made.traced.name
    elif callable(function) and function in _FUNCTIONS.values():
        name = function.__name__
    else:
        got = type(fn_or_name).__name__ if isinstance(fn_or_name, Tensor) else repr(fn_or_name)
        argument, modules = ("fn_or_name", "") if is_single else ("fn_or_module", "torch.nn.Modules, ")
        raise ValueError(
            f"{argument}: got {got}; accepted are {modules}what epigemm.epilogue makes, its `elementwise`, and "
            f"epigemm's functions or their names: {', '.join(_FUNCTIONS)}"
        )
    opened = Log(is_single=is_single)
    with opened:
        opened.returned = function(*args, **kwargs)
    return name, opened
