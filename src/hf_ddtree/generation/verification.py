"""One target forward over a flattened draft tree."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from hf_ddtree.attention import AttentionSwitch, KeptMask
from hf_ddtree.cache import mixers
from hf_ddtree.compat import CACHE_NAME, hands_arguments_on, layers_reading_shared_rows
from hf_ddtree.generation.buckets import padded, rows_for
from hf_ddtree.generation.compiled import CompiledForward, compiled_forward
from hf_ddtree.generation.ranks import Ranks
from hf_ddtree.linear_attention import RecurrentSwitch
from hf_ddtree.round import MixerKind, TapCollector, TreeRound
from hf_ddtree.tree import DeviceTree, DraftTree

# Arguments that only the prefill may see, or that this forward sets itself.
_DROPPED = ("logits_to_keep", "inputs_embeds", "attention_mask", "position_ids")
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class TreeVerifier:
    """Runs the target on trees: depth positions, ancestor-only attention, taps collected.

    Args:
        target (`PreTrainedModel`): the model that verifies.
        taps (`TapCollector`): hooked on the target.
        attention_route (`str`, defaults to `"auto"`): `attention_route` of the [`DDTreeConfig`].
    """

    def __init__(self, target: PreTrainedModel, taps: TapCollector, attention_route: str = "auto"):
        self.target, self.taps, self.attention_route = target, taps, attention_route
        self.attention, self.recurrent = AttentionSwitch(target), RecurrentSwitch(target)
        self._kept_mask = KeptMask()
        #: By which route layers have attended to trees so far.
        self.attention_routes: Counter[str] = Counter()
        #: The compiled forward, if trees are verified by one, and the fewest rows that it is given.
        self.compiled: CompiledForward | None = None
        self.fewest_rows = 1
        self._attending = 0
        self._remote = target.is_remote_code()
        self._hands_on = hands_arguments_on(target)
        # What the last forward was given, where another one's differs in the tokens and their positions alone.
        self._prepared: dict[str, Any] | None = None

    def compile_if_asked(
        self, ranks: Ranks, generation_config: GenerationConfig, model_kwargs: dict[str, Any], budget: int | None
    ) -> None:
        """Verifies trees by a compiled forward from now on, if a call asks for one; see [`compiled_forward`].

        Args:
            ranks, generation_config, model_kwargs: of the call.
            budget (`int`, *optional*): nodes that trees have, all but those without a draft: those are filled up as
                well then, which spares a second graph. `None` if trees have several sizes.
        """
        recurrent = bool(self.recurrent.routes)
        self.compiled = compiled_forward(
            self.target, self.taps, ranks, recurrent, generation_config, model_kwargs, self.attention_route
        )
        self.fewest_rows = 1 if budget is None else rows_for(budget + 1)

    def room(self, budget: int) -> int:
        """Slots that a cache of fixed length needs for trees of at most `budget` nodes, the root not counted."""
        return budget if self.compiled is None else rows_for(budget + 1) - 1

    def reads_last_position(self, tree: DraftTree | DeviceTree, padded: bool) -> bool:
        """Whether a forward over `tree` is plain decoding's own, and takes of what is as long as the sequence only the
        last position; `padded` as in the call.
        """
        return len(tree) == 1 and not (self.recurrent.routes or self.compiled is not None or padded or self._remote)

    def __call__(
        self, tree: DraftTree | DeviceTree, model_kwargs: dict[str, Any], padded: bool = True, missing: int = 0
    ) -> Any:
        """The target's outputs with one row a node.

        Args:
            tree (`DraftTree` or `DeviceTree`): with the anchor as its root.
            model_kwargs (`dict`): `generate`'s, after the anchor was appended: `position_ids` end at the anchor,
                `attention_mask`, where there is one, covers the prefix and the anchor.
            padded (`bool`, *optional*, defaults to `True`): whether some of these may be padding.
            missing (`int`, *optional*, defaults to 0): the latest tokens that `model_kwargs` do not cover yet, which
                is for forwards that [`TreeVerifier.reads_last_position`].
        """
        with self.taps.collect():
            if self.compiled is not None:
                return self._compiled(self.compiled, tree.on_host(), model_kwargs)
            if not (padded or self._remote):
                # A mask that hides nothing is read, converted and dropped again in each forward. Code that is not the
                # library's may count on one.
                model_kwargs = {**model_kwargs, "attention_mask": None}
            if len(tree) == 1 and not self.recurrent.routes:
                # The anchor alone needs no tree: this is the forward of plain decoding. With recurrent layers that
                # would move their states in place, which no rollback could undo.
                return self.target(**self._next_inputs(tree, model_kwargs, missing), return_dict=True)
            device = model_kwargs["position_ids"].device
            tree_round = self.round_of(tree, device)
            with self.reading(tree_round):
                # Under a static cache the mask is made here, not in the forward.
                inputs = self._next_inputs(tree, model_kwargs)
                outputs = self.target(**inputs, return_dict=True) if inputs["input_ids"].device == device else None
            if outputs is None:
                # Inputs that are kept on the host have been moved to the model.
                tree_round = self.round_of(tree, inputs["input_ids"].device)
                with self.reading(tree_round):
                    outputs = self.target(**inputs, return_dict=True)
            for route, count in tree_round.routes.items():
                self.attention_routes[route] += count
            return outputs

    def _compiled(self, forward: CompiledForward, tree: DraftTree, model_kwargs: dict[str, Any]) -> Any:
        """The same by a compiled forward: rows behind the tree's own are its padding, which its outputs keep."""
        whole = padded(tree, max(rows_for(len(tree)), self.fewest_rows))
        device = self.target.device
        # The graph takes masks with their numbers.
        tree_round = TreeRound(whole.depths.to(device), whole.subtree_ends.to(device), "torch")
        with self.reading(tree_round):
            outputs = forward(self.inputs(whole, model_kwargs))
        outputs["logits"] = outputs.logits[:, : len(tree)]
        self.attention_routes[f"{forward.route}, compiled"] += self._attending
        return outputs

    def round_of(self, tree: DraftTree | DeviceTree, device: torch.device) -> TreeRound:
        """What a forward over `tree` on `device` shares with the attention."""
        depths, ends = tree.depths.to(device), tree.subtree_ends.to(device)
        return TreeRound(depths, ends, self.attention_route, tree.deepest, self._kept_mask)

    @contextmanager
    def reading(self, tree_round: TreeRound) -> Iterator[None]:
        """Inside, forwards of this thread on the target read `tree_round`."""
        with self.attention.tree(tree_round), self.recurrent.tree(tree_round):
            yield

    def routes(self, cache: Cache) -> dict[str, int]:
        """How many layers read trees by each route, given the target's cache after its prefill."""
        keeping = {index for index, kind in mixers(cache) if kind is MixerKind.ATTENTION}
        attention = self._attending = len(keeping | layers_reading_shared_rows(self.target))
        return {**({MixerKind.ATTENTION.value: attention} if attention else {}), **self.recurrent.routes}

    def _next_inputs(
        self, tree: DraftTree | DeviceTree, model_kwargs: dict[str, Any], missing: int = 0
    ) -> dict[str, Any]:
        """[`TreeVerifier.inputs`]; a forward whose tokens and positions alone are new takes the rest from the last."""
        prepared, position_ids = self._prepared, model_kwargs["position_ids"]
        unmasked = model_kwargs.get("attention_mask") is None
        if prepared is not None and unmasked and prepared[CACHE_NAME] is model_kwargs[CACHE_NAME]:
            tokens = tree.token_ids[None].to(position_ids.device)
            return {**prepared, "input_ids": tokens, "position_ids": _positions(tree, position_ids, missing)}
        inputs = self.inputs(tree, model_kwargs, missing)
        changing = {name for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        known = changing == {"input_ids", "position_ids"} and "attention_mask" not in inputs
        there = inputs["input_ids"].device == position_ids.device
        self._prepared = inputs if self._hands_on and known and there else None
        return inputs

    def inputs(self, tree: DraftTree | DeviceTree, model_kwargs: dict[str, Any], missing: int = 0) -> dict[str, Any]:
        """What the target's forward takes for `tree`; arguments as in the call."""
        kwargs = {key: value for key, value in model_kwargs.items() if key not in _DROPPED}
        nodes = len(tree)
        for key in _TOKEN_TYPES:
            if kwargs.get(key) is not None:
                kwargs[key] = kwargs[key][..., -1:].repeat_interleave(nodes, dim=-1)
        position_ids = model_kwargs["position_ids"]
        kwargs["position_ids"] = _positions(tree, position_ids, missing)
        mask = model_kwargs.get("attention_mask")
        if mask is not None and nodes > 1:
            mask = torch.cat([mask, mask.new_ones((mask.shape[0], nodes - 1))], dim=-1)
        if mask is not None:
            kwargs["attention_mask"] = mask
        input_ids = tree.token_ids[None].to(position_ids.device)
        inputs = self.target.prepare_inputs_for_generation(input_ids, is_first_iteration=False, **kwargs)
        # Some models ask for the last token's logits only.
        inputs.pop("logits_to_keep", None)
        return inputs


def _positions(tree: DraftTree | DeviceTree, position_ids: torch.Tensor, missing: int) -> torch.Tensor:
    """Positions of the nodes, the anchor's being `missing` after the last of `position_ids`."""
    return position_ids[..., -1:] + (missing if missing else tree.depths.to(position_ids.device))
