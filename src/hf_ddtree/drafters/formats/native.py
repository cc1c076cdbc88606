"""Transformers' own DFlash assistants: a flat configuration, `encoder.fc` for the context projection."""

from typing import Any

from hf_ddtree.drafters.formats.body import rope_parameters

MODEL_TYPE = "muse_glimmer_assistant"

KEY_MAPPING = {r"^encoder\.fc\.": "fc.", r"^encoder\.output_norm_enc\.": "hidden_norm."}


def detect(raw: dict[str, Any]) -> bool:
    return raw.get("model_type") == MODEL_TYPE or "MuseGlimmerAssistantModel" in (raw.get("architectures") or [])


def convert(raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of a [`DFlashConfig`]; what the file leaves out has the library's defaults for this model."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(MODEL_TYPE, **{k: v for k, v in raw.items() if k != "model_type"})
    names = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act "
        "max_position_embeddings rms_norm_eps layer_types sliding_window block_size mask_token_id target_layer_ids "
        "pad_token_id bos_token_id eos_token_id"
    )
    fields = {name: getattr(config, name) for name in names.split()}
    fields["rope_parameters"] = rope_parameters({"rope_parameters": config.rope_parameters})
    fields["causal_layers"] = [False] * config.num_hidden_layers
    fields["inclusive_window"] = True
    fields["vocab_size"] = raw.get("vocab_size") or config.mask_token_id + 1
    return fields
