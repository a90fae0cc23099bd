"""Models of many kinds, tiny, made by configuration: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.example import Example, Inputs, of_package, package

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


def _rows(*shape: int, key: str = "input") -> Inputs:
    return lambda: {key: torch.randn(*shape)}


def _plain(name: str, make: Callable[[], nn.Module], inputs: Inputs) -> Example:
    return Example(name, "torch", make, inputs)


def _autoencoder() -> nn.Module:
    ends = nn.Linear(48, 24), nn.ReLU(inplace=True), nn.Linear(24, 8)
    return nn.Sequential(*ends, nn.Linear(8, 24), nn.LeakyReLU(), nn.Linear(24, 48))


PLAIN = [
    _plain("gated_mlp", lambda: nn.Sequential(Gated(), Gated()), _rows(2, 5, 32)),
    _plain("cross_network", CrossNetwork, _rows(9, 24, key="x")),
    _plain("actor_critic", ActorCritic, _rows(9, 12, key="x")),
    _plain("tabular_resnet", ResNetTabular, _rows(9, 24, key="x")),
    _plain("batch_norm_relu", lambda: Normalised(nn.ReLU), _rows(9, 24)),
    _plain("batch_norm_elu", lambda: Normalised(nn.ELU), _rows(9, 24)),
    _plain("time_embedding", TimeEmbedding, lambda: {"x": torch.randn(3, 5, 32), "time": torch.randn(3, 16)}),
    _plain(
        "encoder_layer",
        lambda: nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True),
        _rows(2, 5, 32, key="src"),
    ),
    _plain(
        "decoder_layer",
        lambda: nn.TransformerDecoderLayer(32, 4, 64, batch_first=True),
        lambda: {"tgt": torch.randn(2, 5, 32), "memory": torch.randn(2, 6, 32)},
    ),
    _plain("autoencoder", _autoencoder, _rows(9, 48)),
]

# --- torchvision and timm --------------------------------------------------------------------------------------------


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


def torchvision(name: str, size: int, *given: Any, kind: str = "", **options: Any) -> Example:
    inputs, path = _rows(2, 3, size, size, key="x"), f"torchvision.models.{kind or name}"
    return of_package(f"torchvision_{name}", path, inputs, *given, num_classes=10, **options)


TORCHVISION = [
    *(torchvision(name, 32) for name in ("resnet18", "mobilenet_v2", "mobilenet_v3_small")),
    *(torchvision(name, 32) for name in ("shufflenet_v2_x0_5", "efficientnet_b0", "vgg11", "swin_v2_t")),
    short(torchvision("convnext_tiny", 64)),
    torchvision("vit", 32, 32, 16, 2, 2, 32, 64, kind="VisionTransformer"),
    torchvision("swin", 64, [4, 4], 24, [2, 2], [2, 4], [4, 4], kind="SwinTransformer"),
]


def timm(name: str, size: int, **options: Any) -> Example:
    given: dict[str, Any] = {"pretrained": False, "num_classes": 10, **options}
    return of_package(f"timm_{name}", "timm.create_model", _rows(2, 3, size, size, key="x"), name, **given)


_SMALL: dict[str, Any] = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2}
_WINDOWS: dict[str, Any] = {"window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 2)}
TIMM = [
    *(timm(f"{name}_patch16_224", 32, **_SMALL) for name in ("vit_tiny", "deit3_small", "beit_base")),
    timm("eva02_tiny_patch14_224", 28, img_size=28, embed_dim=48, depth=2, num_heads=2),
    *(timm(name, 32, **_SMALL) for name in ("cait_xxs24_224", "xcit_nano_12_p16_224")),
    *(short(timm(f"{name}_224", 32, img_size=32)) for name in ("mixer_s16", "resmlp_12", "gmlp_ti16")),
    timm("convnext_atto", 32, depths=(1, 1, 1, 1), dims=(16, 24, 32, 40)),
    timm("swin_tiny_patch4_window7_224", 32, img_size=32, **_WINDOWS),
    timm("poolformer_s12", 32),
    *(timm(name, 64, img_size=64) for name in ("levit_128s", "pit_ti_224")),
    timm("mobilevit_xxs", 64),
    short(timm("volo_d1_224", 32, img_size=32)),
    timm("sequencer2d_s", 32, img_size=32, layers=(1, 1, 1, 1), embed_dims=(16, 24, 24, 24)),
    timm("twins_svt_small", 32, depths=(1, 1, 1, 1), embed_dims=(16, 16, 32, 32)),
    timm("crossvit_tiny_240", 240),
    timm("edgenext_xx_small", 32),
    timm("vit_relpos_small_patch16_224", 32, img_size=32, embed_dim=32, depth=2, num_heads=2),
    short(timm("gmixer_12_224", 32, img_size=32)),
]

# --- transformers ----------------------------------------------------------------------------------------------------


def _ids() -> dict[str, Any]:
    return {"input_ids": torch.randint(3, 90, (2, 9))}


def transformers(name: str, inputs: Inputs = _ids, **config: Any) -> Example:
    def make() -> nn.Module:
        transformers = package("transformers")
        configured = getattr(transformers, f"{name}Config")(**config)
        made: nn.Module = getattr(transformers, f"{name}Model")(configured)
        return made

    return Example(f"transformers_{name}", "transformers", make, inputs)


LAYERS: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT: dict[str, Any] = {**LAYERS, "vocab_size": 99, "intermediate_size": 48}
LLAMA: dict[str, Any] = {**BERT, "num_key_value_heads": 2, "use_cache": False}
GPT: dict[str, Any] = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4}
_HALF: dict[str, Any] = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
_TEXT: dict[str, Any] = {"vocab_size": 99, "d_model": 32, "use_cache": False}
SEQ2SEQ: dict[str, Any] = {
    **{f"{half}_{name}": value for half in ("encoder", "decoder") for name, value in _HALF.items()},
    **_TEXT,
}
T5: dict[str, Any] = {**_TEXT, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
PIXELS: dict[str, Any] = {**LAYERS, "image_size": 32, "patch_size": 16, "intermediate_size": 48}
_AUDIO: dict[str, Any] = {
    **BERT,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}


def pixels() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def _sound() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 400)}


def decoded(inputs: Inputs = _ids) -> Inputs:
    """Of a model that has a decoder, too."""
    return lambda: {**inputs(), "decoder_input_ids": torch.randint(3, 90, (2, 5))}


TRANSFORMERS = [
    # --- some of each kind ---
    *(transformers(name, **BERT) for name in ("Bert", "Roberta", "MPNet")),
    transformers("Electra", **BERT, embedding_size=32),
    transformers("Albert", **BERT, embedding_size=16),
    transformers("MobileBert", **BERT, intra_bottleneck_size=32, embedding_size=32),
    transformers("DistilBert", vocab_size=99, dim=32, n_layers=2, n_heads=4, hidden_dim=48),
    transformers("GPT2", **GPT, use_cache=False),
    transformers("OpenAIGPT", **GPT),
    transformers("GPTNeoX", **BERT, use_cache=False),
    transformers("GPTJ", **GPT, rotary_dim=4, use_cache=False),
    transformers("Bloom", vocab_size=99, hidden_size=32, n_layer=2, n_head=4, use_cache=False),
    transformers("Falcon", **LAYERS, vocab_size=99, use_cache=False),
    transformers("OPT", **LAYERS, vocab_size=99, ffn_dim=48, word_embed_proj_dim=32, use_cache=False),
    *(transformers(name, **LLAMA) for name in ("Llama", "Mistral", "Qwen2", "Phi", "StableLm")),
    transformers("Gemma", **LLAMA, head_dim=8),
    transformers("T5", decoded(), **T5),
    transformers("Bart", decoded(), **SEQ2SEQ),
    *(transformers(name, pixels, **PIXELS) for name in ("ViT", "DeiT", "CLIPVision", "SiglipVision")),
    transformers("Dinov2", pixels, **LAYERS, image_size=32, patch_size=16),
    transformers(
        "Whisper", decoded(lambda: {"input_features": torch.randn(2, 8, 20)}), **SEQ2SEQ, num_mel_bins=8,
        max_source_positions=10, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    ),
    # --- encoders ---
    *(transformers(name, **BERT) for name in ("XLMRoberta", "Camembert", "RobertaPreLayerNorm", "Ernie")),
    *(transformers(name, **BERT) for name in ("NomicBert", "MegatronBert", "Data2VecText")),
    transformers("RemBert", **BERT, input_embedding_size=16, output_embedding_size=24),
    transformers("RoFormer", **BERT, embedding_size=32),
    *(transformers(name, **BERT) for name in ("LayoutLM", "Splinter")),
    transformers("Nystromformer", **BERT, segment_means_seq_len=9, num_landmarks=9),
    transformers("FNet", vocab_size=99, hidden_size=32, num_hidden_layers=2, intermediate_size=48),
    transformers("DebertaV2", **BERT, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    transformers("Esm", **BERT, position_embedding_type="absolute", pad_token_id=1, mask_token_id=2),
    # --- decoders ---
    transformers(
        "GPTNeo", vocab_size=99, hidden_size=32, num_layers=2, num_heads=4,
        attention_types=[[["global", "local"], 1]], use_cache=False,
    ),
    transformers("GPTBigCode", **GPT, use_cache=False),
    transformers("CodeGen", **GPT, rotary_dim=4, use_cache=False),
    transformers("Mpt", vocab_size=99, d_model=32, n_layers=2, n_heads=4, use_cache=False),
    transformers(
        "XGLM", vocab_size=99, d_model=32, num_layers=2, attention_heads=4, ffn_dim=48, use_cache=False
    ),
    transformers("BioGpt", **BERT, use_cache=False),
    transformers("CTRL", **GPT, dff=48, use_cache=False),
    transformers("XLNet", vocab_size=99, d_model=32, n_layer=2, n_head=4, d_inner=48),
    *(transformers(name, **LLAMA, head_dim=8) for name in ("Qwen3", "Gemma2")),
    transformers("Phi3", **LLAMA, pad_token_id=0),
    *(transformers(name, **LLAMA) for name in ("Olmo2", "Starcoder2", "Granite", "Cohere")),
    # --- encoders with decoders ---
    *(transformers(name, decoded(), **SEQ2SEQ) for name in ("MBart", "Pegasus", "M2M100")),
    transformers("Marian", decoded(), **SEQ2SEQ, pad_token_id=0),
    transformers("MT5", decoded(), **T5),
    # --- images and sound ---
    *(transformers(name, pixels, **PIXELS) for name in ("Beit", "ViTMSN", "IJepa")),
    transformers("Yolos", pixels, **{**PIXELS, "image_size": [32, 32]}, num_detection_tokens=4),
    transformers(
        "Segformer", pixels, depths=[1, 1], num_encoder_blocks=2, hidden_sizes=[16, 32], sr_ratios=[2, 1],
        num_attention_heads=[2, 2], strides=[4, 2], patch_sizes=[7, 3], mlp_ratios=[2, 2],
    ),
    transformers("ConvNextV2", pixels, depths=[1, 1, 1, 1], hidden_sizes=[16, 16, 32, 32]),
    transformers(
        "AST", lambda: {"input_values": torch.randn(2, 32, 16)}, **LAYERS, intermediate_size=48,
        max_length=32, num_mel_bins=16,
    ),
    *(transformers(name, _sound, **_AUDIO) for name in ("Wav2Vec2", "Hubert")),
]  # fmt: skip
EXAMPLES = [*PLAIN, *TORCHVISION, *TIMM, *TRANSFORMERS]
