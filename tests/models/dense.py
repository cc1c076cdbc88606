"""Decoders whose every layer sees the whole prefix through rotary positions, or none; without experts."""

from typing import Any

from models.family import Family, causal

# Queries grow with their position, from the ninth on: by position, not by slot, or trees would differ.
SCALED_QUERIES: dict[str, Any] = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=8.0,
    original_max_position_embeddings=9,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.9,
)
_MULTIPLIERS: dict[str, Any] = dict(
    embedding_multiplier=3.0, attention_multiplier=0.5, residual_multiplier=0.7, logits_scaling=2.0
)

FAMILIES: list[Family] = [
    causal("llama", "Llama 2, 3", "Llama"),
    causal("qwen2", "Qwen2, Qwen2.5", "Qwen2"),
    causal("qwen3", "Qwen3", "Qwen3"),
    causal("ministral3", "Ministral 3", "Ministral3", rope_parameters=SCALED_QUERIES),
    causal("gemma", "Gemma", "Gemma", further=True),
    causal("glm", "GLM", "Glm", further=True),
    causal("glm4", "GLM-4", "Glm4"),
    causal("phi", "Phi-1, Phi-2", "Phi", seed=1, further=True),
    causal("phi3", "Phi-3, Phi-4", "Phi3"),
    causal("olmo", "OLMo", "Olmo", further=True),
    causal("olmo2", "OLMo 2", "Olmo2", further=True),
    causal("cohere", "Command R", "Cohere", logit_scale=0.7, seed=1, further=True),
    causal("smollm3", "SmolLM3", "SmolLM3", no_rope_layers=[1, 1, 0, 1]),
    causal("granite", "Granite", "Granite", **_MULTIPLIERS),
    causal("nemotron", "Nemotron", "Nemotron", further=True),
    causal("stablelm", "StableLM", "StableLm", further=True),
    causal("helium", "Helium", "Helium", further=True),
    causal("seed_oss", "Seed-OSS", "SeedOss", further=True),
    causal("ernie4_5", "ERNIE 4.5", "Ernie4_5", further=True),
    causal("hunyuan_dense", "Hunyuan dense", "HunYuanDenseV1", further=True),
    causal("apertus", "Apertus", "Apertus", seed=2, further=True),
    causal("arcee", "Arcee", "Arcee", further=True),
    # A mask of its own for each head lies over the tree's.
    causal("doge", "Doge", "Doge", seed=4),
    causal("gpt_neox", "GPT-NeoX, Pythia", "GPTNeoX"),
]
