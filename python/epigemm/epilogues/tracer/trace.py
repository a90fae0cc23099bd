"""A Python function -> a program: what `make_fx` makes, with the core ATen decompositions, then `steps`.

The function is called with fake fp32 tensors whose sizes are symbols, and with scalars that are symbolic numbers. A
decision that depends on one of them leaves a guard, which is an error here. Torch's symbols are never 1, so the
function is traced a second time for one row and one column. Nothing is computed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

from epigemm import compilers
from epigemm.epilogues.constants import is_users, return_line, user_line
from epigemm.epilogues.kinds import KINDS, MATRIX, SCALAR
from epigemm.epilogues.tracer.aten import NO_FUNCTOR, ON_SCALARS, SUPPORTED, Refusal
from epigemm.epilogues.tracer.graphs import traced_graph
from epigemm.epilogues.tracer.program import FLOAT, REAL, Program, Step, Value, rewritten, words
from epigemm.epilogues.tracer.results import Results, Structure, described, filled, structured
from epigemm.epilogues.tracer.steps import Builder

ROWS, COLUMNS = 5, 7  # different primes, so that a size in the wrong place is noticed
_READS_A_VALUE = words("item tolist __bool__ __float__ __int__ __index__ numpy __array__")


class _Watch(TorchFunctionMode):
    """Watches every call of torch that the user's function makes: notes its line, and refuses what is forbidden."""

    def __init__(self, start: str) -> None:
        super().__init__()
        self.line = start  # of the present call; before the first call that of the function
        self.tensors: list[Any] = []  # the function's arguments, then results of its calls
        # The first error, which the function may have caught, and its line.
        self.first: tuple[str, Exception] | None = None
        self.dtype_line = ""
        self.is_cast = False  # whether a tensor is cast to fp32, which rounds fp64 tensors
        self.lines: dict[str, str] = {}  # the user's lines by the names of the graph's nodes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make a call, unless it is forbidden."""
        kwargs = kwargs or {}
        self.line = user_line(sys._getframe(1), self.line)
        try:
            # Only the user's calls come here: the mode is off inside a function of torch.
            self._judge(func, args, kwargs)
            result = func(*args, **kwargs)
        except (Refusal, RuntimeError) as error:
            self.first = self.first or (self.line, error)
            raise
        finally:
            self._mark_nodes()
        parts = result if isinstance(result, (tuple, list)) else [result]
        self.tensors += [part for part in parts if isinstance(part, Tensor)]
        if isinstance(result, Tensor):
            self.is_cast |= result.dtype == torch.float32 and not _keeps_type(func, args, kwargs)
        return result

    def _mark_nodes(self) -> None:
        """Note that the new nodes of the graph come from this line."""
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        mode = get_proxy_mode()
        if mode is None:
            return
        for node in reversed(mode.tracer.graph.nodes):
            if node.name in self.lines:
                break
            self.lines[node.name] = self.line

    def _judge(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        from torch._subclasses.fake_tensor import FakeTensor

        name = _name_of(func)
        if name in _READS_A_VALUE:
            what = f"{name} reads a tensor's value: data-dependent control flow"
            raise Refusal(f"{what} is not supported; use torch.where")
        if name in NO_FUNCTOR:
            raise Refusal(NO_FUNCTOR[name].format(name=name))
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            # Inside the forward of an autograd.Function gradients are off, too.
            raise Refusal(
                "no_grad or the like, or a torch.autograd.Function, is not supported: the derivative of an epilogue is "
                "that of its formula; tensor.detach() ends one"
            )
        in_training = kwargs.get("training", args[2] if len(args) > 2 else True)
        if name.startswith(("rand", "bernoulli")) or (name.endswith(("dropout", "rrelu")) and in_training):
            raise Refusal(f"{name} draws random numbers; an epilogue is a function of its operands")
        if kwargs.get("out") is not None:
            raise Refusal(f"{name} with out= writes in place; use its result")
        if name in ("dtype", "is_floating_point", "type", "element_size", "itemsize", "new_tensor"):
            self.dtype_line = self.line
        if name in ("requires_grad_", "backward", "register_hook", "retain_grad"):
            raise Refusal(f"{name} is not supported; tensor.detach() ends a derivative")
        if name in ("set_", "__setitem__", "copy_", "detach_", "data"):
            raise Refusal(f"{resolve_name(func) or name} writes in place; use torch.where and a new name")
        for tensor in tree_leaves((args, kwargs)):
            is_real = isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor)
            if is_real and not any(tensor is known for known in self.tensors):
                raise Refusal(
                    f"{name} takes a captured tensor of shape {list(tensor.shape)}; give it as an operand (PerColumn, "
                    "PerRow, Matrix or Scalar)"
                )


