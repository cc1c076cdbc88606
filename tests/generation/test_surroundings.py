"""What surrounds a generate: pipelines, threads, odd masks, copies of its output, and caches put to other use."""

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast, TextIteratorStreamer, pipeline

import hf_ddtree
from hf_ddtree import DDTreeConfig
from hf_ddtree.compat import CACHE_NAME
from pairs import VOCABULARY, make_drafter, make_target, plain, prompt, tree

NEW = 24


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    target = make_target("qwen3")
    return target, make_drafter(target)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    letters = Tokenizer(models.WordLevel({chr(97 + i): i for i in range(VOCABULARY)}, unk_token="a"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="a", pad_token="a")


@pytest.mark.parametrize("when", ["init", "call"])
def test_a_pipeline(pair: tuple[Any, Any], tokenizer: Any, when: str) -> None:
    target, drafter = pair
    kwargs: dict[str, Any] = dict(max_new_tokens=NEW, do_sample=False)
    expected = pipeline("text-generation", model=target, tokenizer=tokenizer)("defgh", **kwargs)
    config = DDTreeConfig(budget=20, pad_token_id=0, **kwargs)
    at_init = {"generation_config": config} if when == "init" else {}
    at_call = {"generation_config": config} if when == "call" else {}
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter, **at_init)
    with hf_ddtree.record() as stats:
        assert pipe("defgh", **at_call) == expected
    assert sum(stats.acceptance_lengths) == NEW - 1


def test_a_streamer_in_a_thread_reports_to_the_open_recorder(pair: tuple[Any, Any], tokenizer: Any) -> None:
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    with hf_ddtree.record() as stats:
        thread = threading.Thread(
            target=tree, args=(*pair, prompt()), kwargs=dict(max_new_tokens=NEW, streamer=streamer)
        )
        thread.start()
        text = "".join(streamer)
        thread.join()
    expected = plain(pair[0], prompt(), max_new_tokens=NEW)
    assert text == tokenizer.decode(expected[0, prompt().shape[1] :])
    assert sum(stats.acceptance_lengths) == NEW - 1


@pytest.mark.parametrize("hole", [slice(0, 2), slice(4, 6), slice(9, 10)], ids=["left", "middle", "before_last"])
def test_masks_with_holes(pair: tuple[Any, Any], hole: slice) -> None:
    mask = torch.ones_like(prompt())
    mask[:, hole] = 0
    expected = plain(pair[0], prompt(), attention_mask=mask, max_new_tokens=NEW)
    assert torch.equal(tree(*pair, prompt(), attention_mask=mask, max_new_tokens=NEW), expected)


def test_one_token_prompts_and_inference_mode(pair: tuple[Any, Any]) -> None:
    with torch.inference_mode():
        inside = tree(*pair, prompt(1), max_new_tokens=NEW, return_dict_in_generate=True)
    assert torch.equal(inside.sequences, plain(pair[0], prompt(1), max_new_tokens=NEW))
    following = torch.cat([inside.sequences, prompt(3)], dim=1)
    cache = inside[CACHE_NAME]
    with torch.no_grad():
        outside = tree(*pair, following, max_new_tokens=NEW, **{CACHE_NAME: cache})
    assert torch.equal(outside, plain(pair[0], following, max_new_tokens=NEW))


def test_autocast(pair: tuple[Any, Any]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = tree(*pair, prompt(), max_new_tokens=NEW)
    assert output.shape == (1, prompt().shape[1] + NEW)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_of_output_and_cache(pair: tuple[Any, Any], duplicate: Any) -> None:
    users = DynamicCache(config=pair[0].config)
    output = tree(*pair, prompt(), max_new_tokens=NEW, return_dict_in_generate=True, **{CACHE_NAME: users})
    other = duplicate(output)
    assert torch.equal(other.sequences, output.sequences)
    assert other.speculation.acceptance_lengths == output.speculation.acceptance_lengths
    following = torch.cat([output.sequences, prompt(3)], dim=1)
    expected = plain(pair[0], following, max_new_tokens=NEW)
    assert torch.equal(tree(*pair, following, max_new_tokens=NEW, **{CACHE_NAME: other[CACHE_NAME]}), expected)
    assert torch.equal(tree(*pair, following, max_new_tokens=NEW, **{CACHE_NAME: users}), expected)


def test_a_cache_that_was_rewritten_gets_a_new_drafter_context(pair: tuple[Any, Any]) -> None:
    output = tree(*pair, prompt(), max_new_tokens=NEW, return_dict_in_generate=True)
    cache = output[CACHE_NAME]
    context = cache.drafter_context
    cache.crop(-6)
    shorter = output.sequences[:, : cache.get_seq_length() + 1]
    rewritten = plain(pair[0], shorter, max_new_tokens=6, do_sample=True, temperature=3.0, **{CACHE_NAME: cache})
    assert cache.get_seq_length() == context.length
    expected = plain(pair[0], rewritten, max_new_tokens=NEW)
    assert torch.equal(tree(*pair, rewritten, max_new_tokens=NEW, **{CACHE_NAME: cache}), expected)
    assert cache.drafter_context is not context


def test_backward_through_a_returned_cache(pair: tuple[Any, Any]) -> None:
    target, drafter = pair
    gradients = []
    for run in (plain, lambda model, *args, **kwargs: tree(model, drafter, *args, **kwargs)):
        cache = run(target, prompt(), max_new_tokens=NEW, return_dict_in_generate=True)[CACHE_NAME]
        target.zero_grad()
        first = target(prompt(3), use_cache=True, **{CACHE_NAME: cache}).logits
        second = target(prompt(2), use_cache=True, **{CACHE_NAME: cache}).logits
        (first.sum() + second.sum()).backward()
        gradients.append(target.model.layers[1].self_attn.k_proj.weight.grad.clone())
    target.zero_grad(set_to_none=True)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-4, rtol=1e-3)


def test_a_tap_named_twice(pair: tuple[Any, Any]) -> None:
    drafter = make_drafter(pair[0], target_layer_ids=[2, 2, 3])
    expected = plain(pair[0], prompt(), max_new_tokens=NEW)
    assert torch.equal(tree(pair[0], drafter, prompt(), max_new_tokens=NEW), expected)


def test_a_drafter_of_nothing_but_nan(pair: tuple[Any, Any]) -> None:
    drafter = make_drafter(pair[0])
    drafter.norm.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"NaN logits.*bfloat16"):
        tree(pair[0], drafter, prompt(), max_new_tokens=NEW)
