"""The decoding loop: draft, build, verify, accept, commit, until a stopping criterion fires."""

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import DynamicCache
from transformers.utils import logging

from hf_ddtree import cache as tree_cache
from hf_ddtree.cache import DDTreeCache, DrafterContext, KeptPath
from hf_ddtree.compat import (
    CACHE_NAME,
    active_stream,
    decoder_layers,
    is_user_defined,
    prefill,
    text_config,
)
from hf_ddtree.configuration import TreeSettings
from hf_ddtree.drafters import device_of
from hf_ddtree.generation import positions
from hf_ddtree.generation.acceptance import GreedyWalk, LazyWalk, Walk
from hf_ddtree.generation.arguments import SequenceArguments
from hf_ddtree.generation.candidate_generator import DDTreeCandidateGenerator
from hf_ddtree.generation.collection import OutputCollector
from hf_ddtree.generation.compatibility import check_inputs
from hf_ddtree.generation.floor import floor_of
from hf_ddtree.generation.output import (
    STAGES,
    DDTreeDecoderOnlyOutput,
    SpeculationStats,
    StageTimer,
    VerifiedTree,
    report,
)
from hf_ddtree.generation.ranks import Ranks
from hf_ddtree.generation.self_test import check_target_verifies_trees
from hf_ddtree.generation.sizing import FixedSize, Sizing, auto_size
from hf_ddtree.generation.verification import TreeVerifier
from hf_ddtree.linear_layers import fast_linear_layers
from hf_ddtree.round import TapCollector
from hf_ddtree.tree import DeviceTree, DraftTree

logger = logging.get_logger(__name__)


