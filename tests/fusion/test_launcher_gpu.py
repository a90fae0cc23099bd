"""CUDA graphs of fused models on a GPU: right numbers after every change, and the device stays usable."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epigemm
from epigemm.packs import weight_packs
from tests.fusion.zoo import deep_mlp
from tests.support.cases import fused_unavailable
from tests.support.untyped import backward

pytestmark = pytest.mark.gpu
hopper = pytest.mark.usefixtures("fused_kernels")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def device_works_on() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert float(torch.ones(1 << 20, device="cuda").sum()) == 1 << 20
    assert bool(torch.randn(64, device="cuda").isfinite().all())


class Layer(nn.Module):
    """Attention and an MLP."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2, self.drop = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(x.shape)
        x = x + self.drop(self.out(seen))
        found: Tensor = x + self.drop(self.fc2(F.gelu(self.fc1(self.norm2(x)))))
        return found


def model_of(dtype: torch.dtype = torch.float32, width: int = 256) -> nn.Module:
    return nn.Sequential(Layer(width), Layer(width)).to("cuda", dtype).eval()


def graphed(model: nn.Module, **settings: Any) -> Any:
    return epigemm.fuse(model, cuda_graphs=True, **settings)


def told(mine: Any) -> Any:
    return mine.fusion_report.cuda_graphs


def images(rows: int, dtype: torch.dtype = torch.float32, width: int = 256) -> Tensor:
    return torch.randn(rows, 33, width, device="cuda", dtype=dtype)


def assert_same(mine: Any, model: nn.Module, x: Tensor) -> None:
    bound = 1e-4 if x.dtype is torch.float32 else 4e-2
    with torch.no_grad():
        torch.testing.assert_close(mine(x), model(x), rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes_in_turn(dtype: torch.dtype) -> None:
    """Results of earlier calls, of other sizes too, stay as they were."""
    model = model_of(dtype)
    mine = graphed(model)
    bound = 1e-4 if dtype is torch.float32 else 4e-2
    kept = []
    with torch.no_grad():
        for _ in range(5):
            for rows in (1, 4, 3):
                x = images(rows, dtype)
                kept.append((mine(x), model(x)))
    for found, expected in kept:
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
    assert told(mine).captured == 3, told(mine)
    assert not told(mine).reasons


def test_replays_give_the_bits_of_a_call() -> None:
    """The graph has the kernels that would be launched one by one."""
    model = model_of()
    mine = graphed(model)
    x = images(2)
    with torch.no_grad():
        first, captured, replayed = (mine(x) for _ in range(3))
    assert torch.equal(first, captured) and torch.equal(first, replayed)


def test_a_convolution_and_a_batch_norm() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
            self.fc = nn.Linear(32, 64)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = torch.relu(self.fc(torch.relu(self.norm(self.conv(x))).mean((2, 3))))
            return found

    model = Model().cuda().eval()
    mine = graphed(model)
    for _ in range(4):
        assert_same(mine, model, torch.randn(4, 3, 32, 32, device="cuda"))
    assert told(mine).captured == 1, told(mine)


# --- parameters ------------------------------------------------------------------------------------------------------


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


def loaded(model: nn.Module) -> None:
    model.load_state_dict({name: 1.1 * value for name, value in model.state_dict().items()})


def through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.9)


def moved(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1


def optimised(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), 1e-3, fused=True).step()


@pytest.mark.parametrize("keep_packs", [False, True])
@pytest.mark.parametrize("change", [in_place, loaded, moved, optimised, through_data])
def test_changed_parameters(change: Callable[[nn.Module], None], keep_packs: bool) -> None:
    if keep_packs and change is through_data:
        pytest.skip("a promise of the caller's: to repack")
    model = model_of(width=1024)
    mine = graphed(model, keep_packs=keep_packs)
    for _ in range(3):
        for _ in range(4):
            assert_same(mine, model, images(64, width=1024))
        change(model)
    for _ in range(3):
        assert_same(mine, model, images(64, width=1024))
    assert told(mine).captured == (4 if change is moved else 1), told(mine)


