"""Every family: a node's logits from the tree's forward are those of a separate forward over prefix and path."""

from typing import Any

import pytest
import torch

from attention.trees import random_tree
from hf_ddtree.cache import DDTreeCache
from hf_ddtree.compat import CACHE_NAME, decoder_layers
from hf_ddtree.generation.verification import TreeVerifier
from hf_ddtree.round import TapCollector
from hf_ddtree.tree import DraftTree
from pairs import FAMILIES, VOCABULARY, make_target

SLIDING = [name for name in FAMILIES if getattr(make_target(name).config, "sliding_window", None)]


def target(
    family: str, window: int | None = None, implementation: str | None = None, dtype: torch.dtype = torch.float64
) -> Any:
    model = make_target(family, implementation=implementation)
    if hasattr(model.config, "num_experts_per_tok"):
        # The grouped matrix product that experts default to has no fp64.
        model.set_experts_implementation("eager")
    model = model.to(dtype)
    if window is not None:
        model.config.sliding_window = window
    return model


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Sequence:
    """A sequence decoded by trees of our choice, beside forwards that read it from its start."""

    def __init__(self, model: Any, prefix: list[int], padding: int = 0):
        self.model, self.padding, self.ids = model, padding, [0] * padding + prefix
        self.cache = DDTreeCache(config=model.config)
        self.verify = TreeVerifier(model, TapCollector(decoder_layers(model), []))
        self.plain(self.ids, **{CACHE_NAME: self.cache})

    def plain(self, ids: list[int], **kwargs: Any) -> torch.Tensor:
        mask = torch.ones(1, len(ids), dtype=torch.long)
        mask[:, : self.padding] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            return self.model(torch.tensor([ids]), attention_mask=mask, position_ids=positions, **kwargs).logits[0]

    def round(self, tree: DraftTree) -> torch.Tensor:
        """The tree's logits, `(nodes, vocab)`; the round stays open."""
        length = len(self.ids) + 1
        mask = torch.ones(1, length, dtype=torch.long)
        mask[:, : self.padding] = 0
        kwargs = {
            CACHE_NAME: self.cache,
            "attention_mask": mask,
            "position_ids": torch.tensor([[length - 1 - self.padding]]),
            "use_cache": True,
        }
        self.cache.begin()
        with torch.no_grad():
            return self.verify(tree, kwargs).logits[0]

    def commit(self, tree: DraftTree, path: list[int]) -> None:
        self.cache.prune(torch.tensor(path))
        self.ids += tree.token_ids[path].tolist()

    def expected(self, tree: DraftTree) -> torch.Tensor:
        """The logits of each node from a forward over the prefix and the path to a leaf under it."""
        logits = torch.empty(len(tree), self.model.config.vocab_size, dtype=self.model.dtype)
        for leaf in [node for node in range(len(tree)) if int(tree.subtree_ends[node]) == node + 1]:
            path = tree.path(leaf)
            logits[path] = self.plain(self.ids + tree.token_ids[path].tolist(), use_cache=False)[len(self.ids) :]
        return logits


def check_rounds(sequence: Sequence, nodes: int = 14, rounds: int = 2) -> None:
    for turn in range(rounds):
        tree = random_tree(nodes, seed=turn, anchor=tokens(1, seed=turn)[0], vocabulary=VOCABULARY)
        assert int(tree.depths.max()) >= 5
        logits, expected = sequence.round(tree), sequence.expected(tree)
        # Norms and softmaxes of the library are in fp32 whatever the model's dtype.
        tolerance = 1e-4 if sequence.model.dtype == torch.float64 else 1e-3
        assert torch.allclose(logits, expected, atol=tolerance), (logits - expected).abs().max()
        # The control: a node's logits are not those of another node.
        assert not torch.allclose(logits, expected.roll(1, 0), atol=1e-2)
        sequence.commit(tree, tree.path(nodes - 1))


@pytest.mark.parametrize("prefix", [1, 3, 20])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_each_node_is_its_path(family: str, prefix: int) -> None:
    check_rounds(Sequence(target(family), tokens(prefix)))


@pytest.mark.parametrize("window", [2, 3, 5, 9])
@pytest.mark.parametrize("prefix", [2, 19])
@pytest.mark.parametrize("family", SLIDING)
def test_windows_shorter_and_longer_than_prefix_and_tree(family: str, prefix: int, window: int) -> None:
    check_rounds(Sequence(target(family, window), tokens(prefix)))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_left_padding(family: str) -> None:
    # In fp32: the library's softmax of a padding row in fp64, whose scores overflow fp32, is NaN in some families.
    model, tree = target(family, dtype=torch.float32), random_tree(9, seed=3)
    check_rounds(Sequence(model, tokens(8), padding=5))
    padded, bare = Sequence(model, tokens(8), padding=5), Sequence(model, tokens(8))
    assert torch.allclose(padded.round(tree), bare.round(tree), atol=1e-3)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "qwen3_sliding", "gemma3"])
def test_both_routes(family: str, implementation: str) -> None:
    check_rounds(Sequence(target(family, implementation=implementation), tokens(9)))


def test_one_node_is_a_plain_forward() -> None:
    sequence = Sequence(target("qwen3_sliding"), tokens(12))
    tree = random_tree(1, seed=0)
    assert torch.allclose(sequence.round(tree), sequence.expected(tree), atol=1e-6)


def test_taps_are_one_row_a_node() -> None:
    """The tapped states of the tree's forward are the pre-norm residuals of each node's path."""
    model = target("qwen3_sliding")
    sequence = Sequence(model, tokens(9))
    taps = TapCollector(decoder_layers(model), [1, 0])
    tree = random_tree(14, seed=2)
    sequence.verify = TreeVerifier(model, taps)
    with taps.hooked():
        sequence.round(tree)
        collected = taps.taps()
        leaf = len(tree) - 1
        path = tree.path(leaf)
        with taps.collect():
            sequence.plain(sequence.ids + tree.token_ids[path].tolist(), use_cache=False)
        assert torch.allclose(collected[:, path], taps.taps()[:, len(sequence.ids) :], atol=1e-4)
    assert collected.shape == (1, 14, 2 * model.config.hidden_size)
