"""Models of many kinds, tiny, made by configuration: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.example import Example
from tests.models.packages import package

# --- plain PyTorch ---------------------------------------------------------------------------------------------------


class Gated(nn.Module):
    """A gated MLP with a norm and a residual, as in Llama."""

    def __init__(self, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)
        return x + self.down(F.silu(self.gate(z)) * self.up(z))  # type: ignore[no-any-return]


class CrossNetwork(nn.Module):
    """DCN: x0 * (W x + b) + x, beside a deep part."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.deep = nn.Sequential(nn.Linear(width, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 1))

    def forward(self, x: Tensor) -> Tensor:
        z = x
        for layer in self.cross:
            z = x * layer(z) + z
        return torch.sigmoid(self.deep(z))


class ActorCritic(nn.Module):
    """Policy and value heads on one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.mean, self.value, self.spread = nn.Linear(32, 4), nn.Linear(32, 1), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        spread = F.softplus(self.spread(h)).clamp(1e-3, 10.0)
        return torch.cat([torch.tanh(self.mean(h)), spread, self.value(h)], -1)


class ResNetTabular(nn.Module):
    """Tabular ResNet: BatchNorm, two layers, dropout, residual."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(width, 48) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(48, width) for _ in range(2))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + self.dropout(down(self.dropout(F.relu(up(norm(x))))))
        return x


class Normalised(nn.Sequential):
    """Linear, BatchNorm, an activation."""

    def __init__(self, activation: Callable[[], nn.Module]) -> None:
        layers: list[nn.Module] = []
        for _ in range(3):
            layers += [nn.Linear(24, 24), nn.BatchNorm1d(24), activation()]
        super().__init__(*layers)


