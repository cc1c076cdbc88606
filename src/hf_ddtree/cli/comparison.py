"""Whether a text is plain decoding's, and where it is not, whether rounding can explain it; the demo's report."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from hf_ddtree.cli.measure import Runner, Tally
from hf_ddtree.cli.pair import Prompt

Tallies = dict[str, Tally]

#: Top-two gaps that rounding can turn, relative to the best logit; fp32's is the one that exactness is claimed for.
_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 2**-5, torch.float16: 2**-8}


@dataclass(frozen=True)
class Gap:
    """How far the target's best logit is above its second, and whether arithmetic in its dtype can swap the two."""

    size: float
    rounding: bool


@torch.inference_mode()
def top_two_gap(target: PreTrainedModel, token_ids: Sequence[int]) -> Gap:
    """The gap of the token that follows `token_ids`, prompt included."""
    logits = target(torch.tensor([list(token_ids)], device=target.device)).logits[0, -1].float()
    best, second = logits.topk(2).values.tolist()
    allowed = _ROUNDING.get(target.dtype, 1e-4)
    if target.dtype != torch.float32:
        allowed *= max(abs(best), 1.0)
    return Gap(best - second, best - second <= allowed)


def as_json(tallies: Tallies, budget: int | str) -> dict[str, dict[str, Any]]:
    """One object a mode; seconds are those of the best runs, stage seconds those of all runs."""
    plain = tallies["plain"]
    report: dict[str, dict[str, Any]] = {}
    for mode, tally in tallies.items():
        report[mode] = {
            "tokens_per_second": tally.tokens_per_second,
            "forwards": tally.forwards,
            "mean_acceptance_length": tally.mean_acceptance_length,
            "identical": tally.difference(plain) is None,
            "mean_acceptance_length_outside_loops": tally.mean_outside_loops(plain),
            "ratio": tally.tokens_per_second / plain.tokens_per_second,
            "tokens": tally.tokens,
            "seconds": tally.seconds,
            "prompts": len(tally.runs),
        }
    report["tree"] |= {
        "budget": budget,
        "rounds": tallies["tree"].rounds,
        "stage_seconds": tallies["tree"].stage_seconds,
    }
    return report


def differences(tallies: Tallies, prompts: list[Prompt], runner: Runner) -> list[str]:
    """A sentence for each mode whose output is not plain decoding's."""
    sentences = []
    for mode, tally in tallies.items():
        place = tally.difference(tallies["plain"])
        if place is not None:
            prompt, token = place
            expected = tallies["plain"].runs[prompt][0].tokens[:token]
            prompt_ids = runner.pair.tokenizer(prompts[prompt].text)["input_ids"]
            gap = top_two_gap(runner.pair.target, [*prompt_ids, *expected])
            sentences.append(
                f"{mode} differs from plain decoding, first at new token {token} of {prompts[prompt].file}, where "
                f"the target's two best logits are {gap.size:.1e} apart."
            )
    return sentences


def machine(runner: Runner) -> str:
    """What the numbers were measured on."""
    target = runner.pair.target
    threads = torch.get_num_threads()
    return (
        f"{os.cpu_count()} CPUs ({platform.machine()}), {threads} thread{'s' * (threads != 1)}, {target.device.type}, "
        f"{str(target.dtype).removeprefix('torch.')}; torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}"
    )
