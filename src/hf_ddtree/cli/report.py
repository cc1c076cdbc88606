"""What was measured, as JSON and in words."""

import os
import platform
from typing import Any

import torch
import transformers

from hf_ddtree.cli.measure import Runner, Tally
from hf_ddtree.cli.pair import Prompt

Tallies = dict[str, Tally]


def as_json(tallies: Tallies, budget: int) -> dict[str, dict[str, Any]]:
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
            gap = top_two_gap(runner, prompts[prompt].text, expected)
            sentences.append(
                f"{mode} differs from plain decoding, first at new token {token} of {prompts[prompt].file}, where "
                f"the target's two best logits are {gap:.1e} apart."
            )
    return sentences


@torch.inference_mode()
def top_two_gap(runner: Runner, prompt: str, tokens: list[int]) -> float:
    """How far the target's best logit is above its second after a text; a rounding error can turn a gap under 1e-4."""
    prompt_ids = runner.pair.tokenizer(prompt, return_tensors="pt")["input_ids"]
    input_ids = torch.cat([prompt_ids, torch.tensor([tokens], dtype=torch.long)], dim=1).to(runner.pair.target.device)
    best, second = runner.pair.target(input_ids).logits[0, -1].float().topk(2).values.tolist()
    return float(best - second)


def machine(runner: Runner) -> str:
    """What the numbers were measured on."""
    target = runner.pair.target
    threads = torch.get_num_threads()
    return (
        f"{os.cpu_count()} CPUs ({platform.machine()}), {threads} thread{'s' * (threads != 1)}, {target.device.type}, "
        f"{str(target.dtype).removeprefix('torch.')}; torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}"
    )
