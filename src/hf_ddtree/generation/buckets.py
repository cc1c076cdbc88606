"""Trees of one size: a compiled forward serves one number of rows, so trees are filled up to a power of two."""

import torch

from hf_ddtree.tree import DraftTree


def rows_for(nodes: int) -> int:
    """The number of rows that `nodes` nodes, the root included, are filled up to: the next power of two."""
    return 1 << (nodes - 1).bit_length()


def padded(tree: DraftTree, rows: int) -> DraftTree:
    """`tree` with `rows` nodes, of which those behind its own are nobody's ancestors and see the prefix alone.

    They repeat the root's token at the root's position, which every model has. The result is for a forward, not for a
    walk: the root's subtree ends where the tree's own nodes do.
    """
    more = rows - len(tree)
    nodes = torch.arange(len(tree), rows)
    return DraftTree(
        token_ids=torch.cat([tree.token_ids, tree.token_ids[:1].expand(more)]),
        parents=torch.cat([tree.parents, tree.parents.new_full((more,), -1)]),
        depths=torch.cat([tree.depths, tree.depths.new_zeros(more)]),
        subtree_ends=torch.cat([tree.subtree_ends, nodes + 1]),
        log_probs=torch.cat([tree.log_probs, tree.log_probs.new_zeros(more)]),
    )
