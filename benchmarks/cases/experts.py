"""Experts: products of groups of rows at layers of models and random routings, and whole layers of transformers."""

from __future__ import annotations

import copy
import importlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import epigemm
from benchmarks.cases.contests import OURS, Contest, rounded
from benchmarks.gradings import bounds

HAS_TRANSFORMERS = find_spec("transformers") is not None
_CHECKED = 512  # tokens of a layer whose results are held against float64


@dataclass(frozen=True)
class Layer:
    """The experts of a model.

    Attributes:
        name: of the model.
        tokens: at once.
        experts: in all.
        chosen: experts of a token.
        hidden: columns of a token.
        between: columns between the two products of an expert.
        family: the module in transformers, and what its classes' names begin with.
        sizes: what its configuration calls `experts` and `between`.
    """

    name: str
    tokens: int
    experts: int
    chosen: int
    hidden: int
    between: int
    family: tuple[str, str] = ("qwen3_moe", "Qwen3Moe")
    sizes: tuple[str, str] = ("num_experts", "moe_intermediate_size")

    def routed(self, device: torch.device) -> Tensor:
        """`[tokens, chosen]`: which experts, some more often than others."""
        shares = torch.rand(self.experts, device=device) + 0.2
        return torch.multinomial(shares.expand(self.tokens, -1), self.chosen)

    def of_transformers(self, device: torch.device) -> Any:
        """Its module there, with random weights in bf16."""
        transformers = importlib.import_module("transformers")
        (module, prefix), (experts, between) = self.family, self.sizes
        about = {"hidden_size": self.hidden, experts: self.experts, between: self.between}
        classes = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
        with device:
            made = getattr(classes, f"{prefix}Experts")(getattr(transformers, f"{prefix}Config")(**about))
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        return made.to(torch.bfloat16)


_LOCAL = ("num_local_experts", "intermediate_size")
LAYERS = (
    Layer("Qwen3-30B-A3B", 4096, 128, 8, 2048, 768),
    Layer("Qwen3-30B-A3B", 32768, 128, 8, 2048, 768),
    Layer("Mixtral 8x7B", 8192, 8, 2, 4096, 14336, ("mixtral", "Mixtral"), _LOCAL),
    Layer("gpt-oss-20b", 8192, 32, 4, 2880, 2880, ("gpt_oss", "GptOss"), _LOCAL),
)


def of_experts(seed: int, count: int, device: torch.device) -> Iterator[Contest]:
    """SwiGLU of all experts in bf16, at layers of models and random routings, and products in fp32 at these.

    Where transformers is installed, also whole layers and their training steps by its implementations.
    """
    torch.manual_seed(seed)
    draw = random.Random(seed)
    for layer in LAYERS:
        rows = layer.routed(device).flatten().bincount(minlength=layer.experts).tolist()
        yield swiglu_of_experts(
            f"{layer.name}, {layer.tokens} tokens", rows, layer.between, layer.hidden, device
        )
    if HAS_TRANSFORMERS:
        for layer in LAYERS:
            yield layer_of_experts(layer, device)
            yield step_of_experts(layer, device)
    for number in range(count):
        experts, most = round(2 ** draw.uniform(0, 8)), round(2 ** draw.uniform(2, 12))
        rows = [draw.randint(0, most) if draw.random() > 0.1 else 0 for _ in range(experts)]
        n, k = 8 * draw.randint(8, 360), 8 * draw.randint(8, 512)
        yield swiglu_of_experts(f"random {number}, {experts} experts", rows, n, k, device)
        yield product_of_experts(f"random {number}, {experts} experts", rows, n, k, device)


def layer_of_experts(layer: Layer, device: torch.device) -> Contest:
    """A layer of transformers without gradients: its default, and its loop over experts."""
    module = layer.of_transformers(device).requires_grad_(False)
    given = _inputs(layer, device)

    def computed(by: str, module: Any = module, given: tuple[Tensor, ...] = given) -> Tensor:
        module.config._experts_implementation = by
        result: Tensor = module(*given)
        return result

    def exact() -> tuple[Tensor, Tensor]:
        some = tuple(each[:_CHECKED] for each in given)
        in_float64 = computed("eager", copy.deepcopy(module).double(), _doubled(some))
        return _around([in_float64], [computed("grouped_mm")[:_CHECKED]])

    return _by_implementations(layer, "layer", computed, exact, Tensor.flatten)


