"""The experts of a mixture as one layer: a sort, a product of all experts, another one behind it, a sum."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from epigemm.arguments import checks
from epigemm.autograd.group_products import by_expert, by_token_summed
from epigemm.decorator import UserEpilogue
from epigemm.epilogues.library import FUNCTIONS
from epigemm.functional import gate_function
from epigemm.groups import ACTIVATIONS, grouped_linear, grouped_linear_glu

_ROW_SCALE = UserEpilogue(FUNCTIONS["row_scale"])


def mixture(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    count: int,
    expert: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """The sum of what a token's experts make of it.

    Args:
        x: `[T, K]`, a row for each token.
        indices: `[T, k]`: the experts of each token, from 0 to `count` - 1.
        weights: `[T, k]`.
        count: the number of experts.
        expert: called with the rows of all experts, group by group, where the groups end, and the rows' weights; it
            multiplies its results by these.

    Returns:
        `[T, N]`, N the columns of what `expert` returns.
    """
    experts, order = torch.sort(indices.reshape(-1))
    every = torch.arange(count, device=experts.device, dtype=experts.dtype)
    offs = torch.searchsorted(experts, every, right=True, out_int32=True)
    by_token = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    routing = (order, by_token, indices.shape[1])
    shares = by_expert(weights.reshape(-1, 1), order, by_token, 1)[:, 0]
    result = expert(by_expert(x, *routing), offs, shares)
    return by_token_summed(result, *routing)


def weighted_linear(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, share: Tensor, offs: Tensor
) -> Tensor:
    """D[m] = (hidden[m] @ weight[g].T + bias[g]) * share[m], g the group of row m; `share` is not rounded."""
    wide = torch.float32 if hidden.element_size() == 2 else hidden.dtype
    return _ROW_SCALE(hidden, weight, bias, share.to(wide), offs=offs)


class Experts(nn.Module):
    """y[t] = sum over j of weights[t, j] * expert(indices[t, j])(x[t]): the experts of a mixture, of all tokens.

    Expert e is `activation(x @ W1[e].T + b1[e]) * (x @ W2[e].T + b2[e])`, or without a gate
    `activation(x @ W1[e].T + b1[e])`; and behind that `@ down[e].T + down_bias[e]`. The layer sorts the tokens' rows by
    their experts, and calls `epigemm.grouped_linear_glu` (or `grouped_linear`) and a grouped product whose epilogue
    adds the bias and multiplies by the weights. Where rows are whole 16 bytes, nothing waits for the GPU in bf16, and
    in fp16 and fp32 if no gradient is recorded; PyTorch's grouped product, which computes the rest, waits in fp32 and
    fp16, and breaks a compiler's graph there if a gradient is recorded.
    Mixtures: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538.

    `weight` and `bias` have the rows of both products of an expert, the activated ones first, as `epigemm.linear_glu`
    takes them. A layer over existing parameters (`from_parameters`) may also have `weight2` and `bias2`.

    Args:
        experts: their number, E.
        in_features: K.
        hidden_features: N.
        bias: whether both layers of each expert have one.
        activation: as of `epigemm.linear_glu`; without a gate what `epigemm.grouped_linear` takes as its epilogue.
        gated: whether the activated product is multiplied by another one.
        device: the parameters' device.
        dtype: the parameters' type.

    Shape:
        x `[T, K]`; indices `[T, k]`, int64 or int32, from 0 to E - 1 (not checked: that would wait for the GPU);
        weights `[T, k]`, floating. The result is `[T, K]`, of x's dtype, under autocast of autocast's. The parameters:
        weight `[E, 2N, K]` or, without a gate, `[E, N, K]`; bias `[E, 2N]` or `[E, N]`; down `[E, K, N]`; down_bias
        `[E, K]`.

    Raises:
        TypeError: an argument is not a tensor; an activation is neither a string nor, without a gate, a function that
            `epigemm.epilogue` made.
        ValueError: an unknown activation; parameters whose shapes do not fit each other.
        RuntimeError: of a call: a shape, dtype or device that does not fit.

    Example:
        >>> layer = epigemm.nn.Experts(8, 64, 32)
        >>> weights, indices = torch.randn(5, 8).softmax(1).topk(2)
        >>> layer(torch.randn(5, 64), indices, weights).shape
        torch.Size([5, 64])
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    weight2: nn.Parameter | None
    bias2: nn.Parameter | None
    down: nn.Parameter
    down_bias: nn.Parameter | None

    def __init__(
        self,
        experts: int,
        in_features: int,
        hidden_features: int,
        bias: bool = False,
        *,
        activation: str | UserEpilogue = "silu",
        gated: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        rows = 2 * hidden_features if gated else hidden_features

        def made(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(experts, *shape, device=device, dtype=dtype))

        biases = (made(rows), made(in_features)) if bias else (None, None)
        self._take(activation, made(rows, in_features), made(in_features, hidden_features), *biases)
        self.reset_parameters()

    @classmethod
    def from_parameters(
        cls,
        weight: nn.Parameter,
        down: nn.Parameter,
        bias: nn.Parameter | None = None,
        down_bias: nn.Parameter | None = None,
        *,
        weight2: nn.Parameter | None = None,
        bias2: nn.Parameter | None = None,
        activation: str | UserEpilogue = "silu",
    ) -> Experts:
        """The layer over these parameter objects.

        It has a gate if weight has twice as many rows as down has columns, or if there is a weight2.

        Raises:
            TypeError: an argument is not an `nn.Parameter` (or None where that is accepted).
            ValueError: shapes that do not fit each other.
        """
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._take(activation, weight, down, bias, down_bias, weight2, bias2)
        return layer

    def _take(self, activation: str | UserEpilogue, *parameters: nn.Parameter | None) -> None:
        names = ("weight", "down", "bias", "down_bias", "weight2", "bias2")
        given = dict(itertools.zip_longest(names, parameters))
        _require_fitting(**given)
        for name, parameter in given.items():
            self.register_parameter(name, parameter)
        if self.gated or not isinstance(activation, UserEpilogue):
            gate_function(activation)  # type: ignore[arg-type]  # which checks it
        if not self.gated and activation == "sigmoid":
            raise ValueError(
                "activation: got 'sigmoid'; accepted without a gate are the epilogues of grouped_linear: "
                f"{', '.join(map(repr, ACTIVATIONS))}"
            )
        self.activation = activation

    @property
    def gated(self) -> bool:
        """Whether the activated product is multiplied by another one."""
        return self.weight2 is not None or self.weight.shape[1] != self.down.shape[2]

    def reset_parameters(self) -> None:
        """Draw the parameters anew: those of each expert as `torch.nn.Linear` draws its own."""
        for name, parameter in self.named_parameters():
            columns = (self.down if name.startswith("down") else self.weight).shape[2]
            bound = 1 / math.sqrt(max(columns, 1))
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Apply the layer to tokens `[T, K]` with the experts and weights of each, `[T, k]`."""
        _require_routing(x, indices, weights, self.down.shape[1])
        return mixture(x, indices, weights, self.weight.shape[0], self._expert)

    def _expert(self, rows: Tensor, offs: Tensor, share: Tensor) -> Tensor:
        hidden: Tensor
        if self.gated:
            second: Any = {"weight2": self.weight2, "bias2": self.bias2, "activation": self.activation}
            hidden = grouped_linear_glu(rows, self.weight, self.bias, offs=offs, **second)
        else:
            hidden = grouped_linear(rows, self.weight, self.bias, offs=offs, epilogue=self.activation)
        return weighted_linear(hidden, self.down, self.down_bias, share, offs)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        count, features, hidden = self.down.shape
        sizes = (
            f"experts={count}, in_features={features}, hidden_features={hidden}, bias={self.bias is not None}"
        )
        return f"{sizes}, activation={self.activation!r}, gated={self.gated}"


def _require_fitting(weight: Any, down: Any, **others: Any) -> None:
    """TypeError unless these are parameters, ValueError unless their shapes fit each other."""
    for name, each in {"weight": weight, "down": down, **others}.items():
        is_absent = each is None and name in others
        if not is_absent and not isinstance(each, nn.Parameter):
            accepted = "a torch.nn.Parameter" + (" or None" if name in others else "")
            raise TypeError(f"{name}: got {type(each).__name__}; accepted is {accepted}")
    if down.dim() != 3:
        _refuse("down", down, "[experts, in_features, hidden_features]")
    count, features, hidden = down.shape
    is_pair = others["weight2"] is not None
    fitting = [[count, rows, features] for rows in (hidden, 2 * hidden)[: 1 if is_pair else 2]]
    if list(weight.shape) not in fitting:
        _refuse("weight", weight, f"{' or '.join(map(str, fitting))}, as down has shape {list(down.shape)}")
    of_weight = dict.fromkeys(("bias", "bias2"), weight.shape[:2])
    for name, shape in {**of_weight, "down_bias": down.shape[:2], "weight2": weight.shape}.items():
        if others[name] is not None and others[name].shape != shape:
            _refuse(name, others[name], f"{list(shape)}")
    if others["bias2"] is not None and not is_pair:
        raise ValueError(
            "bias2: got a parameter without a weight2; accepted is None, and a bias for all rows of weight"
        )


def _require_routing(x: Tensor, indices: Tensor, weights: Tensor, features: int) -> None:
    """TypeError unless tensors, RuntimeError unless each token has experts and as many weights."""
    checks.tensors(x=x, indices=indices, weights=weights)
    if x.dim() != 2 or x.shape[1] != features:
        raise RuntimeError(f"x: got shape {list(x.shape)}; accepted is [tokens, {features}]")
    if indices.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"indices: got dtype {indices.dtype}; accepted are torch.int64 and torch.int32")
    if indices.dim() != 2 or indices.shape[0] != x.shape[0] or not indices.shape[1]:
        raise RuntimeError(
            f"indices: got shape {list(indices.shape)}; accepted is [{x.shape[0]}, k], the experts of each token"
        )
    if weights.shape != indices.shape or not weights.is_floating_point():
        raise RuntimeError(
            f"weights: got shape {list(weights.shape)} and dtype {weights.dtype}; accepted is "
            f"{list(indices.shape)}, floating: a number for each of indices"
        )


def _refuse(name: str, got: Tensor, accepted: str) -> None:
    raise ValueError(f"{name}: got shape {list(got.shape)}; accepted is {accepted}")
