"""What a streamer and a forward hook see of rounds is what the strategies did."""

import pytest
import torch

from hf_ddtree import DDTreeConfig, record
from hf_ddtree.cli.measure import MODES, Runner
from hf_ddtree.cli.rounds import RoundCounter

PROMPT = "hello world"


@pytest.mark.parametrize("budget", [0, 1, 40])
def test_counts_agree_with_the_statistics(pair, budget):
    run = Runner(pair, max_new_tokens=40, budget=budget).run("tree", PROMPT)
    assert run.acceptance_lengths == run.stats.acceptance_lengths
    assert run.forwards == run.stats.rounds + 1
    assert len(run.tokens) == 40 == 1 + sum(run.acceptance_lengths)


def test_drafts_are_accepted_here(pair):
    assert Runner(pair, max_new_tokens=40, budget=60).run("tree", PROMPT).stats.mean_acceptance_length > 1.5


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_tokens_of_plain_decoding(pair, mode):
    runner = Runner(pair, max_new_tokens=30, budget=20)
    run = runner.run(mode, PROMPT)
    assert run.tokens == runner.run("plain", PROMPT).tokens
    assert sum(run.acceptance_lengths) < 30
    if mode == "plain":
        assert run.acceptance_lengths == [1] * 29


def test_a_chunked_prefill_is_no_round(pair):
    counter = RoundCounter()
    inputs = pair.tokenizer(PROMPT, return_tensors="pt")
    config = DDTreeConfig(max_new_tokens=20, do_sample=False, prefill_chunk_size=4)
    with counter.watching(pair.target), record() as stats:
        pair.target.generate(**inputs, generation_config=config, assistant_model=pair.drafter, streamer=counter)
    assert counter.acceptance_lengths == stats.acceptance_lengths
    assert counter.forwards == stats.rounds + 3


def test_the_hook_goes_away_after_an_interruption(pair):
    hooks = len(pair.target._forward_pre_hooks)
    with pytest.raises(KeyboardInterrupt), RoundCounter().watching(pair.target):
        pair.target(torch.tensor([[1, 2]]))
        raise KeyboardInterrupt
    assert len(pair.target._forward_pre_hooks) == hooks
