"""BatchNorm by the batch's own statistics in fused models: what one call replaces, and what is left as it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from epigemm.calls import batch_norm
from tests.fusion.eager import fuse_eagerly, report_of
from tests.support import norm_calls
from tests.support.untyped import backward, torch
from tests.support.watching import results_of

ROWS, WIDTH, OUT = 12, 24, 16


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of calls in epigemm's passes, which run on the CPU, too."""
    return norm_calls.counted(monkeypatch)


class Model(nn.Module):
    """Layers for a forward, which is given as text."""

    def __init__(self, text: str, **options: Any) -> None:
        super().__init__()
        self.fc, self.bn = nn.Linear(WIDTH, OUT), nn.BatchNorm1d(OUT, **options)
        self.second, self.scale = nn.Linear(WIDTH, OUT), nn.Parameter(torch.randn(OUT))
        self.register_buffer("factor", torch.randn(OUT))
        with torch.no_grad():
            for parameter in self.bn.parameters():
                parameter.normal_()
        scope: dict[str, Any] = {"torch": torch, "F": F}
        exec("def forward(self, x):\n" + "".join(f"    {line}\n" for line in text.split("; ")), scope)
        self._function = scope["forward"]

    def forward(self, x: Tensor) -> Any:
        return self._function(self, x)


ALONE, RELU = "return self.bn(self.fc(x))", "return torch.relu(self.bn(self.fc(x)))"
SCALED = "return self.bn(self.fc(x) * self.scale).relu()"
TAKEN = {
    ALONE: "batch_norm(acc + c1)",
    RELU: "relu(batch_norm(acc + c1))",
    "return F.relu(self.bn(self.fc(x)), inplace=True)": "relu(batch_norm(acc + c1))",
    SCALED: "relu(batch_norm((acc + c1) * scale))",
    "return self.bn(self.scale * self.fc(x))": "batch_norm((acc + c1) * scale)",
    "return self.bn(F.linear(x, self.fc.weight)).relu_()": "relu(batch_norm(acc))",
    "return F.gelu(self.second(x)) + self.bn(self.fc(x))": "batch_norm(acc + c1)",
    # Only the last one: it may write what the first one's derivative reads, for all that is known.
    "return self.bn(self.fc(x)) + self.bn(self.second(x))": "batch_norm(acc + c1)",
}
LEFT = [
    "z = self.fc(x); return self.bn(z) + z",
    "x = x + 0.0; z = self.fc(x); x.mul_(2.0); return self.bn(z) + x.sum()",
    "return self.bn(torch.tanh(self.fc(x)))",
    "return self.bn(self.fc(x.view(2, -1, x.shape[1])).transpose(1, 2))",
    "z = self.fc(x)\n    with torch.no_grad(): n = self.bn(z); return n + self.second(x)",
    "return F.instance_norm(self.fc(x).unsqueeze(0), use_input_stats=True)",
    "return self.bn(torch.addmm(x[:, :16], x, self.fc.weight.t()))",
    "return self.bn(torch.addmm(self.scale.view(1, 16), x, self.fc.weight.t()))",
    "return self.bn(self.fc(x) * self.bn.running_var)",
    "z = self.fc(x) * self.factor; self.factor.mul_(-2.0); return self.bn(z)",
    "z = self.fc(x) * self.factor; self.factor.view(4, 4).add_(3.0); return self.bn(z)",
]


def assert_buffers(fused: nn.Module, plain: nn.Module) -> None:
    for mine, other in zip(fused.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def train_alike(plain: nn.Module) -> Any:
    """Fused; results, gradients and buffers are compared over some steps with other numbers of rows."""
    fused = fuse_eagerly(copy.deepcopy(plain))
    for rows in (ROWS, ROWS + 2, ROWS + 4):
        x = torch.randn(rows, WIDTH)
        results = [model(x) for model in (fused, plain)]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
        upstream = torch.randn(results[0].shape)
        for model, result in zip((fused, plain), results, strict=True):
            model.zero_grad()
            backward(result, upstream)
        for (name, mine), other in zip(fused.named_parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), name
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-4)
    assert_buffers(fused, plain)
    return fused


@pytest.mark.parametrize("text", TAKEN)
def test_what_is_taken(text: str, calls: list[int]) -> None:
    plain = Model(text)
    fused = train_alike(plain)
    assert TAKEN[text] in [site.formula for site in report_of(fused).sites]
    assert not report_of(fused).skipped and len(calls) == 3
    assert "by the batch's own statistics" in str(report_of(fused))
    fused.eval(), plain.eval()
    x = torch.randn(ROWS, WIDTH)
    torch.testing.assert_close(fused(x), plain(x), rtol=1e-4, atol=1e-4)
    assert len(calls) == 3


@pytest.mark.parametrize("text", LEFT)
def test_what_is_left(text: str, calls: list[int]) -> None:
    plain = Model(text)
    fused = fuse_eagerly(copy.deepcopy(plain))
    for learns in (True, "no_grad" in text):  # without gradients a mode of the model's own changes nothing
        x = torch.randn(ROWS + 2 * learns, WIDTH)
        with torch.set_grad_enabled(learns):
            torch.testing.assert_close(fused(x), plain(x), rtol=1e-4, atol=1e-4)
    assert_buffers(fused, plain)
    assert not calls


def test_one_row_is_torchs_error(calls: list[int]) -> None:
    fused = fuse_eagerly(Model(ALONE))
    with pytest.raises(RuntimeError, match="more than 1 value per channel"):
        fused(torch.randn(1, WIDTH))
    assert not calls


def test_a_compiled_model_keeps_pytorchs(calls: list[int]) -> None:
    """Its BatchNorm is the compiler's."""
    plain = Model(RELU)
    compiled = torch.compile(copy.deepcopy(plain), backend="epigemm", options={"backend": "aot_eager"})
    x = torch.randn(ROWS, WIDTH)
    torch.testing.assert_close(compiled(x), plain(x), rtol=1e-4, atol=1e-4)
    assert not calls


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype: Any) -> None:
    """Large enough that the device pays for it."""
    layers = nn.Linear(2048, 2048), nn.BatchNorm1d(2048), nn.ReLU()
    plain = nn.Sequential(*layers).to("cuda", dtype)
    fused = fuse_eagerly(copy.deepcopy(plain))
    x = torch.randn(8192, 2048, device="cuda", dtype=dtype)
    tolerance = 5e-2 if dtype is torch.bfloat16 else 1e-3
    small = fuse_eagerly(copy.deepcopy(plain))
    with results_of(batch_norm.normalise) as ours:
        torch.testing.assert_close(fused(x), plain(x), rtol=tolerance, atol=tolerance)
        assert len(ours) == 1
        small(x[:32])
    assert len(ours) == 1
