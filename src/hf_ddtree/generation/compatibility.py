"""Everything that must hold before a token is drafted. Each check raises with both sides and the way out."""

import inspect
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_ddtree import attention, cache, linear_attention
from hf_ddtree.compat import CACHE_NAME, is_dflash_drafter, prompt_length, supported_modes, text_config
from hf_ddtree.configuration import TreeSettings
from hf_ddtree.drafters import device_of, is_sharded
from hf_ddtree.generation import loaded, positions
from hf_ddtree.generation.pair import check_pair

# Settings of other strategies, with the value that means "not used".
_EXCLUSIVE: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "constraints": (None,),
    "force_words_ids": (None,),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "assistant_ensemble_weight": (None,),
}

# Parts of a drafter that a tree's builder asks, as often as the tree needs.
_PATH_HEADS = ("markov_head", "candidate_selector")


def check_request(target: PreTrainedModel, generation_config: GenerationConfig, mode_kwargs: dict[str, Any]) -> None:
    """What can be told before any input is prepared; runs where `generate` validates a generation mode.

    Args:
        target (`PreTrainedModel`): the model `generate` was called on.
        generation_config (`GenerationConfig`): with every override applied.
        mode_kwargs (`dict`): `assistant_model`, `streamer` and the like.

    Raises:
        ValueError: for a setting, model or pair that tree decoding does not serve.
    """
    drafter = mode_kwargs.get("assistant_model")
    if drafter is None:
        raise ValueError(
            "The generation config asks for tree decoding (DDTreeConfig), but there is no drafter: pass "
            "`assistant_model=DFlashModel.from_pretrained(...)`. To generate without one, put a plain "
            "`GenerationConfig` in its place, also in `model.generation_config` if the setting came from there."
        )
    if not is_dflash_drafter(drafter):
        raise ValueError(
            f"Tree decoding drafts with a DFlash drafter, but `assistant_model` is a {type(drafter).__name__}: load "
            "one with `DFlashModel.from_pretrained(...)`, or pass a plain `GenerationConfig` for ordinary assisted "
            "decoding."
        )
    for name, unused in _EXCLUSIVE.items():
        value = getattr(generation_config, name, None)
        if value not in unused:
            raise ValueError(
                "Tree decoding verifies one greedy or sampled sequence, so it cannot be combined with "
                f"`{name}={value!r}`. Leave `{name}` unset, or pass a plain `GenerationConfig`."
            )
    if mode_kwargs.get("synced_gpus") and getattr(generation_config, "guidance_scale", None) not in (None, 1):
        raise ValueError(
            "Under `synced_gpus` (FSDP or DeepSpeed ZeRO-3) all processes run equally many forwards, but "
            f"`guidance_scale={generation_config.guidance_scale}` adds one for each token: leave it unset."
        )
    if is_sharded(drafter) and any(getattr(drafter, name, None) is not None for name in _PATH_HEADS):
        raise ValueError(
            "The drafter is sharded over processes (FSDP2), but its path-conditioned head is asked outside of its "
            "forward: load the drafter whole in each process."
        )
    if mode_kwargs.get("assistant_tokenizer") is not None:
        raise ValueError("A DFlash drafter reads the target's own tokens: drop `assistant_tokenizer`.")
    if generation_config.use_cache is False:
        raise ValueError("Tree decoding keeps the verified prefix in a cache: drop `use_cache=False`.")
    if generation_config.cache_implementation == "quantized":
        raise ValueError(
            "Tree decoding cannot drop rejected nodes from a quantised cache, but `cache_implementation` is "
            "'quantized': leave it unset, or choose 'static' or, on CUDA, 'offloaded' or 'offloaded_static'."
        )
    if "offloaded" in (generation_config.cache_implementation or ""):
        _check_offloading(target, f"`cache_implementation={generation_config.cache_implementation!r}`")
    TreeSettings.read(generation_config)
    check_target(target, generation_config)
    check_pair(target, drafter)


