"""What cannot be served raises before the first forward, and the message names both sides and the way out."""

from typing import Any

import pytest
import torch
import transformers as T
from transformers import DynamicCache, GenerationConfig, StaticCache

from hf_ddtree import DDTreeConfig
from hf_ddtree.compat import CACHE_NAME
from hf_ddtree.generation.compatibility import runs_on_cuda
from pairs import make_drafter, make_target, prompt, tree


@pytest.fixture
def pair() -> Any:
    """A pair whose target must not be run."""
    target = make_target()
    drafter = make_drafter(target)

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the target ran before the request was refused")

    target.model.layers[0].register_forward_pre_hook(forbidden)
    drafter.layers[0].register_forward_pre_hook(forbidden)
    return target, drafter


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(num_beams=2), "num_beams=2"),
        (dict(num_return_sequences=2, do_sample=True), "num_return_sequences=2"),
        (dict(prompt_lookup_num_tokens=4), "prompt_lookup_num_tokens=4"),
        (dict(use_cache=False), "use_cache=False"),
        (dict(cache_implementation="quantized"), "quantized"),
        (dict(output_attentions=True, return_dict_in_generate=True), "eager"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_of_other_strategies(pair: Any, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tree(*pair, prompt(), max_new_tokens=4, **kwargs)


@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
def test_a_cache_for_a_device_that_the_target_is_not_on(pair: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=rf"{kind}.*CUDA.*Qwen3ForCausalLM is on 'cpu'.*unset"):
        tree(*pair, prompt(), max_new_tokens=4, cache_implementation=kind)


def test_a_users_cache_for_a_device_that_the_target_is_not_on(pair: Any) -> None:
    cache = DynamicCache(config=pair[0].config)
    cache.offloading = True
    with pytest.raises(ValueError, match=r"DynamicCache\(offloading=True\).*CUDA.*Qwen3ForCausalLM is on 'cpu'"):
        tree(*pair, prompt(), max_new_tokens=4, **{CACHE_NAME: cache})


def test_weights_that_go_to_a_device_to_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not runs_on_cuda(target)
    target.to("meta")
    assert runs_on_cuda(target)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not runs_on_cuda(target)


def test_a_batch(pair: Any) -> None:
    with pytest.raises(ValueError, match=r"batch holds 2"):
        tree(*pair, prompt().repeat(2, 1), max_new_tokens=4)


def test_an_empty_prompt(pair: Any) -> None:
    with pytest.raises(ValueError, match="prompt has no tokens"):
        tree(*pair, torch.empty(1, 0, dtype=torch.long), max_new_tokens=4)


def test_a_batch_of_embeddings(pair: Any) -> None:
    embeds = pair[0].get_input_embeddings()(prompt().repeat(3, 1)).detach()
    with pytest.raises(ValueError, match=r"batch holds 3"):
        tree(*pair, torch.empty(3, 0, dtype=torch.long), inputs_embeds=embeds, max_new_tokens=4)


def test_no_drafter() -> None:
    with pytest.raises(ValueError, match=r"no drafter.*assistant_model"):
        make_target().generate(prompt(), generation_config=DDTreeConfig(max_new_tokens=4))


def test_a_drafter_that_is_no_dflash_model() -> None:
    target = make_target()
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*DFlashModel"):
        target.generate(
            prompt(), assistant_model=make_target("llama"), generation_config=DDTreeConfig(max_new_tokens=4)
        )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(num_target_layers=9), "9 target layers, the target has 4"),
        (dict(num_target_layers=None, target_layer_ids=[0, 2, 7]), r"taps layers \[0, 2, 7\], the target has 4"),
        (dict(hidden_size=40), "40 in the drafter, 32 in the target"),
        (dict(target_hidden_size=64), "64 in the drafter, 32 in the target"),
        (dict(mask_token_id=16), "mask token 16 lies outside the target's 16"),
        (dict(vocab_size=50_000), "50000 and 16"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_drafter_for_another_target(overrides: dict[str, Any], message: str) -> None:
    target = make_target()
    with pytest.raises(ValueError, match=message):
        tree(target, make_drafter(target, **overrides), prompt(), max_new_tokens=4)


def test_an_encoder_decoder_target() -> None:
    config = T.T5Config(
        vocab_size=16, d_model=32, d_kv=8, d_ff=32, num_layers=4, num_heads=4, decoder_start_token_id=0
    )
    target = T.T5ForConditionalGeneration(config)
    with pytest.raises(ValueError, match="encoder-decoder"):
        target.generate(prompt(), assistant_model=make_drafter(None), generation_config=DDTreeConfig(max_new_tokens=4))


def test_a_target_with_positions_of_its_own() -> None:
    config = T.BloomConfig(vocab_size=16, hidden_size=32, n_layer=4, n_head=4)
    with pytest.raises(ValueError, match=r"BloomForCausalLM.*position_ids"):
        tree(T.BloomForCausalLM(config), make_drafter(None), prompt(), max_new_tokens=4)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("alibi", True, "ALiBi"),
        ("attn_temperature_tuning", True, "attn_temperature_tuning"),
        ("rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "dynamic RoPE"),
    ],
)
def test_a_target_that_looks_at_the_longest_position(pair: Any, field: str, value: Any, message: str) -> None:
    setattr(pair[0].config, field, value)
    with pytest.raises(ValueError, match=message):
        tree(*pair, prompt(), max_new_tokens=4)


def test_a_target_that_keeps_its_states_itself() -> None:
    config = T.RecurrentGemmaConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        lru_width=32,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    target = T.RecurrentGemmaForCausalLM(config)
    with pytest.raises(ValueError, match=r"RecurrentGemma.*states.*assistant_model"):
        tree(target, make_drafter(target), prompt(), max_new_tokens=4)


def test_a_static_cache_that_is_too_short(pair: Any) -> None:
    cache = StaticCache(config=pair[0].config, max_cache_len=13)
    with pytest.raises(ValueError, match=r"holds 13 tokens.*may need 14"):
        tree(*pair, prompt(), max_new_tokens=4, **{CACHE_NAME: cache})


def test_an_attention_without_a_route() -> None:
    target = make_target()
    drafter = make_drafter(target)
    target.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match=r"flash_attention_2.*sdpa"):
        tree(target, drafter, prompt(), max_new_tokens=4)


def test_budget_beside_the_config_is_checked(pair: Any) -> None:
    target, drafter = pair
    with pytest.raises(ValueError, match=r"`budget`.*-1"):
        target.generate(prompt(), assistant_model=drafter, generation_config=DDTreeConfig(max_new_tokens=4), budget=-1)


def test_the_native_chain_is_asked_for_by_name() -> None:
    target = make_target()
    drafter = make_drafter(target)
    config = GenerationConfig(max_new_tokens=20, speculation_type="dflash")
    chain = target.generate(prompt(), assistant_model=drafter, generation_config=config)
    assert torch.equal(chain, tree(target, drafter, prompt(), max_new_tokens=20))
