"""`torch.library.opcheck` of the operators that a public call dispatches to."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.op import Op
from tests.ops.table import rows, some

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")

# A gradient of a row's number sums 16 terms of the size of 4. A kernel sums them in fp32; a traced graph rounds each to
# 16 bits before, by 2^-9: together 4 * 4 * 2^-9.
ROUNDED: dict[str, dict[str, Any]] = {"cpu": {}, "cuda": {"rtol": 2.0**-6, "atol": 2.0**-5}}


class Recorder(TorchDispatchMode):
    """The operators of ours, each with what it is given before it runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[str, tuple[Any, Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "epigemm" and str(func) not in self.seen:
            self.seen[str(func)] = (func, copied(args), copied(kwargs or {}))
        return func(*args, **(kwargs or {}))


def copied(given: Any) -> Any:
    return torch.utils._pytree.tree_map(
        lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t, given
    )


def with_gradient(value: Any) -> Any:
    is_leaf = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.clone().requires_grad_() if is_leaf else value


@rows("opcheck", some)
def test_opcheck(op: Op, device: torch.device, rng: torch.Generator) -> None:
    """Of an eager call, with numbers and with tensors in their place; into `out`; with gradients."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # fp32 may be split there
    recorder = Recorder()
    for tensor_numbers in (False, True):
        arguments = op.draw(rng, (19,), dtype=dtype, device=device, tensor_numbers=tensor_numbers)
        with recorder:
            op.call(**arguments)
            if op.takes_out:
                op.call(**arguments, out=torch.empty(19, 16, dtype=dtype, device=device))
    for func, args, kwargs in recorder.seen.values():
        checks = CHECKS if "_out" not in str(func) else CHECKS[:3:2]
        results = torch.library.opcheck(func, args, kwargs, test_utils=checks)
        assert all(result == "SUCCESS" for result in results.values()), (func, results)
        if "_out" not in str(func) and "into" not in str(func):  # the others have no derivative
            leaves = torch.utils._pytree.tree_map(with_gradient, args)
            results = torch.library.opcheck(func, leaves, kwargs, test_utils=CHECKS, **ROUNDED[device.type])
            assert all(result == "SUCCESS" for result in results.values()), (func, results)
    if op.name.startswith(("linear", "sigmoid", "bias_relu", "relu_div", "scale")):
        assert recorder.seen
