"""What `torch.utils.flop_counter` counts for the operators: their products, as for the PyTorch that they replace.

That module imports Triton, which takes longer than the rest of epigemm. So the formulas are registered when it is
imported, by whoever counts.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from math import prod
from types import ModuleType
from typing import Any

from epigemm._native import ops

_COUNTER = "torch.utils.flop_counter"
_PRODUCTS = ("linear", "linear_with_product", "linear_out", "_into")


def _register(counter: ModuleType) -> None:
    for name in _PRODUCTS:
        operator = getattr(ops, name)
        before = [each.name for each in operator.default._schema.arguments].index("x")

        def formula(*args: Any, before: int = before, **_: Any) -> int:
            x, weight = args[before : before + 2]  # their shapes
            return 2 * int(prod(x)) * int(weight[0]) if weight else 0

        counter.register_flop_formula(operator)(formula)


class _WhenImported(MetaPathFinder):
    """Registers the formulas at the end of the counter's import."""

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if fullname != _COUNTER or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _register(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if _COUNTER in sys.modules:
    _register(sys.modules[_COUNTER])
else:
    sys.meta_path.insert(0, _WhenImported())
