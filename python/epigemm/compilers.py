"""Who traces or transforms the code that runs here, and names of Dynamo and Inductor that torch does not document.

No other file asks or uses such names. `torch.compiler.is_compiling` does not tell who traces: it reads one flag for all
threads, which is set while any of them compiles or exports. Dynamo takes seconds to import, so nothing here imports it
before it is called.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

_Function = TypeVar("_Function", bound=Callable[..., Any])
_importing = threading.Lock()
_DERIVATIVES = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)

is_traced = torch.compiler.is_dynamo_compiling
"""Whether Dynamo traces this code. For Dynamo that is a constant; code that runs gets False, in every thread.

Other tracers (`make_fx`, AOTAutograd, `torch.export`) run the code under modes of their thread. The entry sees those in
C++, which Dynamo cannot run.
"""


def at_trace_time(function: _Function) -> _Function:
    """Have Dynamo run `function` and not trace it, so that its result is a constant of the graph.

    Like `torch.compiler.assume_constant_result`, which would import all of Dynamo here. Dynamo guards everything that
    these functions read: properties of arguments, torch's global state, functorch's levels.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@at_trace_time
def is_exporting() -> bool:
    """Whether this thread exports a program. torch's flag alone would be that of any thread."""
    if not torch.compiler.is_exporting():
        return False
    mode = torch._guards.detect_fake_mode()
    return mode is not None and mode.fake_tensor_converter.export


def is_faked() -> bool:
    """Whether tensors without data stand for others here, as where AOTAutograd traces."""
    return torch._guards.detect_fake_mode() is not None


@at_trace_time
def is_transformed() -> bool:
    """Whether a transform of torch.func is around this code, or forward-mode differentiation.

    Neither shows in a tensor's `requires_grad` where Dynamo traces.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None or in_forward_mode()


@at_trace_time
def in_forward_mode() -> bool:
    """Whether derivatives are computed in forward mode around this code, also those of `torch.func.jvp`."""
    return forward_ad._current_level >= 0


def keeps_numbers() -> bool:
    """Whether numbers that Python reads from tensors here become constants of a program, of make_fx or torch.jit."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return torch._C._get_tracing_state() is not None or (mode is not None and not is_faked())


@contextmanager
def untraced() -> Iterator[None]:
    """No operator becomes part of a program that is made meanwhile, by a mode's tracer or by torch.jit."""
    state = torch._C._get_tracing_state()
    if state is not None:  # else it cannot be set everywhere
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        with _disable_current_modes():
            yield
    finally:
        if state is not None:
            torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether `torch.vmap` has a batch of numbers for a tensor."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def in_functional_derivative() -> bool:
    """Whether this code runs under `torch.func.grad`, `jvp` or a transform that is built on them.

    torch does not combine these with the derivatives of registered operators. References in plain PyTorch work under
    all of them.
    """
    if is_traced():
        return False
    interpreters = torch._C._functorch.get_interpreter_stack()
    return interpreters is not None and any(each.key() in _DERIVATIVES for each in interpreters)


def outside_of_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, before which Dynamo breaks its graph: it runs at once, not when the graph runs."""
    if "torch._dynamo" not in sys.modules:
        return function
    made: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return made


def import_dynamo() -> None:
    """Import Dynamo. This waits if another thread is importing it; the import of one of its modules does not.

    It also makes the two numbers that torch adds to sympy, which two threads that need them first may not make at once.
    """
    with _importing:
        importlib.import_module("torch._dynamo")
        numbers = importlib.import_module("sympy").S
        _ = numbers.IntInfinity, numbers.NegativeIntInfinity


def origin(name: str) -> Any:
    """What symbols of a trace without Dynamo come from."""
    from torch._dynamo.source import ConstantSource

    return ConstantSource(name)


def is_turned_off() -> bool:
    """Whether Dynamo compiles nothing."""
    return os.environ.get("TORCHDYNAMO_DISABLE", "") == "1" or bool(torch._dynamo.config.disable)


def inductor(mode: str | None, options: dict[str, Any]) -> Callable[..., Any]:
    """What torch.compile calls to have Inductor compile a graph; RuntimeError for a wrong mode or option."""
    try:
        made: Callable[..., Any] = torch._TorchCompileInductorWrapper(mode, options, None)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        text, lists_all, _ = str(error).partition(", known options")
        if not lists_all:
            raise
        raise RuntimeError(
            f"options: {text}; accepted are 'backend', 'mode', 'report', 'strict' and those of Inductor, which "
            "torch._inductor.list_options() lists"
        ) from None
    return made


def backend_of(name: Any) -> Callable[..., Any]:
    """The backend of a name, or the callable that was given."""
    found: Callable[..., Any] = torch._dynamo.lookup_backend(name)
    return found


def is_request(error: Exception) -> bool:
    """Whether a backend raised an error in order to have Dynamo trace a frame again, or not at all."""
    return isinstance(error, (torch._dynamo.exc.RestartAnalysis, torch._dynamo.exc.SkipFrame))


def decompose_in_inductor(functions: Mapping[Any, Callable[..., Any]]) -> None:
    """Have Inductor's graphs, forward and backward, hold what these functions call in place of their operators.

    A function has its operator's arguments, and may write into what it makes. The operator stays where it returns
    NotImplemented, and in what is packaged for other processes.
    """

    def in_place_of(function: Callable[..., Any]) -> Callable[..., Any]:
        def decomposed(*args: Any) -> Any:
            from torch._subclasses.functional_tensor import dispatch_functionalize

            is_packaged = torch._inductor.virtualized.V.aot_compilation
            return NotImplemented if is_packaged else dispatch_functionalize(function)(*args)

        return decomposed

    def add(lowering: ModuleType) -> None:
        # As of any custom operator.
        strides = lowering.tag_to_layout_constraint(torch._C.Tag.needs_exact_strides)
        for operator, function in functions.items():
            lowering.make_fallback(operator, strides, override_decomp=True)
            lowering.decompositions[operator] = in_place_of(function)

    when_imported("torch._inductor.lowering", add)


# --- modules that take long to import ---------------------------------------------------------------------------------


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Have `then` called with a module at the end of its import; now, if somebody has imported it."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _WhenImported(name, then))


class _WhenImported(MetaPathFinder):
    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# --- CUDA graphs ------------------------------------------------------------------------------------------------------


def capturing(device: torch.device) -> bool:
    """Whether the current stream of a device is being captured into a CUDA graph."""
    if device.type != "cuda":
        return False
    if device.index == torch._C._cuda_getDevice():
        return bool(torch.cuda.is_current_stream_capturing())
    with torch.cuda.device(device):
        return bool(torch.cuda.is_current_stream_capturing())
