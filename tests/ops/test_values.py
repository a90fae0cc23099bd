"""What a call gives: the numbers of the PyTorch program, its shapes and dtypes; and it changes nothing else."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.ops.bounds import assert_right
from tests.ops.op import COUNT, NUMBER, Op, map_tensors, results_of, tensors_of
from tests.ops.table import rows
from tests.support.thorough import is_thorough

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
of_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
SIZES = [((9,), 16, 24), ((5,), 13, 7), ((1,), 40, 33), ((33,), 8, 64)]
OF_BATCHES = [((19,), 13, 7), ((33,), 8, 64)]  # whose statistics are not those of a few rows


def ieee(op: Op) -> dict[str, Any]:
    """Products of fp32 without slices, whose errors have a derivation of their own."""
    return {"precision": "ieee"} if op.takes_precision else {}


@rows("values")
@of_each_dtype
def test_values(op: Op, dtype: torch.dtype, device: torch.device, rng: torch.Generator) -> None:
    """With every argument there is, without each that may be absent, and of one size in turn."""
    place = DTYPES.index(dtype)
    every = OF_BATCHES if op.of_kind(COUNT) else SIZES
    sizes = every if is_thorough() or device.type == "cuda" else [every[place % len(every)]]
    for lead, n, k in sizes:
        for options in op.variants():
            arguments = op.draw(rng, lead, n, k, dtype=dtype, device=device, **options)
            assert_right(op, op.call(**arguments, **ieee(op)), arguments, dtype, about=(lead, n, k, options))


@rows("inputs")
def test_inputs_are_not_changed(op: Op, device: torch.device, rng: torch.Generator) -> None:
    """And results are new tensors: written to, they change no argument, and no other result."""
    arguments = op.draw(rng, device=device, tensor_numbers=True)
    kept = map_tensors(arguments, torch.clone)
    results = results_of(op.call(**arguments))
    copies = [each.clone() for each in results]
    for place, each in enumerate(results):
        each.fill_(7)
        assert all(torch.equal(a, b) for a, b in zip(results[place + 1 :], copies[place + 1 :], strict=True))
    for name, value in tensors_of(arguments).items():
        assert torch.equal(value, kept[name]), name


@rows("positions", lambda op: op.layer is None)
def test_arguments_by_position(op: Op, rng: torch.Generator) -> None:
    """In the order of the PyTorch program."""
    arguments = op.draw(rng)
    if "weight2" in arguments or op.fixed:
        return
    by_name, by_place = op.call(**arguments), op.call(*arguments.values())
    assert all(torch.equal(a, b) for a, b in zip(results_of(by_name), results_of(by_place), strict=True))


@rows("numbers", lambda op: bool(op.of_kind(NUMBER)))
def test_numbers(op: Op, device: torch.device, rng: torch.Generator) -> None:
    """A float, an int, and a tensor of any floating dtype on the device are the same number."""
    arguments = op.draw(rng, device=device)
    for name in op.of_kind(NUMBER):
        results = [
            results_of(op.call(**{**arguments, name: value}))
            for value in (2.0, 2, *(torch.tensor(2.0, device=device, dtype=dtype) for dtype in DTYPES[:3]))
        ]
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@rows("vectors of fp32", lambda op: op.layer is None)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fp32_operands_beside_16_bits(
    op: Op, dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    """What an epilogue reads beside the product may be fp32: the result has the dtype of x."""
    arguments = op.draw(rng, dtype=dtype, device=device)
    for name in op.wide_beside_16_bits():
        arguments[name] = arguments[name].float() * 1.001
    assert_right(op, op.call(**arguments), arguments, dtype)


@rows("threads", lambda op: op.layer is None)  # a layer that several threads share has one set of parameters
def test_calls_from_several_threads(op: Op, device: torch.device, rng: torch.Generator) -> None:
    """Each thread gets what it would alone."""
    each_arguments = [op.draw(rng, device=device) for _ in range(3)]
    expected = [results_of(op.call(**arguments)) for arguments in each_arguments]
    wrong: list[int] = []
    torch_threads = torch.get_num_threads()

    def work(place: int) -> None:
        # The first product of a new thread would take all cores, which is another order of sums.
        torch.set_num_threads(torch_threads)
        for _ in range(8):
            got = results_of(op.call(**each_arguments[place]))
            if not all(torch.equal(a, b) for a, b in zip(got, expected[place], strict=True)):
                wrong.append(place)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(each_arguments))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@rows("changed statistics", lambda op: "running_mean" in op.operands)
def test_nothing_of_the_arguments_is_kept(op: Op, device: torch.device, rng: torch.Generator) -> None:
    """Nothing folded or converted outlives a call: one that follows a change in place sees the change."""
    arguments = op.draw(rng, lead=(19,), device=device)
    op.call(**arguments)
    for name in ("running_mean", "running_var", "bn_weight"):
        arguments[name].add_(1)
    assert_right(op, op.call(**arguments, **ieee(op)), arguments, torch.float32)


@rows("meta")
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_meta_tensors_and_inference_mode(op: Op, dtype: torch.dtype, rng: torch.Generator) -> None:
    """Shapes, dtypes and strides without numbers; the same bits in `torch.inference_mode`."""
    arguments = op.draw(rng, (2, 3) if op.takes_any_lead else (6,), dtype=dtype)
    expected = results_of(op.call(**arguments))
    with torch.inference_mode():
        got = results_of(op.call(**arguments))
    assert all(torch.equal(a, b) and a.is_inference() for a, b in zip(got, expected, strict=True))
    on_meta = results_of(op.call(**map_tensors(arguments, lambda t: t.to("meta"))))
    for found, want in zip(on_meta, expected, strict=True):
        assert found.is_meta and (found.shape, found.dtype, found.stride()) == (
            want.shape,
            want.dtype,
            want.stride(),
        )
