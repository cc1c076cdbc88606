"""What DFlash's relatives add to it: path-conditioned heads (DSpark, DFlash2), their scorers, and convolutions."""

from .check import check_heads
from .convolution import GroupedConvolution, around
from .markov import ConfidenceHead, GatedMarkovHead, MarkovHead, RecurrentMarkovHead, build_markov_head
from .scorers import MarkovScorer, SelectorScorer, path_scorer
from .selector import CandidateSelector

__all__ = [
    "CandidateSelector",
    "ConfidenceHead",
    "GatedMarkovHead",
    "GroupedConvolution",
    "MarkovHead",
    "MarkovScorer",
    "RecurrentMarkovHead",
    "SelectorScorer",
    "around",
    "build_markov_head",
    "check_heads",
    "path_scorer",
]
