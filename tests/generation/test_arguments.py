"""What a sequence's forwards take, extended late, beside `generate`'s own extension after each token."""

import pytest
import torch
from transformers import GenerationMixin

from hf_ddtree.compat import CACHE_NAME, extend_model_kwargs
from hf_ddtree.generation.arguments import SequenceArguments
from tests.models.zoo import FAMILIES


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
