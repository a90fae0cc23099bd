"""What the library offers: the epilogues of the public functions.

The functors of `csrc/epilogue/registry.def` are written in C++; a test holds both halves together. All others are
generated from their formula.
"""

from __future__ import annotations

from epigemm._native import registry
from epigemm.epilogues import formulas
from epigemm.epilogues.declaration import Traced
from epigemm.epilogues.registry import EPILOGUES, LINKED, Epilogue, typed

_TEXTS = {
    "bias": "D = acc + bias[n]",
    "bias_relu": "D = relu(acc + bias[n])",
    "sigmoid_scale_residual": "z = acc + bias[n]; D = z + scale * sigmoid(z)",
    "scale_batch_norm": "D = multiplier[n] * acc + offset[n]",
    "relu_div": "D = relu(acc + bias[n]) / divisor",
    "sigmoid": "D = sigmoid(acc)",
    "bias_gelu": "z = acc + bias[n]; D = z (1 + erf(z / sqrt(2))) / 2",
    "bias_gelu_tanh": "z = acc + bias[n]; D = z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) / 2",
    "bias_silu": "z = acc + bias[n]; D = z sigmoid(z)",
    "bias_tanh": "D = tanh(acc + bias[n])",
}
"""The formula of each functor in csrc/epilogue."""


def traced(name: str) -> Traced:
    """One of `formulas.FORMULAS`, as if it had been traced. Calls may leave its bias out."""
    return Traced(name, *formulas.FORMULAS[name], is_own=True)


for _number, _half in enumerate(registry()):
    _name, _traced = _half["name"], traced(_half["name"])
    _about = _number, _half["functor"]
    EPILOGUES[_name] = Epilogue(
        _name, _TEXTS[_name], _traced, _traced.operands, *_about, linear=_half["linear"]
    )

BIAS, BIAS_RELU = EPILOGUES["bias"], EPILOGUES["bias_relu"]
SIGMOID, SIGMOID_SCALE_RESIDUAL = EPILOGUES["sigmoid"], EPILOGUES["sigmoid_scale_residual"]
SCALE_BATCH_NORM, RELU_DIV = EPILOGUES["scale_batch_norm"], EPILOGUES["relu_div"]
BIAS_SILU, BIAS_TANH = EPILOGUES["bias_silu"], EPILOGUES["bias_tanh"]
_GELUS = {"none": EPILOGUES["bias_gelu"], "tanh": EPILOGUES["bias_gelu_tanh"]}


def gelu_epilogue(approximate: str) -> Epilogue:
    """The epilogue with this GELU.

    Raises:
        TypeError: `approximate` is no string.
        ValueError: there is no such form.
    """
    if not isinstance(approximate, str):
        raise TypeError(
            f"approximate: got {type(approximate).__name__}; accepted is {' or '.join(map(repr, _GELUS))}"
        )
    if approximate not in _GELUS:
        raise ValueError(f"approximate: got {approximate!r}; accepted is {' or '.join(map(repr, _GELUS))}")
    return _GELUS[approximate]


FUNCTIONS = {name: traced(name) for name in formulas.FORMULAS if name not in EPILOGUES}
"""Those that have no functor in C++."""


def named(name: str) -> Epilogue | None:
    """The epilogue of this name: one that was made, or such as `residual.00`, with each operand's form.

    An exported program may be the first to use one.
    """
    if found := EPILOGUES.get(name) or LINKED.get(name):
        return found
    formula, _, forms = name.partition(".")
    of = FUNCTIONS.get(formula)
    if of is None or not forms or forms.strip("0123") or len(forms) != len(of.operands):
        return None
    shared = [each in "23" for each in forms]
    return typed(of, [each in "13" for each in forms], shared if any(shared) else ())
