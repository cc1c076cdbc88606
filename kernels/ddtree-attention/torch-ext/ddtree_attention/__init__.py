"""Attention of draft-tree nodes over their prefix and ancestors: one Triton kernel, one operator.

`import ddtree_attention` does not import Triton; the first call does.
"""

from .naive import naive_tree_attention
from .op import tree_attention, unavailable, unsupported
from .tree import TreeTables, tree_tables

__all__ = ["TreeTables", "naive_tree_attention", "tree_attention", "tree_tables", "unavailable", "unsupported"]
