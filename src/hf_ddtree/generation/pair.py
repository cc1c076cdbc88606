"""Whether a drafter was trained for a target of this shape: each check with both values, so that it can be shown."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_ddtree.compat import decoder_layers, model_name, text_config
from hf_ddtree.drafters import embedding_shape, head_shape, plain_weight

# A vocabulary is padded to a round number by at most this; a larger difference is another tokenizer.
MAX_VOCABULARY_PADDING = 1024


@dataclass(frozen=True)
class PairCheck:
    """One property that drafter and target must agree on.

    Args:
        what (`str`): the property.
        drafter (`str`): the drafter's value.
        target (`str`): the target's.
        fits (`bool`): whether they agree.
        problem (`str`): what to say if they do not, both values and the way out included.
    """

    what: str
    drafter: str
    target: str
    fits: bool
    problem: str


def check_pair(target: PreTrainedModel, drafter: PreTrainedModel) -> None:
    """Raises `ValueError` unless the drafter was trained for a target of this shape; runs no forward."""
    for check in pair_checks(target, drafter):
        if not check.fits:
            raise ValueError(
                f"The drafter {model_name(drafter)} and target {model_name(target)} do not fit: {check.problem} Use "
                "the drafter that was trained for this model."
            )


def pair_checks(target: PreTrainedModel, drafter: PreTrainedModel) -> Iterator[PairCheck]:
    """The checks of [`check_pair`], one by one.

    Raises:
        ValueError: if the target lacks what a drafter reads: a head, or a list of decoder layers.
    """
    config, width = drafter.config, text_config(target).hidden_size
    head = target.get_output_embeddings()
    if head is None:
        raise ValueError(
            f"{type(target).__name__} has no output embedding, which a DFlash drafter borrows for its logits."
        )
    embedding = target.get_input_embeddings()
    normed = getattr(embedding, "embed_norm", None) is not None
    if normed and not getattr(config, "own_embedding", False) and plain_weight(embedding) is None:
        raise ValueError(
            f"The target's embedding ({type(embedding).__name__}) normalises its rows, which a DFlash drafter reads "
            "as they were before, but it is offloaded, sharded or quantised: keep this layer whole and in memory."
        )
    rows, embedding_width = embedding_shape(target)
    layers, taps = len(decoder_layers(target)), list(config.target_layer_ids)
    trained = getattr(config, "num_target_layers", None)
    if trained is not None:
        yield PairCheck(
            "target layers",
            f"trained for {trained}",
            str(layers),
            trained == layers,
            f"the drafter was trained for {trained} target layers, the target has {layers}.",
        )
    yield PairCheck(
        "tapped layers",
        str(taps),
        f"0 to {layers - 1}",
        max(taps) < layers,
        f"the drafter taps layers {taps}, the target has {layers}.",
    )
    yield _equal("hidden size of the taps", getattr(config, "target_hidden_size", None) or config.hidden_size, width)
    projection = getattr(drafter, "fc", None)
    if projection is not None:
        yield _equal("input width of the projection", projection.in_features, len(taps) * width)
    if not getattr(config, "own_embedding", False):
        yield _equal("embedding width", config.hidden_size, embedding_width)
    if not getattr(config, "own_head", False):
        yield _equal("head width", config.hidden_size, head_shape(target)[1])
    own_rows = config.vocab_size if getattr(config, "own_embedding", False) else None
    owner, embedded = ("target's", rows) if own_rows is None else ("drafter's own", own_rows)
    yield PairCheck(
        "mask token",
        str(config.mask_token_id),
        f"below {embedded}",
        config.mask_token_id < embedded,
        f"the mask token {config.mask_token_id} lies outside the {owner} {embedded} embedding rows.",
    )
    if own_rows is not None:
        yield PairCheck(
            "rows of its own embedding",
            str(own_rows),
            f"at least {rows}",
            own_rows >= rows,
            f"the drafter's own {own_rows} embedding rows cannot embed all of the target's {rows} tokens.",
        )
    yield from _vocabularies(config, rows)


def _vocabularies(config: Any, rows: int) -> Iterator[PairCheck]:
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary is None or config.model_type != "dflash":
        return
    yield PairCheck(
        "vocabulary",
        str(vocabulary),
        f"{rows} ± {MAX_VOCABULARY_PADDING}",
        abs(vocabulary - rows) <= MAX_VOCABULARY_PADDING,
        f"vocabularies of {vocabulary} and {rows} tokens are of different tokenizers.",
    )
    if getattr(config, "draft_vocab_size", None) is not None:
        yield PairCheck(
            "tokens its reduced vocabulary maps to",
            f"below {vocabulary}",
            f"below {rows}",
            vocabulary <= rows,
            f"the drafter's reduced vocabulary maps to tokens below {vocabulary}, the target embeds {rows}.",
        )


def _equal(what: str, of_drafter: int, of_target: int) -> PairCheck:
    problem = f"{what} is {of_drafter} in the drafter, {of_target} in the target."
    return PairCheck(what, str(of_drafter), str(of_target), of_drafter == of_target, problem)
