"""What the fused layers share: parameters, the call, how they print."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from epigemm import functional
from epigemm import route as _route
from epigemm.arguments import checks, eight_bits, invariance
from epigemm.arguments.forms import Function
from epigemm.arguments.precision import PROMOTED
from epigemm.calls import elementwise_kernels

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Unpack

_Layer = TypeVar("_Layer", bound="Layer")


class CallOptions(TypedDict, total=False):
    """The keyword arguments of a layer's calls."""

    precision: str | None
    strict: bool


class Options(CallOptions, total=False):
    """The keyword arguments of all layers."""

    device: Any
    dtype: torch.dtype | None


class Layer(nn.Module):
    """What linear layers and those with BatchNorm share: options, what they make of existing layers, how they print."""

    strict: bool = False  # also on the class, because pickles of earlier versions do not have it
    _shown: ClassVar[tuple[str, ...]] = ()  # attributes of its own that are printed

    def __init__(self, precision: str | None = None, strict: bool = False) -> None:
        super().__init__()
        self.precision = None if precision is None else checks.precision(precision)
        self.strict = checks.flag("strict", strict)

    @property
    def _epilogue_name(self) -> str | None:
        """The name of the epilogue, as in `explain`."""
        raise NotImplementedError

    @classmethod
    def _over(cls: type[_Layer], layers: dict[str, nn.Module], options: CallOptions, **own: Any) -> _Layer:
        """A layer over existing ones, by name; `own`: the constructor's arguments without the call's options."""
        for name, layer in layers.items():
            require_plain(name, layer)
        if unknown := sorted(options.keys() - CallOptions.__optional_keys__):
            raise TypeError(
                f"{unknown[0]}: got one beside a layer whose parameters are shared; accepted are precision and strict"
            )
        make: Any = cls
        module: _Layer = make(1, 1, device="meta", **own, **options)
        module._adopt(**layers)
        return module

    def _adopt(self, *layers: Any, **named: Any) -> None:
        """Take the parameters and the training mode of plain layers."""
        raise NotImplementedError

    def _share(self, name: str, tensor: Tensor | None, *, is_state: bool = True) -> None:
        """Add a tensor that was given: a Parameter stays one, another becomes a buffer, of the state dict or not."""
        self._parameters.pop(name, None)
        if isinstance(tensor, nn.Parameter):
            self.register_parameter(name, tensor)
        else:
            self.register_buffer(name, tensor, is_state)

    def extra_repr(self) -> str:
        """The options of the calls, with the batch-invariant mode if it is on now, and the layer's own arguments."""
        text = f"epilogue={self._epilogue_name}, precision={self.precision!r}"
        is_invariant = invariance.active and invariance.enabled()
        text += (", strict=True" if self.strict else "") + (", batch_invariant=True" if is_invariant else "")
        own = ((name, getattr(self, name)) for name in self._shown)
        return text + "".join(f", {n}={'tensor' if isinstance(v, Tensor) else repr(v)}" for n, v in own)


class FusedLinear(Layer):
    """A linear layer with an epilogue: the parameters of an `nn.Linear`, with its names and its initialisation.

    It is not a subclass of `nn.Linear`, because code that replaces those (quantisers, adapters) would drop the
    epilogue. A layer names its `_function`. One with further operands has a `forward` that gives them to `_run`.
    """

    weight: Tensor
    bias: Tensor | None
    _products: ClassVar[int] = 1  # in its weights

    @property
    def _function(self) -> Function:
        """What the layer computes of the product, its bias and further operands."""
        raise NotImplementedError

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        precision: str | None = None,
        strict: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(precision, strict)
        self._adopt(nn.Linear(in_features, out_features, bias, device=device, dtype=dtype))

    @classmethod
    def from_linear(cls: type[_Layer], linear: nn.Linear, **options: Unpack[CallOptions]) -> _Layer:
        """The fused layer over the parameter objects of `linear`.

        Device, dtype, training mode and `requires_grad` are those of `linear`. It must be a `torch.nn.Linear`, not of a
        subclass, because the fused layer would not run what a subclass adds.

        Raises:
            TypeError: another class, also one that is derived from `torch.nn.Linear`; an unknown option.
            ValueError: `linear` has hooks, a `forward` of its own, or other parameters, buffers or modules.
        """
        return cls._over({"linear": linear}, options)

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as the constructor does."""
        reset_linear(self.weight, self.bias)

    def _adopt(self, linear: nn.Linear) -> None:
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.training = linear.training

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Of 8 bits the weight and its scale keep their types: they stand for the same numbers in any other."""
        scale = self._buffers.get("weight_scale")

        def apply(tensor: Tensor) -> Tensor:
            found = fn(tensor)
            is_kept = tensor is scale or (scale is not None and tensor.dtype is eight_bits.E4M3)
            return tensor.to(found.device) if is_kept and found.dtype is not tensor.dtype else found

        return super()._apply(apply, recurse)  # type: ignore[no-untyped-call]

    def _set_scalar(self, name: str, value: float | Tensor) -> None:
        if isinstance(value, Tensor):  # it follows the layer; a linear layer's state has no such tensor
            self._share(name, value, is_state=False)
        else:  # Dynamo does not trace NumPy's numbers
            setattr(self, name, value if type(value) in (int, float) else checks.scalar_number(name, value))

    @property
    def in_features(self) -> int:
        """K, the size of x's last dimension."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """N, the size of the result's last dimension."""
        return self.weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return self._run(x)

    def _run(self, x: Tensor, *operands: Tensor | float) -> Tensor:
        """Apply the layer; `operands`: those of its function behind the bias."""
        # Module.__getattr__ would take half a microsecond for a parameter. Code that replaces a parameter by another
        # tensor (torch.nn.utils.parametrize, weight norm) removes it from this dictionary.
        weight: Tensor | None = self._parameters.get("weight")
        if weight is None:
            weight = self.weight
        bias: Tensor | None = self._parameters.get("bias")
        if bias is None:
            bias = self.bias
        if (scale := self._buffers.get("weight_scale")) is not None:
            x, given = in_8_bits(x, scale)
            scaled = (given["x_scale"], scale, given["out_dtype"], PROMOTED, None)
            return _route.linear(
                self._function, x, weight, (bias, *operands), None, None, self.strict, scaled
            )
        return _route.linear(self._function, x, weight, (bias, *operands), None, self.precision, self.strict)

    @property
    def _epilogue_name(self) -> str | None:
        return self._function.name

    def extra_repr(self) -> str:
        """The constructor's arguments, as `nn.Linear` prints them."""
        features = f"in_features={self.in_features}, out_features={self.out_features}"
        scale = self._buffers.get("weight_scale")
        quantised = "" if scale is None else f", quantised={eight_bits.RECIPES[scale.dim()]!r}"
        return f"{features}, bias={self.bias is not None}, {super().extra_repr()}{quantised}"