def step_of_experts(layer: Layer, device: torch.device) -> Contest:
    """The same with the gradients of tokens and weights. The first tokens' and the first expert's are checked."""
    module = layer.of_transformers(device)
    given = _inputs(layer, device)
    direction = torch.randn_like(given[0])

    def gradients(by: str, module: Any = module, given: tuple[Tensor, ...] = given) -> list[Tensor]:
        module.config._experts_implementation = by
        x, *routing = given
        x = x.detach().requires_grad_()
        module.zero_grad()
        module(x, *routing).backward(direction.to(x.dtype))
        return [x.grad[:_CHECKED], *(each.grad[0] for each in module.parameters())]  # type: ignore[index]

    def exact() -> tuple[Tensor, Tensor]:
        in_float64 = gradients("eager", copy.deepcopy(module).double(), _doubled(given))
        return _around(in_float64, gradients("grouped_mm"))

    def read(pieces: list[Tensor]) -> Tensor:
        return torch.cat([piece.flatten() for piece in pieces])

    return _by_implementations(layer, "training", gradients, exact, read)


def _by_implementations(
    layer: Layer,
    what: str,
    run: Callable[[str], Any],
    exact: Callable[[], tuple[Tensor, Tensor]],
    read: Callable[[Any], Tensor],
) -> Contest:
    from epigemm.integrations import transformers

    transformers.register()
    runs: dict[str, Callable[[], Any]] = {OURS: lambda: run("epigemm")}
    runs |= {by: lambda by=by: run(by) for by in ("grouped_mm", "eager")}  # type: ignore[misc]
    ratios = {f"vs_transformers_{what}": "grouped_mm", f"vs_transformers_eager_{what}": "eager"}
    return Contest(f"{layer.name}, {layer.tokens} tokens/{what}", runs, ratios, exact, read)


def _inputs(layer: Layer, device: torch.device) -> tuple[Tensor, ...]:
    """Tokens, their experts, and what these count."""
    x = torch.randn(layer.tokens, layer.hidden, device=device).bfloat16()
    share = torch.rand(layer.tokens, layer.chosen, device=device).softmax(1)
    return x, layer.routed(device), share.bfloat16()


def _doubled(given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(each.double() if each.is_floating_point() else each for each in given)


def _around(exact: list[Tensor], others: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Each piece in float64, and twice as far as the others' is where that is farthest."""
    farthest = ((other.double() - each).abs().max() for each, other in zip(exact, others, strict=True))
    bound = [(2 * far).expand(each.numel()) for far, each in zip(farthest, exact, strict=True)]
    return torch.cat([each.flatten() for each in exact]), torch.cat(bound)


def swiglu_of_experts(name: str, rows: list[int], n: int, k: int, device: torch.device) -> Contest:
    """Of this many rows for each expert."""
    m, experts = sum(rows), len(rows)
    x = torch.randn(m, k, device=device).bfloat16() / 4
    weight = torch.randn(experts, 2 * n, k, device=device).bfloat16() / 4
    offs = torch.tensor(rows, device=device).cumsum(0).to(torch.int32)

    def product() -> Tensor:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=offs)

    def eager() -> Tensor:
        first, second = product().chunk(2, 1)
        return F.silu(first) * second

    def exact() -> tuple[Tensor, Tensor]:
        parts, begin = [], 0
        for group, count in enumerate(rows):
            own, begin = x[begin : begin + count].double(), begin + count
            sums = (own @ weight[group].double().t()).chunk(2, 1)
            magnitudes = (own.abs() @ weight[group].double().abs().t()).chunk(2, 1)
            silu = F.silu(sums[0])
            parts.append((silu * sums[1], sums[1].abs() * magnitudes[0] + silu.abs() * magnitudes[1]))
        expected, magnitude = (torch.cat(each) for each in zip(*parts, strict=True))
        return expected, rounded(expected, magnitude, 2.0**-14, torch.finfo(torch.bfloat16).eps)

    runs = {
        OURS: lambda: epigemm.grouped_linear_glu(x, weight, offs=offs),
        "grouped_mm": product,
        "eager": eager,
    }
    ratios = {"vs_grouped_mm": "grouped_mm", "vs_torch": "eager"}
    return Contest(f"{name}: {m}x{2 * n}x{k}", runs, ratios, exact)


def product_of_experts(name: str, rows: list[int], n: int, k: int, device: torch.device) -> Contest:
    """In fp32, against PyTorch's grouped product, which waits for the host and loops over experts."""
    x = torch.randn(sum(rows), k, device=device)
    weight = torch.randn(len(rows), n, k, device=device)
    offs = torch.tensor(rows, device=device).cumsum(0).to(torch.int32)

    def exact() -> tuple[Tensor, Tensor]:
        own = list(zip(torch.split(x.double(), rows), weight.double().mT, strict=True))
        expected = torch.cat([a @ b for a, b in own])
        magnitudes = torch.cat([a.abs() @ b.abs() for a, b in own])
        return expected, rounded(expected, magnitudes, bounds.split(k), torch.finfo(torch.float32).eps)

    runs = {
        OURS: lambda: epigemm.grouped_linear(x, weight, offs=offs),
        "grouped_mm": lambda: F.grouped_mm(x, weight.transpose(1, 2), offs=offs),
    }
    return Contest(f"{name}, fp32: {len(x)}x{n}x{k}", runs, {"vs_grouped_mm_in_fp32": "grouped_mm"}, exact)
