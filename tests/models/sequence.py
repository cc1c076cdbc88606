"""A sequence that is decoded by trees of our choice, beside forwards that read it from its start."""

import copy
from typing import Any

import torch

from hf_ddtree.cache import DDTreeCache
from hf_ddtree.compat import CACHE_NAME, decoder_layers, extend_model_kwargs
from hf_ddtree.generation.verification import TreeVerifier
from hf_ddtree.round import TapCollector
from hf_ddtree.tree import DraftTree
from models.family import Family


class Sequence:
    """Rounds on one model, with inputs prepared as `generate` prepares them.

    Args:
        family (`Family`): of the model.
        model (`PreTrainedModel`): the target.
        prefix (`list[int]`): the prompt, image tokens included.
        padding (`int`): tokens of padding before it.
    """

    def __init__(self, family: Family, model: Any, prefix: list[int], padding: int = 0):
        self.family, self.model, self.padding, self.ids = family, model, padding, [0] * padding + prefix
        self.cache = DDTreeCache(config=model.config)
        self.verify = TreeVerifier(model, TapCollector(decoder_layers(model), []))
        self.kwargs = self._whole(self.ids)
        self.kwargs |= {CACHE_NAME: self.cache, "use_cache": True}
        self._extend(self._read(self.ids, self.kwargs), 1)

    def _whole(self, ids: list[int]) -> dict[str, Any]:
        """What `generate` passes along for a sequence that it reads from the start."""
        tensor = torch.tensor([ids])
        mask = torch.ones_like(tensor)
        mask[:, : self.padding] = 0
        kwargs = {"attention_mask": mask, **self.family.image_inputs(tensor, self.model.dtype)}
        kwargs["position_ids"] = self.model._prepare_position_ids_for_generation(tensor, dict(kwargs))
        return kwargs

    def _read(self, ids: list[int], kwargs: dict[str, Any], first: bool = True) -> Any:
        tensor = torch.tensor([ids])
        inputs = self.model.prepare_inputs_for_generation(tensor, is_first_iteration=first, **kwargs)
        inputs.pop("logits_to_keep", None)
        with torch.no_grad():
            return self.model(**inputs, return_dict=True)

    def _extend(self, outputs: Any, new: int) -> None:
        self.kwargs = extend_model_kwargs(self.model, outputs, self.kwargs, new)

    def plain(self, ids: list[int]) -> torch.Tensor:
        """`(length, vocab)` logits of one forward over the whole of `ids`."""
        return self._read(ids, {**self._whole(ids), "use_cache": False}).logits[0]

    def one_by_one(self, tokens: list[int]) -> torch.Tensor:
        """`(len(tokens), vocab)` logits as plain decoding finds them after the sequence: a forward a token."""
        held, kwargs, rows = copy.deepcopy(self.cache), self.kwargs, []
        self.kwargs = {**kwargs, CACHE_NAME: held}
        for token in tokens:
            outputs = self._read([token], self.kwargs, first=False)
            rows.append(outputs.logits[0, -1])
            self._extend(outputs, 1)
        self.kwargs = kwargs
        return torch.stack(rows)

    def round(self, tree: DraftTree) -> torch.Tensor:
        """The tree's logits, `(nodes, vocab)`; the round stays open."""
        self.cache.begin()
        with torch.no_grad():
            self.outputs = self.verify(tree, self.kwargs)
        return self.outputs.logits[0]

    def commit(self, tree: DraftTree, path: list[int]) -> None:
        self.cache.prune(torch.tensor(path))
        self.ids += tree.token_ids[path].tolist()
        self._extend(self.outputs, len(path))

    def expected(self, tree: DraftTree) -> torch.Tensor:
        """The logits of each node from a forward over the prefix and the path to a leaf under it."""
        rows: dict[int, torch.Tensor] = {}
        for leaf in [node for node in range(len(tree)) if int(tree.subtree_ends[node]) == node + 1]:
            path = tree.path(leaf)
            logits = self.plain(self.ids + tree.token_ids[path].tolist())[len(self.ids) :]
            rows.update(zip(path, logits, strict=True))
        return torch.stack([rows[node] for node in range(len(tree))])
