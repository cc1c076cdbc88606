"""Several processes generating together: one forward spread over them, or sharded weights that all must ask for."""

from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from hf_ddtree.compat import has_unfinished_sequences, tensor_parallel_group
from hf_ddtree.drafters import is_sharded
from hf_ddtree.tree import DeviceTree, DraftTree


class Ranks:
    """What the processes of one generate must agree on; alone, a process agrees with itself.

    - Under tensor parallelism a forward runs on all processes of a group at once, so all must verify the same tree.
      The drafter runs on each of them; where rounding may differ, the first one's tree counts.
    - Under `synced_gpus` each process has a prompt of its own, but a forward gathers weights from all of them. So all
      run equally many forwards, until the last has finished.

    Args:
        target (`PreTrainedModel`): the model that verifies.
        synced (`bool`): whether `generate` runs under `synced_gpus`.
        device (`torch.device`): where the processes exchange tensors.
    """

    def __init__(self, target: PreTrainedModel, synced: bool, device: torch.device):
        self.target, self.synced, self.device = target, synced, device
        self.group = tensor_parallel_group(target)
        #: Whether the target's own hooks bring its weights, so that they must see every forward.
        self.gathering = synced or is_sharded(target)

    def any(self, flag: bool) -> bool:
        """Whether the flag holds in any process; each asks at the same time."""
        for needed, group in ((self.synced, None), (self.group is not None, self.group)):
            if needed:
                flags = torch.tensor(float(flag), device=self.device)
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
                flag = bool(flags.item())
        return flag

    def any_drafts(self, drafts: bool) -> bool:
        """Whether this process, or under `synced_gpus` any, runs its drafter in this round; all must then."""
        return self.any(drafts) if self.synced else drafts

    def agreed_nodes(self, nodes: int) -> int:
        """The number of nodes to draft of the tensor-parallel group's first process, in all of them."""
        if self.group is None:
            return nodes
        number = torch.tensor(nodes, device=self.device)
        self._from_first(number)
        return int(number)

    def unfinished(self, finished: bool) -> bool:
        """Whether another round is due: for this process, or under `synced_gpus` for any."""
        return has_unfinished_sequences(self.target, finished, self.device) if self.synced else not finished

    def agreed(self, tree: DraftTree | DeviceTree) -> DraftTree | DeviceTree:
        """The tree of the tensor-parallel group's first process, in all of them."""
        if self.group is None:
            return tree
        tree = tree.on_host()
        size = torch.tensor(len(tree), device=self.device)
        self._from_first(size)
        columns = torch.zeros((4, int(size)), dtype=torch.long)
        log_probs = torch.zeros(int(size), dtype=torch.float64)
        if dist.get_rank(self.group) == 0:
            columns = torch.stack([tree.token_ids, tree.parents, tree.depths, tree.subtree_ends])
            log_probs = tree.log_probs
        # As integers, for an accelerator may lack float64.
        packed = torch.cat([columns, log_probs.view(torch.long)[None]]).to(self.device)
        self._from_first(packed)
        token_ids, parents, depths, subtree_ends, bits = packed.cpu()
        return DraftTree(token_ids, parents, depths, subtree_ends, bits.view(torch.float64))

    def _from_first(self, tensor: torch.Tensor) -> Any:
        dist.broadcast(tensor, src=dist.get_global_rank(self.group, 0), group=self.group)
