"""Sampling follows the target's distribution over many seeds; a walk that prefers draft tokens would be found."""

from collections import Counter
from typing import Any

import pytest
import torch
from scipy import stats

from hf_ddtree.generation.acceptance import LazyWalk
from pairs import VOCABULARY, make_drafter, make_target, prompt, tree

SAMPLES = 600


def continuations(samples: int) -> Counter[tuple[int, ...]]:
    """The second and third sampled token of many generates: the first that a round decides."""
    target = make_target("llama")
    drafter = make_drafter(target)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(samples):
        output = tree(target, drafter, prompt(4), seed=seed, max_new_tokens=3, do_sample=True, top_k=0, budget=6)
        counts[tuple(output[0, -2:].tolist())] += 1
    return counts


def probabilities() -> dict[tuple[int, ...], float]:
    """The exact distribution of those two tokens, the first one summed out."""
    target = make_target("llama")
    tokens = torch.arange(VOCABULARY)
    with torch.no_grad():
        first = target(prompt(4)).logits[0, -1].softmax(-1)
        rows = torch.cat([prompt(4).expand(VOCABULARY, -1), tokens[:, None]], dim=1)
        second = target(rows).logits[:, -1].softmax(-1)
        pairs = torch.cartesian_prod(tokens, tokens)
        rows = torch.cat([prompt(4).expand(len(pairs), -1), pairs], dim=1)
        third = target(rows).logits[:, -1].softmax(-1).view(VOCABULARY, VOCABULARY, VOCABULARY)
    joint = torch.einsum("a,ab,abc->bc", first, second, third)
    return {(b, c): float(joint[b, c]) for b in range(VOCABULARY) for c in range(VOCABULARY)}


def p_value(counts: Counter[tuple[int, ...]]) -> float:
    """Chi-square over outcomes expected at least five times, the rest in one bin."""
    samples = sum(counts.values())
    expected = {outcome: samples * p for outcome, p in probabilities().items()}
    common = [outcome for outcome, count in expected.items() if count >= 5]
    observed = [counts[outcome] for outcome in common]
    wanted = [expected[outcome] for outcome in common]
    observed.append(samples - sum(observed))
    wanted.append(samples - sum(wanted))
    return float(stats.chisquare(observed, wanted).pvalue)


def test_sampling_follows_the_target() -> None:
    assert p_value(continuations(SAMPLES)) > 1e-3


def test_a_biased_walk_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = LazyWalk._choose

    def biased(self: LazyWalk, input_ids: torch.Tensor, logits: torch.Tensor) -> Any:
        # As a walk would that takes the better of two draws.
        first, second = choose(self, input_ids, logits), choose(self, input_ids, logits)
        return max(first, second, key=lambda choice: float(logits[0, choice[0]]))

    monkeypatch.setattr(LazyWalk, "_choose", biased)
    assert p_value(continuations(SAMPLES)) < 1e-6
