"""The target's cache with room for trees, and the drafter's."""

from hf_ddtree.cache.context import DrafterContext
from hf_ddtree.cache.ddtree_cache import DDTreeCache, adopt, begin, check, mixers, prune, restored_on_error, rollback

__all__ = [
    "DDTreeCache",
    "DrafterContext",
    "adopt",
    "begin",
    "check",
    "mixers",
    "prune",
    "restored_on_error",
    "rollback",
]
