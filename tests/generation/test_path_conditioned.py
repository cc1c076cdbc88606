"""Whole generations with path-conditioned drafters: what they draft never shows in the output."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from drafters.checkpoints import BLOCK, MASK_ID, TAPS, write
from drafters.heads import layouts
from drafters.heads.reference import dflash2_pass, markov_log_probs, selector_log_probs
from drafters.reference import draft
from hf_ddtree import DDTreeCandidateGenerator, DFlashModel, record
from pairs import make_target, plain, prompt, tree

NEW = 24
KEPT = [1, 3, 4, 6, 7, 9, 10, 12, 13, 15]
HEADS: dict[str, Any] = {
    "vanilla": functools.partial(layouts.deepspec, "vanilla"),
    "gated": functools.partial(layouts.specforge, "gated"),
    "rnn": functools.partial(layouts.modelopt, "rnn"),
    "reduced": functools.partial(layouts.speculators, kept=KEPT),
    "dflash2": layouts.dflash2,
}


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def load(head: str, **options: Any) -> DFlashModel:
        raw, weights = HEADS[head]()
        # An untrained drafter is sure of the wrong tokens; flatter scores make broad trees, which are accepted.
        weights["norm.weight"] = torch.full_like(weights["norm.weight"], 0.4)
        for key in weights:
            if "markov_w2" in key or "successor" in key:
                weights[key] = weights[key] * 0.3
        folder: Path = write(tmp_path_factory.mktemp(head), raw, weights)
        return DFlashModel.from_pretrained(folder, **options).eval()

    return load


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("sampling", [False, True])
def test_the_output_is_the_targets_own(drafters: Any, head: str, sampling: bool) -> None:
    target, drafter = make_target("qwen3"), drafters(head)
    arguments: dict[str, Any] = dict(max_new_tokens=NEW, do_sample=sampling, return_dict_in_generate=True)
    accepted = 0
    for seed in range(3):
        ids = prompt(seed=seed)
        expected = plain(target, ids, seed=seed, **arguments)
        output = tree(target, drafter, ids, seed=seed, output_trees=True, **arguments)
        assert torch.equal(output.sequences, expected.sequences)
        accepted += sum(output.speculation.acceptance_lengths) - len(output.speculation.acceptance_lengths)
        for verified in output.speculation.trees:
            verified.tree.validate()
    assert accepted > 0, "nothing was drafted that the target accepted"


def test_confidence_ends_trees_early(drafters: Any) -> None:
    target, ids = make_target("qwen3"), prompt()
    expected = plain(target, ids, max_new_tokens=NEW)
    nodes = []
    for options in ({}, {"confidence_threshold": 0.7}):
        with record() as stats:
            assert torch.equal(tree(target, drafters("vanilla", **options), ids, max_new_tokens=NEW), expected)
        nodes.append(stats.nodes_verified / len(stats.acceptance_lengths))
    assert nodes[1] < nodes[0]


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "dflash2"])
def test_the_chain_is_the_producers_draft(drafters: Any, head: str) -> None:
    """From the target's hidden states to tokens: which slot drafts which token, after which token, by whose head."""
    target, drafter = make_target("qwen3"), drafters(head)
    generator = DDTreeCandidateGenerator(drafter, target, GenerationConfig(max_length=80), budget=40)
    ids = prompt()
    with torch.no_grad():
        outputs = target(ids[:, :-1], output_hidden_states=True)
        chain, given = generator.get_candidates(
            ids, model_kwargs={}, model_outputs=outputs, is_first_iteration=False, n_last_matches=0
        )
    raw, _ = HEADS[head]()
    weights = {key: value.detach() for key, value in drafter.state_dict().items()}
    rows = weights.get("embed_tokens.weight", target.get_input_embeddings().weight.detach())
    logits_of = weights.get("lm_head.weight", target.get_output_embeddings().weight.detach()).double()
    anchor = int(ids[0, -1])
    noise = rows[[anchor] + [MASK_ID] * (BLOCK - 1)]
    taps = torch.cat([outputs.hidden_states[tap + 1][0] for tap in TAPS], dim=-1)
    if head == "dflash2":
        # The fill-in layout: slot 0 drafts nothing.
        states = dflash2_pass(raw, weights, taps, noise, [False, False])[1:]
    else:
        states = draft({**raw, "rope_scaling": None}, weights, taps, noise, [False, False])
    logits, path = states @ logits_of.T, [anchor]
    heads = {key: value for key, value in weights.items() if key.startswith("markov_head.")}
    for _ in range(len(states)):
        if head == "dflash2":
            scores = selector_log_probs(weights, layouts.TOP_K, path, states, logits)
        else:
            scores = markov_log_probs(heads, head, path, states, logits)
        path.append(int(scores.argmax()))
    assert given is None, "the native loop must not take a path-conditioned head's scores for independent ones"
    assert chain[0].tolist() == [*ids[0].tolist(), *path[1:]]


def test_a_reduced_vocabularys_chain_is_in_the_targets_tokens(drafters: Any) -> None:
    target, drafter = make_target("qwen3"), drafters("reduced")
    generator = DDTreeCandidateGenerator(drafter, target, GenerationConfig(max_length=80), budget=40)
    outputs = target(prompt()[:, :-1], output_hidden_states=True)
    chain, given = generator.get_candidates(
        prompt(), model_kwargs={}, model_outputs=outputs, is_first_iteration=False, n_last_matches=0
    )
    drafted = chain[0, prompt().shape[1] :].tolist()
    assert given is None and len(drafted) == drafter.config.draft_depth
    assert set(drafted) <= set(KEPT)


def test_the_native_chain_is_refused_before_the_first_token(drafters: Any) -> None:
    target = make_target("qwen3")
    config = GenerationConfig(max_new_tokens=4, speculation_type="dflash")
    for head in HEADS:
        with pytest.raises(ValueError, match="DDTreeConfig"):
            target.generate(prompt(), assistant_model=drafters(head), generation_config=config)
