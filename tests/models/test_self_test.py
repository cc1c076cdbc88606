"""The self-test of a target lets every family pass, in every dtype, and none whose trees are wrong in some way."""

from typing import Any

import pytest
import torch

from hf_ddtree.cache.recurrent import TreeRecurrentLayer
from hf_ddtree.compat import decoder_layers
from hf_ddtree.generation import self_test
from hf_ddtree.generation.ranks import Ranks
from hf_ddtree.generation.verification import TreeVerifier
from hf_ddtree.round import TapCollector, TreeRound
from models.zoo import FAMILIES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
USUAL = ["llama", "qwen3_sliding", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3", "qwen3_5", "bamba", "lfm2"]
TEXT = [name for name, family in FAMILIES.items() if family.image is None]
# The attention layers of these have no positions.
WITHOUT_POSITIONS = ["granite_moe_hybrid", "nemotron_h", "jamba", "kimi_linear"]
# One attention layer in four, which moves the logits of a random model by less than low precision resolves.
FAINT_MASK = ["bailing_hybrid"]
FAINT_POSITIONS = ["olmo_hybrid", "lara_mini"]
# Its random weights overflow fp16 in plain decoding too.
OVERFLOWS = "olmo_hybrid"
RECURRENT = ["qwen3_5", "qwen3_next", "bamba", "lfm2"]


def cases(names: list[str], faint: list[str] | None = None) -> list[Any]:
    """Families and dtypes; all but the usual families are marked slow, and `faint` ones are in fp32 only."""
    return [
        pytest.param(name, dtype, id=f"{name}-{dtype}", marks=() if name in USUAL else pytest.mark.slow)
        for name in names
        if name in FAMILIES
        for dtype in (["float32"] if name in (faint or []) else DTYPES)
        if (name, dtype) != (OVERFLOWS, "float16")
    ]


def run(family: str, dtype: str) -> Any:
    """Runs the test on a fresh model; returns how many forwards and tokens it took."""
    model = FAMILIES[family].make(DTYPES[dtype])
    taken: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, inputs: taken.append(inputs[0].numel()))
    verifier = TreeVerifier(model, TapCollector(decoder_layers(model), []))
    with torch.no_grad():
        self_test.check_target_verifies_trees(model, verifier, Ranks(model, False, model.device))
    return taken


def refused(family: str, dtype: str) -> None:
    with pytest.raises(ValueError, match="gives the nodes of a draft tree other logits"):
        run(family, dtype)


@pytest.mark.parametrize(("family", "dtype"), cases(TEXT))
def test_passes(family: str, dtype: str) -> None:
    run(family, dtype)


@pytest.mark.parametrize(("family", "dtype"), cases(TEXT, FAINT_MASK))
def test_nodes_that_see_other_branches_are_found(family: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_before(verifier: TreeVerifier, tree: Any, device: torch.device) -> TreeRound:
        return TreeRound(tree.depths, torch.full_like(tree.subtree_ends, len(tree)))

    monkeypatch.setattr(TreeVerifier, "round_of", all_before)
    refused(family, dtype)


@pytest.mark.parametrize(
    ("family", "dtype"), cases([name for name in TEXT if name not in WITHOUT_POSITIONS], FAINT_POSITIONS)
)
def test_positions_by_slot_are_found(family: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = TreeVerifier.inputs

    def by_slot(verifier: TreeVerifier, tree: Any, kwargs: Any) -> Any:
        prepared = inputs(verifier, tree, kwargs)
        first = prepared["position_ids"][..., :1]
        prepared["position_ids"] = first + torch.arange(len(tree))
        return prepared

    monkeypatch.setattr(TreeVerifier, "inputs", by_slot)
    refused(family, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", RECURRENT)
def test_states_that_stay_behind_are_found(family: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreeRecurrentLayer, "commit", lambda layer, path: layer.rollback())
    refused(family, dtype)


@pytest.mark.parametrize(("family", "forwards", "tokens"), [("llama", 3, 29), ("gpt_oss", 3, 29), ("qwen3_5", 7, 30)])
def test_what_it_costs(family: str, forwards: int, tokens: int) -> None:
    taken = run(family, "float32")
    assert (len(taken), sum(taken)) == (forwards, tokens)


@pytest.mark.skipif(OVERFLOWS not in FAMILIES, reason=f"this Transformers has no {OVERFLOWS}")
def test_a_target_that_overflows_says_so() -> None:
    with pytest.raises(ValueError, match=r"OlmoHybridForCausalLM in torch.float16 gives NaN logits"):
        run(OVERFLOWS, "float16")
