"""Targets with adapters: PEFT's wrappers, merged weights, and the library's own integration."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import hf_ddtree
from hf_ddtree import DDTreeConfig
from pairs import make_drafter, make_target, plain, prompt, tree

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")

NEW = 14
KINDS: dict[str, dict[str, Any]] = {
    "all linear": dict(target_modules="all-linear"),
    "head": dict(target_modules=["q_proj", "lm_head"]),
    "embedding": dict(target_modules=["q_proj", "embed_tokens"]),
    "saved modules": dict(target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]),
    "trained tokens": dict(target_modules=["q_proj"], trainable_token_indices=[3, 4]),
}


def trained(model: Any) -> Any:
    """Adapter weights that change the output, as after training."""
    generator = torch.Generator().manual_seed(9)
    for name, weight in model.named_parameters():
        if any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens_delta")):
            weight.data.normal_(0, 0.3, generator=generator)
    return model.eval()


def adapted(target: Any, **fields: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return trained(get_peft_model(target, LoraConfig(task_type="CAUSAL_LM", r=4, **fields)))


def assert_same(model: Any, drafter: Any) -> torch.Tensor:
    expected = plain(model, prompt(), max_new_tokens=NEW)
    output = tree(model, drafter, prompt(), max_new_tokens=NEW, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert output.speculation.nodes_verified > 0
    return expected


@pytest.mark.parametrize(
    ("family", "kind"),
    [("qwen3", "all linear"), ("qwen3", "head")]
    + [("gemma3", kind) for kind in ("embedding", "saved modules", "trained tokens")],
)
def test_lora(family: str, kind: str) -> None:
    """Unmerged, switched off, merged: the drafter borrows what the target reads and says with at that moment."""
    target = make_target(family)
    drafter = make_drafter(target, input_embedding_scale=1.0 if family == "gemma3" else None)
    without = plain(target, prompt(), max_new_tokens=NEW)
    model = adapted(target, **KINDS[kind])
    assert_same(model, drafter)
    with model.disable_adapter():
        assert torch.equal(assert_same(model, drafter), without)
    assert_same(model, drafter)
    assert_same(model.merge_and_unload(), drafter)


def test_an_adapted_head_drafts_with_what_was_trained() -> None:
    target = make_target("qwen3")
    model = adapted(target, **KINDS["saved modules"])
    inner = model.get_base_model()
    io = hf_ddtree.drafters.TargetIO(inner, make_drafter(target))
    weight = inner.lm_head.modules_to_save["default"].weight
    states = torch.randn(1, 2, 32)
    assert torch.allclose(io.logits(states), states @ weight.T, atol=1e-5)
    assert torch.equal(
        io.embed(torch.tensor([[3]]))[0, 0], inner.model.embed_tokens.modules_to_save["default"].weight[3]
    )


def test_another_adapter_between_generates() -> None:
    from peft import LoraConfig

    target = make_target("qwen3")
    drafter = make_drafter(target)
    model = adapted(target, **KINDS["all linear"])
    model.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["v_proj", "up_proj"]))
    trained(model)
    texts = []
    for name in ("default", "other", "default"):
        model.set_adapter(name)
        texts.append(assert_same(model, drafter))
    assert torch.equal(texts[0], texts[2]) and not torch.equal(texts[0], texts[1])


def test_a_drafter_bound_to_an_adapted_model() -> None:
    target = make_target("qwen3")
    model = adapted(target, **KINDS["head"])
    expected = plain(model, prompt(), max_new_tokens=NEW)
    hf_ddtree.attach(model, make_drafter(target), DDTreeConfig(budget=40))
    try:
        with hf_ddtree.record() as stats:
            bound = plain(model, prompt(), max_new_tokens=NEW)
    finally:
        hf_ddtree.detach(model)
    assert torch.equal(bound, expected)
    assert stats.nodes_verified > 0


def test_the_library_s_own_integration() -> None:
    from peft import LoraConfig
    from transformers.integrations.peft import MIN_PEFT_VERSION
    from transformers.utils import check_peft_version

    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError as error:
        pytest.skip(f"transformers' own adapters: {error}")
    target = make_target("qwen3")
    drafter = make_drafter(target)
    for rank, name in ((4, "one"), (2, "two")):
        target.add_adapter(LoraConfig(target_modules=["q_proj", "up_proj"], r=rank), adapter_name=name)
    trained(target)
    texts = []
    for name in ("one", "two"):
        target.set_adapter(name)
        texts.append(assert_same(target, drafter))
    assert not torch.equal(*texts)
    target.disable_adapters()
    assert_same(target, drafter)


@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig", "PromptEncoderConfig"])
def test_learned_prompts_are_refused(kind: str) -> None:
    import peft

    target = make_target("llama")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(target, config).eval()
    forwards: list[int] = []
    target.register_forward_pre_hook(lambda *args: forwards.append(1))
    config = DDTreeConfig(max_new_tokens=NEW, do_sample=False)
    with pytest.raises(ValueError, match="prepends learned prompts to its inputs"):
        model.generate(input_ids=prompt(), assistant_model=make_drafter(target), generation_config=config)
    assert not forwards


def test_an_adapter_that_counts_from_the_prompt_s_end_is_refused() -> None:
    """Activated LoRA adapts the last rows of a forward, whichever nodes these are."""
    ids = prompt()
    target = make_target("qwen3")
    model = adapted(target, **KINDS["all linear"] | {"alora_invocation_tokens": ids[0, 5:7].tolist()})
    config = DDTreeConfig(max_new_tokens=NEW, do_sample=False)
    with pytest.raises(ValueError, match="gives the nodes of a draft tree other logits"):
        model.generate(input_ids=ids, assistant_model=make_drafter(target), generation_config=config)


def test_an_adapter_named_for_the_row() -> None:
    """`adapter_names` has an entry for each row of the batch, which the self-test's forwards must not outnumber."""
    ids, target = prompt(), make_target("qwen3")
    model = adapted(target, **KINDS["all linear"]).eval()
    call = dict(input_ids=ids, adapter_names=["default"])
    expected = model.generate(**call, generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False))
    config = DDTreeConfig(max_new_tokens=NEW, do_sample=False)
    assert torch.equal(
        model.generate(**call, assistant_model=make_drafter(target), generation_config=config), expected
    )
