"""Draft trees: the data structure, the scorers that rank continuations, and the builders."""

from hf_ddtree.tree.build import build_draft_tree, build_from_scorer, build_from_top, top_marginals
from hf_ddtree.tree.device import DeviceMarginals
from hf_ddtree.tree.device_tree import DeviceTree
from hf_ddtree.tree.draft_tree import DraftTree
from hf_ddtree.tree.placement import builds_on_device
from hf_ddtree.tree.ranking import chooser, log_probs_at, rank_children
from hf_ddtree.tree.scoring import Expansion, MarginalScorer, Scorer
from hf_ddtree.tree.useful import useful_marginals

__all__ = [
    "DeviceMarginals",
    "DeviceTree",
    "DraftTree",
    "Expansion",
    "MarginalScorer",
    "Scorer",
    "build_draft_tree",
    "build_from_scorer",
    "build_from_top",
    "builds_on_device",
    "chooser",
    "log_probs_at",
    "rank_children",
    "top_marginals",
    "useful_marginals",
]