def ddtree_decoding(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    assistant_model: Any = None,
    assistant_tokenizer: Any = None,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> DDTreeDecoderOnlyOutput | torch.Tensor:
    r"""
    Generates with draft trees (DDTree, hf.co/papers/2604.12989); `generate` calls it for a [`DDTreeConfig`].

    The parameters are those of every decoding method of Transformers. The output is what `generate` gives without a
    drafter: token for token when greedy (fp32), draw for draw with the same seed when sampling.

    Returns:
        `torch.LongTensor` of shape `(1, length)`, or a [`DDTreeDecoderOnlyOutput`] under
        `return_dict_in_generate=True`.

    Raises:
        ValueError: before the first forward, for inputs that tree decoding does not serve.
    """
    check_inputs(model, input_ids, generation_config, model_kwargs)
    with torch.no_grad():
        ranks = Ranks(model, synced_gpus, input_ids.device)
        walk = _walk(logits_processor, stopping_criteria, generation_config, streamer)
        return _Session(model, assistant_model, ranks, walk, generation_config, model_kwargs).run(input_ids)


class _Session:
    """One generate: the state that outlives a round."""

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Any,
        ranks: Ranks,
        walk: GreedyWalk | LazyWalk,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ):
        self.model, self.drafter, self.ranks, self.walk = model, drafter, ranks, walk
        self.config = generation_config
        self.cache = _own_cache(model_kwargs)
        self.arguments = SequenceArguments(model, model_kwargs)
        settings, device = TreeSettings.read(generation_config), device_of(model) or model.device
        self.max_branching = settings.max_branching
        self.sizing = self._sizing(settings, device)
        self.taps = TapCollector(decoder_layers(model), drafter.config.target_layer_ids, active_stream(model))
        # The kernel gives no attention weights; they come from eager attention alone.
        route = "torch" if generation_config.output_attentions else settings.attention_route
        self.verify = TreeVerifier(model, self.taps, route)
        fixed = self.sizing.largest if isinstance(self.sizing, FixedSize) else None
        self.verify.compile_if_asked(ranks, generation_config, model_kwargs, fixed)
        # A static cache has a prefill in chunks compiled, whose taps would lie in memory that the next chunk reuses.
        generation_config.disable_compile = True
        self.collector = OutputCollector(generation_config, text_config(model))
        self.stats = SpeculationStats(trees=[] if settings.output_trees else None)
        self.last_position = positions.last_position(model)
        #: Whether some of the tokens are padding, which the drafter must not see either.
        self.padded = False
        #: Where it has a limit: the anchor's position, counted here so that no round reads it from the device.
        self.anchor_position = 0
        self.timer = StageTimer(device)
        self.floor = floor_of(model, drafter)
        # Made by the prefill: what the drafter has read depends on the cache, which only then is whole.
        self.context: DrafterContext
        self.candidates: DDTreeCandidateGenerator

    def _sizing(self, settings: TreeSettings, device: torch.device) -> Sizing:
        largest = settings.largest_on(device.type)
        if isinstance(settings.budget_on(device.type), int):
            return FixedSize(largest)
        embeds = self.arguments.kept.get("inputs_embeds")
        length = self.config.max_length + (embeds.shape[1] if embeds is not None else 0)
        largest = positions.most_nodes(self.model, length, largest)
        agreed = self.ranks.group is not None
        return auto_size(self.model, self.drafter, device, self.config.do_sample, largest, agreed)

    def run(self, input_ids: torch.Tensor) -> DDTreeDecoderOnlyOutput | torch.Tensor:
        # A graph would be captured anew for each change of a layer's forward, and has fast products of its own.
        models = [self.drafter] if self.verify.compiled is not None else [self.model, self.drafter]
        with fast_linear_layers(*models):
            check_target_verifies_trees(self.model, self.verify, self.ranks)
            return self._run(input_ids)

    def _run(self, input_ids: torch.Tensor) -> DDTreeDecoderOnlyOutput | torch.Tensor:
        try:
            with self.taps.hooked():
                walk = self._prefill(input_ids)
                while self.ranks.unfinished(walk.finished):
                    if walk.finished:
                        self._idle_round(walk.last_token)
                    else:
                        walk = self._round(walk.input_ids, walk.last_token)
        finally:
            seconds = self.timer.read()
            self.stats.prefill_seconds = seconds.pop("prefill", 0.0)
            self.stats.attention_routes = dict(self.verify.attention_routes)
            self.stats.seconds = {stage: seconds.get(stage, 0.0) for stage in STAGES}
            report(self.stats)
        self.cache.drafter_context = self.context
        self.context.seal(self.cache)
        if self.walk.streamer is not None:
            self.walk.streamer.end()
        if not self.config.return_dict_in_generate:
            return walk.input_ids
        return DDTreeDecoderOnlyOutput(
            sequences=walk.input_ids,
            scores=self.walk.scores,
            logits=self.walk.logits,
            attentions=self.collector.attentions,
            hidden_states=self.collector.hidden_states,
            speculation=self.stats,
            **{CACHE_NAME: self.cache},
        )

    def _prefill(self, input_ids: torch.Tensor) -> Walk:
        """Reads the prompt as `generate` would and emits the first token."""
        # A static cache gives a tensor, which grows with the cache.
        seen = int(self.cache.get_seq_length())
        self.context = _drafter_context(self.cache, self.drafter, seen)
        room = max(self.verify.room(self.sizing.largest), int(self.ranks.synced))
        tree_cache.adopt_static(self.cache, room, fixed=self.verify.compiled is not None)
        with self.taps.collect(), tree_cache.restored_on_error(self.cache):
            outputs = prefill(self.model, input_ids, self.config, self.arguments.kept)
        tree_cache.adopt(self.cache)
        self.candidates = DDTreeCandidateGenerator(
            self.drafter, self.model, self.config, self.sizing.largest, self.max_branching, self.context
        )
        self.context.unread(self.taps.taps())
        self.stats.routes = self.verify.routes(self.cache)
        self.collector.prefill(outputs, self.cache)
        walk = self.walk(DraftTree.root_only(), outputs.logits[:, -1:], input_ids)
        self.arguments.extend(outputs, 1)
        model_kwargs = self.arguments.read()
        mask = model_kwargs.get("attention_mask")
        self.padded = mask is not None and not bool(mask.all())
        if self.last_position is not None:
            self.anchor_position = int(model_kwargs["position_ids"][..., -1].max())
        self.timer.lap("prefill")
        self.timer.end_round()
        return walk

    def _round(self, input_ids: torch.Tensor, anchor: int) -> Walk:
        tree = self.ranks.agreed(self._draft(anchor, input_ids.shape[1]))
        if self.verify.compiled is not None:
            # Which graph serves is known on the host only: one more wait for a device than without a graph.
            tree = tree.on_host()
        path: KeptPath | None = None
        try:
            tree_cache.begin(self.cache)
            outputs = self._verify(tree)
            self.timer.lap("verify")
            walk = self.walk(tree, outputs.logits, input_ids)
            self.timer.lap("accept")
            path = KeptPath(walk.path)
            tree_cache.prune(self.cache, path)
        except BaseException:
            if path is None:
                tree_cache.rollback(self.cache)
            else:
                tree_cache.prune(self.cache, path)
            raise
        self.context.unread(self.taps.taps(path))
        self.collector.verified(outputs, walk.path, len(tree), self.cache)
        self.arguments.extend(outputs, len(walk.path))
        self.anchor_position += len(walk.path)
        self.stats.acceptance_lengths.append(len(walk.path))
        self.stats.nodes_verified += walk.tree.num_drafted
        self.stats.tree_sizes.append(walk.tree.num_drafted)
        self.floor.observe(walk.tree.num_drafted, len(walk.path))
        if self.stats.trees is not None:
            self.stats.trees.append(VerifiedTree(walk.tree, walk.path))
        self.sizing.observe(walk)
        self.timer.lap("commit")
        self.timer.end_round()
        for stages in self.timer.finished():
            if "prefill" not in stages:
                self.sizing.observe_seconds(stages)
        return walk

    def _verify(self, tree: DraftTree | DeviceTree) -> Any:
        if self.verify.reads_last_position(tree, self.padded):
            return self.verify(tree, self.arguments.kept, self.padded, self.arguments.missing)
        return self.verify(tree, self.arguments.read(), self.padded)

    def _idle_round(self, anchor: int) -> None:
        """Runs what a round runs, for other processes whose forwards need this one; nothing of it is kept."""
        if self.ranks.any_drafts(False):
            self._idle_pass(anchor)
        try:
            tree_cache.begin(self.cache)
            self.verify(DraftTree.root_only(anchor), self.arguments.read())
        finally:
            tree_cache.rollback(self.cache)

    def _idle_pass(self, anchor: int) -> None:
        self._draft_states(anchor, depth=1, keep=False)

    def _draft_states(self, anchor: int, depth: int, keep: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        model_kwargs = self.arguments.read()
        positions, mask = (model_kwargs.get(name) for name in ("position_ids", "attention_mask"))
        # Without a mask the drafter need not make its own of it.
        mask = mask if self.padded else None
        return self.candidates.draft_states(anchor, self.context.read(), positions, mask, depth, keep)

    def _draft(self, anchor: int, length: int) -> DraftTree | DeviceTree:
        """The round's tree, no deeper than the tokens that may still be emitted."""
        room = self.config.max_length - length
        candidates = self.candidates
        depth = min(candidates.draft_depth, room - 1)
        if self.last_position is not None:
            depth = min(depth, self.last_position - self.anchor_position)
        nodes = self.ranks.agreed_nodes(self.sizing.nodes(length, depth))
        if self.ranks.any_drafts(nodes > 0) and nodes == 0:
            self._idle_pass(anchor)
        if nodes == 0:
            return DraftTree.root_only(anchor)
        # Each level of a tree has a node.
        depth = min(depth, nodes)
        states, logits = self._draft_states(anchor, depth)
        ranking = candidates.ranking(states, logits, nodes)
        self.timer.lap("draft")
        tree = self.sizing.cut(candidates.build(anchor, ranking, nodes))
        self.timer.lap("build")
        return tree


def _walk(
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: Any,
) -> GreedyWalk | LazyWalk:
    if GreedyWalk.serves(logits_processor, stopping_criteria, generation_config):
        return GreedyWalk(stopping_criteria, streamer)
    return LazyWalk(logits_processor, stopping_criteria, generation_config, streamer)


def _own_cache(model_kwargs: dict[str, Any]) -> Any:
    """The cache to generate with: a [`DDTreeCache`] in place of a dynamic one that `generate` made, or itself."""
    cache = model_kwargs[CACHE_NAME]
    if isinstance(cache, DynamicCache) and not is_user_defined(cache):
        cache = DDTreeCache.over(cache)
        # Before the prompt is read, which so is written where the trees follow it.
        tree_cache.adopt(cache)
        model_kwargs[CACHE_NAME] = cache
    return cache


def _drafter_context(cache: Any, drafter: Any, seen: int) -> DrafterContext:
    """What the drafter has read of the cached prefix: all of it, or, from a foreign cache, nothing."""
    context = getattr(cache, "drafter_context", None)
    if context is not None and context.belongs_to(drafter) and context.continues(cache) and context.length == seen:
        return context
    if seen:
        logger.warning_once(
            f"The cache passed to `generate` holds {seen} tokens that this drafter has not read, so it drafts with "
            "less context at first. Pass the `DDTreeCache` that tree decoding returns to continue a sequence."
        )
    return DrafterContext(drafter)
