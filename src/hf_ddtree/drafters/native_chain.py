"""Which drafters Transformers' own chain (`speculation_type="dflash"`) drafts right with."""

from typing import Any

from hf_ddtree.compat import model_name

# Fields that the chain does not read, with the values that ask for nothing, and what any other asks for.
_UNREAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "markov_rank": ((None, 0), "a Markov head (DSpark)"),
    "selector_rank": ((None, 0), "a candidate selector (DFlash2)"),
    "sample_from_anchor": ((None, False), "the anchor layout"),
    "own_embedding": ((None, False), "an embedding of its own"),
    "own_head": ((None, False), "an output head of its own"),
    "input_embedding_scale": ((None, 1.0), "scaled embeddings"),
}


def check_native_chain(drafter: Any) -> None:
    """Raises `ValueError` unless a drafter is of the base family, whose states alone make the chain.

    The chain feeds every drafter the target's embeddings as they are, and reads slots 1 and later through the target's
    head. What a drafter has beyond that it ignores, so its chains would be wrong without a word.

    Args:
        drafter (`PreTrainedModel`): a [`DFlashModel`] or a native assistant.
    """
    config = drafter.config
    found = [what for name, (plain, what) in _UNREAD.items() if getattr(config, name, None) not in plain]
    if found:
        raise ValueError(
            'Transformers\' own chain (`speculation_type="dflash"`) knows plain DFlash drafters only, but '
            f"{model_name(drafter)} has {', '.join(found)}. Generate with "
            "`generation_config=DDTreeConfig(...)`; `max_branching=1` makes its tree a chain."
        )
