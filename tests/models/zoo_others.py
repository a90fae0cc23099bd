"""Models of diffusion, of graphs, recommenders, policies, and transformers of many options."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.models import zoo
from tests.models.example import Example, Inputs, of_package, package

# --- diffusers -------------------------------------------------------------------------------------------------------


def _diffusers(name: str, inputs: Inputs, **config: Any) -> Example:
    path, whole = f"diffusers.{name}", lambda: {**inputs(), "return_dict": False}
    return of_package(f"diffusers_{name}", path, whole, **config)


_HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
_BLOCKS: dict[str, Any] = {"block_out_channels": (16, 32), "norm_num_groups": 4}
_TEXT = (2, 5, 32)


def _drawn(**shapes: tuple[int, ...]) -> Inputs:
    return lambda: {name: torch.randn(shape) for name, shape in shapes.items()}


def _noisy(key: str = "hidden_states", *image: int, **others: tuple[int, ...]) -> Inputs:
    """An image and its time step."""
    drawn = _drawn(**others, **{key: (2, *(image or (4, 8, 8)))})
    return lambda: {**drawn(), "timestep": torch.tensor([3, 7])}


DIFFUSERS = [
    _diffusers(
        "UNet2DModel", _noisy("sample", 3, 16, 16), **_BLOCKS,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
    ),
    _diffusers(
        "UNet2DConditionModel", _noisy("sample", encoder_hidden_states=_TEXT), **_BLOCKS,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), layers_per_block=1, cross_attention_dim=32,
        attention_head_dim=4,
    ),
    _diffusers(
        "AutoencoderKL", _drawn(sample=(2, 3, 16, 16)), **_BLOCKS,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    _diffusers(
        "DiTTransformer2DModel", lambda: {**_noisy()(), "class_labels": torch.tensor([1, 2])}, **_HEADS,
        sample_size=8, num_embeds_ada_norm=20,
    ),
    _diffusers(
        "PixArtTransformer2DModel",
        lambda: {**_noisy(encoder_hidden_states=_TEXT)(),
                 "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
        **_HEADS, sample_size=8, cross_attention_dim=32, caption_channels=32, use_additional_conditions=False,
    ),
    _diffusers(
        "SD3Transformer2DModel", _noisy(encoder_hidden_states=_TEXT, pooled_projections=(2, 24)), **_HEADS,
        sample_size=8, in_channels=4, out_channels=4, joint_attention_dim=32, caption_projection_dim=32,
        pooled_projection_dim=24, pos_embed_max_size=8,
    ),
    _diffusers(
        "SanaTransformer2DModel", _noisy(encoder_hidden_states=_TEXT), **_HEADS, in_channels=4,
        out_channels=4, num_cross_attention_heads=2, cross_attention_head_dim=16, cross_attention_dim=32,
        caption_channels=32, sample_size=8,
    ),
    _diffusers(
        "PriorTransformer", _noisy("hidden_states", 32, proj_embedding=(2, 32), encoder_hidden_states=_TEXT),
        **_HEADS, embedding_dim=32, num_embeddings=5,
    ),
    _diffusers(
        "Transformer2DModel", _drawn(hidden_states=(2, 32, 4, 4), encoder_hidden_states=_TEXT), **_HEADS,
        in_channels=32, cross_attention_dim=32, use_linear_projection=True,
    ),
]  # fmt: skip

# --- torch_geometric -------------------------------------------------------------------------------------------------


def _graph(**shapes: tuple[int, ...]) -> Inputs:
    drawn = _drawn(x=(12, 16), **shapes)
    return lambda: {**drawn(), "edge_index": torch.randint(0, 12, (2, 30))}


def _batched(inputs: Inputs) -> Inputs:
    return lambda: {**inputs(), "batch": torch.arange(12) // 6}


def _geometric(name: str, inputs: Inputs, *given: Any, **options: Any) -> Example:
    path = f"torch_geometric.nn.models.{name}"
    return of_package(f"geometric_{name}", path, inputs, *given, **options)


_LAYERS: dict[str, Any] = {"in_channels": 16, "hidden_channels": 32, "num_layers": 3, "out_channels": 8}
_STEPS: dict[str, Any] = {"edge_dim": 4, "num_layers": 2, "num_timesteps": 2}
GEOMETRIC = [
    *(_geometric(name, _graph(), **_LAYERS) for name in ("GCN", "GraphSAGE", "GIN", "EdgeCNN")),
    _geometric("GAT", _graph(), **_LAYERS, heads=2),
    _geometric("MLP", _drawn(x=(12, 16)), **_LAYERS),
    _geometric("LINKX", _graph(), 12, 16, 32, 8, 2),
    _geometric("AttentiveFP", _batched(_graph(edge_attr=(30, 4))), 16, 32, 8, **_STEPS),
    _geometric("SGFormer", _batched(_graph()), 16, 32, 8, is_fp32=True),
]

# --- deepctr-torch ---------------------------------------------------------------------------------------------------


def _recommender(name: str, *, linear: bool = True, **options: Any) -> Example:
    def make() -> nn.Module:
        inputs = package("deepctr_torch.inputs")
        columns = [inputs.SparseFeat(f"s{i}", 20, embedding_dim=8) for i in range(3)]
        columns += [inputs.DenseFeat(f"d{i}", 1) for i in range(2)]
        given = (columns, columns) if linear else (columns,)
        model: Any = getattr(package("deepctr_torch.models"), name)(*given, **options)
        # Theirs all are nearly zero.
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        return model  # type: ignore[no-any-return]

    def inputs() -> dict[str, Any]:
        return {"X": torch.cat([torch.randint(0, 20, (9, 3)).float(), torch.randn(9, 2)], -1)}

    return Example(f"deepctr_{name}", "deepctr_torch", make, inputs)


_DEEP: dict[str, Any] = {"dnn_hidden_units": (32, 16)}
RECOMMENDERS = [
    *(_recommender(name, **_DEEP) for name in ("DeepFM", "WDL", "DCNMix", "NFM", "AutoInt", "FiBiNET")),
    *(_recommender(name, **_DEEP) for name in ("IFM", "DIFM")),
    _recommender("DCN", **_DEEP, cross_parameterization="matrix"),
    _recommender("AFN", afn_dnn_hidden_units=(32, 16)),
    _recommender("PNN", linear=False, **_DEEP),
    _recommender("MMOE", linear=False, expert_dnn_hidden_units=(32, 16)),
    _recommender("ESMM", linear=False, tower_dnn_hidden_units=(32, 16)),
]

# --- x-transformers --------------------------------------------------------------------------------------------------


def _x_transformer(name: str, kind: str = "Decoder", **options: Any) -> Example:
    def make() -> nn.Module:
        package_: Any = package("x_transformers")
        layers = getattr(package_, kind)(dim=32, depth=2, heads=2, attn_dim_head=16, **options)
        made: nn.Module = package_.TransformerWrapper(num_tokens=99, max_seq_len=16, attn_layers=layers)
        return made

    return Example(
        f"x_transformers_{name}", "x_transformers", make, lambda: {"x": torch.randint(0, 99, (2, 9))}
    )


def _x_images() -> nn.Module:
    package_: Any = package("x_transformers")
    layers = package_.Encoder(dim=32, depth=2, heads=2, attn_dim_head=16)
    made: nn.Module = package_.ViTransformerWrapper(
        image_size=32, patch_size=16, num_classes=10, attn_layers=layers
    )
    return made


X_TRANSFORMERS = [
    _x_transformer("decoder"),
    _x_transformer("encoder", "Encoder"),
    _x_transformer("glu", ff_glu=True),
    _x_transformer("swiglu", ff_glu=True, ff_swish=True, use_rmsnorm=True),
    _x_transformer("relu_squared", ff_relu_squared=True),
    _x_transformer("gated_values", attn_gate_values=True),
    _x_transformer("attention_on_attention", attn_on_attn=True),
    _x_transformer("sandwich", sandwich_norm=True),
    _x_transformer("residual_attention", "Encoder", residual_attn=True, pre_norm=False),
    _x_transformer("rotary", rotary_pos_emb=True),
    _x_transformer("no_bias", ff_no_bias=True, use_scalenorm=True),
    Example("x_transformers_vit", "x_transformers", _x_images, lambda: {"img": torch.randn(2, 3, 32, 32)}),
]

# --- stable-baselines3 -----------------------------------------------------------------------------------------------


def _policy(name: str, path: str, *, discrete: bool, seen: str = "obs", **options: Any) -> Example:
    def make() -> nn.Module:
        module, policy = path.rsplit(".", 1)
        spaces = package("gymnasium.spaces")
        space = spaces.Box(-1.0, 1.0, (12,))
        done = spaces.Discrete(4) if discrete else spaces.Box(-1.0, 1.0, (4,))
        made: nn.Module = getattr(package(f"stable_baselines3.{module}"), policy)(
            space, done, lambda _: 1e-3, **options
        )
        return made

    def inputs() -> dict[str, Any]:
        return {seen: torch.randn(9, 12), "deterministic": True}

    return Example(f"policy_{name}", "stable_baselines3", make, inputs, is_fp32=True)


_NET: dict[str, Any] = {"net_arch": [32, 32]}
POLICIES = [
    _policy("ppo", "ppo.policies.MlpPolicy", discrete=True),
    _policy("ppo_gelu", "ppo.policies.MlpPolicy", discrete=True, activation_fn=nn.GELU, **_NET),
    _policy("a2c_continuous", "a2c.policies.MlpPolicy", discrete=False, ortho_init=False),
    _policy("sac", "sac.policies.MlpPolicy", discrete=False, **_NET),
    _policy("td3", "td3.policies.MlpPolicy", discrete=False, seen="observation", **_NET),
]
EVERY = [*zoo.EXAMPLES, *DIFFUSERS, *GEOMETRIC, *RECOMMENDERS, *X_TRANSFORMERS, *POLICIES]
