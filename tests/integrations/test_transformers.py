"""transformers' experts by epigemm, against its own implementation: tiny layers of six families."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epigemm.fusion import FusionReport
from epigemm.integrations import transformers as integration

transformers = pytest.importorskip("transformers", minversion="5", reason="transformers is missing")
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    # module, class, of the configuration
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeExperts", {"moe_intermediate_size": 24, "num_experts": 6}),
    "mixtral": ("MixtralConfig", "MixtralExperts", {"intermediate_size": 24, "num_local_experts": 6}),
    "olmoe": ("OlmoeConfig", "OlmoeExperts", {"intermediate_size": 24, "num_experts": 6}),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3Experts", {"moe_intermediate_size": 24, "n_routed_experts": 6}),
    "gpt_oss": ("GptOssConfig", "GptOssExperts", {"intermediate_size": 24, "num_local_experts": 6}),
    "nemotron_h": ("NemotronHConfig", "NemotronHExperts", {"moe_intermediate_size": 24, "n_routed_experts": 6}),
}  # fmt: skip
TOKENS, HIDDEN, CHOSEN = 10, 32, 2


def layer(family: str, dtype: torch.dtype) -> Any:
    """A layer of experts with random weights, which transformers computes expert by expert."""
    name, experts, sizes = FAMILIES[family]
    config = getattr(transformers, name)(hidden_size=HIDDEN, **sizes)
    config._experts_implementation = "eager"
    module = getattr(transformers.models, family)
    made = getattr(getattr(module, f"modeling_{family}"), experts)(config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made.to(dtype).eval()


def routed(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, their experts, of which one has none, and the weights."""
    chosen = torch.stack([torch.randperm(5)[:CHOSEN] for _ in range(TOKENS)])
    return torch.randn(TOKENS, HIDDEN).to(dtype), chosen, torch.rand(TOKENS, CHOSEN).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_as_transformers(family: str, dtype: torch.dtype) -> None:
    """In inference and in training."""
    integration.register()
    experts, given = layer(family, dtype), routed(dtype)
    with torch.no_grad():
        expected = experts(*given)
    tolerance = 16 * torch.finfo(dtype).eps
    scale = float(expected.abs().max())
    experts.config._experts_implementation = "epigemm"
    with torch.no_grad():
        found = experts(*given)
    assert found.dtype is dtype
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * scale)
    gradients = {}
    for implementation in ("eager", "epigemm"):
        experts.config._experts_implementation = implementation
        x = given[0].detach().clone().requires_grad_()
        experts(x, *given[1:]).float().square().sum().backward()
        gradients[implementation] = [x.grad, *(each.grad for each in experts.parameters())]
        experts.zero_grad()
    for ours, theirs in zip(gradients["epigemm"], gradients["eager"], strict=True):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=8 * tolerance, atol=2 * tolerance * scale)


def test_experts_of_another_rank_add_nothing() -> None:
    """What is behind the last group is undefined, and must not reach the sum."""
    experts, (x, chosen, weights) = layer("qwen3_moe", torch.float32), routed(torch.float32)
    experts.config._experts_implementation = "epigemm"
    integration.register()
    experts._is_expert_parallel = True
    chosen[:, 1], weights[:, 1] = experts.num_experts, 0
    alone = experts(x, chosen[:, :1].contiguous(), weights[:, :1])
    torch.testing.assert_close(experts(x, chosen, weights), alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("version", ["4.57.1", ""])
def test_without_transformers_5(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    other = types.ModuleType("transformers")
    other.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", other if version else None)
    with pytest.raises(ImportError, match=f"transformers: got {'version 4' if version else 'none'}"):
        integration.register()


@pytest.mark.usefixtures("fresh_compiler")
def test_the_compiler_fuses_transformers_own() -> None:
    """Of its grouped products: the halves of the first, which become two, and the second with the weights."""
    experts, given = layer("qwen3_moe", torch.bfloat16), routed(torch.bfloat16)
    reports: list[FusionReport] = []
    experts.config._experts_implementation = "grouped_mm"
    options: Any = {"backend": "aot_eager", "report": reports.append, "strict": True}
    compiled: Any = torch.compile(experts, backend="epigemm", options=options)
    with torch.no_grad():
        found, expected = compiled(*given), experts(*given)
    bound = 16 * torch.finfo(torch.bfloat16).eps * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)
    assert [report.chains for report in reports] == [(3, 3)]
