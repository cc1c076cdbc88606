"""The parts of the recipe in `examples/smollm2` that have a plain reference."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_ddtree.drafters import DFlashConfig, DFlashModel
from hf_ddtree.drafters.heads import path_scorer

RECIPE = Path(__file__).parents[2] / "examples" / "smollm2"
pytestmark = pytest.mark.skipif(not RECIPE.is_dir(), reason="the examples are in the repository only")


@pytest.fixture(autouse=True)
def recipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts import each other by their plain names."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(RECIPE.parent / "demo_pair"))
    monkeypatch.syspath_prepend(str(RECIPE))
    yield
    for name in set(sys.modules) - before:
        if str(RECIPE.parent) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@torch.inference_mode()
def test_padded_rows_decode_as_the_model_does_alone() -> None:
    from llama_target import LlamaTarget

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).eval()
    target, rows = LlamaTarget(model, [0, 2]), [[5, 6, 7], [8, 9, 10, 11, 12, 13]]
    feed = torch.tensor([[1] * (6 - len(row)) + row for row in rows])
    cache = target.new_cache(torch.tensor([6 - len(row) for row in rows]), 12)
    for _ in range(4):
        logits, taps = target.forward(feed, cache)
        for place, row in enumerate(rows):
            plain = model(torch.tensor([row]), output_hidden_states=True)
            torch.testing.assert_close(logits[place], plain.logits[0, -1], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(taps[place, -1, :32], plain.hidden_states[1][0, -1], rtol=1e-4, atol=1e-5)
            row.append(int(logits[place].argmax()))
        feed = logits.argmax(-1, keepdim=True)


def test_the_selector_learns_the_scores_that_it_is_used_with() -> None:
    from selector import fit_projection, selector_losses, with_selector

    torch.manual_seed(0)
    embedding = torch.randn(64, 32)
    config = DFlashConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        block_size=8,
        mask_token_id=1,
        target_layer_ids=[0],
        num_target_layers=2,
    )
    drafter = with_selector(DFlashModel(config), embedding)
    states, text = torch.randn(1, 7, 32), torch.randint(2, 64, (1, 8))
    fit_projection(drafter, states)
    drafter.candidate_selector.successor_codebook.data.normal_()
    logits = states @ embedding.T
    losses = selector_losses(drafter, states, logits, torch.arange(64), text)
    scorer = path_scorer(drafter, states[0], logits[0])
    assert scorer is not None
    seen = 0
    for depth in range(7):
        drafted = scorer.expand(depth, text[0, depth : depth + 1], None, 16)
        mass = logits[0, depth].topk(16).values.logsumexp(-1) - logits[0, depth].logsumexp(-1)
        hit = (drafted.token_ids[0] == text[0, depth + 1]).nonzero()
        expected = mass - drafted.log_probs[0, hit[0, 0]] if len(hit) else torch.tensor(0.0)
        torch.testing.assert_close(losses[0, depth], expected, rtol=1e-4, atol=1e-5)
        seen += len(hit)
    assert seen
