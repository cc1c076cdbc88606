"""The drafter's pass against its definition written out in float64, with and without a cache, over several rounds."""

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.checkpoints import BLOCK, HIDDEN, LAYERS, TAPS, write, zlab_config, zlab_weights
from drafters.reference import draft, inverse_frequencies
from hf_ddtree import DFlashModel
from hf_ddtree.cache import DrafterContext
from hf_ddtree.compat import CACHE_NAME

FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

# (configuration, the causal layers it means)
CASES: dict[str, tuple[dict[str, Any], list[bool]]] = {
    "plain": ({}, [False, False]),
    "causal": ({"is_causal": True}, [True, True]),
    "sliding_is_causal": ({"layer_types": [SLIDING, FULL], "sliding_window": 4}, [True, False]),
    "sliding_shorter_than_the_block": ({"layer_types": [SLIDING] * 2, "sliding_window": 3}, [True, True]),
    "sliding_bidirectional": (
        {"layer_types": [SLIDING, FULL], "sliding_window": 6, "is_causal": False},
        [False, False],
    ),
    "bias": ({"attention_bias": True}, [False, False]),
    "yarn": ({"rope_scaling": YARN}, [False, False]),
}
ROUNDS = (9, 1, 3, 2, 5)


def checkpoint(case: str, folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], Any]:
    raw = zlab_config(**CASES[case][0])
    weights = zlab_weights(bias=raw["attention_bias"])
    model = DFlashModel.from_pretrained(write(folder, raw, weights), dtype=torch.float64).eval()
    return raw, weights, model


