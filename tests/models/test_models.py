"""Other people's models, tiny: outputs and gradients of `epigemm.fuse` against those of the model as it was.

In fp64 a model's own output says how far fp32 is from it: a fused model may be a few times as far.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epigemm
from tests.models.example import Example, first_tensor, package
from tests.models.zoo_others import EVERY
from tests.support.untyped import backward

# Eager's own error is that of one order of summation; another one's differs by a small factor, and ends in few bits.
FACTOR, FLOOR = 8.0, 2.0**-19

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]
examples = pytest.mark.parametrize("example", EVERY, ids=str)


def made(example: Example) -> nn.Module:
    try:
        package(example.package)
    except Exception as error:  # also an installation that does not fit this torch
        pytest.skip(
            f"{example.package} cannot be imported ({type(error).__name__}: {error}); pip install epigemm[models]"
        )
    torch.manual_seed(0)
    return example.make()


def in_double(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in values.items()
    }


def outcome(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor | None]:
    """The output, and a gradient for each parameter, None among them."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    output = first_tensor(model(**inputs))
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    backward(output, upstream.to(output.dtype))
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return {"output": output.detach(), **gradients}


def errors(
    found: dict[str, Tensor | None], exact: dict[str, Tensor | None]
) -> Iterator[tuple[str, float, float]]:
    """Of each tensor how far it is from the exact one, and how large that is."""
    for name, value in exact.items():
        mine = found[name]
        assert (mine is None) == (value is None), name
        if mine is not None and value is not None:
            yield name, float((mine.double() - value).norm()), float(value.norm())


@examples
def test_outputs_and_gradients(example: Example) -> None:
    if example.is_fp32:
        pytest.skip("nothing is more exact: it computes in fp32 whatever it is given")
    model = made(example).eval()
    exact_model, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    fused = epigemm.fuse(model, options={"backend": "eager"})
    # Another call has another batch of the same size. LeViT keeps what it made of its biases, with its graph.
    for _ in range(1 if "levit" in example.name else 2):
        inputs = example.inputs()
        exact, eager = outcome(exact_model, in_double(inputs)), outcome(plain, inputs)
        mine = outcome(fused, inputs)
        scale = max(size for _, _, size in errors(eager, exact))
        for (name, own, size), (_, others, _) in zip(errors(mine, exact), errors(eager, exact), strict=True):
            # Gradients that cancel to nothing are noise of the others' size.
            assert own <= FACTOR * others + FLOOR * max(size, 2.0**-10 * scale), (name, own, others, size)
    report = fused.fusion_report
    assert isinstance(report, epigemm.FusionReport)
    assert report.sites or example.name in ("encoder_layer", "timm_poolformer_s12"), report


@examples
def test_inference(example: Example) -> None:
    model = made(example).eval()
    fused = epigemm.fuse(model, options={"backend": "eager"})
    inputs = example.inputs()
    with torch.inference_mode():
        expected, actual = first_tensor(model(**inputs)), first_tensor(fused(**inputs))
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3 * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_generation_with_a_cache(name: str) -> None:
    """`generate` calls the model with one token more each time, and a cache that grows."""
    transformers = pytest.importorskip(
        "transformers", reason="pip install epigemm[models]", exc_type=ImportError
    )
    torch.manual_seed(0)
    sizes = {
        "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
        "Llama": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
        },
    }
    config = getattr(transformers, f"{name}Config")(vocab_size=99, pad_token_id=0, **sizes[name])
    kind = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM"}[name]
    model = getattr(transformers, kind)(config).eval()
    fused = epigemm.fuse(model, options={"backend": "eager"})
    ids = torch.randint(3, 90, (2, 5))
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    torch.testing.assert_close(fused.generate(ids, **options), model.generate(ids, **options), rtol=0, atol=0)
    assert fused.fusion_report.sites
