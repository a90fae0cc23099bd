"""Docstrings of public functions name every argument, what is returned and what is raised."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import epigemm
from epigemm import docstrings

FUNCTIONS = [
    name for name in epigemm.__all__ if name.startswith("linear") or name in ("sigmoid", "bias_relu")
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_described(name: str) -> None:
    function = getattr(epigemm, name)
    text = inspect.getdoc(function) or ""
    arguments = text.partition("Args:")[2].partition("Returns:")[0]
    described = [line.split(":")[0].strip() for line in arguments.splitlines() if line.startswith("    ")]
    names = list(inspect.signature(function).parameters)
    assert [each for each in described if each in names] == names
    assert text.index("Args:") < text.index("Returns:") < text.index("Raises:") < text.index("Example:")


def test_sections_follow_the_signature() -> None:
    def scaled(x: Any, weight: Any, scale: Any = 1.0, eps: Any = 1e-5) -> None:
        """Scale.

        Example:
            >>> scaled(x, weight)
        """

    text = inspect.getdoc(docstrings.of_linear(scaled)) or ""
    assert "    scale: a number, or a 0-d floating tensor" in text
    assert "ValueError: unknown precision; negative or non-finite eps" in text
    assert "scale neither a number nor a tensor" in text
    assert text.startswith("Scale.\n") and text.endswith(">>> scaled(x, weight)")


def test_a_layer_has_the_arguments_that_it_takes() -> None:
    class Layer:
        """A layer.

        Example:
            >>> Layer(1, 2)
        """

        def __init__(self, in_features: int, out_features: int) -> None:
            pass

    text = inspect.getdoc(docstrings.of_layer(Layer)) or ""
    assert "    in_features: K.\n    out_features: N.\n    precision:" in text and "divisor" not in text
    assert "`[..., K]` to `[..., N]`." in text
