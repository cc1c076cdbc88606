"""Quantised targets: the layers of a package run as they are, and a drafter borrows a quantised embedding and head."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from torch import nn

from hf_ddtree.drafters import TargetIO
from pairs import make_drafter, make_target, plain, prompt, tree
from targets.packed import pack, unpack

NEW = 16
DTYPES = [torch.float32, torch.bfloat16]
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


def assert_same(target: Any, drafter: Any, **kwargs: Any) -> None:
    """Token for token as `generate` without a drafter, and with trees that are accepted."""
    expected = plain(target, prompt(), max_new_tokens=NEW, **kwargs)
    output = tree(target, drafter, prompt(), max_new_tokens=NEW, return_dict_in_generate=True, **kwargs)
    assert torch.equal(output.sequences, expected)
    assert output.speculation.mean_acceptance_length > 1.2


def assert_parts_at_near_ties(target: Any, seed: int, **drafter_fields: Any) -> None:
    """The same tokens, up to a place where the target's two best logits are closer than its own arithmetic is good."""
    ids = prompt(seed=seed)
    expected = plain(target, ids, max_new_tokens=NEW)[0]
    drafter = make_drafter(target, **drafter_fields)
    tokens = tree(target, drafter, ids, max_new_tokens=NEW)[0]
    different = (tokens != expected).nonzero()
    if len(different):
        with torch.no_grad():
            logits = target(expected[None, : int(different[0])]).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        assert best - second < 0.05 * logits.std()


def linear(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear)


def embedding(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Embedding)


def weights_int8(target: Any) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(target, Int8WeightOnlyConfig(), linear)


def weights_float8(target: Any) -> None:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    quantize_(target, Float8WeightOnlyConfig(), linear)


def weights_int4_embedding_int8(target: Any) -> None:
    from torchao.quantization import IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerAxis, PerGroup

    quantize_(target, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16)), linear)
    quantize_(target, IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)), embedding)


@needs_torchao
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantise", [weights_int8, weights_float8, weights_int4_embedding_int8])
def test_weights_of_torchao(quantise: Callable[[Any], None], dtype: torch.dtype) -> None:
    """Head and, in the last kind, embedding included."""
    target = make_target("qwen3").to(dtype)
    quantise(target)
    drafter = make_drafter(target).to(dtype)
    assert type(target.lm_head.weight) is not nn.Parameter
    assert_same(target, drafter)
    assert_same(target, drafter, do_sample=True, temperature=0.7)


@needs_torchao
def test_an_embedding_of_torchao_without_the_target_s_scale() -> None:
    target = make_target("gemma3")
    rows = target.get_input_embeddings().weight[:4].clone()
    weights_int4_embedding_int8(target)
    io = TargetIO(target, make_drafter(target, input_embedding_scale=1.0))
    assert torch.allclose(io.embed(torch.arange(4)[None])[0], rows, atol=0.02)


def activations(granularity: str) -> Any:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, PerRow, PerTensor, quantize_

    target = make_target("qwen3")
    kind = {"row": PerRow(), "tensor": PerTensor()}[granularity]
    quantize_(target, Int8DynamicActivationInt8WeightConfig(granularity=kind), linear)
    return target


@needs_torchao
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_activations_quantised_as_they_come(granularity: str) -> None:
    """Rounding errors of the last bit move an integer by one, in plain decoding too: tokens part at near ties only.

    That is so with one scale a row, and no worse with one for the whole forward, which a tree's nodes share.
    """
    target = activations(granularity)
    for seed in range(2):
        assert_parts_at_near_ties(target, seed)


@needs_torchao
def test_a_wrong_position_is_found_in_a_target_whose_own_arithmetic_varies() -> None:
    target = activations("row")
    rotary, forward = target.model.rotary_emb, target.model.rotary_emb.forward

    def by_slot(states: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return forward(states, position_ids[:, :1] + torch.arange(position_ids.shape[1])[None])

    rotary.forward = by_slot
    with pytest.raises(ValueError, match="gives the nodes of a draft tree other logits"):
        tree(target, make_drafter(target), prompt(), max_new_tokens=NEW)


def wide() -> Any:
    """A target whose rows fill a block of bitsandbytes' 4-bit kinds."""
    shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, head_dim=16)
    config = T.Qwen3Config(vocab_size=64, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, **shape)
    return make_target(lambda: T.Qwen3ForCausalLM(config))


@needs_bitsandbytes
@pytest.mark.parametrize("with_head", [False, True])
def test_nf4_of_bitsandbytes(with_head: bool, tmp_path: Path) -> None:
    wide().save_pretrained(tmp_path)
    skipped = ["none"] if with_head else None
    quantisation = T.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=skipped)
    target = T.Qwen3ForCausalLM.from_pretrained(tmp_path, quantization_config=quantisation, dtype=torch.float32)
    assert (target.lm_head.weight.dtype == torch.uint8) is with_head
    assert_same(target, make_drafter(target, vocab_size=64, hidden_size=64))


@needs_bitsandbytes
def test_int8_of_bitsandbytes(tmp_path: Path) -> None:
    """It quantises activations too, by the row, and computes in fp16."""
    wide().save_pretrained(tmp_path)
    quantisation = T.BitsAndBytesConfig(load_in_8bit=True)
    target = T.Qwen3ForCausalLM.from_pretrained(tmp_path, quantization_config=quantisation, dtype=torch.float32)
    for seed in range(2):
        assert_parts_at_near_ties(target, seed, vocab_size=64, hidden_size=64)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gemma2"])
def test_packed_layers_draft_what_whole_ones_draft(family: str) -> None:
    """Without any package: head and embedding are called, and sizes come from what they declare."""
    target = make_target(family)
    scale = 1.0 if family == "gemma3" else None
    drafter = make_drafter(target, input_embedding_scale=scale)
    pack(target)
    packed = tree(target, drafter, prompt(), max_new_tokens=NEW, return_dict_in_generate=True)
    assert torch.equal(packed.sequences, plain(target, prompt(), max_new_tokens=NEW))
    states, ids = torch.randn(1, 3, 32), torch.tensor([[3, 1, 7]])
    io = TargetIO(target, drafter)
    logits, embedded = io.logits(states), io.embed(ids)
    multiplied = target.get_input_embeddings().embed_scale if scale is None else 1.0
    unpack(target)
    io = TargetIO(target, make_drafter(target))
    assert torch.allclose(logits, io.logits(states), atol=1e-5)
    assert torch.allclose(embedded, io.embed(ids) * multiplied, atol=1e-5)


def test_a_normalised_embedding_must_be_whole() -> None:
    """Its rows are read before their norm, which no call gives."""
    target = make_target("qwen3")
    pack(target)
    target.get_input_embeddings().embed_norm = nn.LayerNorm(32)
    with pytest.raises(ValueError, match=r"normalises its rows.*keep this layer whole and in memory"):
        tree(target, make_drafter(target), prompt(), max_new_tokens=NEW)
