"""`hidden_states` and `attentions` of the accepted path, in the shapes `generate` returns them."""

from typing import Any

import torch
from transformers import GenerationConfig

from hf_ddtree.cache import DDTreeCache


class OutputCollector:
    """Gathers, for each emitted token, the layers' outputs of the forward that chose it.

    Args:
        generation_config (`GenerationConfig`): says which are wanted.
    """

    def __init__(self, generation_config: GenerationConfig):
        wanted = generation_config.return_dict_in_generate
        self.hidden_states: tuple[Any, ...] | None = () if wanted and generation_config.output_hidden_states else None
        self.attentions: tuple[Any, ...] | None = () if wanted and generation_config.output_attentions else None

    def prefill(self, outputs: Any) -> None:
        """The prompt's forward: its outputs as they are."""
        if self.hidden_states is not None:
            self.hidden_states += (outputs.hidden_states,)
        if self.attentions is not None:
            self.attentions += (outputs.attentions,)

    def verified(self, outputs: Any, path: list[int], nodes: int, cache: DDTreeCache) -> None:
        """A tree's forward: one row for each node of the accepted path."""
        if self.hidden_states is not None:
            self.hidden_states += tuple(
                tuple(layer[:, node : node + 1] for layer in outputs.hidden_states) for node in path
            )
        if self.attentions is not None:
            windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
            for length in range(1, len(path) + 1):
                self.attentions += (
                    tuple(
                        _row(layer, path[:length], nodes, window)
                        for layer, window in zip(outputs.attentions, windows, strict=True)
                    ),
                )


def _row(weights: torch.Tensor, path: list[int], nodes: int, window: int | None) -> torch.Tensor:
    """The last node's weights on the prefix and the path: what plain decoding's cache would have held."""
    prefix = weights.shape[-1] - nodes
    columns = list(range(prefix)) + [prefix + node for node in path]
    if window is not None:
        columns = columns[-window:]
    node = path[-1]
    return weights[:, :, node : node + 1, torch.tensor(columns, device=weights.device)]
