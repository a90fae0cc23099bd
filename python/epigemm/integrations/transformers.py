"""Hugging Face transformers: the experts of its mixtures by `epigemm.grouped_linear` (transformers 5.24 and newer).

`register()` puts "epigemm" among the implementations of experts that transformers knows:

    epigemm.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="epigemm")

Where no gradient is recorded, the layer of a model in 16 bits is a sort, a gather, one kernel for the gated product of
all experts, one for the product behind it with its bias and the routing weights, and a sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epigemm.groups import grouped_linear, grouped_linear_glu
from epigemm.nn.experts import mixture, weighted_linear

_NAME = "epigemm"
_LEAST_VERSION = (5, 24)
_OF_CLASSES = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLU": "relu",
    "Tanh": "tanh",
}
"""The activations of transformers' `ACT2CLS` that `grouped_linear` has, by the names of their classes."""


def register() -> None:
    """Make "epigemm" an `experts_implementation` of transformers. A second call changes nothing.

    Raises:
        ImportError: transformers is missing, or older than version 5.24.
    """
    try:
        import transformers
    except ImportError:
        raise ImportError("transformers: got none; accepted is version 5.24 or newer") from None
    first, second, *_ = transformers.__version__.split(".")
    if (int(first), int(second)) < _LEAST_VERSION:
        raise ImportError(f"transformers: got version {transformers.__version__}; accepted is 5.24 or newer")
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_NAME, experts_forward)


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The layer of experts `self`, one of transformers' classes.

    Args:
        self: has the experts' weights, and says how they lie: `has_gate`, `has_bias`, `is_transposed`, ...
        hidden_states: `[tokens, hidden]`.
        top_k_index: `[tokens, k]`: the experts of each token. One that is not among the layer's (`num_experts` and
            more, on another rank) adds nothing.
        top_k_weights: `[tokens, k]`: what their results are multiplied by.

    Returns:
        `[tokens, hidden]`.
    """
    down, bias = _as_rows(self, self.down_proj), self.down_proj_bias if self.has_bias else None

    def expert(rows: Tensor, offs: Tensor, share: Tensor) -> Tensor:
        is_parallel = self._is_expert_parallel
        elsewhere = (
            (torch.arange(len(rows), device=rows.device) >= offs[-1])[:, None] if is_parallel else None
        )
        hidden = _zeroed(_activated(self, rows, offs, elsewhere), elsewhere)
        if not self.has_post_expert_norm:
            return _zeroed(weighted_linear(hidden, down, bias, share, offs), elsewhere)
        product = _zeroed(grouped_linear(hidden, down, bias, offs=offs), elsewhere)
        return self.post_expert_norm(product) * share[:, None]  # type: ignore[no-any-return]

    x = hidden_states.to(down.dtype)
    return mixture(x, top_k_index, top_k_weights, self.num_experts, expert).to(hidden_states.dtype)


def _activated(self: Any, x: Tensor, offs: Tensor, elsewhere: Tensor | None) -> Tensor:
    """What stands between the two products of each expert."""
    from transformers.integrations.moe import _default_apply_gate

    activation = _OF_CLASSES.get(type(getattr(self, "act_fn", None)).__name__)
    if not self.has_gate:
        bias = self.up_proj_bias if self.has_bias else None
        weight = _as_rows(self, self.up_proj)
        product = grouped_linear(x, weight, bias, offs=offs, epilogue=activation or "identity")
        return product if activation else self.act_fn(product)
    weight, bias = _as_rows(self, self.gate_up_proj), self.gate_up_proj_bias if self.has_bias else None
    if activation and self.is_concatenated and type(self)._apply_gate is _default_apply_gate:
        return grouped_linear_glu(x, weight, bias, offs=offs, activation=activation)
    return self._apply_gate(_zeroed(grouped_linear(x, weight, bias, offs=offs), elsewhere))  # type: ignore[no-any-return]


def _as_rows(self: Any, weight: Tensor) -> Tensor:
    """`[experts, out, in]`."""
    return weight.transpose(-2, -1) if self.is_transposed else weight


def _zeroed(product: Tensor, elsewhere: Tensor | None) -> Tensor:
    """Without what is undefined behind the last group."""
    return product if elsewhere is None else product.masked_fill(elsewhere, 0)
