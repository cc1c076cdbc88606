"""The Triton kernel as a route of the gated delta rule over a tree: when it is taken, and what is counted."""

import torch

from ddtree_attention import delta_unsupported
from hf_ddtree.configuration import ATTENTION_ROUTES
from hf_ddtree.round import TreeRound

AUTO, KERNEL, TORCH = ATTENTION_ROUTES

#: Nodes from which on the kernel is taken by itself. PyTorch's form passes some 15 times over `n x n` numbers a head:
#: computed for 32 heads on an H200, 0.03 ms a layer at 256 nodes, and at 128 a quarter of that, about one launch.
FEWEST_NODES = 256


def takes_kernel(tree: TreeRound, key: torch.Tensor, value: torch.Tensor, state: torch.Tensor) -> bool:
    """Whether a layer's rule is computed by the kernel; counted in `tree.routes`, with the reason where it is not.

    Args:
        tree (`TreeRound`): says by its `attention_route` what is wanted; `"kernel"` takes it at every size.
        key, value, state: those of [`tree_gated_delta_rule`].

    Raises:
        ValueError: if `attention_route="kernel"` asks for the kernel and it does not serve the layer.
    """
    # An interpreted kernel runs on a CPU, slowly: for tests, which ask for it.
    if tree.attention_route == TORCH or (tree.attention_route == AUTO and key.device.type == "cpu"):
        return False
    reason = delta_unsupported(key, value, state)
    if tree.attention_route == KERNEL and reason is not None:
        raise ValueError(
            f"`attention_route={KERNEL!r}` verifies trees with Triton kernels, which do not serve {reason}: pass "
            f"`attention_route={AUTO!r}` to use them where they can be."
        )
    if tree.attention_route == AUTO and reason is None and len(tree.depths) < FEWEST_NODES:
        reason = f"fewer than {FEWEST_NODES} nodes"
    tree.routes["gated delta rule kernel" if reason is None else f"gated delta rule ({reason})"] += 1
    return reason is None
