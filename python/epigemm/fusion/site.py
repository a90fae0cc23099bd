"""One fused call of a rewritten graph: checks, at every call, that fusing it changes nothing, and runs it either way.

What a chain computes depends on things that a graph does not show: dtypes, devices, autocast, hooks, BatchNorm's mode.
So each site keeps the nodes that it replaced as a function of its own, and runs that where the fused call
would not give the same values, type and gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from epigemm import call as _call
from epigemm import packs
from epigemm.checks import DTYPES
from epigemm.epilogues import (
    BIAS,
    BIAS_RELU,
    RELU_DIV,
    SIGMOID_SCALE_RESIDUAL,
    compute_dtype,
)
from epigemm.fusion import chains, worth
from epigemm.fusion.operations import is_number
from epigemm.fusion.repeat import Repeat
from epigemm.fusion.rest import Fused, Rest
from epigemm.fusion.state import has_global_hooks, why_not_callable

_EPILOGUES = {
    chains.LINEAR: BIAS,
    chains.RELU: BIAS_RELU,
    chains.RELU_DIV: RELU_DIV,
    chains.RESIDUAL: SIGMOID_SCALE_RESIDUAL,
}
# The last two stand for plain tensors while a graph is made.
_PLAIN = (Tensor, nn.Parameter, FakeTensor, FunctionalTensor)
_WIDE = (torch.float32, torch.float64)
_STRIDED = torch.strided
_is_compiling = torch.compiler.is_compiling
_tracing_state = torch._C._get_tracing_state
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes: Callable[[], list[Any]] = _get_current_function_mode_stack
_has_function_mode = torch._C._is_torch_function_mode_enabled
_any_autocast = torch._C._is_any_autocast_enabled

watchers: list[list[tuple[str, str]]] = []


@contextmanager
def watch() -> Iterator[list[tuple[str, str]]]:
    """Collect (site or module, reason) for every call in the block that runs unfused.

    A linear layer without an epilogue is none of them: whether it is replaced is a question of speed alone.
    Calls inside a graph compiled by `torch.compile` decide while it is compiled: nothing is collected at later calls.

    Example:
        >>> with epigemm.fusion.watch() as unfused:
        ...     model(x)
        >>> unfused
        []
    """
    seen: list[tuple[str, str]] = []
    watchers.append(seen)
    try:
        yield seen
    finally:
        watchers.remove(seen)


def tell_watchers(name: str, reason: str) -> None:
    """Tell whoever watches that a call ran unfused."""
    for seen in watchers:
        seen.append((name, reason))


class Ref:
    """Where a site finds one operand: an input, or an attribute of one."""

    def __init__(self, position: int, attribute: str = "") -> None:
        self.position, self.attribute = position, attribute

    def read(self, inputs: Sequence[Any]) -> Any:
        """The operand, as it is now."""
        value = inputs[self.position]
        attribute = self.attribute
        if not attribute:
            return value
        # Modules look for attributes elsewhere first, which takes longer than the rest of this.
        parameters = value._parameters
        return parameters[attribute] if attribute in parameters else getattr(value, attribute)


class NormRefs:
    """Where a site finds its BatchNorm; `index` is that of a called module's input, else None."""

    def __init__(self, vectors: tuple[Ref | None, ...], eps: Ref | float, index: int | None) -> None:
        self.vectors, self.eps, self.index = vectors, eps, index

    def trains(self, inputs: Sequence[Any]) -> bool:
        """Whether a called module needs the batch's statistics."""
        if self.index is None or type(inputs[self.index]) is not nn.BatchNorm1d:
            return False
        module = inputs[self.index]
        return bool(module.training or module.running_mean is None or module.running_var is None)


