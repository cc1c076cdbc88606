"""What a sequence's forwards take, extended late, beside `generate`'s own extension after each token."""

import pytest
import torch
from tests.models.zoo import FAMILIES
from transformers import GenerationMixin, StaticCache

from hf_ddtree.cache import DDTreeCache
from hf_ddtree.compat import CACHE_NAME, decoder_layers, extend_model_kwargs
from hf_ddtree.generation.arguments import SequenceArguments
from hf_ddtree.generation.verification import TreeVerifier
from hf_ddtree.round import TapCollector
from hf_ddtree.tree import DraftTree, build_draft_tree


def arguments(rank=2):
    shape = [1] * (rank - 1) + [-1]
    return {
        "position_ids": torch.tensor([0, 0, 1, 2]).view(shape),
        "attention_mask": torch.tensor([[0, 1, 1, 1]]),
        CACHE_NAME: object(),
        "use_cache": True,
    }


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("steps", [[1], [1, 1, 1], [2, 1, 4]])
def test_late_is_as_in_time(rank, steps):
    model = FAMILIES["llama"].build()
    late, in_time = SequenceArguments(model, arguments(rank)), arguments(rank)
    cache = late.kept[CACHE_NAME]
    for new in steps:
        late.extend({}, new)
        in_time = extend_model_kwargs(model, {}, in_time, new)
    assert late.missing == sum(steps)
    assert late.kept["position_ids"].shape[-1] == 4
    found = late.read()
    assert late.missing == 0
    assert found is late.read()
    for name in ("position_ids", "attention_mask"):
        assert torch.equal(found[name], in_time[name])
    assert found[CACHE_NAME] is cache


def test_token_types_are_extended_in_time():
    model = FAMILIES["llama"].build()
    late = SequenceArguments(model, {**arguments(), "token_type_ids": torch.tensor([[0, 1, 0, 1]])})
    late.extend({}, 1)
    late.extend({}, 1)
    assert late.missing == 0
    assert late.kept["token_type_ids"].tolist() == [[0, 1, 0, 1, 1, 1]]


def test_a_model_with_an_extension_of_its_own_sees_every_output(monkeypatch):
    model, seen = FAMILIES["llama"].build(), []

    def own(self, outputs, model_kwargs, **kwargs):
        seen.append(outputs)
        return GenerationMixin._update_model_kwargs_for_generation(self, outputs, model_kwargs, **kwargs)

    monkeypatch.setattr(type(model), "_update_model_kwargs_for_generation", own)
    late = SequenceArguments(model, arguments())
    late.extend({"first": 1}, 1)
    late.extend({"second": 2}, 1)
    assert seen == [{"first": 1}, {"second": 2}]
    assert late.read()["position_ids"].tolist() == [[0, 0, 1, 2, 3, 4]]


def inputs_of_rounds(model, cache, **more):
    """What the verifier gives the forwards of some rounds, and what the model's own preparation gives."""
    verify = TreeVerifier(model, TapCollector(decoder_layers(model), []))
    kwargs = {"position_ids": torch.arange(4)[None], "attention_mask": None, CACHE_NAME: cache, **more}
    drafted = build_draft_tree(torch.randn(3, 9).log_softmax(-1), 6, anchor=4)
    for tree, missing in ((DraftTree.root_only(5), 0), (DraftTree.root_only(6), 1), (drafted, 0), (drafted.cut(2), 0)):
        yield verify._next_inputs(tree, kwargs, missing), verify.inputs(tree, kwargs, missing)


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] is value
        assert same, name


@pytest.mark.parametrize(
    "more", [{"use_cache": True}, {"use_cache": True, "token_type_ids": torch.tensor([[0, 0, 1]])}]
)
def test_forwards_after_the_first(more):
    model = FAMILIES["llama"].build()
    rounds = list(inputs_of_rounds(model, DDTreeCache(config=model.config), **more))
    for found, expected in rounds:
        check_equal(found, expected)
    assert [found["input_ids"].shape[1] for found, _ in rounds] == [1, 1, 7, 3]
    assert [found["position_ids"][0, 0].item() for found, _ in rounds] == [3, 4, 3, 3]
    assert rounds[2][0]["position_ids"].max() > 3


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_forwards_with_masks_made_for_each(family):
    """A static cache has its masks made before the forward, one for each kind of layer."""
    model = FAMILIES[family].build()
    config = model.config
    cache = StaticCache(config=config, max_cache_len=16)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache.early_initialization(1, config.num_key_value_heads, width, torch.float32, torch.device("cpu"))
    made = [found["attention_mask"] for found, _ in list(inputs_of_rounds(model, cache))[:2]]
    assert all(mask is not None for mask in made)
    assert len(set(map(id, made))) == len(made)
