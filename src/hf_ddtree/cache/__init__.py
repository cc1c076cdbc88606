"""The target's cache with room for trees, and the drafter's."""

from hf_ddtree.cache.adoption import adopt, adopt_static, check, fixed_length, restored_on_error
from hf_ddtree.cache.context import DrafterContext
from hf_ddtree.cache.ddtree_cache import DDTreeCache, begin, mixers, prune, rollback
from hf_ddtree.cache.fixed import FixedSlidingTreeLayer
from hf_ddtree.cache.path import KeptPath

__all__ = [
    "DDTreeCache",
    "DrafterContext",
    "FixedSlidingTreeLayer",
    "KeptPath",
    "adopt",
    "adopt_static",
    "begin",
    "check",
    "fixed_length",
    "mixers",
    "prune",
    "restored_on_error",
    "rollback",
]
