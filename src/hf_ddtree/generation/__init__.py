"""The strategy: from the taps of the accepted path to the next committed tokens."""

from hf_ddtree.generation.candidate_generator import DDTreeCandidateGenerator
from hf_ddtree.generation.output import DDTreeDecoderOnlyOutput, SpeculationStats, record

__all__ = ["DDTreeCandidateGenerator", "DDTreeDecoderOnlyOutput", "SpeculationStats", "record"]
