"""Whole generates with trees beside plain ones."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import GenerationConfig

from hf_ddtree import DDTreeConfig
from hf_ddtree.compat import CACHE_NAME
from models.family import Family
from models.nodes import DTYPES, errors_of
from models.zoo import FAMILIES
from pairs import make_drafter

PROMPT, NEW = 11, 32
GREEDY: dict[str, Any] = dict(do_sample=False)
SAMPLING: dict[str, Any] = dict(do_sample=True, temperature=0.9, top_k=12)
# Of 15 tokens that may follow, a large tree holds most and goes on from some; a small one is often refused.
LARGE, SMALL = 60, 8


@dataclass(frozen=True)
class Generated:
    """What the generates of a family gave.

    Args:
        verdict (`str`): "equal", token for token; in low precision "equal to rounding": up to a token where plain
            decoding's two best logits are closer than its own arithmetic resolves.
        acceptance_lengths (`list[int]`): of all rounds of trees.
        text (`list[int]`): the greedy text.
        routes (`dict[str, int]`): layers by the way they verify a tree.
    """

    verdict: str
    acceptance_lengths: list[int]
    text: list[int]
    routes: dict[str, int]


def drafter_for(model: Any) -> Any:
    """A random drafter that reads a first, a middle and the last layer."""
    layers = model.config.get_text_config().num_hidden_layers
    drafter = make_drafter(model, target_layer_ids=[0, 2, layers - 1], num_target_layers=layers)
    return drafter.to(model.dtype)


def run(family: Family, model: Any, ids: list[int], drafter: Any = None, budget: int = LARGE, **settings: Any) -> Any:
    """`generate`'s output, with trees if there is a drafter; a cache among the settings holds the image already."""
    tensor, call = torch.tensor([ids]), dict[str, Any]()
    if CACHE_NAME in settings:
        call[CACHE_NAME] = settings.pop(CACHE_NAME)
    else:
        call = family.image_inputs(tensor, model.dtype)
    settings = dict(max_new_tokens=NEW, return_dict_in_generate=True) | settings
    if drafter is not None:
        call["assistant_model"] = drafter
    config = GenerationConfig(**settings) if drafter is None else DDTreeConfig(budget=budget, **settings)
    torch.manual_seed(5)
    return model.generate(tensor, generation_config=config, **call)


@cache
def generated_by(family: str, dtype: str) -> Generated:
    """Greedy text and, in fp32, sampled text, with trees and without; once a test run.

    Args:
        family (`str`): a name of [`models.zoo.FAMILIES`].
        dtype (`str`): "float32" or "bfloat16".
    """
    chosen, exact = FAMILIES[family], dtype == "float32"
    model = chosen.make(DTYPES[dtype])
    drafter, prompt = drafter_for(model), chosen.prompt(PROMPT, seed=3)
    plain = run(chosen, model, prompt, output_logits=True, **GREEDY)
    output = run(chosen, model, prompt, drafter, LARGE, **GREEDY)
    lengths = list(output.speculation.acceptance_lengths)
    if exact:
        assert torch.equal(output.sequences, plain.sequences), "greedy"
        sampled = run(chosen, model, prompt, drafter, SMALL, **SAMPLING)
        assert torch.equal(sampled.sequences, run(chosen, model, prompt, **SAMPLING).sequences), "sampling"
        lengths += sampled.speculation.acceptance_lengths
    else:
        _check_parting(family, plain, output.sequences, len(prompt))
    text = plain.sequences[0, len(prompt) :].tolist()
    verdict = "equal" if exact else "equal to rounding"
    return Generated(verdict, lengths, text, output.speculation.routes)


def _check_parting(family: str, plain: Any, sequence: torch.Tensor, start: int) -> None:
    """Asserts that two texts part, if at all, at a choice that plain decoding's arithmetic does not settle."""
    parted = (plain.sequences != sequence)[0, start:].nonzero()
    if not len(parted):
        return
    step = int(parted[0])
    logits = plain.logits[step][0].double()
    gap = logits[plain.sequences[0, start + step]] - logits[sequence[0, start + step]]
    resolved = 12 * errors_of(family, "bfloat16").plain * float(logits.std())
    assert float(gap) <= resolved, (step, float(gap), resolved)
