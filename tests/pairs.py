"""Tiny random pairs of target and drafter, one for each kind of attention layer, and running them side by side."""

import threading
from collections.abc import Callable
from typing import Any

import torch
import transformers as T
from transformers import GenerationConfig

from hf_ddtree import DDTreeConfig, DFlashConfig, DFlashModel
from models.family import LAYERS, SHAPE, VOCABULARY, known_fields
from models.zoo import ALL

# Every kind of attention layer once: what runs in all of the tests that a family may matter to.
FAMILIES: dict[str, Any] = {
    name: ALL[name].build
    for name in ("llama", "mistral", "qwen3", "qwen3_sliding", "qwen3_moe", "gemma2", "gemma3", "gpt_oss")
}

# Families with a test of their own.
_FURTHER: dict[str, Any] = {
    "longrope": lambda: T.Phi3ForCausalLM(
        T.Phi3Config(
            **known_fields(T.Phi3Config, SHAPE),
            original_max_position_embeddings=24,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "long_factor": [1.5, 2.0, 3.0, 4.0],
                "short_factor": [1.0, 1.0, 1.1, 1.2],
                "original_max_position_embeddings": 24,
                "factor": 4.0,
            },
        )
    ),
}


def make_target(family: Any = "qwen3", seed: int = 0, implementation: str | None = None) -> Any:
    """A random target, of a family or built by a function; flat weights would repeat one token."""
    torch.manual_seed(seed)
    model = (family if callable(family) else {**FAMILIES, **_FURTHER}[family])().eval()
    if implementation is not None:
        model.set_attn_implementation(implementation)
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.25, generator=generator)
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None)
    return model


def make_drafter(target: Any, seed: int = 1, **overrides: Any) -> DFlashModel:
    """A random drafter of the right shape; with 16 tokens and 40 nodes it is accepted often enough."""
    torch.manual_seed(seed)
    fields: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        block_size=6,
        mask_token_id=2,
        target_layer_ids=[0, 2, 3],
        num_target_layers=LAYERS,
        pad_token_id=0,
        bos_token_id=1,
    )
    drafter = DFlashModel(DFlashConfig(**{**fields, **overrides})).eval()
    # An untrained drafter is sure of the wrong tokens; flatter marginals make broad trees, which are accepted.
    drafter.norm.weight.data.fill_(0.4)
    return drafter


def prompt(length: int = 11, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def plain(target: Any, ids: torch.Tensor, seed: int = 5, **kwargs: Any) -> Any:
    """`generate` without a drafter."""
    torch.manual_seed(seed)
    return target.generate(ids, **_split(GenerationConfig, kwargs))


def tree(target: Any, drafter: Any, ids: torch.Tensor, seed: int = 5, budget: int = 40, **kwargs: Any) -> Any:
    """The same call with a drafter and a tree."""
    torch.manual_seed(seed)
    arguments = _split(DDTreeConfig, {"budget": budget, **kwargs})
    return target.generate(ids, assistant_model=drafter, **arguments)


def check_threads(target: Any, drafter: Any, new: int) -> None:
    """Three threads on one model, one of them without a drafter, each give the text of their own prompt."""
    expected = [plain(target, prompt(seed=seed), max_new_tokens=new) for seed in range(3)]
    outputs: list[Any] = [None] * 3

    def run(seed: int) -> None:
        if seed:
            outputs[seed] = tree(target, drafter, prompt(seed=seed), max_new_tokens=new)
        else:
            outputs[seed] = target.generate(prompt(seed=seed), max_new_tokens=new)

    in_threads(run, 3)
    assert all(map(torch.equal, outputs, expected))


def in_threads(run: Callable[[int], None], count: int) -> None:
    """Calls `run` with 0, 1, ... in as many threads at once, and waits for all."""
    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


_CALL_ARGUMENTS = (
    "attention_mask",
    "inputs_embeds",
    "streamer",
    "logits_processor",
    "stopping_criteria",
    "tokenizer",
    "past_key_values",
    "cache",
    "prefix_allowed_tokens_fn",
    "negative_prompt_ids",
    "synced_gpus",
)


def _split(config_class: type[GenerationConfig], kwargs: dict[str, Any]) -> dict[str, Any]:
    call = {key: kwargs.pop(key) for key in list(kwargs) if key in _CALL_ARGUMENTS}
    # Processors and criteria may keep state, so each call makes its own.
    for name in ("logits_processor", "stopping_criteria"):
        if name in call:
            call[name] = call[name]()
    return {"generation_config": config_class(**kwargs), **call}
