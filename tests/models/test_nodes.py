"""Every family: a node's logits from the tree's forward are those of a separate forward over prefix and path."""

from typing import Any

import pytest
import torch

from attention.trees import random_tree
from hf_ddtree.compat import active_stream, decoder_layers
from hf_ddtree.generation.verification import TreeVerifier
from hf_ddtree.round import TapCollector
from models.measure import as_dictionary, measure
from models.nodes import DTYPES, errors_of, node_errors
from models.sequence import Sequence
from models.zoo import FAMILIES, cases

BOUNDED = [name for name, family in FAMILIES.items() if family.window is not None]


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("family", cases())
def test_each_node_is_its_path(family: str, dtype: str, models_report: list[dict[str, Any]]) -> None:
    errors_of(family, dtype).check()
    if dtype == "float64":
        models_report.append(as_dictionary(measure(family, dtype)))


@pytest.mark.parametrize("family", cases())
def test_a_prefix_of_one_token(family: str) -> None:
    chosen = FAMILIES[family]
    node_errors(chosen, chosen.make(torch.float64), chosen.prompt(1), trees=(42,)).check()


@pytest.mark.parametrize(("window", "length"), [(2, 19), (3, 2), (5, 19), (9, 3)])
@pytest.mark.parametrize("family", cases(BOUNDED))
def test_windows_shorter_and_longer_than_prefix_and_tree(family: str, window: int, length: int) -> None:
    chosen = FAMILIES[family]
    node_errors(chosen, chosen.make(torch.float64, window=window), chosen.prompt(length)).check()


@pytest.mark.parametrize("family", cases())
def test_left_padding(family: str) -> None:
    # In fp32: the library's softmax of a padding row in fp64, whose scores overflow fp32, is NaN in some families.
    chosen = FAMILIES[family]
    model = chosen.make()
    node_errors(chosen, model, chosen.prompt(8), padding=5, trees=(42,)).check()
    tree = random_tree(9, seed=3, vocabulary=chosen.text_vocabulary)
    padded, bare = (Sequence(chosen, model, chosen.prompt(8), padding) for padding in (5, 0))
    assert torch.allclose(padded.round(tree), bare.round(tree), atol=1e-3)


@pytest.mark.parametrize("family", cases())
def test_the_other_attention_implementation(family: str) -> None:
    chosen = FAMILIES[family]
    model = chosen.make()
    used = model.config._attn_implementation
    other = "eager" if used == "sdpa" else "sdpa"
    if other == "sdpa" and not model._supports_sdpa:
        # Attention sinks: the library offers such a model eager attention alone.
        with pytest.raises(ValueError, match="scaled_dot_product_attention"):
            model.set_attn_implementation(other)
        return
    model.set_attn_implementation(other)
    assert model.config._attn_implementation == other
    node_errors(chosen, model, chosen.prompt(9), trees=(42,)).check()


def test_one_node_is_a_plain_forward() -> None:
    family = FAMILIES["qwen3_sliding"]
    sequence = Sequence(family, family.make(torch.float64), family.prompt(12))
    tree = random_tree(1, seed=0)
    assert torch.allclose(sequence.round(tree), sequence.expected(tree), atol=1e-6)


@pytest.mark.parametrize("family", ["qwen3_sliding", "gemma4_shared", "gemma3n"])
def test_taps_are_one_row_a_node(family: str) -> None:
    """The tapped states of the tree's forward are the pre-norm residuals of each node's path."""
    chosen = FAMILIES[family]
    model = chosen.make(torch.float64)
    sequence = Sequence(chosen, model, chosen.prompt(9))
    last = model.config.num_hidden_layers - 1
    taps = TapCollector(decoder_layers(model), [1, last, 0], active_stream(model))
    tree = random_tree(14, seed=42)
    sequence.verify = TreeVerifier(model, taps)
    with taps.hooked():
        sequence.round(tree)
        collected = taps.taps()
        path = tree.path(len(tree) - 1)
        with taps.collect():
            sequence.plain(sequence.ids + tree.token_ids[path].tolist())
        assert torch.allclose(collected[:, path], taps.taps()[:, len(sequence.ids) :], atol=1e-4)
    assert collected.shape == (1, 14, 3 * model.config.hidden_size)
