"""Recurrent layers over a tree: the gated delta rule's own form for trees, and every path by itself for the others."""

from hf_ddtree.linear_attention.switch import RecurrentSwitch, check

__all__ = ["RecurrentSwitch", "check"]