def in_8_bits(x: Tensor, weight_scale: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """x for a layer that `quantise` has made, and what its call gets besides."""
    eight_bits.check_unquantised(x)
    recipe = eight_bits.RECIPES[weight_scale.dim()]
    x8, x_scale = elementwise_kernels.quantised(x, recipe) or eight_bits.by_recipe(x, recipe)
    return x8, {"x_scale": x_scale, "weight_scale": weight_scale, "out_dtype": x.dtype}


class Activated(FusedLinear):
    """A layer with an activation that its caller names."""

    _shown: ClassVar[tuple[str, ...]] = ("activation",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: str = "silu",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(in_features, self._products * out_features, bias, **options)
        functional.gate_function(activation)  # which checks it
        self.activation = activation

    @classmethod
    def from_linear(
        cls: type[_Layer], linear: nn.Linear, *, activation: str = "silu", **options: Unpack[CallOptions]
    ) -> _Layer:
        """As of `FusedLinear`."""
        return cls._over({"linear": linear}, options, activation=activation)

    @property
    def _function(self) -> Function:
        return functional.gate_function(self.activation)


def reset_linear(weight: Tensor, bias: Tensor | None) -> None:
    """As `nn.Linear.reset_parameters`, of which this is all that it reads."""
    layer: Any = SimpleNamespace(weight=weight, bias=bias)
    nn.Linear.reset_parameters(layer)


_KINDS = {"linear": nn.Linear, "linear2": nn.Linear, "bn": nn.BatchNorm1d}
"""The class of a layer that is taken, by the name of the argument."""

_NAMES: dict[type[nn.Module], tuple[set[str], set[str]]] = {
    nn.Linear: ({"weight", "bias"}, set()),
    nn.BatchNorm1d: ({"weight", "bias"}, {"running_mean", "running_var", "num_batches_tracked"}),
}
"""By class: the names of the parameters of a plain layer, and of its buffers and modules."""

_HOOKS = tuple(name for name in vars(nn.Identity()) if name.endswith("_hooks"))
_CODES: dict[Any, Any] = {kind: kind.forward.__code__ for kind in _NAMES}
_PLAIN: tuple[Any, ...] = (Tensor.__torch_function__, nn.Parameter.__torch_function__)
_TORCH_FUNCTIONS = [getattr(each, "__func__", each) for each in _PLAIN]


def require_plain(name: str, layer: object) -> None:
    """TypeError unless a layer is exactly of its name's class; ValueError if its calls also run something else.

    A fused layer does not call the layers whose parameters it shares, so that would be dropped silently.
    """
    kind: Any = type(layer)
    accepted = _KINDS[name]
    # The projection of nn.MultiheadAttention is a subclass of Linear without changes.
    if kind is not accepted and (kind, accepted) != (NonDynamicallyQuantizableLinear, nn.Linear):
        derived = (
            "" if not issubclass(kind, accepted) else " itself, as a subclass may compute something else"
        )
        raise TypeError(f"{name}: got {kind.__name__}; accepted is a torch.nn.{accepted.__name__}{derived}")
    assert isinstance(layer, nn.Module)
    state, (parameters, others) = vars(layer), _NAMES[accepted]
    added = [key for key in _HOOKS if state[key]]
    added += [key for key in ("forward", "_call_impl", *sorted(parameters)) if key in state]
    if getattr(kind.forward, "__code__", None) is not _CODES[accepted]:
        added.append(f"{kind.__name__}.forward")
    if state.get("_compiled_call_impl") is not None:
        added.append("compile()")
    tensors = {**layer._parameters, **layer._buffers}.items()
    added += [f"a {key} of type {type(each).__name__}" for key, each in tensors if is_special(each)]
    added += sorted((layer._parameters.keys() ^ parameters) | ({*layer._buffers, *layer._modules} ^ others))
    if added:
        found = ", ".join(dict.fromkeys(added))
        raise ValueError(
            f"{name}: got a {kind.__name__} that differs from a plain one in {found}; accepted is one "
            "without hooks, a forward of its own, or other parameters, buffers and modules, which would be dropped"
        )


def is_special(tensor: Tensor | None) -> bool:
    """Whether operators on a tensor may do something else: a quantised or distributed tensor, or another subclass."""
    if tensor is None:
        return False
    overrides = type(tensor).__torch_function__
    function = getattr(overrides, "__func__", overrides)
    is_plain = any(function is each for each in _TORCH_FUNCTIONS)  # Dynamo cannot compare them otherwise
    return not is_plain or is_traceable_wrapper_subclass(tensor)
