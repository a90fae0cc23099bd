"""`torch.autocast`: the dtype and the numbers are those of the PyTorch program under it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from tests.ops.bounds import assert_right
from tests.ops.op import COUNT, MATRIX, Arguments, Op, map_tensors, results_of, tensors_of
from tests.ops.table import few, rows
from tests.ops.test_autograd import gradients, with_leaves
from tests.support.thorough import is_thorough

of_each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


CAST = ("x", "weight", "bias", "weight2", "bias2")
"""What `F.linear` casts."""


def narrowed(op: Op, arguments: Arguments, dtype: torch.dtype) -> Iterator[Arguments]:
    """What is beside the product in fp32; each operand in 16 bits by itself; all. Statistics are of one type."""
    yield arguments
    others = [name for name in op.operands if name not in CAST and isinstance(arguments[name], Tensor)]
    others = [name for name in others if arguments[name].dim() and "running" not in name]
    for names in (*([name] for name in others), others) if len(others) > 1 else [others] * bool(others):
        yield arguments | {name: arguments[name].to(dtype) for name in names}


READS_THE_BIAS = ("@ended", "@of_every_operand")
"""Functions that do more with a bias than to add it to the product."""


def promoted(op: Op, arguments: Arguments, dtype: torch.dtype) -> list[torch.dtype]:
    """The dtypes of the program's results; a bias that a user's function adds counts as that of `F.linear`."""
    if "running_mean" in op.operands:  # of which PyTorch's operator leaves x's dtype
        z = F.linear(arguments["x"], arguments["weight"])
        scale = arguments.get("scale")
        return [(z if scale is None else z * scale).dtype]
    is_users = op.name.startswith("@") and op.name not in READS_THE_BIAS
    if is_users and isinstance(arguments.get("bias"), Tensor):
        arguments = arguments | {"bias": arguments["bias"].to(dtype)}
    found = [each.dtype for each in results_of(op.reference(**arguments))]
    return [
        result.dtype(torch.float32) if result.of != MATRIX or result.is_fp32 else each
        for each, result in zip(found, op.results, strict=True)
    ]


@rows("autocast", lambda op: op.is_linear and not op.of_kind(COUNT))
@of_each_dtype
def test_of_products(op: Op, dtype: torch.dtype, device: torch.device, rng: torch.Generator) -> None:
    """x, weight and bias are cast, as those of `F.linear`; fp64 stays.

    Results have the dtype to which PyTorch promotes: fp32 beside an fp32 residual.
    """
    drawn = op.draw(rng, device=device)
    for arguments in narrowed(op, drawn, dtype):
        with torch.autocast(device.type, dtype=dtype):
            got = results_of(op.call(**arguments))
            expected = promoted(op, arguments, dtype)
        told = {name: value.dtype for name, value in tensors_of(arguments).items()}
        assert [each.dtype for each in got] == expected, told
        if not is_thorough() and arguments is not drawn:
            continue
        is_cast = op.name.startswith("@")  # a user's operands may be
        names = [name for name in CAST if isinstance(arguments.get(name), Tensor)]
        cast = arguments | {
            name: arguments[name].to(dtype) for name in names if not is_cast or name != "bias"
        }
        rounded = [each.to(result.dtype(dtype)) for each, result in zip(got, op.results, strict=True)]
        assert_right(op, tuple(rounded), cast, dtype, times=2.0)
    doubles = map_tensors(drawn, torch.Tensor.double)
    with torch.autocast(device.type, dtype=dtype):
        assert_right(op, op.call(**doubles), doubles, torch.float64)
    with torch.autocast(device.type, enabled=False):
        assert [each.dtype for each in results_of(op.call(**drawn))] == [
            result.dtype(torch.float32) for result in op.results
        ]


@rows("autocast recorded", lambda op: op.is_linear and not op.of_kind(COUNT))
@of_each_dtype
def test_gradients(op: Op, dtype: torch.dtype, rng: torch.Generator) -> None:
    """PyTorch's under autocast, beside operands in 16 bits; the results have the dtypes of the plain call's."""
    (*_, arguments) = narrowed(op, op.draw(rng, (19,)), dtype)
    given, theirs = with_leaves(op, arguments), with_leaves(op, arguments)
    with torch.autocast("cpu", dtype=dtype):
        plain = results_of(op.call(**arguments))
        results, wanted_results = results_of(op.call(**given)), results_of(op.reference(**theirs))
    assert [each.dtype for each in results] == [each.dtype for each in plain]
    upstream = [torch.randn(each.shape, generator=rng) for each in wanted_results]
    wanted = gradients(op, lambda **_: wanted_results, theirs, upstream)
    found = gradients(op, lambda **_: results, given, upstream)
    for name, mine, other in zip(op.leaves(arguments), found, wanted, strict=True):
        assert mine.dtype is arguments[name].dtype
        error, size = (mine.double() - other.double()).abs().max(), float(other.abs().max())
        assert float(error) <= 32 * torch.finfo(dtype).eps * (1 + size), name


@rows("autocast out", lambda op: op.is_linear and op.takes_out and not op.of_kind(COUNT))
def test_out(op: Op, rng: torch.Generator) -> None:
    """Of the result's dtype, which `explain` tells; a strict call into another dtype is refused."""
    arguments = op.draw(rng)
    with torch.autocast("cpu", torch.bfloat16):
        want = op.call(**arguments)
        out = torch.full_like(want, float("nan"))
        assert op.call(**arguments, out=out) is out and torch.equal(out, want)
        is_wide = want.dtype is torch.float32
        wrong = torch.full_like(want, 7.0, dtype=torch.bfloat16 if is_wide else torch.float32)
        with pytest.raises(RuntimeError, match=rf"out: got dtype {wrong.dtype}; accepted is {want.dtype}"):
            op.call(**arguments, out=wrong)
        assert bool((wrong == 7.0).all())
        with pytest.raises(RuntimeError, match=r"strict: got True"):
            op.call(**arguments, strict=True)
        first, named = op.in_order(arguments)
        function: Any = epigemm.linear_glu if op.name == "linear_glu-two_weights" else op.function
        found = str(epigemm.explain(function, *first, **named))
    assert ("autocast: an operand is float32, and so is the result" in found) == is_wide


@rows("autocast of transforms and graphs", lambda op: op.is_linear and op.is_vmappable and few(op))
@pytest.mark.usefixtures("fresh_compiler")
def test_transforms_and_graphs(op: Op, rng: torch.Generator) -> None:
    """As of the plain call: `vmap`, inference mode, a compiled call with a gradient and without."""
    arguments = op.draw(rng)
    compiled: Any = torch.compile(op.call, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        want = results_of(op.call(**arguments))
        with torch.inference_mode():
            found = [results_of(op.call(**arguments))]
        found.append(results_of(compiled(**arguments)))
        found.append(results_of(compiled(**with_leaves(op, arguments))))
        batched = torch.vmap(lambda x: op.call(**arguments | {"x": x}))(torch.stack([arguments["x"]] * 2))
        found.append([each[1] for each in results_of(batched)])
    for each in found:
        torch.testing.assert_close(each, want, rtol=2**-6, atol=2**-6)


@rows("autocast elementwise", lambda op: not op.is_linear)
@of_each_dtype
def test_elementwise_calls_stay(
    op: Op, dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    """They have no product that would be cast."""
    arguments = op.draw(rng, device=device)
    with torch.autocast(device.type, dtype=dtype):
        got = op.call(**arguments)
    assert_right(op, got, arguments, torch.float32)
