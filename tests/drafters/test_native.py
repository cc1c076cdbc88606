"""Beside Transformers' own DFlash assistant: the same weights, the same states, the same chain under its own loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, GenerationConfig
from transformers.cache_utils import DFlashCache

from drafters.checkpoints import BLOCK, HIDDEN, TAPS, native_config, native_weights, write, zlab_weights
from hf_ddtree import DFlashModel
from hf_ddtree.compat import CACHE_NAME
from pairs import make_target, prompt

FULL, SLIDING = "full_attention", "sliding_attention"

CASES: dict[str, dict[str, Any]] = {
    "wide_window": {},
    "narrow_window": {"sliding_window": 6},
    "window_shorter_than_the_block": {"sliding_window": 3},
    "mixed": {"layer_types": [FULL, SLIDING], "sliding_window": 4},
    "full": {"layer_types": [FULL, FULL]},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
        }
    },
}


def twins(folder: Path, case: str) -> tuple[Any, Any]:
    """The library's model and ours from one folder in the native layout."""
    write(folder, native_config(**CASES[case]), native_weights(zlab_weights()))
    native = AutoModel.from_pretrained(folder)
    assert type(native).__name__ == "MuseGlimmerAssistantModel"
    return native.eval(), DFlashModel.from_pretrained(folder).eval()


@pytest.mark.parametrize("case", list(CASES))
@torch.no_grad()
def test_states_are_equal_without_a_cache(case: str, tmp_path: Path) -> None:
    native, ours = twins(tmp_path, case)
    generator = torch.Generator().manual_seed(0)
    noise, taps = (torch.randn(1, n, w, generator=generator) for n, w in ((BLOCK, HIDDEN), (12, HIDDEN * len(TAPS))))
    # Without a cache the library's mask covers the slots only, so it gets one.
    cache = DFlashCache(config=native.config)
    cache.set_previous_accepted_tokens(12)
    expected = native(noise, taps, **{CACHE_NAME: cache}).last_hidden_state
    assert torch.allclose(ours(noise, taps).last_hidden_state, expected, atol=2e-5)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("case", list(CASES))
@torch.no_grad()
def test_rounds_are_equal_with_the_library_s_cache(case: str, padded: bool, tmp_path: Path) -> None:
    """Driven as the library's candidate generator drives it: crop the last noise, bring the new context."""
    native, ours = twins(tmp_path, case)
    generator = torch.Generator().manual_seed(1)
    caches = [DFlashCache(config=model.config) for model in (native, ours)]
    for cache in caches:
        cache.activate_past_recording()
    length = 0
    for new in (9, 1, 4, 2, 5):
        noise, taps = (
            torch.randn(1, n, w, generator=generator) for n, w in ((BLOCK, HIDDEN), (new, HIDDEN * len(TAPS)))
        )
        total = length + new + BLOCK
        mask = (torch.arange(total) >= 2).long()[None] if padded else None
        outputs = []
        for model, cache in zip((native, ours), caches, strict=True):
            cache.set_previous_accepted_tokens(new)
            if length:
                cache.crop(-BLOCK)
            positions = torch.arange(length, total)[None]
            outputs.append(
                model(
                    noise, taps, attention_mask=mask, position_ids=positions, **{CACHE_NAME: cache}
                ).last_hidden_state
            )
        assert torch.allclose(outputs[1], outputs[0], atol=2e-5), length
        length += new


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "temperature": 0.9}], ids=["greedy", "sampling"])
@pytest.mark.parametrize("case", ["narrow_window", "full"])
def test_the_native_chain_runs_on_both(case: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """An explicit `speculation_type="dflash"` is the library's loop: both drafters give the same passes and output."""
    native, ours = twins(tmp_path, case)
    target, ids = make_target("qwen3_sliding"), prompt()
    mask = torch.ones_like(ids)
    outputs, passes = [], []
    for drafter in (native, ours):
        seen: list[tuple[int, torch.Tensor]] = []

        def record(_module: Any, _args: Any, kwargs: Any, output: Any, seen: Any = seen) -> None:
            seen.append((kwargs["context_hidden_states"].shape[1], output.last_hidden_state))

        handle = drafter.register_forward_hook(record, with_kwargs=True)
        config = GenerationConfig(speculation_type="dflash", max_new_tokens=30, pad_token_id=0, **settings)
        torch.manual_seed(0)
        outputs.append(target.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=config))
        handle.remove()
        passes.append(seen)
    assert torch.equal(*outputs)
    assert [new for new, _ in passes[0]] == [new for new, _ in passes[1]]
    assert len(passes[0]) > 3
    for (_, expected), (_, states) in zip(*passes, strict=True):
        assert torch.allclose(states, expected, atol=1e-4)
    if not settings:
        plain = GenerationConfig(max_new_tokens=30, pad_token_id=0)
        assert torch.equal(outputs[1], target.generate(ids, attention_mask=mask, generation_config=plain))