class Site:
    """One fused call. Calling it computes what the replaced nodes computed.

    Args:
        name: where it is, for people.
        function: the public function that computes it.
        x: where to find the product's first operand.
        weight: and the second.
        unfused: the replaced nodes, as a function of None and the inputs.
        of_forwards: the same, calling forwards of modules, which have no hooks.
        bias: a vector that is added to the product.
        no_bias: a layer's bias, which was None.
        scale: a vector that the product is multiplied by.
        scalar: the epilogue's number.
        norm: the BatchNorm behind it.
        before_norm: the site without it, for when it trains.
        weight_is_kn: the weight is [K, N].
        added_bias: the bias is none of the layer's own.
        of_matrices: the function that was called takes matrices only.
        is_parameter: whether the weight, if it is a parameter, may keep its fp16 pieces between calls; None: look.
            Writes that torch does not count (`weight.data.copy_(...)`) would go unseen: whoever asks for it calls
            `repack()` after these.
        modules: positions of the called modules among the inputs, and their classes.
    """

    remembers = False
    """Whether it is there from call to call, and ready to remember something."""

    def __init__(
        self,
        name: str,
        function: str,
        x: Ref,
        weight: Ref,
        unfused: Callable[..., Any],
        of_forwards: Callable[..., Any],
        bias: Ref | None = None,
        no_bias: Ref | None = None,
        scale: Ref | None = None,
        scalar: Ref | float | None = None,
        norm: NormRefs | None = None,
        before_norm: Site | None = None,
        weight_is_kn: bool = False,
        added_bias: bool = False,
        of_matrices: bool = False,
        is_parameter: bool | None = False,
        modules: tuple[tuple[int, type[nn.Module]], ...] = (),
    ) -> None:
        self.name, self.function = name, function
        self._x, self._weight, self._bias, self._no_bias = x, weight, bias, no_bias
        self._scale, self._scalar, self._norm, self._before_norm = scale, scalar, norm, before_norm
        self._unfused, self._of_forwards = unfused, of_forwards
        self._weight_is_kn, self._added_bias, self._of_matrices = weight_is_kn, added_bias, of_matrices
        self._is_parameter = is_parameter
        self._modules = modules

    def get_ready(self) -> None:
        """To remember things from call to call."""
        self.remembers = True
        self._rest, self._repeat = Rest(), Repeat()
        self._refs = tuple(self._all_refs())

    def __repr__(self) -> str:
        return f"<fused {self.function} {self.name}>"

    def __call__(self, *inputs: Any) -> Any:
        """Compute the chain; the inputs are those of `origins`."""
        eager = self.remembers and not _is_compiling()
        if eager and self._rest.left and not watchers and self._rest.lasts(self._x.read(inputs)):
            return self._unfused(None, *inputs)
        norm = self._norm
        if norm is not None and norm.index is not None and norm.trains(inputs):
            assert self._before_norm is not None
            return inputs[norm.index](self._before_norm(*inputs))
        # Modules that are not what they were may lack the attributes that are read next.
        reason = self._why_not_modules(inputs)
        if not reason and not _is_compiling() and has_global_hooks() and self._modules:
            reason = "there are global module hooks"
        if not reason and eager and self._repeat.holds([ref.read(inputs) for ref in self._refs]):
            Fused.calls += 1
            return self._fused(inputs)
        if reason:
            return self._run_unfused(self._unfused, inputs, reason)
        x, weight, bias = self._x.read(inputs), self._weight.read(inputs), None
        if self._bias is not None:
            bias = self._bias.read(inputs)
        if self.function == chains.LINEAR and not _alone_is_faster(x):
            self._begin_to_rest(x)
            return self._of_forwards(None, *inputs)
        reason = self._why_not(inputs, x, weight, bias)
        if reason:
            if reason in worth.REASONS:
                self._begin_to_rest(x)
            return self._run_unfused(self._of_forwards, inputs, reason)
        if eager:
            self._repeat.remember([ref.read(inputs) for ref in self._refs])
            Fused.calls += 1
        return self._fused(inputs)

    def _run_unfused(self, unfused: Callable[..., Any], inputs: Sequence[Any], reason: str) -> Any:
        if not _is_compiling() and watchers:
            tell_watchers(self.name, reason)
        return unfused(None, *inputs)

    def _begin_to_rest(self, x: Any) -> None:
        if self.remembers and not _is_compiling():
            self._rest.begin(x)

    def _fused(self, inputs: Sequence[Any]) -> Tensor:
        """The fused call."""
        x, weight = self._x.read(inputs), self._weight.read(inputs)
        bias = None if self._bias is None else self._bias.read(inputs)
        keeps = self._is_parameter if self._is_parameter is not None else isinstance(weight, nn.Parameter)
        pack_use = packs.KEEP if keeps else packs.FIND
        if self._weight_is_kn:
            weight = weight.t()
        if self._scale is None and self._norm is None:
            scalar = self._scalar.read(inputs) if isinstance(self._scalar, Ref) else self._scalar
            epilogue = _EPILOGUES[self.function]
            return _call.linear(epilogue, x, weight, bias, scalar, None, None, False, pack_use)
        scale = None if self._scale is None else self._scale.read(inputs)
        mean, var, gamma, beta, eps = None, None, None, None, 0.0
        if self._norm is not None:
            mean, var, gamma, beta = (None if ref is None else ref.read(inputs) for ref in self._norm.vectors)
            eps = self._norm.eps.read(inputs) if isinstance(self._norm.eps, Ref) else self._norm.eps
        vectors = (bias, scale, mean, var, gamma, beta)
        return _call.linear_folded(x, weight, vectors, eps, None, None, False, pack_use)

    # --- whether the fused call may stand for the chain ---

    def _why_not_modules(self, inputs: Sequence[Any]) -> str:
        """Why calling the chain's modules is more than their mathematics; empty where it is not."""
        for index, kind in self._modules:
            module = inputs[index]
            if type(module) is not kind:
                return f"the {kind.__name__} was replaced by a {type(module).__name__}"
            if reason := why_not_callable(module):
                return reason
        return ""

    def _why_not(self, inputs: Sequence[Any], x: Any, weight: Any, bias: Any) -> str:
        """Why this call must run the replaced nodes; empty where it need not."""
        if not _is_plain(x) or not _is_plain(weight):
            return "an argument is no plain strided tensor of fp16, bf16, fp32 or fp64"
        if reason := worth.why_not(self.function, x, weight, keeps_pack=self._is_parameter is not False):
            return reason
        if self._no_bias is not None and self._no_bias.read(inputs) is not None:
            return "the layer has got a bias of its own"
        if type(x) in worth.REAL and not _is_compiling():  # else a compiler's own modes are active
            if _tracing_state() is not None or forward_ad._current_level >= 0:
                return "under torch.jit.trace or forward-mode derivatives"
            if _dispatch_modes() or (_has_function_mode() and _is_watched()):
                return "a mode that sees every operator is active"
        if not (x.is_cuda or x.is_cpu):
            return f"x is on {x.device}"
        return self._why_not_product(inputs, x, weight, bias)

    def _why_not_product(self, inputs: Sequence[Any], x: Tensor, weight: Tensor, bias: Any) -> str:
        rank = x.dim()
        if rank == 0 or (self._of_matrices and rank != 2) or weight.dim() != 2 or weight.device != x.device:
            return "the product's shapes or devices do not fit"
        columns, depth = weight.shape
        if self._weight_is_kn:
            columns, depth = depth, columns
        if x.shape[-1] != depth:
            return "the product's shapes do not fit"
        dtype = x.dtype
        if _any_autocast() and torch.is_autocast_enabled(x.device.type):
            if dtype == torch.float64 or weight.dtype == torch.float64:
                return "fp64 under autocast"
            dtype = torch.get_autocast_dtype(x.device.type)
            own_bias: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32)
        else:
            if weight.dtype != dtype:
                return f"x is {dtype}, the weight {weight.dtype}"
            own_bias = (dtype,)
        if bias is not None:
            accepted = (dtype,) if self._added_bias else own_bias
            if not _is_vector(bias, columns, x, accepted):
                return "the bias is no vector of the product's dtype and width on its device"
        return self._why_not_epilogue(inputs, x, dtype, columns)

    def _why_not_epilogue(self, inputs: Sequence[Any], x: Tensor, dtype: torch.dtype, columns: Any) -> str:
        if self._scale is not None and not _is_vector(self._scale.read(inputs), columns, x, (dtype,)):
            return "the scale is no vector of the product's dtype and width on its device"
        if isinstance(self._scalar, Ref):
            scalar = self._scalar.read(inputs)
            if not _is_plain(scalar) or scalar.dim() != 0 or scalar.device != x.device:
                return "the scalar is no 0-d floating tensor on x's device"
            if scalar.dtype != dtype and dtype not in _WIDE:
                return "PyTorch may round the scalar to 16 bits first"
        if self._norm is not None:
            if x.dim() != 2:
                return "BatchNorm of an input that is not [M, N]"
            return self._why_not_norm(inputs, self._norm, x, dtype, columns)
        return ""

    def _why_not_norm(
        self, inputs: Sequence[Any], norm: NormRefs, x: Tensor, dtype: torch.dtype, columns: Any
    ) -> str:
        eps = norm.eps.read(inputs) if isinstance(norm.eps, Ref) else norm.eps
        if not is_number(eps) or not 0 <= eps < math.inf:
            return "BatchNorm's eps is no finite number, or negative"
        vectors = [ref.read(inputs) for ref in norm.vectors if ref is not None]
        given = [vector for vector in vectors if vector is not None]
        accepted = (dtype, compute_dtype(dtype))
        if not all(_is_vector(vector, columns, x, accepted) for vector in given):
            return "a vector of BatchNorm is not of the product's width, dtype or device"
        if any(vector.dtype != given[0].dtype for vector in given):
            return "the vectors of BatchNorm differ in dtype"
        return ""

    def _all_refs(self) -> Iterator[Ref]:
        """Where to find all that a call is computed from, x first."""
        for ref in (self._x, self._weight, self._bias, self._no_bias, self._scale, self._scalar):
            if isinstance(ref, Ref):
                yield ref
        if self._norm is not None:
            yield from (ref for ref in (*self._norm.vectors, self._norm.eps) if isinstance(ref, Ref))


def _is_watched() -> bool:
    """Whether somebody sees the functions that are called, beside torch's own default device."""
    return any(type(mode) is not DeviceContext for mode in _function_modes())


def _alone_is_faster(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_cuda and x.dtype == torch.float32 and not _any_autocast()


def _is_plain(tensor: Any) -> bool:
    """Whether an operand is a tensor that epigemm's operators take, not a subclass with a meaning of its own."""
    if type(tensor) not in _PLAIN:
        return False
    return tensor.layout is _STRIDED and not tensor.is_nested and tensor.dtype in DTYPES


def _is_vector(vector: Any, columns: Any, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> bool:
    if not _is_plain(vector) or vector.dtype not in dtypes or vector.device != x.device:
        return False
    return bool(vector.dim() == 1 and vector.shape[0] == columns)


def call(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of a module, with all that it may do."""
    return module(*args, **kwargs)