@hopper
def test_kept_packs_are_read() -> None:
    model = model_of(width=1024)
    mine = graphed(model, keep_packs=True)
    for _ in range(3):
        assert_same(mine, model, images(64, width=1024))
    packs = [pack for each in model.parameters() for pack in weight_packs.kept(each).values()]
    assert packs and all(pack.frozen for pack in packs)


# --- what is around a call -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_and_streams(dtype: torch.dtype) -> None:
    """Two models in one pool, called from four threads, each on a stream of its own."""
    models = [model_of(dtype), model_of(dtype)]
    mine = [graphed(model) for model in models]
    bound = 1e-4 if dtype is torch.float32 else 4e-2
    for each, model in zip(mine, models, strict=True):
        assert_same(each, model, images(2, dtype))

    # Drawn here: the generator of a device refuses while another thread captures a graph.
    noise = torch.randn(4, 30, 256, device="cuda", dtype=dtype)
    torch.cuda.synchronize()

    def work(seed: int) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream), torch.no_grad():
            results = []
            for place in range(30):
                which = (seed + place) % 2
                x = torch.full((1 + place % 3, 33, 256), float(seed), device="cuda", dtype=dtype)
                x += noise[seed, place]
                results.append((mine[which](x), models[which](x)))
            stream.synchronize()
            for found, expected in results:
                torch.testing.assert_close(found, expected, rtol=bound, atol=bound)

    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(work, seed) for seed in range(4)]:
            each.result()
    assert all(told(each).captured >= 3 for each in mine)


def test_under_a_capture() -> None:
    model = deep_mlp(3, 128).cuda().eval()
    mine = graphed(model)
    x = torch.randn(32, 128, device="cuda")
    for _ in range(3):
        assert_same(mine, model, x)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = mine(x)
    for _ in range(2):
        x.normal_()
        graph.replay()
        with torch.no_grad():
            torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-4)
    for _ in range(2):
        assert_same(mine, model, torch.randn(32, 128, device="cuda"))


