"""`torch.ops.epigemm.*` called directly: bad arguments, memory over many calls."""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.arithmetic import FP32
from tests.support.cases import ELEMENTWISE, LINEAR, draw_operands, poisoned
from tests.support.problems import make

ops: Any = torch.ops.epigemm


def linear_arguments(name: str, rng: torch.Generator) -> list[Any]:
    problem = make(name, FP32, (9, 16, 24), rng, device="cpu")
    operands = problem.operands
    return [name, problem.x, problem.weight, operands.bias, operands.tensors, operands.scalars, "default"]


@pytest.mark.parametrize("name", LINEAR)
def test_bad_linear_arguments(name: str, rng: torch.Generator) -> None:
    """(position, value, what the message must name)."""
    good = linear_arguments(name, rng)
    cases: list[tuple[int, Any, str]] = [
        (0, "no_such", "epilogue"),
        (0, "", "epilogue"),
        (1, torch.zeros(9, 23), "x"),
        (1, torch.zeros(9, 24, dtype=torch.int32), "x"),
        (1, torch.tensor(1.0), "x"),
        (2, torch.zeros(24), "weight"),
        (2, torch.zeros(16, 24, dtype=torch.float64), "weight"),
        (3, torch.zeros(15), "bias"),
        (4, [torch.zeros(3)] * 5, "operands"),
        (5, [1.0, 2.0, 3.0], "scalars"),
        (6, "fast", "precision"),
    ]
    # Leaving out what the epilogue needs; an empty list is right for one that needs nothing.
    cases += [(position, [], word) for position, word in ((4, "operands"), (5, "scalars")) if good[position]]
    for position, value, word in cases:
        arguments = list(good)
        arguments[position] = value
        out = poisoned((9, 16), torch.float32, "cpu")
        with pytest.raises((RuntimeError, ValueError), match=word):
            ops.linear(*arguments)
        with pytest.raises((RuntimeError, ValueError), match=word):
            ops.linear_out(*arguments, out)
        assert bool(out.isnan().all())


@pytest.mark.parametrize("pack", [True, False])
def test_writing_out_is_counted(pack: bool, rng: torch.Generator) -> None:
    """Whatever arguments follow `out` in the schema; without a device no operator of PyTorch counts it."""
    arguments = linear_arguments("bias", rng)
    out, unreal = torch.empty(9, 16), torch.empty(9, 16, device="meta")
    ops.linear_out(*arguments, out, pack, False)
    ops.linear_out(
        *(each.to(unreal) if isinstance(each, torch.Tensor) else each for each in arguments), unreal, pack
    )
    assert out._version > 0 and unreal._version > 0
    torch.testing.assert_close(out, ops.linear(*arguments, pack))
    with pytest.raises(RuntimeError, match="strict: got True"):
        ops.linear(*arguments, pack, True)


def _derivative(grad: torch.Tensor, name: str, *arguments: Any) -> None:
    """Refused with an error, or with a reason (`Reason`), for which nothing is launched."""
    if reason := ops._derivative_out(name, grad, *arguments, None, None, None):
        raise RuntimeError(str(reason))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_native_derivatives_guard_memory(name: str, rng: torch.Generator) -> None:
    """What would read or write out of bounds is refused below Python as well."""
    x = torch.randn(9, 16, device="cuda")
    operands = draw_operands(name, 16, FP32, "cuda", rng)
    vectors = [operands.bias] if operands.bias is not None else []
    native = functools.partial(_derivative, x)
    out = poisoned((9, 16), torch.float32, "cuda")
    for wrong in (poisoned((9, 15), torch.float32, "cuda"), poisoned((8, 16), torch.float32, "cuda")):
        with pytest.raises(RuntimeError):
            native(name, x, operands.bias, operands.tensors, operands.scalars, wrong)
        assert bool(wrong.isnan().all())
    with pytest.raises(RuntimeError):
        native(name, x, operands.bias, operands.tensors, operands.scalars, out.double())
    if vectors:
        with pytest.raises(RuntimeError):
            native(name, x, torch.zeros(15, device="cuda"), operands.tensors, operands.scalars, out)
    for index, tensor in enumerate(operands.tensors):
        short = list(operands.tensors)
        short[index] = tensor[:-1]
        with pytest.raises(RuntimeError):
            native(name, x, operands.bias, short, operands.scalars, out)
    with pytest.raises(RuntimeError):
        native("no_such", x, None, [], [], out)
    with pytest.raises(RuntimeError):
        native(name, x, None, [], [1.0] * 9, out)
    assert bool(out.isnan().all())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc: resident memory can not be read")
def test_many_calls_at_constant_memory(device: torch.device) -> None:
    """String arguments of a stable-ABI kernel have leaked 58 to 99 bytes a call: 200,000 calls would show 12 MB.

    A long unknown name makes a leak on the error path larger than whatever the allocator could hide.
    """
    x, weight, out = (torch.randn(size, 4, device=device) for size in (1, 4, 1))
    unknown = "x" * 200

    def calls(count: int) -> None:
        for _ in range(count):
            ops._derivative_out("sigmoid_scale_residual", x, x, None, [], [2.0], out, None, None, None)

    def refused(count: int) -> None:
        for _ in range(count):
            with pytest.raises(RuntimeError, match="epilogue"):
                ops._dry_linear(
                    unknown, x, weight, None, None, None, None, 0, 0, 0, False, False, None, None, False
                )

    def public(count: int) -> None:
        for _ in range(count):
            ops.linear_out("bias", x, weight, None, [], [], "highest", out)

    loops = [(refused, 2_000, 10_000), (public, 2_000, 20_000)]
    if device.type == "cuda":  # of such an operator without a string as its result
        loops.append((calls, 20_000, 200_000))
    for loop, warm_up, count in loops:
        loop(warm_up)
        gc.collect()
        before = resident_bytes()
        loop(count)
        gc.collect()
        grown = resident_bytes() - before
        assert grown < 20 * count, f"{loop.__name__}: {grown / count:.0f} bytes a call"
