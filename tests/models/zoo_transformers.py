"""More models of transformers, and some of timm and torchvision with other layouts of their blocks."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.example import Example
from tests.models.zoo import (
    BERT,
    LLAMA,
    PIXELS,
    decoded,
    ids,
    pixels,
    short,
    timm,
    torchvision,
    transformers,
)

_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "use_cache": False,
}
_AUDIO: dict[str, Any] = {
    **BERT,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}
_GPT: dict[str, Any] = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False}


def _sound() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 400)}


TRANSFORMERS = [
    # --- encoders ---
    transformers("XLMRoberta", **BERT),
    transformers("Camembert", **BERT),
    transformers("RobertaPreLayerNorm", **BERT),
    transformers("Ernie", **BERT),
    transformers("NomicBert", **BERT),
    transformers("MegatronBert", **BERT),
    transformers("Data2VecText", **BERT),
    transformers("RemBert", **BERT, input_embedding_size=16, output_embedding_size=24),
    transformers("RoFormer", **BERT, embedding_size=32),
    transformers("LayoutLM", **BERT),
    transformers("Splinter", **BERT),
    transformers("Nystromformer", **BERT, segment_means_seq_len=9, num_landmarks=9),
    transformers("FNet", vocab_size=99, hidden_size=32, num_hidden_layers=2, intermediate_size=48),
    transformers("DebertaV2", **BERT, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    transformers("Esm", **BERT, position_embedding_type="absolute", pad_token_id=1, mask_token_id=2),
    # --- decoders ---
    transformers(
        "GPTNeo",
        None,
        vocab_size=99,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        use_cache=False,
    ),
    transformers("GPTBigCode", **_GPT),
    transformers("CodeGen", **_GPT, rotary_dim=4),
    transformers("Mpt", vocab_size=99, d_model=32, n_layers=2, n_heads=4, use_cache=False),
    transformers(
        "XGLM", vocab_size=99, d_model=32, num_layers=2, attention_heads=4, ffn_dim=48, use_cache=False
    ),
    transformers("BioGpt", **BERT, use_cache=False),
    transformers("CTRL", vocab_size=99, n_embd=32, n_layer=2, n_head=4, dff=48, use_cache=False),
    transformers("XLNet", vocab_size=99, d_model=32, n_layer=2, n_head=4, d_inner=48),
    transformers("Qwen3", **LLAMA, head_dim=8),
    transformers("Gemma2", **LLAMA, head_dim=8),
    transformers("Phi3", **LLAMA, pad_token_id=0),
    transformers("Olmo2", **LLAMA),
    transformers("Starcoder2", **LLAMA),
    transformers("Granite", **LLAMA),
    transformers("Cohere", **LLAMA),
    # --- encoders with decoders ---
    transformers("MBart", ids(decoder_input_ids=decoded), **_SEQ2SEQ),
    transformers("Pegasus", ids(decoder_input_ids=decoded), **_SEQ2SEQ),
    transformers("Marian", ids(decoder_input_ids=decoded), **_SEQ2SEQ, pad_token_id=0),
    transformers("M2M100", ids(decoder_input_ids=decoded), **_SEQ2SEQ),
    transformers(
        "MT5",
        ids(decoder_input_ids=decoded),
        vocab_size=99,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        use_cache=False,
    ),
    # --- images and sound ---
    transformers("Beit", pixels, **PIXELS),
    transformers("ViTMSN", pixels, **PIXELS),
    transformers("IJepa", pixels, **PIXELS),
    transformers("Yolos", pixels, **{**PIXELS, "image_size": [32, 32]}, num_detection_tokens=4),
    transformers(
        "Segformer",
        pixels,
        depths=[1, 1],
        num_encoder_blocks=2,
        hidden_sizes=[16, 32],
        sr_ratios=[2, 1],
        num_attention_heads=[2, 2],
        strides=[4, 2],
        patch_sizes=[7, 3],
        mlp_ratios=[2, 2],
    ),
    transformers("ConvNextV2", pixels, depths=[1, 1, 1, 1], hidden_sizes=[16, 16, 32, 32]),
    transformers(
        "AST",
        lambda: {"input_values": torch.randn(2, 32, 16)},
        **{k: v for k, v in BERT.items() if k != "vocab_size"},
        max_length=32,
        num_mel_bins=16,
    ),
    transformers("Wav2Vec2", _sound, **_AUDIO),
    transformers("Hubert", _sound, **_AUDIO),
]
VISION = [
    short(torchvision("convnext_tiny", 64)),
    torchvision("efficientnet_b0", 32),
    torchvision("vgg11", 32),
    torchvision("swin_v2_t", 32),
    short(timm("volo_d1_224", 32, img_size=32)),
    timm("sequencer2d_s", 32, img_size=32, layers=(1, 1, 1, 1), embed_dims=(16, 24, 24, 24)),
    timm("twins_svt_small", 32, depths=(1, 1, 1, 1), embed_dims=(16, 16, 32, 32)),
    timm("crossvit_tiny_240", 240),
    timm("edgenext_xx_small", 32),
    timm("vit_relpos_small_patch16_224", 32, img_size=32, embed_dim=32, depth=2, num_heads=2),
    short(timm("gmixer_12_224", 32, img_size=32)),
]
EXAMPLES: list[Example] = [*TRANSFORMERS, *VISION]