def _name_of(function: Any) -> str:
    """The name of a function or method of torch, or of the property that it reads."""
    name = getattr(function, "__name__", "")
    return name if name != "__get__" else getattr(getattr(function, "__self__", None), "__name__", "")


def _keeps_type(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a result that is fp32 in the trace would be fp64 for fp64 tensors."""
    is_cast = func in (Tensor.float, Tensor.to, Tensor.type) or kwargs.get("dtype") is not None
    given = tree_leaves((args, kwargs))
    return not is_cast and any(isinstance(part, Tensor) and part.is_floating_point() for part in given)


@functools.cache
def _environment_type() -> Any:
    """A `ShapeEnv` that notes the user's line at which each guard was made."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # takes seconds: at the first decoration

    class Environment(ShapeEnv):
        guard_lines: list[str]

        def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
            before = len(self.guards)
            result = super().evaluate_expr(*args, **kwargs)
            for _ in self.guards[before:]:
                self.guard_lines.append(
                    "" if _harmless(sys._getframe(1)) else user_line(sys._getframe(1), "?")
                )
            return result

    return Environment


def _harmless(frame: FrameType) -> bool:
    """Whether a guard is one that torch makes for a power of a scalar, where both answers give the same graph."""
    frames = (each for each, _ in traceback.walk_stack(frame))
    of_torch = itertools.takewhile(lambda each: not is_users(each.f_code.co_filename), frames)
    return any("pow" in each.f_code.co_name for each in of_torch)


def trace_results(function: Callable[..., Any], kinds: Sequence[str], name: str, start: str) -> Results:
    """What `function(acc, *operands)` computes and returns.

    Raises:
        NotImplementedError: the function does what no functor can; the message names the line.
        TypeError: it fails by itself under the trace, or returns anything but tensors.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    compilers.import_dynamo()
    # Modes around the decoration must not affect the epilogue: fake tensors, inference mode, autocast.
    with (
        # The modes of a thread that exports are in a list of all threads. To set them back turns them on here.
        torch._C._PreserveDispatchKeyGuard(),
        torch._guards.tracing(None),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        _default_of_fp32(),
    ):
        return _trace_results(function, kinds, name, start)


@contextlib.contextmanager
def _default_of_fp32() -> Iterator[None]:
    """Numbers such as `torch.where(condition, 1.0, 0.1)` are fp32, whatever torch's default dtype is at the decoration.

    That setting is the whole process's. It is touched only if it is another one, and is set back when the last of the
    threads that decorate at the same time is done. None of them waits for the trace of another.
    """
    with _lock:
        before = _defaults[0] if _defaults else torch.get_default_dtype()
        _defaults.append(before)
        if before is not torch.float32:
            torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        with _lock:
            _defaults.pop()
            if before is not torch.float32 and not _defaults:
                torch.set_default_dtype(before)


_lock = threading.Lock()
_defaults: list[torch.dtype] = []
"""For each decoration that goes on now the dtype to be set back, which is the same for all."""


def _trace_results(function: Callable[..., Any], kinds: Sequence[str], name: str, start: str) -> Results:
    found, watch = _trace_once(function, kinds, name, start, torch.float32)
    of_one, beside = _trace_once(function, kinds, name, start, torch.float32, (1, 1))
    if _in_fp32(of_one) != _in_fp32(found):
        steps = itertools.zip_longest(watch.lines.items(), beside.lines.items())
        line = next(((one or other)[1] for one, other in steps if one != other), start)
        raise NotImplementedError(
            f"{name} ({line}): it is traced twice, and computes two things: the shape of a tensor decides what is "
            "computed, or random numbers, the time or the like would become constants of the epilogue"
        )
    if watch.dtype_line or watch.is_cast:
        wide, _ = _trace_once(function, kinds, name, start, torch.float64)
        if _in_fp32(wide) != _in_fp32(found):
            line = watch.dtype_line or start
            raise NotImplementedError(
                f"{name} ({line}): a tensor's dtype decides what is computed; an epilogue is one function, in "
                "fp32 and for fp64 tensors in fp64"
            )
        return wide  # the fp64 trace: its constants have more digits, and it has the casts to fp32
    return found


def _in_fp32(found: Results) -> str:
    """The fp32 form of what an fp64 trace found, as text."""
    every = [
        (_program_in_fp32(found.program(each.value)), replace(each.about, is_fp32=False))
        for each in found.results
    ]
    return repr(filled(found.structure, every))  # `float()` of fp32 is the tensor itself


def _program_in_fp32(program: Program) -> Program:
    """The fp32 form of a program from an fp64 trace: constants rounded to fp32, and no casts to fp32."""

    def change(number: int, step: Step) -> Step | Value:
        inputs = tuple(_of_fp32(value) if isinstance(value, float) else value for value in step.inputs)
        if step.op == "highest":
            return float(torch.finfo(torch.float32).max)
        if step.op == "copy" and step.kind == FLOAT:
            return inputs[0]
        return replace(step, inputs=inputs, kind=REAL if step.kind == FLOAT else step.kind)

    made = rewritten(program, change)
    return replace(made, result=_of_fp32(made.result)) if isinstance(made.result, float) else made


def _of_fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32, device="cpu"))


def _trace_once(
    function: Callable[..., Any],
    kinds: Sequence[str],
    name: str,
    start: str,
    dtype: torch.dtype,
    sizes: tuple[int, int] = (ROWS, COLUMNS),
) -> tuple[Results, _Watch]:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    environment = _environment_type()(specialize_zero_one=True, duck_shape=True)
    environment.guard_lines = []
    mode: Any = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)

    def argument(kind: str, number: int) -> Any:
        origin = compilers.origin(f"{kind}{number}")
        if kind == SCALAR:
            value = 1.7 + number  # not 0 or 1, which a trace would take for constants
            dynamic = DimDynamic.DYNAMIC
            symbol = environment.create_unspecified_symbol(value, source=origin, dynamic_dim=dynamic)
            return environment.create_symfloatnode(symbol, hint=value, source=origin)
        shape = KINDS[kind].shape(sizes[:1], sizes[1])
        every: list[Any] = [DimDynamic.STATIC if size == 1 else DimDynamic.DYNAMIC for size in shape]
        symbols: Any = StatelessSymbolicContext(dynamic_sizes=every)
        return mode.from_tensor(
            torch.empty(shape, dtype=dtype, device="cpu"), symbolic_context=symbols, source=origin
        )

    arguments = [argument(kind, number) for number, kind in enumerate((MATRIX, *kinds))]
    watch = _Watch(start)
    structure: Structure = 0

    def traced(*given: Any) -> list[Tensor]:
        nonlocal structure
        watch.tensors[:] = given
        with torch.device("cpu"), watch:
            result = function(*given)
        if watch.first is not None:  # the function has caught the error
            watch.line, error = watch.first
            raise error
        leaves, structure = structured(result)
        if not all(isinstance(each, Tensor) for each in leaves):
            watch.line = return_line(function, watch.line)
            raise Refusal(f"it returns {described(result)}; {_RETURNED}")
        return leaves

    def refused(line: str, reason: object) -> str:
        return f"{name} ({line}): {reason}"

    try:
        module = traced_graph(traced, arguments)
    except Refusal as refusal:
        error = TypeError if "it returns" in str(refusal) else NotImplementedError
        raise error(refused(*(watch.first or (watch.line, refusal)))) from None
    except Exception as cause:
        raise _translated(cause, name, watch.line) from cause
    _check_guards(environment, name, start)

    def location(node: fx.Node) -> str:
        return watch.lines.get(node.name, start)

    builder = Builder(module, sizes, location)
    line = ""
    try:
        found = builder.build(structure)
        line = return_line(function, watch.line)
        _check_results(module, builder, structure)
    except Refusal as refusal:
        line = line or (location(builder.node) if builder.node is not None else start)
        raise NotImplementedError(refused(line, refusal)) from None
    return found, watch


def _translated(cause: Exception, name: str, line: str) -> Exception:
    """An error of torch or of the function itself, with the place."""
    for frame, number in traceback.walk_tb(cause.__traceback__):
        if is_users(frame.f_code.co_filename):
            line = f"{frame.f_code.co_filename}:{number}"
    kind = type(cause).__name__
    if "DataDependent" in kind:
        return NotImplementedError(
            f"{name} ({line}): control flow that depends on a tensor's value is not supported; use torch.where"
        )
    text = str(cause).strip().split("\n")[0]
    if _is_about_a_scalar(cause):
        return NotImplementedError(f"{name} ({line}): this is not supported on a Scalar; {ON_SCALARS}")
    error = type(cause) if isinstance(cause, (TypeError, ValueError, NotImplementedError)) else TypeError
    if "SymIntArrayRef" in text or "normalized_shape" in text:
        text = "a shape is read, a norm computed, or random numbers are drawn"
    elif "must match the size of tensor" in text or "Expected cond" in text:
        text = "shapes do not broadcast; the function sees [M, N], of PerColumn [N] and of PerRow [M, 1]"
    return error(f"{name} ({line}): it fails while it is traced: {kind}: {text}")


def _is_about_a_scalar(cause: Exception) -> bool:
    """Whether an error comes from a symbolic number: a SyntaxError, from a method that no graph can contain."""
    if isinstance(cause, SyntaxError):
        return True
    frames = (frame for frame, _ in traceback.walk_tb(cause.__traceback__))
    is_within = any(isinstance(frame.f_locals.get("self"), torch.SymFloat) for frame in frames)
    return is_within or "SymFloat" in str(cause)


def _check_guards(environment: Any, name: str, start: str) -> None:
    """Refuse guards, except those that compare the M or N of two operands."""
    for guard, line in zip(environment.guards, environment.guard_lines, strict=False):
        text = str(guard.expr)
        if not line or all(re.fullmatch(r"Eq\(s\d+, (s\d+|1)\)", part) for part in text.split(" | ")):
            continue
        place = start if line == "?" else line
        if "zf" in text:
            raise NotImplementedError(
                f"{name} ({place}): the value of a scalar operand decides what is computed, or is made a constant; use "
                f"torch.where and torch.clamp, and no float() or math function of it; {ON_SCALARS}"
            )
        raise NotImplementedError(f"{name} ({place}): {_SHAPE}")


_SHAPE = (
    "the shape of a tensor decides what is computed, or is given to view or reshape; operands broadcast by themselves: "
    "the function sees [M, N], of PerColumn [N] and of PerRow [M, 1]"
)
_RETURNED = "an epilogue returns a tensor, or a tuple or list of tensors"


def _check_results(module: fx.GraphModule, builder: Builder, structure: Structure) -> None:
    """Refuses a matrix of another shape or type; of a reduction the builder does."""
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    for number, result in enumerate(output.args[0]):
        if result in builder.reduced:
            continue
        which = "its result" if structure == 0 else f"its result {number}"
        value = result.meta.get("val") if isinstance(result, fx.Node) else None
        if not isinstance(value, Tensor):
            raise Refusal("it returns no tensor")
        if builder.hints(value) != list(builder.whole):
            raise Refusal(
                f"{which} has the shape {builder.shape_in_words(value)}, not [M, N], that of the accumulator"
            )
        if not value.is_floating_point():
            raise Refusal(f"{which} is of {value.dtype}, not floating point; supported are {SUPPORTED}")
        if structure != 0 and value.dtype not in (torch.float32, builder.dtype):
            raise Refusal(
                f"{which} is of {value.dtype}; a matrix among several results has x's dtype, or fp32 after "
                "float(): return it without this cast, or after one more"
            )
