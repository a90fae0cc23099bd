"""Streams, CUDA graphs, devices, threads and the allocator: calls among other CUDA work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import epigemm
from tests.gpu.launching import captured, cuda
from tests.ops.op import Arguments, Op, map_tensors
from tests.support.arithmetic import BF16, FP32, TF32
from tests.support.cases import ELEMENTWISE, LINEAR, draw_operands, poisoned
from tests.support.invariance import bits
from tests.support.problems import Problem, make
from tests.support.public import PUBLIC
from tests.support.threads import at_once

pytestmark = pytest.mark.gpu

SPIN = 200_000_000  # clock cycles, about 0.1 s: longer than any launch that could overtake it


class Way(NamedTuple):
    """A public function, and the tensors with which it takes certain kernels."""

    function: Op
    dtype: torch.dtype
    shape: tuple[int, int, int]
    precision: str | None = None

    def draw(self, rng: torch.Generator) -> Arguments:
        """Numbers in 0-d tensors."""
        return self.function.draw(
            rng, self.shape[:1], *self.shape[1:], dtype=self.dtype, device="cuda", tensor_numbers=True
        )

    def __call__(self, **arguments: Any) -> Tensor:
        options = {"precision": self.precision} if self.precision else {}
        found: Tensor = self.function.call(**arguments, **options)
        return found

    def __str__(self) -> str:
        return f"{self.function.name}-{self.dtype}-{self.precision}"


def ways() -> Iterator[Way]:
    """Kernels of 16 bits, PyTorch's, and those on fp16 slices, which need large products."""
    for function in PUBLIC:
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            yield Way(function, dtype, (128, 128, 128))
        if function.is_linear:
            yield from (
                Way(function, torch.float32, (1024, 4096, 4096), each) for each in ("highest", "high")
            )


WAYS = list(ways())
every_way = pytest.mark.parametrize("way", WAYS, ids=str)


def problems(rng: torch.Generator, shape: tuple[int, int, int] = (256, 256, 128)) -> list[Problem]:
    """Every linear epilogue on the fused path (bf16, TF32) and on the second one (fp32)."""
    return [make(name, each, shape, rng) for name in LINEAR for each in (BF16, TF32, FP32)]


@every_way
def test_calls_follow_the_current_stream(way: Way, rng: torch.Generator) -> None:
    """The input is written late on a side stream: a kernel on any other stream would read the old values."""
    late = way.draw(rng)
    expected = way(**late)
    early = map_tensors(late, lambda t: torch.full_like(t, math.nan))
    stream = cuda.Stream()
    cuda.synchronize()
    with cuda.stream(stream):
        cuda._sleep(SPIN)
        for name, tensor in early.items():
            if isinstance(tensor, Tensor):
                tensor.copy_(late[name])
        actual = way(**early)
    stream.synchronize()
    assert torch.equal(actual, expected)


@every_way
def test_calls_do_not_synchronise(way: Way, rng: torch.Generator) -> None:
    """No call waits for the device, also where a number lies there, and where the guard of slices has work to do."""
    arguments = way.draw(rng)
    arguments["x"][3, 3] = math.inf
    way(**arguments)
    cuda.synchronize()
    cuda.set_sync_debug_mode("error")
    try:
        cuda._sleep(SPIN)
        event = cuda.Event()
        event.record()
        way(**arguments)
        assert not event.query(), "the call waited for the device"
    finally:
        cuda.set_sync_debug_mode("default")
    cuda.synchronize()


@every_way
def test_graphs_follow_their_inputs(way: Way, rng: torch.Generator) -> None:
    """Captured with ordinary numbers, replayed with others: also with infinities and rows beyond the slices' range."""
    arguments = way.draw(rng)
    out = torch.empty_like(way(**arguments))
    graph = captured(lambda: way(**arguments, out=out))
    for change in ("none", "other", "infinite", "nan", "range", "none"):
        fresh = way.draw(rng)
        if way.precision:  # whose slices may have been kept
            fresh["weight"] = arguments["weight"]
        if change == "infinite":
            fresh["x"][17, 9] = math.inf
        if change == "nan":
            fresh["x"][-1, -1] = math.nan
        if change == "range":
            fresh["x"][50] *= 2.0**-40
            fresh["x"][50, 3] = 2.0**10
        for name, tensor in fresh.items():
            if isinstance(tensor, Tensor) and tensor is not arguments[name]:
                arguments[name].copy_(tensor.mul_(1.25) if tensor.dim() == 0 else tensor)
        out.fill_(5.5)
        graph.replay()
        assert torch.equal(bits(out), bits(way(**fresh))), change
    assert bool(out.isfinite().all())