@pytest.mark.parametrize("is_around_all", [True, False])
def test_autocast(is_around_all: bool) -> None:
    """What autocast has cached before a capture is gone at its end."""
    model = model_of()
    mine = graphed(model)

    def cast() -> Any:
        return torch.autocast("cuda", torch.bfloat16)

    with cast() if is_around_all else nullcontext():
        for _ in range(5):
            with nullcontext() if is_around_all else cast(), torch.no_grad():
                x = images(2)
                torch.testing.assert_close(mine(x), model(x), rtol=4e-2, atol=4e-2)
    del x
    torch.cuda.empty_cache()
    filler = [torch.full((256, 1024), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(64)]
    with cast(), torch.no_grad():
        x = images(2)
        torch.testing.assert_close(mine(x), model(x), rtol=4e-2, atol=4e-2)
    assert told(mine).captured == 1 and len(filler) == 64


def test_deterministic_algorithms() -> None:
    """New memory is filled then; what a graph reads must not be."""
    model = model_of(torch.bfloat16)
    mine = graphed(model)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for _ in range(4):
            assert_same(mine, model, images(2, torch.bfloat16))
    finally:
        torch.use_deterministic_algorithms(False)


def test_batch_invariant_and_precision() -> None:
    model = model_of()
    mine, plain = graphed(model), epigemm.fuse(model)
    x = images(3)
    for _ in range(3):
        assert_same(mine, model, x)
        if not fused_unavailable():
            with torch.no_grad(), epigemm.batch_invariant():
                assert torch.equal(mine(x), plain(x))


def test_gradients_and_training() -> None:
    model = model_of()
    mine = graphed(model)
    for _ in range(3):
        x = images(2).requires_grad_()
        backward(mine(x).square().mean())
        expected = torch.autograd.grad(model(x).square().mean(), x)[0]
        torch.testing.assert_close(x.grad, expected, rtol=1e-3, atol=1e-6)
    assert not told(mine).captured and told(mine).reasons
    mine.train()
    with torch.no_grad():
        first, second = (mine(torch.ones(2, 33, 256, device="cuda")) for _ in range(2))
    assert not torch.equal(first, second)


class Recorded(nn.Module):
    """Results that autograd records, some of them as views and some through a parameter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.gain = nn.Linear(64, 64), nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = torch.relu(self.fc(x))
        with torch.no_grad():
            detached = h * 2
        return h, h.view(-1)[:8], detached, detached + self.gain, self.gain.view(8, 8)


@pytest.mark.parametrize("way", ["fuse", "reduce-overhead"])
def test_results_keep_their_requires_grad(way: str) -> None:
    model = Recorded().cuda()
    mine = (
        graphed(model) if way == "fuse" else torch.compile(model, backend="epigemm", mode="reduce-overhead")
    )
    for grad in (True, False, True):
        for _ in range(4):
            x = torch.randn(16, 64, device="cuda")
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            with torch.set_grad_enabled(grad):
                found, expected = mine(x), model(x)
            for one, other in zip(found, expected, strict=True):
                assert one.requires_grad == other.requires_grad
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
            if grad:
                gradients = [
                    torch.autograd.grad((each[0].sum() + each[3].sum()), list(model.parameters()))
                    for each in (found, expected)
                ]
                torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


# --- what cannot be captured -----------------------------------------------------------------------------------------


@torch.library.custom_op("epigemm_tests::waits", mutates_args=())
def waits(x: Tensor) -> Tensor:
    """Its schema does not say that the host reads a number."""
    return x * (1 + (x.sum().item() > 0))


@waits.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("epigemm_tests::odd", mutates_args=())
def odd(x: Tensor) -> Tensor:
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("odd")
    return x + 1


@odd.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("operator", [waits, odd], ids=["waits", "odd"])
def test_a_capture_that_fails(operator: Any) -> None:
    """The model goes on, and so do others in the same pool, those that are captured later among them."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(256, 256)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = operator(torch.relu(self.fc(x)))
            return found

    before, after = model_of(), model_of()
    earlier, later = graphed(before), graphed(after)
    for _ in range(3):
        assert_same(earlier, before, images(2))
    model = Model().cuda().eval()
    mine = graphed(model)
    for _ in range(4):
        assert_same(mine, model, torch.randn(8, 256, device="cuda"))
    assert not told(mine).captured
    assert "it cannot be captured" in told(mine).reasons[0]
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.empty_cache()
    assert bool(torch.randn(64, device="cuda").isfinite().all()), "random numbers are drawn as before"
    for _ in range(3):
        assert_same(later, after, images(3))
        assert_same(earlier, before, images(2))
    assert told(later).captured == 1 and told(earlier).captured == 1


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda z: z + torch.tensor([1.0], device=z.device), "copies numbers of the host's"),
        (lambda z: z + torch.ones(1).to(z.device), "copies between"),
        (lambda z: F.dropout(z, 0.5, True), "draws random numbers"),
    ],
)
def test_what_is_told_before(function: Callable[[Tensor], Tensor], reason: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return function(self.fc(x))

    model = Model().cuda().eval()
    mine = graphed(model)
    for _ in range(3):
        x = torch.randn(8, 64, device="cuda")
        with torch.no_grad():
            torch.manual_seed(3)
            found = mine(x)
            torch.manual_seed(3)
            torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-4)
    assert not told(mine).captured and reason in told(mine).reasons[0]


def test_models_come_and_go() -> None:
    """Their memory is given back; a pool of which all graphs are gone is not captured to."""
    for _ in range(3):
        model = model_of()
        mine = graphed(model)
        for _ in range(3):
            assert_same(mine, model, images(2))
        assert told(mine).captured == 1
        del mine, model
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="one GPU")
def test_another_device_than_the_current() -> None:
    model = model_of().to("cuda:1")
    mine = graphed(model)
    for _ in range(4):
        assert_same(mine, model, images(2).to("cuda:1"))
    assert told(mine).captured == 1
    mine.to("cuda:0")
    for _ in range(4):
        assert_same(mine, mine._call_impl, images(2))
