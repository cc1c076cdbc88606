"""The paper's loop written out plainly (DDTree, arXiv 2604.12989, Algorithm 1): what the package is compared with.

Everything is as the paper's description has it and nothing more: log-probabilities over the whole vocabulary, a heap
of tuples, a visibility matrix filled node by node, a dense mask over prefix and tree, the library's attention under
that mask, and caches that grow by concatenation and are indexed anew after each round. Greedy, one prompt.
"""

import heapq
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from hf_ddtree.compat import CACHE_NAME


@dataclass
class Generated:
    """The whole sequence, and the tokens that each round emitted, the bonus token included."""

    sequence: list[int]
    acceptance_lengths: list[int] = field(default_factory=list)


@dataclass
class Tree:
    """Nodes in the order they were taken, the root first."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]


@torch.no_grad()
def generate(target: Any, drafter: Any, input_ids: torch.Tensor, budget: int, new_tokens: int) -> Generated:
    """Greedy decoding by draft trees of `budget` nodes, without an end token."""
    layers = drafter.config.target_layer_ids
    cache, context = DynamicCache(), DynamicCache()
    outputs = target(input_ids, use_cache=True, output_hidden_states=True, **{CACHE_NAME: cache})
    taps = _taps(outputs, layers)
    result = Generated([*input_ids[0].tolist(), int(outputs.logits[0, -1].argmax())])
    last = len(result.sequence) - 1 + new_tokens
    while len(result.sequence) < last:
        log_probs = draft(target, drafter, context, taps, result.sequence[-1])
        tree = build(log_probs[: last - len(result.sequence) - 1], budget, result.sequence[-1])
        outputs = verify(target, cache, tree)
        path, bonus = accept(tree, outputs.logits[0].argmax(-1).tolist())
        keep(cache, len(result.sequence) - 1, path)
        taps = _taps(outputs, layers)[:, path]
        result.sequence += [tree.tokens[node] for node in path[1:]] + [bonus]
        result.acceptance_lengths.append(len(path))
    return result


def draft(target: Any, drafter: Any, context: DynamicCache, taps: torch.Tensor, anchor: int) -> torch.Tensor:
    """One drafter pass: log-probabilities of shape `(depth, vocabulary)`."""
    block = drafter.config.block_size
    ids = torch.tensor([[anchor] + [drafter.config.mask_token_id] * (block - 1)])
    states = drafter(target.get_input_embeddings()(ids), taps, cache=context).last_hidden_state
    context.crop(-block)
    return target.get_output_embeddings()(states[:, 1:])[0].log_softmax(-1)


def build(log_probs: torch.Tensor, budget: int, anchor: int) -> Tree:
    """Algorithm 1: take the best path, push its next sibling and its first child."""
    tree = Tree([anchor], [-1], [0])
    if len(log_probs) == 0:
        return tree
    best = log_probs.topk(min(budget, log_probs.shape[-1]), dim=-1)
    scores, tokens = best.values.tolist(), best.indices.tolist()
    heap = [(-scores[0][0], (0,), 0)]
    while heap and len(tree.tokens) <= budget:
        cost, ranks, parent = heapq.heappop(heap)
        depth, rank = len(ranks) - 1, ranks[-1]
        tree.tokens.append(tokens[depth][rank])
        tree.parents.append(parent)
        tree.depths.append(depth + 1)
        if rank + 1 < len(scores[depth]):
            sibling = cost + scores[depth][rank] - scores[depth][rank + 1]
            heapq.heappush(heap, (sibling, (*ranks[:-1], rank + 1), parent))
        if depth + 1 < len(scores):
            heapq.heappush(heap, (cost - scores[depth + 1][0], (*ranks, 0), len(tree.tokens) - 1))
    return tree


def verify(target: Any, cache: DynamicCache, tree: Tree) -> Any:
    """One forward over all nodes, each of which sees the prefix and its ancestors."""
    prefix, count = cache.get_seq_length(), len(tree.tokens)
    visible = torch.zeros(count, count, dtype=torch.bool)
    for node, parent in enumerate(tree.parents):
        if parent >= 0:
            visible[node] = visible[parent]
        visible[node, node] = True
    mask = torch.cat([torch.ones(count, prefix, dtype=torch.bool), visible], dim=-1)[None, None]
    return target(
        torch.tensor([tree.tokens]),
        attention_mask=mask,
        position_ids=prefix + torch.tensor([tree.depths]),
        use_cache=True,
        output_hidden_states=True,
        **{CACHE_NAME: cache},
    )


def accept(tree: Tree, choices: list[int]) -> tuple[list[int], int]:
    """The nodes that agree with the target, from the root on, and the token after them."""
    children = {
        (parent, token): node for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))
    }
    path = [0]
    while (path[-1], choices[path[-1]]) in children:
        path.append(children[path[-1], choices[path[-1]]])
    return path, choices[path[-1]]


def keep(cache: DynamicCache, prefix: int, path: list[int]) -> None:
    """Leaves the prefix and the path's rows in the cache."""
    rows = torch.cat([torch.arange(prefix), prefix + torch.tensor(path)])
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, rows], layer.values[:, :, rows]


def _taps(outputs: Any, layers: list[int]) -> torch.Tensor:
    return torch.cat([outputs.hidden_states[layer + 1] for layer in layers], dim=-1)
