"""Streams, CUDA graphs, devices, threads and the allocator: the kernels among other CUDA work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import epigemm
from tests.support import plans
from tests.support.arithmetic import BF16, FP32, TF32
from tests.support.cases import ELEMENTWISE, LINEAR, draw_operands, poisoned
from tests.support.problems import Problem, make
from tests.support.public import PUBLIC, Public, map_tensors

pytestmark = pytest.mark.gpu

functions = pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.name)
cuda: Any = torch.cuda
SPIN = 200_000_000  # clock cycles, about 0.1 s: longer than any launch that could overtake it


def problems(rng: torch.Generator, shape: tuple[int, int, int] = (256, 256, 128)) -> list[Problem]:
    """Every linear epilogue on the fused path (bf16, TF32) and on the second one (fp32)."""
    return [
        make(name, arithmetic, shape, "cuda", rng) for name in LINEAR for arithmetic in (BF16, TF32, FP32)
    ]


@functions
def test_calls_follow_the_current_stream(function: Public, rng: torch.Generator) -> None:
    """The input is written late on a side stream: a kernel on any other stream would read the old values."""
    for dtype in (torch.bfloat16, torch.float32):
        late = function.draw(rng, shape=(128, 128, 128), dtype=dtype, device="cuda")
        expected = function.call(**late)
        early = map_tensors(late, lambda t: torch.full_like(t, float("nan")))
        stream = cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            cuda._sleep(SPIN)
            for name, tensor in early.items():
                if isinstance(tensor, torch.Tensor):
                    tensor.copy_(late[name])
            actual = function.call(**early)
        stream.synchronize()
        assert torch.equal(actual, expected)


@functions
def test_calls_do_not_synchronise(function: Public, rng: torch.Generator) -> None:
    """No call waits for the device, 0-d scale tensors included."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        arguments = function.draw(rng, shape=(64, 64, 64), dtype=dtype, device="cuda", tensor_scalar=True)
        function.call(**arguments)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            cuda._sleep(SPIN)
            event = cuda.Event()
            event.record()
            function.call(**arguments)
            assert not event.query(), "the call waited for the device"
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


@functions
def test_cuda_graphs(function: Public, rng: torch.Generator) -> None:
    """Captured once, replayed with other inputs in the same memory: the fold and scalar tensors are read anew."""
    for dtype in (torch.bfloat16, torch.float32):
        arguments = function.draw(rng, shape=(64, 128, 64), dtype=dtype, device="cuda", tensor_scalar=True)
        side = cuda.Stream()
        with torch.cuda.stream(side):
            function.call(**arguments)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = function.call(**arguments)
        for _ in range(3):
            fresh = function.draw(rng, shape=(64, 128, 64), dtype=dtype, device="cuda", tensor_scalar=True)
            for name, tensor in fresh.items():
                if isinstance(tensor, torch.Tensor):
                    if tensor.dim() == 0:
                        tensor.mul_(torch.rand((), generator=rng).item() + 0.5)
                    arguments[name].copy_(tensor)
            captured.fill_(float("nan"))
            graph.replay()
            assert torch.equal(captured, function.call(**fresh))


def test_graph_capture_of_every_epilogue(rng: torch.Generator) -> None:
    for problem in problems(rng):
        expected = problem.run()
        out = problem.out()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            problem.run(out)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


def run_threads(count: int, work: Callable[[int], None]) -> None:
    failures: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_threads_on_streams_of_their_own(rng: torch.Generator) -> None:
    """The current stream is thread-local; caches of attributes are filled by whoever comes first."""
    cases = problems(rng)
    expected = [problem.run() for problem in cases]
    torch.cuda.synchronize()

    def work(index: int) -> None:
        stream = cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(10):
                for problem, value in zip(cases[index::4], expected[index::4], strict=True):
                    assert torch.equal(problem.run(), value)

    run_threads(4, work)


