"""Dense masks that outlive a round, so that a round writes its tree's part of them and not the whole context's."""

import torch

from hf_ddtree.compat import causal_window
from hf_ddtree.round import TreeRound

# Columns a buffer starts with beyond what it must hold; it then grows by an eighth, for it may have many rows.
SPARE_COLUMNS = 256


class KeptMask:
    """The additive mask of trees over a growing prefix, in one buffer that is written only where trees are or were."""

    def __init__(self) -> None:
        self._buffers: dict[int, _Buffer] = {}
        self._last: tuple[torch.Tensor, torch.Tensor, int] | None = None

    def written(self, block: torch.Tensor, prefix: int) -> torch.Tensor:
        """
        The mask of a tree, a view that the next call writes over.

        Args:
            block (`torch.Tensor` of shape `(nodes, nodes)`): additive, of the nodes among themselves.
            prefix (`int`): keys before them, which all see.

        Returns:
            `torch.Tensor` of shape `(1, 1, nodes, prefix + nodes)`.
        """
        mask = self._buffer(1).written(block, prefix, 1)
        self._last = mask, block, prefix
        return mask

    def repeated(self, mask: torch.Tensor, groups: int) -> torch.Tensor | None:
        """`mask.repeat(1, 1, groups, 1)` if `mask` is what was returned last, unchanged; else `None`."""
        if self._last is None or self._last[0] is not mask or not self._buffer(1).unchanged:
            return None
        return self._buffer(groups).written(*self._last[1:], groups)

    def _buffer(self, groups: int) -> "_Buffer":
        return self._buffers.setdefault(groups, _Buffer())


class _Buffer:
    """Rows of zeros but for the block written last."""

    def __init__(self) -> None:
        self.storage = torch.empty(0, 0)
        self.block = slice(0)
        self.version = 0

    @property
    def unchanged(self) -> bool:
        """Whether nobody else has written into a view."""
        return self.storage._version == self.version

    def written(self, block: torch.Tensor, prefix: int, copies: int) -> torch.Tensor:
        rows, keys = copies * len(block), prefix + len(block)
        if rows > self.storage.shape[0] or keys > self.storage.shape[1] or block.dtype != self.storage.dtype:
            columns = keys + max(SPARE_COLUMNS, keys // 8)
            self.storage = torch.zeros(max(rows, self.storage.shape[0]), columns, dtype=block.dtype)
        elif not self.unchanged:
            self.storage.zero_()
        else:
            self.storage[:, self.block] = 0
        # Noted first: an interrupt while the block is written must not leave a part of it for good.
        self.block = slice(prefix, keys)
        self.storage[:rows, self.block].unflatten(0, (copies, len(block))).copy_(block)
        self.version = self.storage._version
        return self.storage[None, None, :rows, :keys]


def kept_tree_mask(
    tree: TreeRound,
    batch_size: int,
    kv_length: int,
    kv_offset: int,
    mask_function: object,
    attention_mask: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device | str,
) -> torch.Tensor | None:
    """
    The mask of [`ddtree_mask`] as a part of one that is kept, or `None` where it must be made anew.

    It is kept where each node sees the whole prefix: one causal sequence without padding, from its first token on. On
    an accelerator, which makes masks faster than it can be asked whether there is padding, nothing is kept.

    Args: those of [`ddtree_mask`], for keys that are a prefix and then the nodes.
    """
    kept, nodes = tree.kept_mask, len(tree.depths)
    prefix = kv_length - nodes
    if kept is None or batch_size != 1 or kv_offset != 0 or torch.device(device).type != "cpu":
        return None
    # In inference mode writes are not counted, by which the kept mask learns of those that are not its own.
    if tree.depths.device.type != "cpu" or torch.is_inference_mode_enabled():
        return None
    if causal_window(mask_function) != (True, None):
        return None
    if attention_mask is not None and not bool(attention_mask[:, :prefix].all()):
        return None
    # One mask a round: a second would write over it, or be changed with it by a model that writes into its masks.
    claim = object()
    if tree.once("kept mask", lambda: claim) is not claim:
        return None
    block = torch.zeros(nodes, nodes, dtype=dtype).masked_fill_(~tree.visible, torch.finfo(dtype).min)
    return kept.written(block, prefix)
