"""Where operators are registered. The Hub's builder writes its own file of this name, with a unique namespace."""

import torch

NAMESPACE = "ddtree_attention"

ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """The qualified name under which an operator is registered."""
    return f"{NAMESPACE}::{op_name}"
