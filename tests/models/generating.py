"""Whole generates with trees beside plain ones."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import GenerationConfig

from hf_ddtree import DDTreeConfig
from hf_ddtree.compat import CACHE_NAME
from models.family import VOCABULARY, Family
from models.nodes import DTYPES, errors_of
from models.sequence import Sequence
from models.zoo import FAMILIES
from pairs import make_drafter

PROMPT, NEW = 11, 32
GREEDY: dict[str, Any] = dict(do_sample=False)
SAMPLING: dict[str, Any] = dict(do_sample=True, temperature=0.9, top_k=12)
# Of 15 tokens that may follow, a large tree holds most and goes on from some; a small one is often refused.
LARGE, SMALL = 60, 8

# A token may be this many times plain decoding's own error (root mean square) below the best one in bf16.
RESOLVED = 6.0


@dataclass(frozen=True)
class Generated:
    """What the generates of a family gave.

    Args:
        verdict (`str`): "equal", token for token; in low precision "equal to rounding" of a text that parted from
            plain decoding's: each of its tokens is the best at its place, or as good as the arithmetic resolves.
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
    greedy = GREEDY if exact else {**GREEDY, **text_only(chosen)}
    plain = run(chosen, model, prompt, **greedy)
    output = run(chosen, model, prompt, drafter, LARGE, **greedy)
    lengths = list(output.speculation.acceptance_lengths)
    equal = torch.equal(output.sequences, plain.sequences)
    if exact:
        assert equal, "greedy"
        sampled = run(chosen, model, prompt, drafter, SMALL, **SAMPLING)
        assert torch.equal(sampled.sequences, run(chosen, model, prompt, **SAMPLING).sequences), "sampling"
        lengths += sampled.speculation.acceptance_lengths
    elif not equal:
        check_rounding(family, model, prompt, output.sequences[0, len(prompt) :].tolist())
    text = plain.sequences[0, len(prompt) :].tolist()
    verdict = "equal" if equal else "equal to rounding"
    return Generated(verdict, lengths, text, output.speculation.routes)


def text_only(family: Family) -> dict[str, Any]:
    """Settings that keep image tokens out of a text: a forward over all of it would look for their images."""
    others = list(range(family.text_vocabulary, VOCABULARY))
    return dict(suppress_tokens=others) if others else {}


def logits_over(family: Family, model: Any, prompt: list[int], text: list[int]) -> torch.Tensor:
    """What one plain forward over the whole text says of each of its places.

    Args:
        family (`Family`): of the model.
        model (`PreTrainedModel`): the target.
        prompt (`list[int]`): what the text follows.
        text (`list[int]`): tokens below `family.text_vocabulary`.

    Returns:
        `torch.Tensor` of shape `(len(text), family.text_vocabulary)`: logits in units of their standard deviation.
    """
    logits = Sequence(family, model, prompt).plain(prompt + text)[len(prompt) - 1 : -1].double()
    return logits[:, : family.text_vocabulary] / logits.std()


def resolved_gap(family: str) -> float:
    """What bf16 cannot tell apart: plain decoding's own error, or that of one rounding, some times over."""
    return RESOLVED * max(errors_of(family, "bfloat16").plain, torch.finfo(torch.bfloat16).eps / 2)


def check_rounding(family: str, model: Any, prompt: list[int], text: list[int]) -> None:
    """Asserts that every token of a text is the best at its place, or as good as bf16 can tell."""
    logits = logits_over(FAMILIES[family], model, prompt, text)
    gaps = logits.amax(1) - logits.gather(1, torch.tensor(text)[:, None])[:, 0]
    step, resolved = int(gaps.argmax()), resolved_gap(family)
    assert float(gaps[step]) <= resolved, (
        f"{family}: token {step} is {gaps[step]:.3f} below the best, of {resolved:.3f}"
    )
