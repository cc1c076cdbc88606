"""Whether the head fields of a configuration make sense together."""

from typing import Any

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")


def check_heads(config: Any) -> None:
    """Raises `ValueError` unless heads and convolutions can be built from this [`DFlashConfig`]."""
    if config.markov_rank and config.selector_rank:
        raise ValueError(
            f"`markov_rank={config.markov_rank}` is DSpark's and `selector_rank={config.selector_rank}` DFlash2's: a "
            "drafter has one head at most."
        )
    if config.markov_rank and config.markov_head_type not in MARKOV_HEAD_TYPES:
        raise ValueError(
            f"`markov_head_type={config.markov_head_type!r}` is not supported; supported: "
            f"{', '.join(MARKOV_HEAD_TYPES)}."
        )
    if config.confidence_head and not config.markov_rank:
        raise ValueError("`confidence_head=True` is known beside a Markov head only, but `markov_rank` is 0.")
    threshold = config.confidence_threshold
    if threshold is not None and not (config.confidence_head and 0 < threshold < 1):
        raise ValueError(
            f"`confidence_threshold={threshold}` must lie between 0 and 1 and needs a drafter with a confidence head, "
            f"but `confidence_head={config.confidence_head}`. Leave it unset to draft the whole tree."
        )
    if bool(config.conv_kernel_size) != bool(config.selector_rank):
        raise ValueError(
            f"DFlash2's convolutions and selector come together, but `conv_kernel_size={config.conv_kernel_size}` and "
            f"`selector_rank={config.selector_rank}`."
        )
    if config.conv_kernel_size and config.hidden_size % config.conv_group_size:
        raise ValueError(
            f"`conv_group_size={config.conv_group_size}` does not divide `hidden_size={config.hidden_size}`."
        )
    if config.selector_rank and not 1 <= config.selector_top_k <= config.vocab_size:
        raise ValueError(
            f"`selector_top_k={config.selector_top_k}` must be from 1 to `vocab_size={config.vocab_size}`."
        )
    if config.selector_rank and config.draft_vocab_size is not None:
        raise ValueError(
            "Which vocabulary a candidate selector's codebooks follow beside a reduced head "
            f"(`draft_vocab_size={config.draft_vocab_size}`) is not known, so it is not supported."
        )
