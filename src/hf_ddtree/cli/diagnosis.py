"""What `hf-ddtree doctor` finds out about a pair; printing is not its business."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from hf_ddtree import DDTreeConfig, DFlashConfig, DFlashModel
from hf_ddtree.cli.comparison import top_two_gap
from hf_ddtree.cli.measure import first_difference
from hf_ddtree.cli.pair import Pair
from hf_ddtree.cli.tested import rows_of
from hf_ddtree.compat import CACHE_NAME, decoder_layers
from hf_ddtree.drafters import device_of, head_shape
from hf_ddtree.drafters.formats import detect
from hf_ddtree.generation.compatibility import check_target
from hf_ddtree.generation.floor import FLOOR
from hf_ddtree.generation.pair import pair_checks
from hf_ddtree.generation.ranks import Ranks
from hf_ddtree.generation.self_test import check_target_verifies_trees
from hf_ddtree.generation.verification import TreeVerifier
from hf_ddtree.linear_attention.states import bytes_of
from hf_ddtree.round import TapCollector

OK, DOUBTFUL, FAILED = "ok", "doubtful", "FAIL"
TRIAL_TOKENS, CONTEXT = 20, 1000


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Args:
        what (`str`): what was looked at.
        drafter, target (`str`): both sides' values.
        status (`str`): `OK`, `DOUBTFUL` or `FAILED`.
        advice (`str`): what is wrong and the way out, where the status is not `OK`.
    """

    what: str
    drafter: str = ""
    target: str = ""
    status: str = OK
    advice: str = ""


def read_layout(source: str) -> tuple[dict[str, Any], Finding]:
    """The raw configuration of a drafter and whether its layout is known.

    Raises:
        OSError: if there is no configuration to read.
    """
    raw, _ = DFlashConfig.get_config_dict(source)
    try:
        layout = detect(raw).__name__.rpartition(".")[2]
    except ValueError as error:
        return raw, Finding("layout", ", ".join(raw.get("architectures") or ["?"]), "", FAILED, str(error))
    return raw, Finding("layout", layout)


def load_drafter(source: str, target: PreTrainedModel) -> tuple[DFlashModel | None, Finding]:
    """The drafter on the target's device, in its dtype but never in fp16, or why it does not load."""
    dtype = torch.bfloat16 if target.dtype == torch.float16 else target.dtype
    try:
        drafter = DFlashModel.from_pretrained(source, dtype=dtype).to(target.device).eval()
    except (ValueError, OSError) as error:
        return None, Finding("configuration and weights", status=FAILED, advice=str(error))
    count = len(drafter.state_dict())
    return drafter, Finding("configuration and weights", f"{count} tensors, all used")


def describe(drafter: DFlashModel, raw: dict[str, Any]) -> dict[str, str]:
    """The fields that a drafter's pass depends on, as they were understood."""
    config = drafter.config
    kinds = [
        f"{kind.removesuffix('_attention')}{f' ({config.sliding_window})' if kind.startswith('sliding') else ''} "
        f"{'causal' if causal else 'bidirectional'}"
        for kind, causal in zip(config.layer_types, config.causal_layers, strict=True)
    ]
    rope = config.rope_parameters
    fields = {
        "architecture": ", ".join(raw.get("architectures") or ["none"]),
        "model_type in the file": str(raw.get("model_type")),
        "block size": str(config.block_size),
        "mask token": str(config.mask_token_id),
        "tapped layers": ", ".join(map(str, config.target_layer_ids)),
        "layers": "; ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)),
        "width": f"{config.hidden_size}, {config.num_attention_heads} heads, {config.num_key_value_heads} of keys",
        "RoPE": f"{rope.get('rope_type', 'default')}, theta {rope.get('rope_theta')}",
        "parameters": f"{sum(weight.numel() for weight in drafter.parameters()):,}",
    }
    factors = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping", "draft_vocab_size")
    return fields | {name: str(getattr(config, name)) for name in factors if getattr(config, name, None) is not None}


def compare(target: PreTrainedModel, drafter: DFlashModel) -> Iterator[Finding]:
    """Whether the target can verify trees, and does, and each property that the two must agree on."""
    what = "kind of target"
    try:
        check_target(target, target.generation_config)
        yield Finding(what, "", type(target).__name__)
        yield _tested(target)
        yield _self_test(target)
        for check in pair_checks(target, drafter):
            status, advice = (OK, "") if check.fits else (FAILED, check.problem)
            yield Finding(check.what, check.drafter, check.target, status, advice)
    except ValueError as error:
        yield Finding(what, "", type(target).__name__, FAILED, str(error))


def _self_test(target: PreTrainedModel) -> Finding:
    """What every target goes through before its first tree; the trial does not repeat it."""
    what, claim = "self-test", "each node as its path"
    try:
        with torch.no_grad():
            verifier = TreeVerifier(target, TapCollector(decoder_layers(target), []))
            check_target_verifies_trees(target, verifier, Ranks(target, False, device_of(target) or target.device))
    except ValueError as error:
        return Finding(what, "", claim, FAILED, str(error))
    return Finding(what, "", claim)