def _check_offloading(target: PreTrainedModel, what: str) -> None:
    """Raises `ValueError` if the target's layers cannot use an offloaded cache, which the library gives CUDA streams.

    Args:
        target (`PreTrainedModel`): whose layers update the cache.
        what (`str`): what asks for it.
    """
    if not runs_on_cuda(target):
        device = device_of(target) or target.device
        raise ValueError(
            f"{what} asks for a cache that is kept on the host and brought to a CUDA device layer by layer, but "
            f"{type(target).__name__} is on {device.type!r}: leave `cache_implementation` unset, or pass a cache that "
            "is not offloaded."
        )


def runs_on_cuda(target: PreTrainedModel) -> bool:
    """Whether its layers may run on a CUDA device; weights that are offloaded or sharded may go there to be used."""
    devices = {weight.device.type for weight in target.parameters()}
    return torch.cuda.is_available() and (devices != {"cpu"} or is_sharded(target))


def check_target(target: PreTrainedModel, generation_config: GenerationConfig) -> None:
    """Raises `ValueError` unless the target is a decoder whose positions and attention can be set for a tree."""
    name = type(target).__name__
    if target.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model; draft trees are verified by decoder-only models.")
    if supported_modes(target) is not None:
        raise ValueError(f"{name} generates in modes of its own only: {supported_modes(target)}.")
    parameters = inspect.signature(target.forward).parameters
    if "position_ids" not in parameters:
        raise ValueError(
            f"{name} does not take `position_ids`: its positions, if it has any, follow the cache's length, so the "
            "nodes of a tree cannot be given their depth. Generate without `assistant_model`."
        )
    loaded.check(target)
    linear_attention.check(target)
    positions.check(target)
    attention.check(target)
    route = TreeSettings.read(generation_config).attention_route
    attention.check_route(target, route, bool(generation_config.output_attentions))
    if generation_config.output_attentions and attention.original_implementation(text_config(target)) != "eager":
        raise ValueError(
            '`output_attentions=True` needs the target on eager attention: load it with `attn_implementation="eager"`.'
        )


def check_inputs(
    target: PreTrainedModel, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> None:
    """What can be told only from the prepared inputs, still before the first forward."""
    embeds = model_kwargs.get("inputs_embeds")
    batch = embeds.shape[0] if embeds is not None else input_ids.shape[0]
    if batch != 1:
        raise ValueError(
            f"Tree decoding serves one sequence at a time, but the batch holds {batch}: call `generate` once a "
            "prompt (a pipeline does with `batch_size=1`)."
        )
    if embeds is None and input_ids.shape[1] == 0:
        raise ValueError(
            "The prompt has no tokens, so there is nothing to continue: pass at least one, the model's "
            "beginning-of-text token for instance."
        )
    held: Any = model_kwargs.get(CACHE_NAME)
    cache.check(held)
    if held.offloading:
        _check_offloading(target, f"`{type(held).__name__}(offloading=True)`")
    _check_room(target, held, input_ids, generation_config, model_kwargs)
    attention.check_padding(TreeSettings.read(generation_config).attention_route, model_kwargs.get("attention_mask"))
    embedded = embeds.shape[1] if embeds is not None and input_ids.shape[1] == 0 else 0
    budget = TreeSettings.read(generation_config).budget_on(target.device.type)
    # An automatic budget keeps its trees as small as it takes.
    nodes = budget if isinstance(budget, int) else 0
    positions.check_length(target, generation_config.max_length + embedded, nodes)


def _check_room(
    target: PreTrainedModel,
    held: Any,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    """Raises `ValueError` if the cache is of a fixed length that all tokens but the last do not fit in."""
    config = text_config(target)
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    length = cache.fixed_length(held, window)
    if length is None:
        return
    past, prompt = int(held.get_seq_length()), prompt_length(input_ids, generation_config, model_kwargs)
    # A cache that is not shorter than the prompt reads it once more.
    read = prompt - past if prompt > past else input_ids.shape[1]
    needed = past + read + generation_config.max_length - input_ids.shape[1] - 1
    if needed > length:
        raise ValueError(
            f"The static cache holds {length} tokens, but this call may need {needed} (`max_length` or "
            f"`max_new_tokens`): pass one with `max_cache_len={needed}` or more, or ask for fewer tokens."
        )
