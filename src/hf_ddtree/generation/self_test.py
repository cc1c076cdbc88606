"""One look at a target before its first tree: do a tree's nodes get the logits of the paths they stand for?"""

import weakref
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_ddtree.cache import DDTreeCache, mixers, prune
from hf_ddtree.compat import text_config
from hf_ddtree.drafters import device_of, embedding_shape
from hf_ddtree.generation.ranks import Ranks
from hf_ddtree.generation.trial_forwards import TrialForwards
from hf_ddtree.generation.verification import TreeVerifier
from hf_ddtree.round import MixerKind
from hf_ddtree.tree import DraftTree

PREFIX = 6
BRANCHES = [[0, 1, 2], [0, 3, 4]]

# A wrong mask or position moves some node's logits by 5% of their spread or more; arithmetic by these shares at most.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 0.02
# Low precision and quantised activations make steps of rounding errors, in plain decoding too: so many times its own.
OF_ITS_OWN, LARGEST_TOLERANCE = 8, 0.15
# A router of experts may flip at a node in low precision: by chance, unlike a wrong mask, so other tokens must pass.
OTHER_TOKENS = (1, 2)

_passed: "weakref.WeakKeyDictionary[PreTrainedModel, set[tuple[Any, ...]]]" = weakref.WeakKeyDictionary()


def check_target_verifies_trees(target: PreTrainedModel, verifier: TreeVerifier, ranks: Ranks) -> None:
    """Compares a tree of two branches with plain forwards, once for each model object, dtype, device and route.

    It catches models that take their positions or windows from slots of the cache, compute attention outside of
    Transformers' attention interface, or prepare their inputs in a way that a tree does not survive. Three forwards of
    29 tokens together; seven of 30 where layers are recurrent, whose states are followed along an accepted path too;
    somewhat more where adapters have the two branches read one after the other.
    Only if these differ, others tell how much plain decoding itself differs, and whether other tokens differ as well.

    Args:
        target (`PreTrainedModel`): the model that will verify.
        verifier (`TreeVerifier`): prepares the inputs of a tree for it.
        ranks (`Ranks`): the processes whose forwards need each other; all run the test if one has not.

    Raises:
        ValueError: if the logits differ, or if a layer did not attend through the tree's attention, or if plain
            forwards give NaN.
    """
    device = device_of(target) or target.device
    key = (target.dtype, device, text_config(target).__class__, verifier.attention_route)
    if not ranks.any(key not in _passed.setdefault(target, set())):
        return
    forwards = TrialForwards(target, device, PREFIX, ranks.gathering)
    difference, tolerance = _difference(target, verifier, forwards, 0)
    if not difference <= tolerance:
        for other, allowed in (_difference(target, verifier, forwards, trial) for trial in OTHER_TOKENS):
            if not other <= allowed:
                raise ValueError(
                    f"{type(target).__name__} gives the nodes of a draft tree other logits than the same tokens in a "
                    f"row (they differ by {max(difference, other):.1%} of their spread), so trees would change its "
                    "output. It probably takes positions or windows from slots of the cache, or treats the tokens of "
                    "a forward together. Generate without `assistant_model`."
                )
    _passed[target].add(key)


def _difference(
    target: PreTrainedModel, verifier: TreeVerifier, forwards: TrialForwards, trial: int
) -> tuple[float, float]:
    """How far a tree's nodes are from their paths at most, as a share of the logits' spread, and what is allowed."""
    vocabulary, _ = embedding_shape(target)
    prefix = (torch.arange(PREFIX) * 5 + 3 + 29 * trial)[None] % vocabulary
    tree = _tree(vocabulary, trial)
    tree_round = verifier.round_of(tree, forwards.device)
    cache = DDTreeCache(config=text_config(target))
    nodes = forwards.tree(verifier, prefix, tree, tree_round, cache)
    if missing := mixers(cache) - tree_round.mixed:
        raise ValueError(_unread(type(target).__name__, missing, len(mixers(cache))))
    rows = torch.cat([prefix.expand(len(BRANCHES), -1), tree.token_ids[torch.tensor(BRANCHES)]], dim=1)
    readings = [forwards.in_a_row, forwards.token_by_token]
    if verifier.recurrent.routes:
        # Some recurrent layers move on by several tokens otherwise than by one, which is what decoding does.
        readings.reverse()
    plain = readings[0](rows)
    if plain.isnan().any():
        raise ValueError(f"{type(target).__name__} in {target.dtype} gives NaN logits: load it in another dtype.")
    found, expected = nodes[torch.tensor(BRANCHES).flatten()], plain.flatten(0, 1)
    if verifier.recurrent.routes:
        # States that were moved along a path go on as those of decoding it.
        prune(cache, torch.tensor(BRANCHES[-1][:-1]))
        found = torch.cat([found, forwards.next(rows[-1:], cache)[0]])
        expected = torch.cat([expected, plain[-1, -1:]])
    difference = _largest_share(found, expected)
    tolerance = TOLERANCE.get(target.dtype, LOW_PRECISION_TOLERANCE)
    if tolerance < difference <= LARGEST_TOLERANCE:
        own = _largest_share(readings[1](rows).flatten(0, 1), plain.flatten(0, 1))
        tolerance = max(tolerance, min(OF_ITS_OWN * own, LARGEST_TOLERANCE))
    return difference, tolerance


def _tree(vocabulary: int, trial: int) -> DraftTree:
    """The root with two branches of two nodes."""
    return DraftTree(
        token_ids=(torch.tensor([7, 11, 2, 6, 13]) + 17 * trial) % vocabulary,
        parents=torch.tensor([-1, 0, 1, 0, 3]),
        depths=torch.tensor([0, 1, 2, 1, 2]),
        subtree_ends=torch.tensor([5, 3, 3, 5, 5]),
        log_probs=torch.zeros(5, dtype=torch.float64),
    )


def _largest_share(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """How far the row that is furthest off is on average, as a share of its logits' spread; NaN if any is."""
    differences = (logits - expected).abs().mean(dim=-1)
    return float((differences / expected.std(dim=-1).clamp_min(1e-6)).max())


def _unread(name: str, missing: set[tuple[int, MixerKind]], count: int) -> str:
    if len(missing) == count:
        which = f"None of the layers of {name} reads"
    else:
        first = sorted(missing, key=lambda mixer: mixer[0])
        listed = ", ".join(f"{index} ({kind.value})" for index, kind in first[:3])
        more = f" and {len(first) - 3} more" if len(first) > 3 else ""
        which = f"Layers {listed}{more} of {name} do not read"
    return (
        f"{which} tokens through Transformers' attention interface or the recurrent states of its cache, by which a "
        "draft tree is verified. Generate without `assistant_model`."
    )
