"""A tiny hybrid with Gated DeltaNet layers, for tests of what is the same in all of them."""

from typing import Any

import torch

from models.delta import FAMILIES

HYBRIDS = {family.name: family for family in FAMILIES if family.present}


def make_hybrid(dtype: torch.dtype = torch.float32) -> Any:
    """Qwen3.5: recurrent layers and layers of attention by turns."""
    return HYBRIDS["qwen3_5"].make(dtype)