def inputs(context: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    taps = torch.randn(context, len(TAPS) * HIDDEN, generator=generator, dtype=torch.float64)
    return taps, torch.randn(BLOCK, HIDDEN, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("context", [1, 2, 13])
@pytest.mark.parametrize("case", list(CASES))
@torch.no_grad()
def test_without_a_cache(case: str, context: int, tmp_path: Path) -> None:
    raw, weights, model = checkpoint(case, tmp_path)
    taps, noise = inputs(context)
    output = model(noise[None], taps[None]).last_hidden_state[0]
    assert torch.allclose(output, draft(raw, weights, taps, noise, CASES[case][1]), atol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("case", list(CASES))
@torch.no_grad()
def test_rounds_with_a_cache(case: str, implementation: str, tmp_path: Path) -> None:
    """The context grows by the accepted tokens; a round's own slots leave no trace in the next."""
    raw, weights, model = checkpoint(case, tmp_path)
    model.set_attn_implementation(implementation)
    taps, _ = inputs(sum(ROUNDS))
    context, position = DrafterContext(model), 0
    for turn, new in enumerate(ROUNDS):
        noise = inputs(1, seed=100 + turn)[1]
        context.begin(new)
        output = model(noise[None], taps[None, position : position + new], **{CACHE_NAME: context.cache})
        assert getattr(output, CACHE_NAME) is context.cache
        context.commit(new)
        position += new
        expected = draft(raw, weights, taps[:position], noise, CASES[case][1])
        assert torch.allclose(output.last_hidden_state[0], expected, atol=1e-5), turn


@pytest.mark.parametrize("case", ["plain", "sliding_is_causal", "sliding_bidirectional"])
@torch.no_grad()
def test_left_padding(case: str, tmp_path: Path) -> None:
    """Padded context, masked and with positions that do not count it, drafts what the bare context drafts."""
    raw, weights, model = checkpoint(case, tmp_path)
    padding, (taps, _) = 4, inputs(sum(ROUNDS))
    padded = torch.cat([torch.full((padding, taps.shape[1]), 50.0, dtype=torch.float64), taps])
    context, position = DrafterContext(model), 0
    for turn, real in enumerate(ROUNDS):
        new = real + padding if turn == 0 else real
        start = position + (padding if turn else 0)
        noise = inputs(1, seed=100 + turn)[1]
        total = start + new + BLOCK
        mask = (torch.arange(total) >= padding).long()[None]
        positions = (torch.arange(total) - padding).clamp(min=0)[None, start:]
        context.begin(new)
        output = model(
            noise[None],
            padded[None, start : start + new],
            attention_mask=mask,
            position_ids=positions,
            **{CACHE_NAME: context.cache},
        )
        context.commit(new)
        position += real
        expected = draft(raw, weights, taps[:position], noise, CASES[case][1])
        assert torch.allclose(output.last_hidden_state[0], expected, atol=1e-5), turn


@torch.no_grad()
def test_positions_are_absolute(tmp_path: Path) -> None:
    """RoPE is relative, so a shift of all positions changes nothing and a gap changes the output."""
    raw, weights, model = checkpoint("plain", tmp_path)
    taps, noise = inputs(7)
    expected = draft(raw, weights, taps, noise, [False] * LAYERS)
    positions = torch.arange(100, 107 + BLOCK)[None]
    output = model(noise[None], taps[None], position_ids=positions).last_hidden_state[0]
    assert torch.allclose(output, expected, atol=1e-4)
    positions[:, 7:] += 3
    gap = model(noise[None], taps[None], position_ids=positions).last_hidden_state[0]
    assert not torch.allclose(gap, expected, atol=1e-2)


@torch.no_grad()
def test_a_4d_mask_is_used_as_it_is(tmp_path: Path) -> None:
    raw, weights, model = checkpoint("plain", tmp_path)
    taps, noise = inputs(7)
    mask = torch.zeros(1, 1, BLOCK, 7 + BLOCK, dtype=torch.float64)
    mask[..., :3] = torch.finfo(torch.float64).min
    output = model(noise[None], taps[None], attention_mask=mask).last_hidden_state[0]
    assert torch.allclose(output, draft(raw, weights, taps[3:], noise, [False] * LAYERS, 3), atol=1e-5)


@torch.no_grad()
def test_a_batch_is_its_rows(tmp_path: Path) -> None:
    raw, weights, model = checkpoint("sliding_is_causal", tmp_path)
    rows = [inputs(7, seed=seed) for seed in range(3)]
    output = model(
        torch.stack([noise for _, noise in rows]), torch.stack([taps for taps, _ in rows])
    ).last_hidden_state
    for row, (taps, noise) in enumerate(rows):
        assert torch.allclose(output[row], draft(raw, weights, taps, noise, [True, False]), atol=1e-5)


@pytest.mark.parametrize("case", ["plain", "yarn"])
def test_frequencies_stay_in_fp32(case: str, tmp_path: Path) -> None:
    raw, _, model = checkpoint(case, tmp_path)
    expected, scale = inverse_frequencies(raw)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        frequencies, factor = model.to(dtype).rotary_emb.frequencies(torch.device("cpu"))
        assert frequencies.dtype == torch.float32
        assert torch.allclose(frequencies.double(), expected, rtol=1e-5)
        assert factor == pytest.approx(scale)
    # At a position where bf16 frequencies would be off by whole turns.
    cos, sin = model.to(torch.bfloat16).rotary_emb(torch.tensor([[200]]), torch.float32)
    angles = torch.cat([200 * expected] * 2)
    assert torch.allclose(cos[0, 0, 0].double(), angles.cos() * scale, atol=1e-4)
    assert torch.allclose(sin[0, 0, 0].double(), angles.sin() * scale, atol=1e-4)


@torch.no_grad()
def test_bfloat16_is_close(tmp_path: Path) -> None:
    raw, weights, model = checkpoint("plain", tmp_path)
    taps, noise = inputs(7)
    output = model.to(torch.bfloat16)(noise[None].bfloat16(), taps[None].bfloat16()).last_hidden_state[0]
    expected = draft(raw, weights, taps, noise, [False] * LAYERS)
    assert output.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(output.double(), expected, dim=-1).min() > 0.995
