"""Operators on draft-tree nodes, as Triton kernels: attention over prefix and ancestors, and the gated delta rule.

`import ddtree_attention` does not import Triton; the first call does.
"""

from .delta import delta_unsupported, tree_delta_rule
from .naive import naive_tree_attention
from .op import tree_attention, unavailable, unsupported
from .tree import TreeTables, tree_tables

__all__ = [
    "TreeTables",
    "delta_unsupported",
    "naive_tree_attention",
    "tree_attention",
    "tree_delta_rule",
    "tree_tables",
    "unavailable",
    "unsupported",
]