def test_results_repeat_bit_for_bit(rng: torch.Generator) -> None:
    for problem in problems(rng, (1000, 1032, 2048)):
        first = problem.run()
        for _ in range(5):
            assert torch.equal(problem.run(), first)


def test_a_row_does_not_depend_on_the_rows_around_it_within_one_tile(rng: torch.Generator) -> None:
    """The same plan adds in the same order: rows of a longer batch have the same bits."""
    problem = make("bias", BF16, (512, 256, 512), "cuda", rng)
    whole = problem.run_fused(plans.numbers(plans.TMA))
    part = Problem("bias", BF16, problem.x[:128], problem.weight, problem.operands).run_fused(
        plans.numbers(plans.TMA)
    )
    if whole is None or part is None:
        pytest.skip("gpu: no fused kernel here")
    assert torch.equal(whole[:128], part)


def second_device() -> torch.device:
    if torch.cuda.device_count() < 2:
        pytest.skip("gpu: only one CUDA device")
    return torch.device("cuda:1")


def test_second_device(rng: torch.Generator) -> None:
    """Tensors on device 1 while device 0 is current: the kernel must run where the tensors are."""
    device = second_device()
    assert torch.cuda.current_device() == 0
    for name in LINEAR:
        for arithmetic in (BF16, TF32, FP32):
            problem = make(name, arithmetic, (256, 256, 128), device, rng)
            problem.check(problem.run(), second_path=True)
            assert torch.cuda.current_device() == 0
    for name in ELEMENTWISE:
        operands = draw_operands(name, 64, FP32, device, rng)
        x = torch.randn(32, 64, device=device)
        out = poisoned(x.shape, x.dtype, device)
        torch.ops.epigemm.elementwise_out(name, x, operands.bias, operands.tensors, operands.scalars, out)
        assert not bool(out.isnan().any())
        assert torch.cuda.current_device() == 0


def test_two_devices_are_told_apart(rng: torch.Generator) -> None:
    device = second_device()
    x, weight = torch.randn(8, 16, device="cuda:0"), torch.randn(8, 16, device=device)
    with pytest.raises(RuntimeError, match="weight: got device cuda:1; accepted is cuda:0"):
        epigemm.linear_relu(x, weight)


def test_side_stream_of_the_second_device(rng: torch.Generator) -> None:
    device = second_device()
    problem = make("bias", BF16, (256, 256, 128), device, rng)
    stream = cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        actual = problem.run()
    stream.synchronize()
    problem.check(actual, second_path=True)


def test_out_of_memory_keeps_its_type() -> None:
    """An output that can not be allocated is torch.OutOfMemoryError, which callers know how to handle."""
    total = torch.cuda.get_device_properties(0).total_memory
    columns = 2**16
    rows = total // columns  # bf16: twice the memory of the device
    x = torch.zeros(1, 8, device="cuda", dtype=torch.bfloat16).expand(rows, 8)
    weight = torch.zeros(columns, 8, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(torch.OutOfMemoryError):
        epigemm.linear_relu(x, weight)
    torch.cuda.empty_cache()
    assert torch.equal(epigemm.linear_relu(x[:4] + 1, weight[:8] + 1), torch.full_like(weight[:4], 8.0))


def test_temporary_inputs_may_be_freed_at_once(rng: torch.Generator) -> None:
    """The caching allocator may hand their memory to the next call on the same stream, which comes later."""
    problem = make("bias_relu", BF16, (512, 512, 512), "cuda", rng)
    expected = problem.run()
    for _ in range(20):
        temporary = Problem(
            problem.name, BF16, problem.x.clone(), problem.weight.clone(), problem.operands.map(torch.clone)
        )
        actual = temporary.run()
        del temporary
        torch.full((512, 512), float("nan"), device="cuda", dtype=torch.bfloat16)
        assert torch.equal(actual, expected)


def test_memory_does_not_grow(rng: torch.Generator) -> None:
    cases = problems(rng)
    for problem in cases:
        problem.run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        for problem in cases:
            problem.run()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
