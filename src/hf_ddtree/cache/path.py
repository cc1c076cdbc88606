"""The path of a tree that a round keeps, as all layers of a cache need it."""

import torch


class KeptPath:
    """The kept nodes, brought to each device once for all its layers.

    Args:
        nodes (`torch.LongTensor` of shape `(kept,)`): root first, increasing; on the host, or it is waited for.
    """

    def __init__(self, nodes: torch.Tensor):
        self.nodes = nodes
        self._copies: dict[torch.device, torch.Tensor] = {nodes.device: nodes}
        last = int(nodes[-1]) if len(nodes) else -1
        #: Whether they are the tree's first nodes, whose rows are where they belong.
        self.in_place = last == len(nodes) - 1

    def __len__(self) -> int:
        return self.nodes.shape[0]

    def on(self, device: torch.device) -> torch.Tensor:
        """`nodes` on `device`."""
        if device not in self._copies:
            self._copies[device] = self.nodes.to(device)
        return self._copies[device]