class TimeEmbedding(nn.Module):
    """A diffusion model's: scale and shift of a block by its time step."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, 2 * width))
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.time(time)[:, None].chunk(2, dim=-1)
        return x + self.fc(self.norm(x) * (1 + scale) + shift)  # type: ignore[no-any-return]


def _rows(*shape: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"x": torch.randn(*shape)}


def _sequential(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


PLAIN = [
    Example(
        "gated_mlp",
        "torch",
        lambda: nn.Sequential(Gated(), Gated()),
        lambda: {"input": torch.randn(2, 5, 32)},
    ),
    Example("cross_network", "torch", CrossNetwork, _rows(9, 24)),
    Example("actor_critic", "torch", ActorCritic, _rows(9, 12)),
    Example("tabular_resnet", "torch", ResNetTabular, _rows(9, 24)),
    Example("batch_norm_relu", "torch", lambda: Normalised(nn.ReLU), lambda: {"input": torch.randn(9, 24)}),
    Example("batch_norm_elu", "torch", lambda: Normalised(nn.ELU), lambda: {"input": torch.randn(9, 24)}),
    Example(
        "time_embedding",
        "torch",
        TimeEmbedding,
        lambda: {"x": torch.randn(3, 5, 32), "time": torch.randn(3, 16)},
    ),
    Example(
        "encoder_layer",
        "torch",
        lambda: nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True),
        lambda: {"src": torch.randn(2, 5, 32)},
    ),
    Example(
        "decoder_layer",
        "torch",
        lambda: nn.TransformerDecoderLayer(32, 4, 64, batch_first=True),
        lambda: {"tgt": torch.randn(2, 5, 32), "memory": torch.randn(2, 6, 32)},
    ),
    Example(
        "autoencoder",
        "torch",
        lambda: _sequential(
            nn.Linear(48, 24),
            nn.ReLU(inplace=True),
            nn.Linear(24, 8),
            nn.Linear(8, 24),
            nn.LeakyReLU(),
            nn.Linear(24, 48),
        ),
        lambda: {"input": torch.randn(9, 48)},
    ),
]

# --- torchvision and timm --------------------------------------------------------------------------------------------


def images(size: int, key: str = "x") -> Callable[[], dict[str, Any]]:
    return lambda: {key: torch.randn(2, 3, size, size)}


def short(example: Example) -> Example:
    """A model whose stages of equal blocks have two of them: no model counts for its depth."""

    def make() -> nn.Module:
        model = example.make()
        for module in model.modules():
            for name, child in module.named_children():
                if isinstance(child, nn.Sequential) and len({type(block) for block in child}) == 1:
                    module.add_module(name, child[:2])
        return model

    return replace(example, make=make)


def torchvision(name: str, size: int, **options: Any) -> Example:
    def make() -> nn.Module:
        models = package("torchvision").models
        made: nn.Module = getattr(models, name)(num_classes=10, **options)
        return made

    return Example(f"torchvision_{name}", "torchvision", make, images(size))


def _vision_transformer() -> nn.Module:
    models = package("torchvision").models
    made: nn.Module = models.VisionTransformer(32, 16, 2, 2, 32, 64, num_classes=10)
    return made


def _swin() -> nn.Module:
    models = package("torchvision").models
    made: nn.Module = models.SwinTransformer([4, 4], 24, [2, 2], [2, 4], [4, 4], num_classes=10)
    return made


TORCHVISION = [
    torchvision("resnet18", 32),
    torchvision("mobilenet_v2", 32),
    torchvision("mobilenet_v3_small", 32),
    torchvision("shufflenet_v2_x0_5", 32),
    Example("torchvision_vit", "torchvision", _vision_transformer, images(32)),
    Example("torchvision_swin", "torchvision", _swin, images(64)),
]


def timm(name: str, size: int, **options: Any) -> Example:
    def make() -> nn.Module:
        made: nn.Module = package("timm").create_model(name, pretrained=False, num_classes=10, **options)
        return made

    return Example(f"timm_{name}", "timm", make, images(size))


_SMALL: dict[str, Any] = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2}
TIMM = [
    timm("vit_tiny_patch16_224", 32, **_SMALL),
    timm("deit3_small_patch16_224", 32, **_SMALL),
    timm("beit_base_patch16_224", 32, **_SMALL),
    timm("eva02_tiny_patch14_224", 28, img_size=28, embed_dim=48, depth=2, num_heads=2),
    timm("cait_xxs24_224", 32, **_SMALL),
    timm("xcit_nano_12_p16_224", 32, **_SMALL),
    short(timm("mixer_s16_224", 32, img_size=32)),
    short(timm("resmlp_12_224", 32, img_size=32)),
    short(timm("gmlp_ti16_224", 32, img_size=32)),
    timm("convnext_atto", 32, depths=(1, 1, 1, 1), dims=(16, 24, 32, 40)),
    timm(
        "swin_tiny_patch4_window7_224",
        32,
        img_size=32,
        window_size=4,
        embed_dim=24,
        depths=(2, 2),
        num_heads=(2, 2),
    ),
    timm("poolformer_s12", 32),
    timm("levit_128s", 64, img_size=64),
    timm("pit_ti_224", 64, img_size=64),
    timm("mobilevit_xxs", 64),
]

# --- transformers ----------------------------------------------------------------------------------------------------


def ids(**others: Any) -> Callable[[], dict[str, Any]]:
    def inputs() -> dict[str, Any]:
        ids = torch.randint(3, 90, (2, 9))
        return {"input_ids": ids, **{name: value() for name, value in others.items()}}

    return inputs


def transformers(name: str, inputs: Callable[[], dict[str, Any]] | None = None, **config: Any) -> Example:
    def make() -> nn.Module:
        transformers = package("transformers")
        configured = getattr(transformers, f"{name}Config")(**config)
        made: nn.Module = getattr(transformers, f"{name}Model")(configured)
        return made

    return Example(f"transformers_{name}", "transformers", make, inputs or ids())


BERT: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
LLAMA: dict[str, Any] = {**BERT, "num_key_value_heads": 2, "use_cache": False}
PIXELS = {"image_size": 32, "patch_size": 16, **{k: v for k, v in BERT.items() if k != "vocab_size"}}


def pixels() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def decoded() -> Tensor:
    return torch.randint(3, 90, (2, 5))


TRANSFORMERS = [
    transformers("Bert", **BERT),
    transformers("Roberta", **BERT),
    transformers("Electra", **BERT, embedding_size=32),
    transformers("Albert", **BERT, embedding_size=16),
    transformers("MPNet", **BERT),
    transformers("MobileBert", **{**BERT, "intra_bottleneck_size": 32, "embedding_size": 32}),
    transformers("DistilBert", vocab_size=99, dim=32, n_layers=2, n_heads=4, hidden_dim=48),
    transformers("GPT2", vocab_size=99, n_embd=32, n_layer=2, n_head=4, use_cache=False),
    transformers("OpenAIGPT", vocab_size=99, n_embd=32, n_layer=2, n_head=4),
    transformers("GPTNeoX", **BERT, use_cache=False),
    transformers("GPTJ", vocab_size=99, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, use_cache=False),
    transformers("Bloom", vocab_size=99, hidden_size=32, n_layer=2, n_head=4, use_cache=False),
    transformers(
        "Falcon", vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, use_cache=False
    ),
    transformers(
        "OPT",
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=48,
        word_embed_proj_dim=32,
        use_cache=False,
    ),
    transformers("Llama", **LLAMA),
    transformers("Mistral", **LLAMA),
    transformers("Qwen2", **LLAMA),
    transformers("Gemma", **LLAMA, head_dim=8),
    transformers("Phi", **LLAMA),
    transformers("StableLm", **LLAMA),
    transformers(
        "T5",
        ids(decoder_input_ids=decoded),
        vocab_size=99,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        use_cache=False,
    ),
    transformers(
        "Bart",
        ids(decoder_input_ids=decoded),
        vocab_size=99,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        use_cache=False,
    ),
    transformers("ViT", pixels, **PIXELS),
    transformers("DeiT", pixels, **PIXELS),
    transformers("Dinov2", pixels, **{k: v for k, v in PIXELS.items() if k != "intermediate_size"}),
    transformers("CLIPVision", pixels, **PIXELS),
    transformers("SiglipVision", pixels, **PIXELS),
    transformers(
        "Whisper",
        lambda: {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": decoded()},
        vocab_size=99,
        num_mel_bins=8,
        max_source_positions=10,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    ),
]
EXAMPLES = [*PLAIN, *TORCHVISION, *TIMM, *TRANSFORMERS]
