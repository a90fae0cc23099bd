"""Fusion on a GPU: kernels that run, kept packs, and mode="reduce-overhead". Whole models: `test_models.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import epigemm
from epigemm.fusion import FusionReport
from epigemm.packs import weight_packs
from tests.fusion.eager import fuse_eagerly

pytestmark = pytest.mark.gpu
hopper = pytest.mark.usefixtures("fused_kernels")


def wide() -> Any:
    """fp32 at "highest": lone layers too run on fp16 slices."""
    return nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024)).cuda()


def compiled(model: Any, **options: Any) -> Any:
    settings: dict[str, Any] = {"backend": "aot_eager", **options}
    return torch.compile(model, backend="epigemm", fullgraph=True, options=settings)


@hopper
@pytest.mark.parametrize("road", ["fuse", "compile"])
def test_weights_that_nobody_counts_the_writes_of(road: str) -> None:
    """A target network follows by `.data`: a kept pack would be stale, so that none is made unasked."""
    torch._dynamo.reset()
    model = wide()
    fast = fuse_eagerly(model) if road == "fuse" else compiled(model)
    x = torch.randn(4096, 1024, device="cuda")
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
            assert not any(weight_packs.kept(layer.weight) for layer in (model[0], model[2]))
            for layer in (model[0], model[2]):
                layer.weight.data.mul_(1.5)


@hopper
@pytest.mark.parametrize("recipe", ["row", "tensor"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_products_of_eight_bits(backend: str, recipe: str) -> None:
    """What follows a product is part of its call; a product alone stays as it is."""
    torch._dynamo.reset()
    layers = [nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024)]
    model = epigemm.nn.quantise(nn.Sequential(*layers).cuda().bfloat16().eval(), recipe)
    reports: list[FusionReport] = []
    fast = compiled(model, backend=backend, report=reports.append, strict=True)
    x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        # One call rounds GELU's argument to bf16 first, so some numbers are the next ones in 8 bits.
        torch.testing.assert_close(fast(x), model(x), rtol=4e-2, atol=4e-2)
    (report,) = reports
    assert [site.formula for site in report.sites] == ["gelu(acc + c1)"], report


MODES = [None, "reduce-overhead", "max-autotune"]
ROADS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "fuse": lambda model, options: epigemm.fuse(model, options=options),
    "compile": lambda model, options: torch.compile(
        model, backend="epigemm", fullgraph=True, options=options
    ),
}


def check_call(fast: Any, model: Any, x: torch.Tensor) -> None:
    """One call, which a CUDA graph may replay: its result is that of the model."""
    bound = 2e-4 if x.dtype is torch.float32 else 4e-2
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(fast(x), model(x), rtol=bound, atol=bound)


@pytest.mark.slow
@hopper
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str | None, road: str, dtype: torch.dtype) -> None:
    """Fused kernels in Inductor's graphs: at the first calls, captured, and after a write to a weight."""
    torch.compiler.reset()
    model = wide().to(dtype)
    reports: list[FusionReport] = []
    fast = ROADS[road](model, {"mode": mode, "report": reports.append, "strict": True})
    with torch.no_grad():
        for step in range(5):
            check_call(fast, model, torch.randn(4096, 1024, device="cuda", dtype=dtype))
            if step > 2:
                model[0].weight.mul_(1.1)
                model[2].weight.data.mul_(0.9)
    if dtype is torch.float32:  # in 16 bits the planner may prefer PyTorch's GEMM
        assert [site.function for site in reports[0].sites][:1] == ["linear_relu"], reports[0]


