"""One look at a target before its first tree: do a tree's nodes get the logits of the paths they stand for?"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_ddtree.cache import DDTreeCache, begin, mixers, prune
from hf_ddtree.compat import CACHE_NAME, text_config
from hf_ddtree.drafters import device_of, embedding_shape
from hf_ddtree.generation.ranks import Ranks
from hf_ddtree.generation.verification import TreeVerifier
from hf_ddtree.round import TreeRound
from hf_ddtree.tree import DraftTree

PREFIX = 6

# A wrong mask or position moves logits by about their own spread; arithmetic moves them by these shares of it at most.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 0.15
# Activations quantised to integers turn rounding errors into steps, in plain decoding too: so many times its own.
OF_ITS_OWN = 8

_passed: "weakref.WeakKeyDictionary[PreTrainedModel, set[tuple[Any, ...]]]" = weakref.WeakKeyDictionary()


def check_target_verifies_trees(target: PreTrainedModel, verifier: TreeVerifier, ranks: Ranks) -> None:
    """Compares a tree of two branches with two plain forwards, once for each model object, dtype, device and route.

    It catches models that take their positions or windows from slots of the cache, compute attention outside of
    Transformers' attention interface, or prepare their inputs in a way that a tree does not survive. Four forwards of
    at most nine tokens, or eleven where layers are recurrent, whose states are followed along an accepted path too; if
    these differ a little, others tell how much plain decoding itself differs.

    Args:
        target (`PreTrainedModel`): the model that will verify.
        verifier (`TreeVerifier`): prepares the inputs of a tree for it.
        ranks (`Ranks`): the processes whose forwards need each other; all run the test if one has not.

    Raises:
        ValueError: if the logits differ, or if a layer did not attend through the tree's attention.
    """
    device = device_of(target) or target.device
    key = (target.dtype, device, text_config(target).__class__, verifier.attention_route)
    if not ranks.any(key not in _passed.setdefault(target, set())):
        return
    call = _Call(target, device, ranks.gathering)
    tree, branches = _tree(), [[0, 1, 2], [0, 3, 4]]
    vocabulary, _ = embedding_shape(target)
    prefix = (torch.arange(PREFIX) * 5 + 3)[None] % vocabulary
    tree.token_ids.copy_(tree.token_ids % vocabulary)
    tree_round = verifier.round_of(tree, device)
    cache = DDTreeCache(config=text_config(target))
    nodes = call.tree(verifier, prefix, tree, tree_round, cache)
    name = type(target).__name__
    if missing := mixers(cache) - tree_round.mixed:
        listed = ", ".join(f"{index} ({kind.value})" for index, kind in sorted(missing, key=lambda mixer: mixer[0]))
        raise ValueError(
            f"Layers {listed} of {name} do not read tokens through Transformers' attention interface, or the states "
            "of its cache, which a draft tree is verified through. Generate without `assistant_model`."
        )
    rows = [torch.cat([prefix, tree.token_ids[None, branch]], dim=1) for branch in branches]
    readings = [call.in_a_row, call.token_by_token]
    if verifier.recurrent.routes:
        # Some recurrent layers move on by several tokens otherwise than by one, which is what decoding does.
        readings.reverse()
    plain = [readings[0](ids) for ids in rows]
    compared = [nodes[branch] for branch in branches], plain
    if verifier.recurrent.routes:
        # States that were moved along a path go on as those of decoding it.
        prune(cache, torch.tensor(branches[-1][:-1]))
        compared = [*compared[0], call.next(rows[-1], cache)], [*plain, plain[-1][-1:]]
    # A router of experts may flip at a node in low precision, but not at most of them.
    which = -1 if target.dtype in TOLERANCE else len(tree) // 2
    worst = sorted(_shares(*compared))[which]
    tolerance = TOLERANCE.get(target.dtype, LOW_PRECISION_TOLERANCE)
    if tolerance < worst <= LOW_PRECISION_TOLERANCE:
        own = max(_shares([readings[1](ids) for ids in rows], plain))
        tolerance = max(tolerance, min(OF_ITS_OWN * own, LOW_PRECISION_TOLERANCE))
    if not worst <= tolerance:
        raise ValueError(
            f"{name} gives the nodes of a draft tree other logits than the same tokens in a row (they differ by "
            f"{worst:.1%} of their spread), so trees would change its output. It probably takes positions or windows "
            "from slots of the cache, or treats the tokens of a forward together. Generate without `assistant_model`."
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


def _shares(logits: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    """For each row how far its logits are from the expected ones on average, as a share of their spread."""
    differences = (torch.cat(logits) - torch.cat(expected)).abs().mean(dim=-1)
    return (differences / torch.cat(expected).std(dim=-1).clamp_min(1e-6)).tolist()


class _Call:
    """The target's forwards of the test, which its own hooks do not see unless they are what brings its weights."""

    def __init__(self, target: PreTrainedModel, device: torch.device, through_hooks: bool):
        self.target, self.device = target, device
        self.forward: Callable[..., Any] = target if through_hooks else functools.partial(type(target).forward, target)

    def tree(
        self,
        verifier: TreeVerifier,
        prefix: torch.Tensor,
        tree: DraftTree,
        tree_round: TreeRound,
        cache: DDTreeCache,
    ) -> torch.Tensor:
        """`(nodes, vocab_size)` logits of a tree behind the prefix."""
        self.prompt(prefix, cache)
        begin(cache)
        positions = torch.arange(PREFIX + 1, device=self.device)[None]
        kwargs: dict[str, Any] = {CACHE_NAME: cache, "position_ids": positions, "use_cache": True}
        with verifier.reading(tree_round):
            return self.forward(**verifier.inputs(tree, kwargs), return_dict=True).logits[0].float()

    def prompt(self, ids: torch.Tensor, cache: DDTreeCache) -> torch.Tensor:
        """`(length, vocab_size)` logits, with inputs prepared as `generate` prepares a prompt."""
        return self._plain(ids, cache, 0)

    def in_a_row(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the tokens after the prefix, all read at once."""
        return self.prompt(ids, DDTreeCache(config=text_config(self.target)))[PREFIX:]

    def token_by_token(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the tokens after the prefix, as plain decoding computes them."""
        cache = DDTreeCache(config=text_config(self.target))
        self.prompt(ids[:, :PREFIX], cache)
        return torch.cat([self.next(ids[:, : i + 1], cache) for i in range(PREFIX, ids.shape[1])])

    def next(self, ids: torch.Tensor, cache: DDTreeCache) -> torch.Tensor:
        """`(1, vocab_size)` logits of the last of `ids`, those before it being in the cache."""
        return self._plain(ids[:, -1:], cache, ids.shape[1] - 1)

    def _plain(self, ids: torch.Tensor, cache: DDTreeCache, start: int) -> torch.Tensor:
        ids = ids.to(self.device)
        positions = torch.arange(start, start + ids.shape[1], device=self.device)[None]
        kwargs: dict[str, Any] = {CACHE_NAME: cache, "position_ids": positions, "use_cache": True}
        inputs = self.target.prepare_inputs_for_generation(ids, is_first_iteration=start == 0, **kwargs)
        inputs.pop("logits_to_keep", None)
        return self.forward(**inputs, return_dict=True).logits[0].float()
