"""A bound drafter: plain `generate` gives the same text through trees, and the model shows no sign of it."""

import copy
import gc
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from transformers import AutoModelForCausalLM, GenerationConfig

import hf_ddtree
from hf_ddtree import DDTreeConfig
from pairs import make_drafter, make_target, plain, prompt

NEW = 16


@pytest.fixture
def pair() -> Any:
    target = make_target()
    return target, make_drafter(target)


def rounds(call: Any) -> tuple[Any, int]:
    with hf_ddtree.record() as stats:
        return call(), stats.rounds


def test_plain_calls_run_trees_and_give_the_same_text(pair: Any) -> None:
    target, drafter = pair
    ids, expected = prompt(), plain(target, prompt(), max_new_tokens=NEW)
    hf_ddtree.attach(target, drafter)
    calls = {
        "arguments": lambda: target.generate(ids, max_new_tokens=NEW),
        "config": lambda: target.generate(ids, generation_config=GenerationConfig(max_new_tokens=NEW)),
        "positional": lambda: target.generate(ids, GenerationConfig(max_new_tokens=NEW)),
        "keyword inputs": lambda: target.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW
        ),
    }
    for name, call in calls.items():
        output, count = rounds(call)
        assert torch.equal(output, expected), name
        assert 0 < count < NEW - 1, name
    hf_ddtree.detach(target)
    output, count = rounds(calls["arguments"])
    assert torch.equal(output, expected) and count == 0


def test_sampling_with_a_seed(pair: Any) -> None:
    target, drafter = pair
    expected = plain(target, prompt(), max_new_tokens=NEW, do_sample=True, seed=9)
    hf_ddtree.attach(target, drafter)
    assert torch.equal(plain(target, prompt(), max_new_tokens=NEW, do_sample=True, seed=9), expected)


def test_settings_fill_what_the_call_leaves_open(pair: Any) -> None:
    target, drafter = pair
    given = GenerationConfig(max_new_tokens=NEW)
    hf_ddtree.attach(target, drafter, DDTreeConfig(budget=5, max_branching=1))

    def nodes(**kwargs: Any) -> int:
        with hf_ddtree.record() as stats:
            output = target.generate(prompt(), **kwargs)
        assert output.shape[1] == prompt().shape[1] + NEW
        return round(stats.nodes_verified / stats.rounds)

    assert nodes(max_new_tokens=NEW) <= 5
    assert nodes(generation_config=given) <= 5
    assert not hasattr(given, "budget"), "the caller's config was written to"
    assert nodes(generation_config=DDTreeConfig(budget=11, max_branching=4, max_new_tokens=NEW)) > 5


def test_the_model_shows_no_sign(pair: Any) -> None:
    target, drafter = pair

    def signs() -> Any:
        return (
            dict(vars(target)),
            list(target.state_dict()),
            [name for name, _ in target.named_modules()],
            [name for name, _ in target.named_parameters()],
            target.config.to_dict(),
            target.generation_config.to_dict(),
        )

    before = signs()
    hf_ddtree.attach(target, drafter)
    assert signs() == before
    target.generate(prompt(), max_new_tokens=NEW)
    assert signs() == before
    hf_ddtree.detach(target)
    assert signs() == before


def test_copies_have_no_drafter(pair: Any, tmp_path: Path) -> None:
    target, drafter = pair
    hf_ddtree.attach(target, drafter)
    expected, _ = rounds(lambda: target.generate(prompt(), max_new_tokens=NEW))
    target.save_pretrained(tmp_path)
    copies = [
        copy.deepcopy(target),
        pickle.loads(pickle.dumps(target)),
        AutoModelForCausalLM.from_pretrained(tmp_path),
    ]
    assert not [path.name for path in tmp_path.iterdir() if "draft" in path.name]
    for other in copies:
        output, count = rounds(lambda other=other: other.generate(prompt(), max_new_tokens=NEW))
        assert torch.equal(output, expected) and count == 0
    _, count = rounds(lambda: target.generate(prompt(), max_new_tokens=NEW))
    assert count


def test_another_object_of_the_class_is_not_concerned(pair: Any) -> None:
    hf_ddtree.attach(*pair)
    _, count = rounds(lambda: make_target(seed=4).generate(prompt(), max_new_tokens=NEW))
    assert count == 0


def test_attaching_and_detaching_again(pair: Any) -> None:
    target, drafter = pair
    hf_ddtree.detach(target)
    other = make_drafter(target, seed=2, block_size=3)
    hf_ddtree.attach(target, drafter)
    hf_ddtree.attach(target, drafter)
    hf_ddtree.attach(target, other)
    with hf_ddtree.record() as stats:
        target.generate(prompt(), max_new_tokens=NEW)
    assert max(stats.acceptance_lengths) <= 3
    hf_ddtree.detach(target)
    hf_ddtree.detach(target)
    assert rounds(lambda: target.generate(prompt(), max_new_tokens=NEW))[1] == 0


