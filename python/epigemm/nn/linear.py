"""A linear layer with an epilogue of the user's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from epigemm import docstrings
from epigemm.decorated import Decorated
from epigemm.epilogues.library import BIAS
from epigemm.nn.base import CallOptions, EpilogueLinear, Options, pack_use
from epigemm.results_epilogue import ResultsEpilogue
from epigemm.user_epilogue import UserEpilogue

if TYPE_CHECKING:
    from typing_extensions import Unpack


@docstrings.of_layer
class Linear(EpilogueLinear):
    """A linear layer with an epilogue of the user's: epilogue(x @ weight.T, operands...) in one kernel.

    If the epilogue has an operand `bias: PerColumn`, it is the layer's own bias. The other operands are arguments of
    the call, by position or name. Without an epilogue the layer computes the product and the bias. With an epilogue of
    several results the layer returns several.

    Raises:
        TypeError: `epilogue` is not an epilogue; `bias=True`, and it has no operand `bias: PerColumn`; `bias=False`,
            and it has one without the default None.

    Example:
        >>> layer = epigemm.nn.Linear(64, 32, epilogue=swish_clamp)
        >>> y = layer(x, residual, limit=0.5)
    """

    _epilogue = BIAS

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool | None = None,
        *,
        epilogue: UserEpilogue | ResultsEpilogue | None = None,
        **options: Unpack[Options],
    ) -> None:
        if epilogue is not None and not isinstance(epilogue, Decorated):
            raise TypeError(
                f"epilogue: got {type(epilogue).__name__}; accepted is what epigemm.epilogue makes of a function"
            )
        takes_bias = epilogue is None or epilogue.takes_bias
        if bias and not takes_bias:
            raise TypeError(
                "bias: got True for an epilogue without an operand bias: PerColumn; accepted is False"
            )
        specs = () if epilogue is None else epilogue.traced.operands
        if (
            bias is False
            and takes_bias
            and any(each.name == "bias" and not each.is_optional for each in specs)
        ):
            raise TypeError(
                "bias: got False for an epilogue that needs its operand bias; accepted is True, or an epilogue with "
                "bias: PerColumn = None"
            )
        has_bias = takes_bias if bias is None else bias
        super().__init__(in_features, out_features, has_bias, **options)
        self.epilogue = epilogue

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        epilogue: UserEpilogue | ResultsEpilogue | None = None,
        **options: Unpack[CallOptions],
    ) -> Linear:
        """The layer over the parameter objects of `linear`."""
        bias = isinstance(linear, nn.Linear) and linear.bias is not None
        return cls._sharing(linear, options, bias=bias, epilogue=epilogue)

    def forward(self, x: Tensor, *operands: Tensor | float | None, **named: Tensor | float | None) -> Any:
        """Apply the layer. `operands`: those of the epilogue, without the layer's own bias."""
        if self.epilogue is None:
            if operands or named:
                raise TypeError("operands: got some for a layer without an epilogue; accepted is x alone")
            return super().forward(x)
        weight, bias = self.weight, self.bias
        if self.epilogue.takes_bias:
            others = [spec.name for spec in self.epilogue.traced.operands if spec.name != "bias"]
            if len(operands) > len(others) or "bias" in named:
                raise TypeError(
                    f"operands: got {len(operands)} and {sorted(named)}; accepted are {others}, beside the layer's bias"
                )
            by_place = dict(zip(others, operands, strict=False))
            if twice := by_place.keys() & named.keys():
                raise TypeError(f"operands: got {sorted(twice)} twice; accepted is one value each")
            operands, named = (), {**by_place, **named, **({} if bias is None else {"bias": bias})}
        return self.epilogue.call(
            x, weight, operands, named, None, self.precision, self.strict, pack_use(weight)
        )

    @property
    def _epilogue_name(self) -> str | None:
        return None if self.epilogue is None else self.epilogue.traced.name
