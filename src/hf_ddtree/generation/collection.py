"""`hidden_states` and `attentions` of the accepted path, in the shapes `generate` returns them."""

from typing import Any

import torch
import torch.nn.functional as F
from transformers import GenerationConfig
from transformers.cache_utils import Cache, CacheLayerMixin, StaticLayer

from hf_ddtree.cache import FixedSlidingTreeLayer


class OutputCollector:
    """Gathers, for each emitted token, the layers' outputs of the forward that chose it.

    Args:
        generation_config (`GenerationConfig`): says which are wanted.
        text_config (`PreTrainedConfig`): of the target's language part.
    """

    def __init__(self, generation_config: GenerationConfig, text_config: Any):
        self.text_config = text_config
        wanted = generation_config.return_dict_in_generate
        self.hidden_states: tuple[Any, ...] | None = () if wanted and generation_config.output_hidden_states else None
        self.attentions: tuple[Any, ...] | None = () if wanted and generation_config.output_attentions else None

    def prefill(self, outputs: Any, cache: Cache) -> None:
        """The prompt's forward: its outputs as they are, but for the room of a static cache."""
        if self.hidden_states is not None:
            self.hidden_states += (outputs.hidden_states,)
        if self.attentions is not None:
            layers = self._layers_read(outputs.attentions, cache)
            self.attentions += (
                tuple(
                    weights[..., : weights.shape[-1] - getattr(layer, "room", 0)]
                    for weights, layer in zip(outputs.attentions, layers, strict=True)
                ),
            )

    def verified(self, outputs: Any, path: list[int], nodes: int, cache: Cache) -> None:
        """A tree's forward: one row for each node of the accepted path."""
        if self.hidden_states is not None:
            self.hidden_states += tuple(
                tuple(layer[..., node : node + 1, :] for layer in outputs.hidden_states) for node in path
            )
        if self.attentions is not None:
            layers = self._layers_read(outputs.attentions, cache)
            for length in range(1, len(path) + 1):
                self.attentions += (
                    tuple(
                        _row(weights, path[:length], len(path), nodes, layer)
                        for weights, layer in zip(outputs.attentions, layers, strict=True)
                    ),
                )

    def _layers_read(self, attentions: Any, cache: Cache) -> list[Any]:
        """The layer of the cache whose keys each of the weights are on."""
        layers: list[Any] = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
        if len(layers) < len(attentions):
            # The model's last layers read the keys of the last one before them that is of the same type.
            types = self.text_config.layer_types
            shared = dict(zip(types, layers, strict=False))
            layers += [shared[kind] for kind in types[len(layers) :]]
        return layers


def _row(weights: torch.Tensor, path: list[int], kept: int, nodes: int, layer: Any) -> torch.Tensor:
    """The last node's weights on the prefix and the path: what plain decoding's cache would have held.

    Args:
        weights (`torch.Tensor` of shape `(batch, heads, nodes, keys)`): of the tree's forward.
        path (`list[int]`): the nodes down to the one wanted.
        kept (`int`): nodes that the round has committed.
        nodes (`int`): nodes of the tree.
        layer (`CacheLayerMixin`): that holds the keys, after the commit.
    """
    static = isinstance(layer, StaticLayer)
    # Behind the nodes of a full layer of fixed length there are free slots, and of any in a compiled forward.
    if isinstance(layer, FixedSlidingTreeLayer):
        prefix = min(int(layer.get_seq_length()) - kept, layer.max_cache_len)
    else:
        prefix = int(layer.get_seq_length()) - kept if static and not layer.is_sliding else weights.shape[-1] - nodes
    columns = [*range(prefix), *(prefix + node for node in path)]
    width: Any = layer.max_cache_len - getattr(layer, "room", 0) if static else getattr(layer, "sliding_window", None)
    if width is not None:
        columns = columns[-width:]
    row = weights[:, :, path[-1] : path[-1] + 1, torch.tensor(columns, device=weights.device)]
    return F.pad(row, (0, width - len(columns))) if static else row