@every_way
def test_streams_side_by_side(way: Way, rng: torch.Generator) -> None:
    """Calls on several streams at once share no scratch memory, not even where a pack is kept."""
    arguments = way.draw(rng)
    inputs = [arguments["x"] * factor for factor in (1.0, -0.5, 3.0, 0.125)]
    expected = [way(**(arguments | {"x": x})) for x in inputs]
    cuda.synchronize()
    streams = [cuda.Stream() for _ in inputs]
    for _ in range(5):
        results = []
        for x, stream in zip(inputs, streams, strict=True):
            with cuda.stream(stream):
                results.append(way(**(arguments | {"x": x})))
        cuda.synchronize()
        assert all(torch.equal(mine, other) for mine, other in zip(results, expected, strict=True))


def test_memory_does_not_grow(rng: torch.Generator) -> None:
    """A kept pack apart, a call leaves nothing behind: its workspace goes back to torch."""
    calls = [(way, way.draw(rng)) for way in WAYS]
    before = 0
    for turn in range(10):
        for way, arguments in calls:
            way(**arguments)
        cuda.synchronize()
        before = before if turn else cuda.memory_allocated()
    assert cuda.memory_allocated() <= before


def test_threads_on_streams_of_their_own(rng: torch.Generator) -> None:
    """The current stream is thread-local; caches of attributes are filled by whoever comes first."""
    calls = [(way, way.draw(rng)) for way in WAYS if not way.precision]
    of_calls = [(way, arguments, way(**arguments)) for way, arguments in calls]
    of_operators = [(problem, problem.run()) for problem in problems(rng)]
    cuda.synchronize()

    def work(index: int) -> None:
        with cuda.stream(cuda.Stream()):
            for _ in range(10):
                for problem, value in of_operators[index::4]:
                    assert torch.equal(problem.run(), value)
                for way, arguments, value in of_calls[index::4]:  # of what is written there as well
                    assert torch.equal(way(**map_tensors(arguments, torch.clone)), value)

    at_once(4, work)


def test_second_device(rng: torch.Generator) -> None:
    """Tensors on device 1 while device 0 is current: the kernel must run where the tensors are."""
    if cuda.device_count() < 2:
        pytest.skip("gpu: only one CUDA device")
    device = torch.device("cuda:1")
    assert cuda.current_device() == 0
    for name in LINEAR:
        for arithmetic in (BF16, TF32, FP32):
            problem = make(name, arithmetic, (256, 256, 128), rng, device=device)
            problem.check(problem.run(), second_path=True)
            assert cuda.current_device() == 0
    problem = make("bias", FP32, (256, 256, 128), rng, device=device, with_bias=False)
    for _ in range(2):  # the first call makes the device known, the second one is the entry's
        problem.check(epigemm.linear(problem.x, problem.weight, precision="ieee"), second_path=True)
        assert cuda.current_device() == 0
    for name in ELEMENTWISE:
        operands = draw_operands(name, 64, FP32, device, rng)
        x = torch.randn(32, 64, device=device)
        out = poisoned(x.shape, x.dtype, device)
        torch.ops.epigemm.elementwise_out(name, x, operands.bias, operands.tensors, operands.scalars, out)
        assert not bool(out.isnan().any())
        assert cuda.current_device() == 0


def test_out_of_memory_keeps_its_type() -> None:
    """An output that can not be allocated is torch.OutOfMemoryError, which callers know how to handle."""
    total = cuda.get_device_properties(0).total_memory
    columns = 2**16
    rows = total // columns  # bf16: twice the memory of the device
    x = torch.zeros(1, 8, device="cuda", dtype=torch.bfloat16).expand(rows, 8)
    weight = torch.zeros(columns, 8, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(torch.OutOfMemoryError):
        epigemm.linear_relu(x, weight)
    cuda.empty_cache()
    assert torch.equal(epigemm.linear_relu(x[:4] + 1, weight[:8] + 1), torch.full_like(weight[:4], 8.0))