def _tested(target: PreTrainedModel) -> Finding:
    what, titles = "tested as", dict.fromkeys(row["title"] for row in rows_of(target))
    if titles:
        return Finding(what, "", "; ".join(titles))
    advice = (
        f"{type(target).__name__} is not among the families that this release was tested with. "
        "The self-test tells whether its trees are right all the same."
    )
    return Finding(what, "", "none", DOUBTFUL, advice)


@dataclass(frozen=True)
class Trial:
    """A short greedy text, decoded plainly and with trees."""

    findings: list[Finding]
    text: str
    output: Any


def run_trial(pair: Pair, prompt: str, budget: int | None) -> Trial:
    """Decodes `TRIAL_TOKENS` tokens both ways.

    Raises:
        ValueError, RuntimeError: whatever decoding raises.
    """
    inputs = pair.inputs(prompt)
    settings: dict[str, Any] = {"max_new_tokens": TRIAL_TOKENS, "do_sample": False}
    expected = pair.target.generate(**inputs, generation_config=GenerationConfig(**settings))
    config = DDTreeConfig(budget=budget, return_dict_in_generate=True, **settings)
    output = pair.target.generate(**inputs, assistant_model=pair.drafter, generation_config=config)
    start = inputs["input_ids"].shape[1]
    stats, new = output.speculation, output.sequences[0, start:].tolist()
    mean = stats.mean_acceptance_length
    acceptance = Finding("acceptance length", f"{mean:.2f} tokens a round", f"{stats.rounds} rounds")
    if stats.rounds and mean < FLOOR:
        advice = (
            "Nothing of what was drafted is accepted: a drafter of another target of the same shape, taps off by one, "
            "or a prompt far from what it was trained on (--prompt tries another)."
        )
        acceptance = Finding(acceptance.what, acceptance.drafter, acceptance.target, DOUBTFUL, advice)
    attention = Finding("tree attention", "", _routes(stats.attention_routes))
    identity = _identity(pair.target, expected[0].tolist(), output.sequences[0].tolist(), start)
    return Trial([acceptance, attention, identity], pair.decode(new), output)


def memory(pair: Pair, rows: int, output: Any) -> dict[str, int]:
    """Estimated bytes: weights, `CONTEXT` tokens of both caches, recurrent states, which do not grow with tokens,
    and the logits of a tree.

    Args:
        pair (`Pair`): target and drafter.
        rows (`int`): nodes of a tree, the root included.
        output (`DDTreeDecoderOnlyOutput`, *optional*): of the trial, whose caches tell what a token takes.
    """
    target, drafter = pair.target, pair.drafter
    sizes = {"target weights": _weights(target), "drafter weights": _weights(drafter)}
    if output is not None:
        cache = output[CACHE_NAME]
        sizes[f"target cache, {CONTEXT} tokens"] = _cache_bytes(cache)
        if states := sum(bytes_of(layer) for layer in cache.layers if isinstance(layer, LinearAttentionLayer)):
            sizes["recurrent states"] = states
        sizes[f"drafter cache, {CONTEXT} tokens"] = _cache_bytes(cache.drafter_context.cache)
    vocabulary, _ = head_shape(target)
    # The target's rows in its own dtype, and one copy of them in fp32.
    sizes[f"logits of {rows} nodes"] = rows * vocabulary * (target.dtype.itemsize + 4)
    return sizes


def _routes(routes: dict[str, int]) -> str:
    """Each route's share of the layers, the largest first."""
    total = sum(routes.values())
    shares = sorted(routes.items(), key=lambda item: -item[1])
    return "; ".join(f"{route}: {count / total:.0%} of layers" for route, count in shares) or "no tree was verified"


def _identity(target: PreTrainedModel, expected: list[int], tokens: list[int], start: int) -> Finding:
    what = f"text of {len(expected) - start} tokens"
    place = first_difference(tokens, expected)
    if place is None:
        return Finding(what, "with trees: equal", "plain decoding")
    between = top_two_gap(target, expected[:place])
    where = f"first differs at token {place - start + 1}"
    gap = f"two best logits {between.size:.1e} apart"
    if between.rounding:
        return Finding(what, where, gap, DOUBTFUL, f"A gap this small turns with the rounding of {target.dtype}.")
    return Finding(what, where, gap, FAILED, "Trees change this target's text: please report the model.")


def _weights(model: PreTrainedModel) -> int:
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def _cache_bytes(cache: Any) -> int:
    total = 0
    for layer in cache.layers:
        keys: Any = getattr(layer, "keys", None)
        if keys is None or keys.dim() != 4 or not keys.shape[-2]:
            continue
        row = sum(side[0, :, 0].numel() * side.element_size() for side in (keys, layer.values))
        total += row * min(CONTEXT, getattr(layer, "sliding_window", None) or CONTEXT)
    return total
