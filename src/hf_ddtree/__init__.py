"""Draft trees for `transformers`: one import, and `model.generate` with a DFlash drafter verifies a tree a round.

The output is exactly the target's. See [`DDTreeConfig`] for what can be set, [`record`] for what happened.
"""

from typing import TYPE_CHECKING, Any

from hf_ddtree.attachment import attach, detach
from hf_ddtree.cache import DDTreeCache
from hf_ddtree.configuration import DDTreeConfig
from hf_ddtree.drafters import DFlashConfig
from hf_ddtree.generation import DDTreeCandidateGenerator, DDTreeDecoderOnlyOutput, SpeculationStats, record
from hf_ddtree.packing import PackedWeights, packed_weights
from hf_ddtree.registration import register

if TYPE_CHECKING:
    from hf_ddtree.drafters import DFlashModel

__version__ = "0.1.0"

__all__ = [
    "DDTreeCache",
    "DDTreeCandidateGenerator",
    "DDTreeConfig",
    "DDTreeDecoderOnlyOutput",
    "DFlashConfig",
    "DFlashModel",
    "PackedWeights",
    "SpeculationStats",
    "attach",
    "detach",
    "packed_weights",
    "record",
]

register()


def __getattr__(name: str) -> Any:
    # Loaded when asked for: it imports a modeling file of Transformers, which takes a second.
    if name == "DFlashModel":
        from hf_ddtree.drafters import DFlashModel

        return DFlashModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
