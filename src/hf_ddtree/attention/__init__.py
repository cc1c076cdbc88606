"""Verifying a tree in one forward: the `"ddtree"` attention and mask, and the switch that puts a model on them."""

from hf_ddtree.attention.compiled import ATTEND, compiled_attention
from hf_ddtree.attention.interface import ddtree_attention
from hf_ddtree.attention.kept_mask import KeptMask
from hf_ddtree.attention.kernel import check_padding, check_route, planned_mask
from hf_ddtree.attention.mask import ddtree_mask
from hf_ddtree.attention.switch import NAME, AttentionSwitch, check, original_implementation

__all__ = [
    "ATTEND",
    "NAME",
    "AttentionSwitch",
    "KeptMask",
    "check",
    "check_padding",
    "check_route",
    "compiled_attention",
    "ddtree_attention",
    "ddtree_mask",
    "original_implementation",
    "planned_mask",
]
