"""Every kind of cache that `generate` can make: the text and the cache of plain decoding with the same kind, or no."""

import itertools
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import CompileConfig, StaticCache
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    EncoderDecoderCache,
    QuantizedLayer,
)

from caches import assert_same_cache
from hf_ddtree.compat import CACHE_NAME, TRANSFORMERS_VERSION
from models.family import FULL, SLIDING
from pairs import make_drafter, make_target, plain, prompt, tree
from streams import Stream, stand_in

NEW = 20
KINDS = ["static", "offloaded", "offloaded_static"]


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


def run_both(target: Any, **kwargs: Any) -> Any:
    expected = plain(target, prompt(), max_new_tokens=NEW, return_dict_in_generate=True, **kwargs)
    output = tree(target, make_drafter(target), prompt(), max_new_tokens=NEW, return_dict_in_generate=True, **kwargs)
    assert torch.equal(output.sequences, expected.sequences)
    assert_same_cache(output[CACHE_NAME], expected[CACHE_NAME])
    return output, expected


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "temperature": 0.8}], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *itertools.product(["llama", "qwen3_sliding", "gemma3", "gpt_oss"], KINDS),
        # The library keeps a static cache's sliding layers on the device, and fails where there are no others.
        *itertools.product(["qwen3", "mistral"], KINDS[:2]),
    ],
)
def test_the_text_and_the_cache_are_plain_decoding_s(family: str, kind: str, settings: dict[str, Any]) -> None:
    entered = Stream.entered
    output, _ = run_both(make_target(family), cache_implementation=kind, **settings)
    assert output.speculation.mean_acceptance_length > 1.1
    assert isinstance(output[CACHE_NAME], StaticCache if "static" in kind else DynamicCache)
    assert (Stream.entered > entered) == ("offloaded" in kind)


def unequal_widths() -> Any:
    """Latent attention, whose keys are wider than its values."""
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **COMMON,
            num_key_value_heads=4,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=4,
            qk_nope_head_dim=8,
            v_head_dim=6,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
        )
    )


def shared_layers() -> Any:
    """The last two layers read the keys and values of the two before them."""
    return transformers.Gemma4ForCausalLM(
        transformers.Gemma4TextConfig(
            **COMMON,
            num_key_value_heads=2,
            head_dim=8,
            global_head_dim=8,
            sliding_window=6,
            layer_types=[SLIDING, FULL] * 2,
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=16,
            hidden_size_per_layer_input=8,
        )
    )


COMMON: dict[str, Any] = dict(
    vocab_size=16,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)


def recurrent_layers() -> Any:
    """Every second layer keeps a state instead of keys and values."""
    return transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(
            **COMMON,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            layer_types=["linear_attention", FULL] * 2,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        )
    )


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("build", [unequal_widths, shared_layers, recurrent_layers])
def test_layers_of_other_shapes(build: Any, kind: str | None) -> None:
    output, _ = run_both(make_target(build), cache_implementation=kind, do_sample=True)
    assert output.speculation.mean_acceptance_length > 1.1


@pytest.mark.parametrize("kind", [None, "static"])
@pytest.mark.parametrize("length", [3, 11])
@pytest.mark.parametrize("build", ["llama", "gemma3", shared_layers])
def test_attentions_are_those_of_plain_decoding(build: Any, length: int, kind: str | None) -> None:
    """Of a static cache they span all its slots, those of the tree's room left out."""
    target = make_target(build, implementation="eager")
    kwargs: dict[str, Any] = dict(
        max_new_tokens=12, return_dict_in_generate=True, output_attentions=True, cache_implementation=kind
    )
    expected = plain(target, prompt(length), **kwargs)
    output = tree(target, make_drafter(target), prompt(length), **kwargs)
    assert torch.equal(output.sequences, expected.sequences)
    for ours, theirs in zip(output.attentions, expected.attentions, strict=True):
        for weights, reference in zip(ours, theirs, strict=True):
            torch.testing.assert_close(weights, reference, rtol=0, atol=5e-5)


@pytest.mark.parametrize("kind", ["static", "offloaded_static"])
@pytest.mark.parametrize("budget", [0, 3, 40])
@pytest.mark.parametrize("settings", [dict(prefill_chunk_size=4), dict(max_cache_len=90)], ids=str)
def test_settings_that_touch_a_static_cache(settings: dict[str, Any], budget: int, kind: str) -> None:
    target = make_target("qwen3_sliding")
    kwargs: dict[str, Any] = dict(max_new_tokens=NEW, cache_implementation=kind, **settings)
    output = tree(target, make_drafter(target), prompt(), budget=budget, **kwargs)
    assert torch.equal(output, plain(target, prompt(), **kwargs))


