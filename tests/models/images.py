"""Models that read an image before the text: positions in three dimensions, image tokens that see each other."""

from typing import Any

import torch
import transformers

from models.delta import DELTA, ROUTES, remembering
from models.family import FULL, SLIDING, Family, Image, text_config

IMAGE, VIDEO, START, END = 15, 14, 13, 12


def _pixels(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4))


def _patches(patch: int, grid: tuple[int, int] = (2, 4), types: str | None = "mm_token_type_ids") -> Image:
    """A picture cut into patches of two frames, two by two of which make a token: an image wider than high."""
    height, width = grid
    pixels = _pixels(height * width, 3 * 2 * patch * patch)
    return Image(
        IMAGE,
        height * width // 4,
        lambda: dict(pixel_values=pixels, image_grid_thw=torch.tensor([[1, height, width]])),
        types,
    )


def _wrapper(
    name: str,
    title: str,
    model: str,
    text: str,
    image: Image,
    wrapper: dict[str, Any],
    window: str | None = None,
    open_routing: dict[str, Any] | None = None,
    seed: int = 0,
    further: bool = False,
    routes: frozenset[str] = frozenset({"attention"}),
    **fields: Any,
) -> Family:
    """A language model inside one that reads images."""

    def build(**overrides: Any) -> Any:
        language = text_config(text, {**fields, **overrides})
        config = getattr(transformers, f"{model}Config")(text_config=language.to_dict(), **wrapper)
        return getattr(transformers, f"{model}ForConditionalGeneration")(config)

    return Family(
        name,
        title,
        f"{model}ForConditionalGeneration",
        build,
        routes,
        window=window,
        open_routing=open_routing,
        image=image,
        seed=seed,
        further=further,
    )


_QWEN_IDS: dict[str, Any] = dict(
    image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END
)
_QWEN_TOWER: dict[str, Any] = dict(
    depth=2, hidden_size=16, intermediate_size=24, num_heads=2, patch_size=2, spatial_merge_size=2, out_hidden_size=32
)
_MROPE: dict[str, Any] = dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 1, 1])
_SIGLIP: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=2
)
_GEMMA4_TOWER: dict[str, Any] = dict(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    patch_size=2,
    pooling_kernel_size=2,
    position_embedding_size=16,
)
_COORDINATES = torch.tensor([[[column, row] for row in range(4) for column in range(4)]])

FAMILIES: list[Family] = [
    _wrapper(
        "qwen2_vl",
        "Qwen2-VL after an image",
        "Qwen2VL",
        "Qwen2VLTextConfig",
        _patches(2),
        dict(
            _QWEN_IDS,
            vision_config=dict(depth=2, embed_dim=16, hidden_size=32, num_heads=2, patch_size=2, mlp_ratio=2),
        ),
        rope_parameters=_MROPE,
        further=True,
    ),
    _wrapper(
        "qwen2_5_vl",
        "Qwen2.5-VL after an image",
        "Qwen2_5_VL",
        "Qwen2_5_VLTextConfig",
        _patches(2),
        dict(_QWEN_IDS, vision_config=dict(_QWEN_TOWER, window_size=4, fullatt_block_indexes=[1])),
        rope_parameters=_MROPE,
    ),
    _wrapper(
        "qwen3_vl",
        "Qwen3-VL after an image",
        "Qwen3VL",
        "Qwen3VLTextConfig",
        _patches(2),
        dict(
            _QWEN_IDS,
            vision_config=dict(_QWEN_TOWER, num_position_embeddings=16, deepstack_visual_indexes=[0, 1]),
        ),
        rope_parameters=_MROPE,
    ),
    _wrapper(
        "qwen3_vl_moe",
        "Qwen3-VL-MoE after an image",
        "Qwen3VLMoe",
        "Qwen3VLMoeTextConfig",
        _patches(2),
        dict(
            _QWEN_IDS,
            vision_config=dict(_QWEN_TOWER, num_position_embeddings=16, deepstack_visual_indexes=[0, 1]),
        ),
        open_routing=dict(num_experts_per_tok=4),
        rope_parameters=_MROPE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        further=True,
    ),
    remembering(
        _wrapper(
            "qwen3_5_image",
            "Qwen3.5 after an image",
            "Qwen3_5",
            "Qwen3_5TextConfig",
            _patches(2),
            dict(_QWEN_IDS, vision_config=dict(_QWEN_TOWER, num_position_embeddings=16)),
            routes=ROUTES,
            rope_parameters=dict(_MROPE, mrope_interleaved=True, partial_rotary_factor=1.0),
            **DELTA,
        )
    ),
    _wrapper(
        "gemma3_image",
        "Gemma 3 after an image",
        "Gemma3",
        "Gemma3TextConfig",
        Image(IMAGE, 4, lambda: dict(pixel_values=_pixels(1, 3, 8, 8)), types="token_type_ids"),
        dict(
            image_token_index=IMAGE,
            boi_token_index=START,
            eoi_token_index=END,
            mm_tokens_per_image=4,
            vision_config=_SIGLIP,
        ),
        window="sliding_window",
        sliding_window=6,
        layer_types=[SLIDING, FULL] * 2,
        query_pre_attn_scalar=8,
    ),
    _wrapper(
        "gemma4_image",
        "Gemma 4 after an image",
        "Gemma4",
        "Gemma4TextConfig",
        Image(IMAGE, 4, lambda: dict(pixel_values=_pixels(1, 16, 12), image_position_ids=_COORDINATES)),
        dict(
            image_token_id=IMAGE,
            boi_token_id=START,
            eoi_token_id=END,
            video_token_id=VIDEO,
            vision_config=_GEMMA4_TOWER,
            audio_config=None,
        ),
        window="sliding_window",
        sliding_window=6,
        num_hidden_layers=6,
        layer_types=[SLIDING, FULL] * 3,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=16,
        global_head_dim=12,
        use_bidirectional_attention="vision",
        seed=6,
    ),
    _wrapper(
        "muse_glimmer",
        "Muse Glimmer after an image",
        "MuseGlimmer",
        "MuseGlimmerTextConfig",
        _patches(2, types=None),
        dict(
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            out_hidden_size=64,
            projector_hidden_size=16,
            vision_config=dict(
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                patch_size=2,
                pos_emb_height=4,
                pos_emb_width=4,
                max_position_embeddings=16,
            ),
        ),
        window="sliding_window",
        sliding_window=6,
    ),
]