def test_nothing_keeps_the_model_alive(pair: Any) -> None:
    target = make_target()
    hf_ddtree.attach(target, pair[1])
    target.generate(prompt(), max_new_tokens=4)
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None


def test_an_assistant_in_the_call_takes_precedence(pair: Any) -> None:
    target, drafter = pair
    expected = plain(target, prompt(), max_new_tokens=NEW)
    hf_ddtree.attach(target, drafter)
    with hf_ddtree.record() as stats:
        short = make_drafter(target, seed=2, block_size=3)
        assert torch.equal(target.generate(prompt(), max_new_tokens=NEW, assistant_model=short), expected)
    assert max(stats.acceptance_lengths) <= 3
    ordinary = make_target(seed=5)
    output, count = rounds(lambda: target.generate(prompt(), max_new_tokens=NEW, assistant_model=ordinary))
    assert torch.equal(output, expected) and count == 0


@pytest.mark.parametrize(
    ("batch", "kwargs", "message"),
    [
        (1, dict(num_beams=2), "num_beams=2"),
        (2, {}, "batch holds 2"),
        (1, dict(prompt_lookup_num_tokens=3), "prompt_lookup_num_tokens=3"),
        (1, dict(use_cache=False), "use_cache=False"),
        (1, dict(cache_implementation="quantized"), "quantized"),
        (1, dict(custom_generate=lambda **_: None), "custom_generate"),
        (1, dict(generation_config=GenerationConfig(num_beams=3, max_new_tokens=4)), "num_beams=3"),
    ],
    ids=lambda value: next(iter(value), "batch") if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("config", [None, DDTreeConfig(budget=7)], ids=["", "settings"])
def test_what_trees_do_not_serve_names_the_way_out(
    pair: Any, batch: int, kwargs: dict[str, Any], message: str, config: Any
) -> None:
    hf_ddtree.attach(*pair, config)
    with pytest.raises(ValueError, match=rf"{message}(.|\n)*hf_ddtree\.detach") as raised:
        pair[0].generate(prompt().repeat(batch, 1), **{"max_new_tokens": 4, **kwargs})
    assert str(raised.value).count("hf_ddtree.detach") == 1


def test_the_pair_is_checked_when_attaching(pair: Any) -> None:
    target, drafter = pair
    with pytest.raises(ValueError, match=r"9 target layers, the target has 4"):
        hf_ddtree.attach(target, make_drafter(target, num_target_layers=9))
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM.*DFlashModel"):
        hf_ddtree.attach(target, target)
    with pytest.raises(ValueError, match="BloomForCausalLM"):
        bloom = T.BloomForCausalLM(T.BloomConfig(vocab_size=16, hidden_size=32, n_layer=4, n_head=4))
        hf_ddtree.attach(bloom, drafter)
    with pytest.raises(ValueError, match=r"max_new_tokens.*generate"):
        hf_ddtree.attach(target, drafter, DDTreeConfig(budget=7, max_new_tokens=9))
    with pytest.raises(ValueError, match="takes a Transformers model"):
        hf_ddtree.attach(torch.nn.Linear(2, 2), drafter)
    assert rounds(lambda: target.generate(prompt(), max_new_tokens=4))[1] == 0
    target.generate = target.generate
    with pytest.raises(ValueError, match="of its own"):
        hf_ddtree.attach(target, drafter)


class Wrapper(torch.nn.Module):
    """As PEFT wraps a model: `generate` is passed on to the inner one."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def get_base_model(self) -> Any:
        return self.model

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.generate(*args, **kwargs)


def test_a_wrapped_model(pair: Any) -> None:
    target, drafter = pair
    wrapper = Wrapper(target)
    expected = plain(target, prompt(), max_new_tokens=NEW)
    hf_ddtree.attach(wrapper, drafter)
    output, count = rounds(lambda: wrapper.generate(prompt(), max_new_tokens=NEW))
    assert torch.equal(output, expected) and count
    hf_ddtree.detach(wrapper)
    assert rounds(lambda: wrapper.generate(prompt(), max_new_tokens=NEW))[1] == 0


def test_threads(pair: Any) -> None:
    """Some attach and detach while others generate: every text is right, whichever way it was made."""
    target, drafter = pair
    expected = plain(target, prompt(), max_new_tokens=NEW)
    results: list[torch.Tensor] = []

    def generate() -> None:
        for _ in range(4):
            results.append(target.generate(prompt(), max_new_tokens=NEW))

    def switch() -> None:
        for _ in range(20):
            hf_ddtree.attach(target, drafter)
            hf_ddtree.detach(target)

    threads = [threading.Thread(target=run) for run in (generate, generate, switch)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and all(torch.equal(output, expected) for output in results)
