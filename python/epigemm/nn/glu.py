"""The gated layer of transformers: two products of one input, of one layer of 2N rows or of two layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from epigemm import docstrings, glu
from epigemm.nn.base import Activated, CallOptions, in_8_bits, reset_linear

if TYPE_CHECKING:
    from typing_extensions import Unpack


@docstrings.of_layer
class LinearGLU(Activated):
    """activation(x @ W1.T + b1) * (x @ W2.T + b2): the gated layers of transformers (SwiGLU, GeGLU, ...).

    `weight` `[2N, K]` and `bias` `[2N]` have the rows of both products, the activated ones first: `epigemm.linear_glu`
    says which models store them so; `from_linear` takes a layer with an even number of rows. A layer over two layers
    (`from_linears`) also has `weight2` and `bias2`, each with N rows.

    Example:
        >>> epigemm.nn.LinearGLU(64, 32, activation="gelu")(torch.randn(8, 64)).shape
        torch.Size([8, 32])
    """

    weight2: Tensor | None
    bias2: Tensor | None

    _products = 2
    _shown = ()

    @classmethod
    def from_linears(
        cls,
        linear: nn.Linear,
        linear2: nn.Linear,
        *,
        activation: str = "silu",
        **options: Unpack[CallOptions],
    ) -> LinearGLU:
        """The layer over the parameter objects of two layers, of which the first is activated.

        Llama's is `LinearGLU.from_linears(mlp.gate_proj, mlp.up_proj)`.

        Raises:
            TypeError: another class than `torch.nn.Linear`; an unknown option.
            ValueError: `linear2` has another shape or dtype than `linear`; a layer has hooks, a `forward` of its own,
                or other parameters.
        """
        return cls._over({"linear": linear, "linear2": linear2}, options, activation=activation)

    def _adopt(self, linear: nn.Linear, linear2: nn.Linear | None = None) -> None:
        if linear2 is None and linear.out_features % 2:
            raise ValueError(
                f"linear: got {linear.out_features} out_features; accepted is an even number, half for each product"
            )
        if linear2 is not None:
            shape, expected = list(linear2.weight.shape), list(linear.weight.shape)
            if shape != expected:
                raise ValueError(
                    f"linear2: got a weight of shape {shape}; accepted is {expected}, that of linear"
                )
            dtype, expected_dtype = linear2.weight.dtype, linear.weight.dtype
            if dtype != expected_dtype:
                raise ValueError(
                    f"linear2: got a weight of {dtype}; accepted is {expected_dtype}, that of linear"
                )
        super()._adopt(linear)
        self.register_parameter("weight2", getattr(linear2, "weight", None))
        self.register_parameter("bias2", getattr(linear2, "bias", None))

    def reset_parameters(self) -> None:
        """As of `FusedLinear`, for both products."""
        super().reset_parameters()
        if self.weight2 is not None:
            reset_linear(self.weight2, self.bias2)

    @property
    def out_features(self) -> int:
        """N, the size of the result's last dimension."""
        rows = self.weight.shape[0]
        return rows // 2 if self.weight2 is None else rows

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        weight, bias, second = self.weight, self.bias, (self.weight2, self.bias2)
        options: Any = {"precision": self.precision, "strict": self.strict, "activation": self.activation}
        if (scale := self._buffers.get("weight_scale")) is not None:
            x, scales = in_8_bits(x, scale)
            options.update(scales)
            if second[0] is None:  # each half has blocks of its own, if there are blocks
                (weight, weight2), biases = weight.chunk(2), (None, None) if bias is None else bias.chunk(2)
                bias, second = biases[0], (weight2, biases[1])
        return glu.linear_glu(x, weight, bias, weight2=second[0], bias2=second[1], **options)

    def extra_repr(self) -> str:
        """As of `FusedLinear`, with whether there are two weights, the second one's bias, and the activation."""
        two = "" if self.weight2 is None else f", two weights, bias2={self.bias2 is not None}"
        return f"{super().extra_repr()}{two}, activation={self.activation!r}"
