"""The layout a drafter is saved in: z-lab's, or its relative that has a name for the drafter's head."""

from typing import Any

from hf_ddtree.drafters.formats import dflash2, dspark, zlab


def export(config: Any) -> dict[str, Any]:
    """The `config.json` of a [`DFlashConfig`]."""
    if config.markov_rank:
        return dspark.export(config)
    return dflash2.export(config) if config.selector_rank else zlab.export(config)