def launched(call: Callable[[], Any]) -> list[str]:
    """The names of the kernels that a call launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [each.name for each in profile.events() if each.device_type.name == "CUDA"]


@pytest.mark.slow
@hopper
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("learns", [False, True])
def test_sizes_that_change(mode: str | None, learns: bool) -> None:
    """The second size makes the axis dynamic: the chain stays fused, and each size has its own plan."""
    torch.compiler.reset()
    model = wide()
    fast: Any = epigemm.fuse(model, mode=mode, strict=True)
    for rows in (4096, 2048, 3000, 17, 4096, 8192, 1):
        x = torch.randn(rows, 1024, device="cuda", requires_grad=learns)
        with torch.set_grad_enabled(learns):
            check_call(fast, model, x)
            if learns:
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
                wanted = [x, *model.parameters()]
                found = torch.autograd.grad(fast(x).square().mean(), wanted)
                for mine, right in zip(
                    found, torch.autograd.grad(model(x).square().mean(), wanted), strict=True
                ):
                    # By norms: a hidden unit whose sum is nearly zero may fall on either side of ReLU's kink.
                    assert float((mine - right).norm()) <= 1e-3 * float(right.norm())
    assert "linear_relu" in {site.function for site in fast.fusion_report.sites}, fast.fusion_report


class Layers(nn.Module):
    """Large enough to pay; a forward that is a function of (self, x)."""

    divisor: torch.Tensor

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(1024, 2048), nn.Linear(1024, 2048), nn.Linear(2048, 1024)
        self.register_buffer("divisor", torch.tensor(2.0))
        self.function = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


@hopper
@pytest.mark.parametrize(("device", "function"), [("cpu", "linear_relu"), ("cuda", "linear_relu_truediv")])
def test_a_scalar_on_the_cpu_ends_a_chain(device: str, function: str) -> None:
    """PyTorch takes a 0-d tensor of the CPU beside CUDA tensors; the kernels read theirs on the device."""
    model = Layers(lambda self, x: torch.relu(self.gate(x)) / self.divisor).cuda()
    model.divisor = model.divisor.to(device)
    fused: Any = fuse_eagerly(model)
    x = torch.randn(4096, 1024, device="cuda")
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)
    assert [site.function for site in fused.fusion_report.sites] == [function], fused.fusion_report


def gated(self: Any, x: torch.Tensor) -> Any:
    return x + self.down(nn.functional.gelu(nn.functional.silu(self.gate(x)) * self.up(x)))


@hopper
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chains_that_are_linked(dtype: torch.dtype) -> None:
    """A gate, GELU, a residual: results and gradients are the model's."""
    model = Layers(gated).cuda().to(dtype)
    fused = fuse_eagerly(model)
    bound = 1e-4 if dtype is torch.float32 else 4e-2
    for learns in (False, True):
        x = torch.randn(4096, 1024, device="cuda", dtype=dtype, requires_grad=learns)
        with torch.set_grad_enabled(learns):
            mine, expected = fused(x), model(x)
        torch.testing.assert_close(mine, expected, rtol=bound, atol=bound)
        if learns:
            found = [torch.autograd.grad(y.square().mean(), x)[0] for y in (mine, expected)]
            scale = float(found[1].abs().max())
            torch.testing.assert_close(found[0], found[1], rtol=bound, atol=bound * scale)


class Several(nn.Module):
    """KernelBench 2/81: in 16 bits no fused kernel is expected to pay."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gemm = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.gemm(x)
        z = z * torch.sigmoid(z) / 2.0
        return torch.clamp(torch.tanh(torch.clamp(z, min=-1.0, max=1.0)), min=-1.0, max=1.0)


@hopper
@pytest.mark.parametrize("learns", [False, True])
def test_several_kernels_behind_a_gemm_are_one(learns: bool) -> None:
    """In two kernels, and recorded in 16 bits: results and gradients are near float64's."""
    model = Several(4096).cuda().bfloat16()
    fused: Any = fuse_eagerly(model)
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=learns)
    wide = Several(4096).cuda().double()
    wide.load_state_dict(model.state_dict())
    exact = x.detach().double().requires_grad_(learns)
    with torch.set_grad_enabled(learns):
        mine, eager, expected = fused(x), model(x), wide(exact)
    (site,) = fused.fusion_report.sites
    assert len(site.matched) == 7, fused.fusion_report
    if learns:
        assert "one elementwise kernel in the place of 6" in str(fused.fusion_report)
    error, of_eager = ((y.double() - expected).abs().max().item() for y in (mine, eager))
    assert error <= 1.5 * of_eager + 1e-3
    if learns:
        (found,), (of_model,), (right,) = (
            torch.autograd.grad(y.square().mean(), z) for y, z in ((mine, x), (eager, x), (expected, exact))
        )
        errors = [(each.double() - right).abs().max().item() for each in (found, of_model)]
        assert errors[0] <= 2 * errors[1] + 1e-9
    with torch.set_grad_enabled(learns):
        kernels = launched(lambda: fused(x))
    # Beside the two: zeros in the place of the bias, which the product has, and what cuBLAS clears.
    computing = [name for name in kernels if "Memset" not in name and "FillFunctor" not in name]
    # Without gradients the planner may take one fused kernel.
    assert len(computing) <= 2 if not learns else len(computing) == 2, kernels
