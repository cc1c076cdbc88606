"""How far a tree's forward is from separate forwards over prefix and path, and how far plain decoding is from them."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from attention.trees import random_tree
from hf_ddtree.tree import DraftTree
from models.family import Family
from models.sequence import Sequence
from models.zoo import FAMILIES

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
NODES = 14
# Seeds of trees that branch at the root and below, down to level seven.
TREES = (42, 20, 31)

# In fp64 it is the family's own.
TOLERANCE = {torch.float32: 1e-3}
# In low precision a tree may be this many times as far off as plain decoding is, or as far as the format resolves.
TIMES_PLAIN, RESOLUTION = 3.0, 2.0**-6


@dataclass(frozen=True)
class NodeErrors:
    """Errors of logits in units of their standard deviation.

    Args:
        dtype (`torch.dtype`): of the model.
        worst (`float`): the largest of a tree's forward, against a separate forward over prefix and path.
        typical (`float`): its root mean square.
        plain (`float`): in low precision the root mean square of plain decoding, one token at a time; else 0.
        controls (`dict[str, float]`): root mean squares of trees that are wrong.
        tolerance (`float`, *optional*): what `worst` may be; in low precision that is not bounded.
    """

    dtype: torch.dtype
    worst: float
    typical: float
    plain: float
    controls: dict[str, float]
    tolerance: float | None

    @property
    def bound(self) -> float:
        """What `typical` may be in low precision."""
        return max(TIMES_PLAIN * self.plain, RESOLUTION)

    def check(self) -> None:
        """Asserts that the trees are exact to rounding, and that wrong ones are told apart."""
        if self.tolerance is not None:
            assert self.worst < self.tolerance, self
        else:
            assert self.typical < self.bound, self
        threshold = self.bound if self.tolerance is None else self.tolerance
        assert min(self.controls.values()) > 2 * threshold, self


def node_errors(
    family: Family, model: Any, prefix: list[int], padding: int = 0, trees: tuple[int, ...] = TREES
) -> NodeErrors:
    """Trees of `NODES` nodes, each after the longest path of the last one was committed.

    Args:
        family (`Family`): of the model.
        model (`PreTrainedModel`): the target.
        prefix (`list[int]`): the prompt.
        padding (`int`): tokens of padding before it.
        trees (`tuple[int, ...]`): seeds of the trees, one a round.
    """
    sequence = Sequence(family, model, prefix, padding)
    tolerance = family.fp64_error if model.dtype == torch.float64 else TOLERANCE.get(model.dtype)
    of_trees, of_plain, controls = [], [], {}
    for seed in trees:
        tree = random_tree(NODES, seed, anchor=family.tokens(1, seed)[0], vocabulary=family.text_vocabulary)
        deepest = tree.path(int(tree.depths.argmax()))
        assert len(deepest) > 5
        expected = sequence.expected(tree).double()
        scale = expected.std()
        if tolerance is None:
            one_by_one = sequence.one_by_one(tree.token_ids[deepest].tolist()).double()
            of_plain.append((one_by_one - expected[deepest]) / scale)
        if not controls:
            for name, wrong in _wrong_trees(tree).items():
                controls[name] = _rms((sequence.round(wrong).double() - expected) / scale)
                sequence.cache.rollback()
        of_trees.append((sequence.round(tree).double() - expected) / scale)
        sequence.commit(tree, deepest)
    errors = torch.cat(of_trees)
    worst, typical = float(errors.abs().max()), _rms(errors)
    plain = _rms(torch.cat(of_plain)) if of_plain else 0.0
    return NodeErrors(model.dtype, worst, typical, plain, controls, tolerance)


@cache
def errors_of(family: str, dtype: str) -> NodeErrors:
    """Those of a family after a prompt that is longer than its windows; measured once a test run.

    Args:
        family (`str`): a name of [`models.zoo.FAMILIES`].
        dtype (`str`): a name of `DTYPES`.
    """
    chosen = FAMILIES[family]
    return node_errors(chosen, chosen.make(DTYPES[dtype]), chosen.prompt(9))


def _wrong_trees(tree: DraftTree) -> dict[str, DraftTree]:
    all_end, slots = torch.full_like(tree.subtree_ends, len(tree)), torch.arange(len(tree))
    return {
        "all nodes before are ancestors": DraftTree(
            tree.token_ids, tree.parents, tree.depths, all_end, tree.log_probs
        ),
        "positions follow slots": DraftTree(tree.token_ids, tree.parents, slots, tree.subtree_ends, tree.log_probs),
    }


def _rms(errors: torch.Tensor) -> float:
    return float(errors.pow(2).mean().sqrt())