def test_a_chunked_prefill_is_not_compiled() -> None:
    target = make_target("llama")
    config = CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True
    kwargs: dict[str, Any] = dict(max_new_tokens=NEW, cache_implementation="static", prefill_chunk_size=4)
    expected = plain(target, prompt(), **kwargs)
    target.get_compiled_call = lambda *arguments: pytest.fail("the target was compiled")
    assert torch.equal(tree(target, make_drafter(target), prompt(), compile_config=config, **kwargs), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_left_padding(family: str, kind: str) -> None:
    target = make_target(family)
    ids, mask = prompt(11).clone(), torch.ones(1, 11, dtype=torch.long)
    ids[:, :4] = mask[:, :4] = 0
    kwargs: dict[str, Any] = dict(attention_mask=mask, max_new_tokens=NEW, cache_implementation=kind)
    assert torch.equal(tree(target, make_drafter(target), ids, **kwargs), plain(target, ids, **kwargs))


def test_embedded_inputs_count_for_the_length() -> None:
    target = make_target("llama")
    kwargs: dict[str, Any] = dict(
        inputs_embeds=target.get_input_embeddings()(prompt()).detach(),
        max_new_tokens=NEW,
        cache_implementation="static",
    )
    none = torch.zeros(1, 0, dtype=torch.long)
    assert torch.equal(tree(target, make_drafter(target), none, **kwargs), plain(target, none, **kwargs))


def bfloat16_autocast() -> Any:
    if Version("5.24.0.dev0") > TRANSFORMERS_VERSION:
        pytest.skip("this transformers gives a static cache's values the dtype of its keys, and fails")
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("mode", [torch.inference_mode, bfloat16_autocast])
def test_surrounding_modes(mode: Any) -> None:
    target = make_target("llama")
    with mode():
        kwargs: dict[str, Any] = dict(max_new_tokens=8, cache_implementation="static")
        expected = plain(target, prompt(), **kwargs)
        assert torch.equal(tree(target, make_drafter(target), prompt(), **kwargs), expected)


def test_one_new_token() -> None:
    target = make_target("gemma3")
    kwargs: dict[str, Any] = dict(max_new_tokens=1, cache_implementation="static")
    assert torch.equal(tree(target, make_drafter(target), prompt(1), **kwargs), plain(target, prompt(1), **kwargs))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_largest_tree_fits_until_the_end(family: str) -> None:
    """The static cache that `generate` sizes for plain decoding gets just the room that the trees need."""
    target = make_target(family)
    for new in (2, 3, 7, 30):
        output = tree(
            target,
            make_drafter(target),
            prompt(),
            budget=25,
            max_new_tokens=new,
            cache_implementation="static",
            return_dict_in_generate=True,
        )
        for layer in output[CACHE_NAME].layers:
            assert layer.max_cache_len - getattr(layer, "room", 0) <= 11 + new - 1 or layer.is_sliding
            assert getattr(layer, "room", 25) == 25
        assert torch.equal(output.sequences, plain(target, prompt(), max_new_tokens=new))
        del target._previous_max_cache_length


def test_a_quantised_cache_is_refused_before_it_is_made() -> None:
    target = make_target("llama")
    with pytest.raises(ValueError, match=r"quantised.*unset.*'static' or, on CUDA, 'offloaded'"):
        tree(target, make_drafter(target), prompt(), max_new_tokens=4, cache_implementation="quantized")


class HalfPrecisionLayer(QuantizedLayer):
    """Quantised states that need no further library."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        return tensor.half()

    def _dequantize(self, q_tensor: torch.Tensor) -> torch.Tensor:
        return q_tensor.float()


class Observed(DynamicCache):
    """A user's cache that does something of its own with each update."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        return super().update(*args, **kwargs)


class OwnLayer(DynamicLayer):
    """A user's layer; being a `DynamicLayer` says nothing of how it keeps its rows."""


@pytest.mark.parametrize(
    ("cache", "named"),
    [
        (Cache(layers=[HalfPrecisionLayer() for _ in range(4)]), "HalfPrecisionLayer"),
        (Cache(layers=[OwnLayer() for _ in range(4)]), "OwnLayer"),
        (Cache(layer_class_to_replicate=OwnLayer), "OwnLayer"),
        (Cache(layers=[DynamicIndexedLayer() for _ in range(4)]), "DynamicIndexedLayer"),
        (Observed(), r"Observed.*`update`"),
        (EncoderDecoderCache(DynamicCache(), DynamicCache()), "EncoderDecoderCache"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_caches_that_cannot_be_pruned_are_refused_by_name(cache: Any, named: str) -> None:
    target = make_target("llama")
    with pytest.raises(ValueError, match=rf"{named}.*'static' or, on CUDA, 'offloaded'.*`DynamicCache`"):
        tree(target, make_drafter(target), prompt(), max_new_tokens=4, **{CACHE_NAME: cache})
