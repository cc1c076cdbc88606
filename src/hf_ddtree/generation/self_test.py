"""One look at a target before its first tree: do a tree's nodes get the logits of the paths they stand for?"""

import weakref
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_ddtree.cache import DDTreeCache, begin
from hf_ddtree.compat import CACHE_NAME, decoder_layers, text_config
from hf_ddtree.generation.verification import TreeVerifier
from hf_ddtree.round import TreeRound
from hf_ddtree.tree import DraftTree

PREFIX = 6

# A wrong mask or position moves logits by about their own spread; arithmetic moves them by these shares of it at most.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 0.15

_passed: "weakref.WeakKeyDictionary[PreTrainedModel, set[tuple[Any, ...]]]" = weakref.WeakKeyDictionary()


def check_target_verifies_trees(target: PreTrainedModel, verifier: TreeVerifier) -> None:
    """Compares a tree of two branches with two plain forwards, once for each model object, dtype, device and route.

    It catches models that take their positions or windows from slots of the cache, compute attention outside of
    Transformers' attention interface, or prepare their inputs in a way that a tree does not survive. Four forwards of
    at most nine tokens; the model's own hooks do not see them.

    Args:
        target (`PreTrainedModel`): the model that will verify.
        verifier (`TreeVerifier`): prepares the inputs of a tree for it.

    Raises:
        ValueError: if the logits differ, or if a layer did not attend through the tree's attention.
    """
    key = (target.dtype, target.device, text_config(target).__class__, verifier.attention_route)
    if key in _passed.setdefault(target, set()):
        return
    tree, branches = _tree(), [[0, 1, 2], [0, 3, 4]]
    vocabulary = target.get_input_embeddings().weight.shape[0]
    prefix = (torch.arange(PREFIX) * 5 + 3)[None] % vocabulary
    tree.token_ids.copy_(tree.token_ids % vocabulary)
    tree_round = verifier.round_of(tree, target.device)
    nodes = _logits_of_nodes(target, verifier, prefix, tree, tree_round)
    layers = len(decoder_layers(target))
    name = type(target).__name__
    if tree_round.layers_attended != layers:
        raise ValueError(
            f"{tree_round.layers_attended} of the {layers} layers of {name} attend through Transformers' attention "
            "interface, which a draft tree is verified through. Generate without `assistant_model`."
        )
    differences = []
    for branch in branches:
        ids = torch.cat([prefix, tree.token_ids[None, branch]], dim=1)
        plain = _forward(target, ids, DDTreeCache(config=text_config(target)))[0, -len(branch) :].float()
        difference = (nodes[branch] - plain).abs().mean(dim=-1) / plain.std(dim=-1).clamp_min(1e-6)
        differences += difference.tolist()
    # A router of experts may flip at a node in low precision, but not at most of them.
    worst = max(differences) if target.dtype in TOLERANCE else sorted(differences)[len(differences) // 2]
    if not worst <= TOLERANCE.get(target.dtype, LOW_PRECISION_TOLERANCE):
        raise ValueError(
            f"{name} gives the nodes of a draft tree other logits than the same tokens in a row (they differ by "
            f"{worst:.1%} of their spread), so trees would change its output. It probably takes positions or windows "
            "from slots of the cache. Generate without `assistant_model`."
        )
    _passed[target].add(key)


def _tree() -> DraftTree:
    """The root with two branches of two nodes."""
    return DraftTree(
        token_ids=torch.tensor([7, 11, 2, 6, 13]),
        parents=torch.tensor([-1, 0, 1, 0, 3]),
        depths=torch.tensor([0, 1, 2, 1, 2]),
        subtree_ends=torch.tensor([5, 3, 3, 5, 5]),
        log_probs=torch.zeros(5, dtype=torch.float64),
    )


def _logits_of_nodes(
    target: PreTrainedModel, verifier: TreeVerifier, prefix: torch.Tensor, tree: DraftTree, tree_round: TreeRound
) -> torch.Tensor:
    cache = DDTreeCache(config=text_config(target))
    _forward(target, prefix, cache)
    begin(cache)
    positions = torch.arange(PREFIX + 1, device=target.device)[None]
    kwargs: dict[str, Any] = {CACHE_NAME: cache, "position_ids": positions, "use_cache": True}
    inputs = verifier.inputs(tree, kwargs)
    with verifier.switch.tree(tree_round):
        return _call(target, inputs)[0].float()


def _forward(target: PreTrainedModel, ids: torch.Tensor, cache: DDTreeCache) -> torch.Tensor:
    """The target's logits, with its inputs prepared as `generate` prepares a prompt."""
    ids = ids.to(target.device)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    kwargs: dict[str, Any] = {CACHE_NAME: cache, "position_ids": positions, "use_cache": True}
    inputs = target.prepare_inputs_for_generation(ids, is_first_iteration=True, **kwargs)
    return _call(target, inputs)


def _call(target: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
    return type(target).forward(target, **inputs, return_dict=True).logits
