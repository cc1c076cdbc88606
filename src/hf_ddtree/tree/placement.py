"""Where the tree of marginals is built when these lie on an accelerator: there, or on the host."""

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from hf_ddtree.tree.build import build_from_scorer
from hf_ddtree.tree.device import DeviceMarginals
from hf_ddtree.tree.scoring import MarginalScorer

#: MPS lacks some of the device builder's integer operations in the oldest PyTorch supported.
HOST_ONLY = ("cpu", "mps")

_TRIALS = 3


@lru_cache(maxsize=64)
def builds_on_device(device: torch.device, depth: int, width: int, budget: int) -> bool:
    """
    Whether trees of a shape are built sooner on a device than by reading its marginals and bringing a tree back.

    Timed once a process for each shape, in some milliseconds: the device's builder is hundreds of small operations,
    and what it costs to ask for them depends on the host. Both give the same tree, so the answer changes no text.

    Args:
        device (`torch.device`): of the marginals.
        depth, width (`int`): of their table.
        budget (`int`): nodes, the root not counted.
    """
    if device.type in HOST_ONLY:
        return False
    table = torch.randn(depth, width, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    values, ids = (part.to(device) for part in table.sort(dim=-1, descending=True))

    def there() -> None:
        DeviceMarginals(values, ids).build(budget, 0)

    def here() -> None:
        scorer = MarginalScorer(values.cpu().numpy(), ids.cpu().numpy())
        tree = build_from_scorer(scorer, budget, anchor=0)
        for part in (tree.token_ids, tree.depths, tree.subtree_ends):
            part.to(device)

    return _seconds(there, device) < _seconds(here, device)


def _seconds(build: Callable[[], Any], device: torch.device) -> float:
    """Of the fastest call, what the device still had to do included; the first one only warms up."""
    times = []
    for _ in range(_TRIALS + 1):
        # Reading a number waits on every kind of device.
        torch.zeros(1, device=device).cpu()
        started = time.perf_counter()
        build()
        torch.zeros(1, device=device).cpu()
        times.append(time.perf_counter() - started)
    return min(times[1:])
