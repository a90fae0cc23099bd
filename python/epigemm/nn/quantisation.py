"""`quantise`: layers whose weights have 8 bits, for inference. `FusedLinear` quantises x at each call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from epigemm.arguments import eight_bits
from epigemm.arguments.eight_bits import RECIPES
from epigemm.nn.base import FusedLinear, Layer, is_special, require_plain
from epigemm.nn.layers import Linear
from epigemm.results_epilogue import ResultsEpilogue

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WEIGHTS = ("weight", "weight2")
_ACCEPTED = ", ".join(map(repr, RECIPES))
# They read the weights of the layers within: epigemm's with a BatchNorm, and the fast path of torch's.
_READ_WEIGHTS = (Layer, nn.TransformerEncoderLayer)


def quantise(module: nn.Module, recipe: str = "row") -> nn.Module:
    """Give the linear layers of a model weights in `float8_e4m3fn`, for inference.

    A weight becomes `weight / scale`, rounded, and the scale a buffer `weight_scale`. At each call x is quantised in
    the same way, and both scales multiply the sums. The result has x's dtype, and the bias stays as it is. A scale is
    the largest magnitude, at least 2^-100, over 448:

    - "row": of each row of the weight, and of each row of x; `weight_scale` is `[out_features]`.
    - "tensor": of the whole weight, and of the whole x; `weight_scale` is `[]`.
    - "1x128": of each 128 x 128 numbers of the weight, and of each 128 columns of a row of x; `weight_scale` is
      `[ceil(out_features / 128), ceil(in_features / 128)]`, of a `LinearGLU` that of both products.

    Quantised are `torch.nn.Linear` itself, which becomes an `epigemm.nn.Linear`, and epigemm's layers of one result
    without a BatchNorm, with in_features of whole 16 and weights in fp32, bf16 or fp16. All else stays, also subclasses
    of `torch.nn.Linear` and `torch.nn.TransformerEncoderLayer`, which reads its weights itself. To quantise a part of a
    model, give that.

    The layers have no gradients: their parameters do not require one, and an x that does is an error. A state dict has
    the weights in 8 bits with their scales. A model that has been quantised in the same way loads it. Casts of the
    model, as `.bfloat16()`, leave both as they are. A model that casts x to the dtype of a layer's weight, as
    transformers' T5 does, is not supported. Layers that share a weight get a copy each.

    Args:
        module: the model, which is changed in place.
        recipe: "row", "tensor" or "1x128".

    Returns:
        `module`; if that is itself a `torch.nn.Linear`, the layer in its place.

    Raises:
        TypeError: `module` is no module; `recipe` is no string.
        ValueError: unknown `recipe`; no layer of `module` can be quantised; a `torch.nn.Linear` has hooks, a `forward`
            of its own, or other parameters, buffers or modules; a layer's parameter is a quantised or distributed
            tensor, or another wrapper. Nothing is changed then.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.GELU()).eval()
        >>> with torch.no_grad():
        ...     y = epigemm.nn.quantise(model)(torch.randn(8, 64))
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: got {type(module).__name__}; accepted is a torch.nn.Module")
    if not isinstance(recipe, str):
        raise TypeError(f"recipe: got {type(recipe).__name__}; accepted are {_ACCEPTED}")
    if recipe not in RECIPES:
        raise ValueError(f"recipe: got {recipe!r}; accepted are {_ACCEPTED}")
    found = [*_layers(module, "", set())]
    if not found:
        raise ValueError(
            f"module: got a {type(module).__name__} without a layer that can be quantised; accepted is one with a "
            "torch.nn.Linear or a layer of epigemm.nn, with in_features of whole 16 and weights in fp32, bf16 or fp16"
        )
    made = {each: _quantised(each, recipe) for each in dict.fromkeys(layer for _, layer in found)}
    for path, layer in found:
        if path:
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, made[layer])
    return made.get(module, module)


def _layers(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, Any]]:
    """The layers to quantise, one for each of their names: where it is, empty for the module itself, and the layer."""
    if _is_taken(module, path):
        yield path, module
    elif module not in seen and not isinstance(module, _READ_WEIGHTS):
        seen.add(module)
        for name, child in module._modules.items():
            if child is not None:
                yield from _layers(child, f"{path}.{name}" if path else name, seen)


def _is_taken(module: nn.Module, path: str) -> bool:
    is_own = isinstance(module, FusedLinear) and not isinstance(
        getattr(module, "epilogue", None), ResultsEpilogue
    )
    if not is_own and type(module) is not nn.Linear:
        return False
    weight = module._parameters.get("weight")
    columns = 0 if weight is None or weight.dtype not in _DTYPES else weight.shape[1]
    if not columns or columns % eight_bits.MULTIPLE:
        return False
    for name, each in module._parameters.items() if is_own else ():
        if is_special(each):
            raise ValueError(
                f"module: in {path or 'it'} got a {name} of type {type(each).__name__}; accepted is a torch.Tensor"
            )
    if not is_own:
        try:
            require_plain("linear", module)
        except ValueError as error:
            text = str(error).removeprefix("linear: ")
            raise ValueError(f"module: in {path or 'it'} {text}") from None
    return True


def _quantised(layer: nn.Linear | FusedLinear, recipe: str) -> FusedLinear:
    """One of epigemm's layers itself, or one in the place of PyTorch's; it shares no parameter objects."""
    made: FusedLinear = layer if isinstance(layer, FusedLinear) else Linear.from_linear(layer)
    for name, each in made._parameters.items():
        if each is not None:
            made._parameters[name] = nn.Parameter(each.detach(), requires_grad=False)
    names = [name for name in _WEIGHTS if made._parameters.get(name) is not None]
    weights: list[Tensor] = [getattr(made, name) for name in names]
    products = [each for of in weights for each in of.chunk(made._products // len(weights))]
    whole, scale = eight_bits.of_weights(products, recipe)
    for name, part in zip(names, whole.chunk(len(names)), strict=True):
        made._parameters[name] = nn.Parameter(part.clone() if weights[1:] else part, requires_grad=False)
    made.register_buffer("weight_scale", scale)
    return made
