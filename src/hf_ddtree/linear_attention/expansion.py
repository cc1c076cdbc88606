"""Recurrent layers without a rule for trees read every root-to-leaf path as a sequence of its own."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, LinearAttentionLayer
from transformers.utils import logging

from hf_ddtree.compat import scans_as_it_steps
from hf_ddtree.linear_attention.paths import Part, Paths
from hf_ddtree.linear_attention.states import bytes_of, copied
from hf_ddtree.round import CURRENT_ROUND, MixerKind, TreeRound

logger = logging.get_logger(__name__)

#: Bytes that what is read at once may take, estimated.
BYTES_AT_ONCE = 2**30

# Estimates: what a mixer holds of a token, in sizes of the token; states alive at a time, before and after a step.
_TOKENS_A_TOKEN = 16
_STATES_A_STEP = 3


class PathExpansion:
    """Lets recurrent mixers read a tree, path by path, for the length of a forward.

    A mixer is called with rows in place of the nodes, and with copies of the committed states for each of them, so
    that these stay as they are. The layer of the cache is left to read the accepted tokens once more at its commit.
    What is read at once takes about `BYTES_AT_ONCE` at most.

    Args:
        mixers (`Iterable[nn.Module]`): modules that take and return tokens of shape `(batch, tokens, ...)`, and keep
            their states in the cache's layer `mixer.layer_idx`.
    """

    def __init__(self, mixers: Iterable[nn.Module]):
        self.mixers = list(mixers)
        if self.mixers:
            names = ", ".join(sorted({type(mixer).__name__ for mixer in self.mixers}))
            logger.warning_once(
                f"The target's recurrent layers ({names}) have no rule for draft trees, so each path of a tree is "
                "read by itself. The text is the same, but a round takes longer."
            )

    @contextmanager
    def tree(self, tree: TreeRound) -> Iterator[None]:
        """Inside, forwards of this thread read `tree`; those of other threads are as ever."""
        forward = _Forward(tree)
        handles: list[Any] = []
        token = _FORWARD.set(forward)
        try:
            for mixer in self.mixers:
                # Other hooks of the mixer see nodes: they run before the first and after the second.
                handles.append(mixer.register_forward_pre_hook(forward.expand, with_kwargs=True))
                handles.append(mixer.register_forward_hook(forward.contract, prepend=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
            _FORWARD.reset(token)


def by_level(mixer: nn.Module, layer: LinearAttentionLayer, device: torch.device) -> bool:
    """Whether a mixer reads one level of a tree at a time, as decoding would, rather than whole paths.

    On a CPU because PyTorch's scans fill up chunks of 64 to 256 tokens for every path; elsewhere where a scan is not
    what single steps are. A convolution alone has no scan.
    """
    scans = any(state is not None for state in layer.recurrent_states.values())
    return scans and (device.type == "cpu" or not scans_as_it_steps(mixer))


class _Forward:
    """One forward over a tree: what its mixers have read."""

    def __init__(self, tree: TreeRound):
        self.tree = tree
        self._paths: Paths | None = None
        self._parts: dict[tuple[bool, int, torch.device], list[Part]] = {}
        self._calls: dict[Any, list[_Call]] = {}
        self._running: list[tuple[_Call, Token[TreeRound | None]]] = []

    # A call in another thread may meet hooks that are being removed, and then brings no `kwargs`.
    def expand(self, mixer: nn.Module, args: Any, kwargs: Any = None) -> Any:
        if _FORWARD.get() is not self:
            return None
        call = _Call(mixer, args, kwargs, self)
        self.tree.mixed.add((call.layer_idx, MixerKind.RECURRENT))
        # What is made for trees inside of the mixer must take the rows for rows.
        self._running.append((call, CURRENT_ROUND.set(None)))
        return next(call.inputs)

    def contract(self, _mixer: nn.Module, _args: Any, output: Any) -> Any:
        if _FORWARD.get() is not self:
            return None
        call, token = self._running.pop()
        output = call.nodes(output)
        CURRENT_ROUND.reset(token)
        calls = self._calls.setdefault(call.layer, [])
        calls.append(call)
        call.layer.pend(partial(_replay, calls))
        return output

    @property
    def paths(self) -> Paths:
        if self._paths is None:
            self._paths = Paths(self.tree)
        return self._paths

    def parts(self, by_level: bool, at_once: int, device: torch.device) -> list[Part]:
        """The tree in parts of `at_once` leaves; layers of one shape share them."""
        key = by_level, at_once, device
        if key not in self._parts:
            self._parts[key] = (self.paths.in_levels if by_level else self.paths.in_rows)(at_once, device)
        return self._parts[key]


_FORWARD: ContextVar[_Forward | None] = ContextVar("ddtree_path_expansion", default=None)


def _replay(calls: "list[_Call]", path: torch.Tensor, layer: LinearAttentionLayer) -> None:
    for call in calls:
        call.replay(path, layer)


class _Call:
    """One mixer's call with a tree's nodes, in tensors of shape `(1, nodes, ...)`: made as several, with rows.

    The first of these is the call that the hooks are in; the others leave out all hooks of the mixer.
    """

    def __init__(self, mixer: nn.Module, args: Any, kwargs: Any, forward: _Forward):
        self.mixer, self.arguments = mixer, (args, kwargs)
        self.layer_idx: Any = mixer.layer_idx
        given = list(_leaves(self.arguments))
        cache = next((value for value in given if isinstance(value, Cache)), None)
        if cache is None:
            raise ValueError(
                f"{type(mixer).__name__} was called without a cache, which holds the states that a draft tree starts "
                "from: drop `use_cache=False`."
            )
        self.layer: Any = cache.layers[self.layer_idx]
        self.count = len(forward.tree.depths)
        nodes = [value for value in given if self._is_of_nodes(value)]
        device = nodes[0].device
        self.by_level = by_level(mixer, self.layer, device)
        token, state = sum(value.nbytes for value in nodes) // self.count, bytes_of(self.layer)
        if self.by_level:
            leaf = _STATES_A_STEP * state + _TOKENS_A_TOKEN * token
        else:
            leaf = forward.paths.longest * (state + _TOKENS_A_TOKEN * token)
        self.parts = forward.parts(self.by_level, max(1, BYTES_AT_ONCE // leaf), device)
        self.inputs = self._inputs()

    def nodes(self, output: Any) -> Any:
        """What the mixer gives for the nodes; `output` is what it gave in the first call."""
        read: list[Any] = []
        for part in self.parts:
            outputs = [] if read else [output]
            while len(outputs) < len(part.steps):
                args, kwargs = next(self.inputs)
                outputs.append(self.mixer.forward(*args, **kwargs))
            tokens = _joined([_map(_flat, rows) for rows in outputs])
            read.append(_map(partial(_at, part.read), tokens))
        return _joined(read)

    @torch.no_grad()
    def replay(self, path: torch.Tensor, layer: LinearAttentionLayer) -> None:
        """Reads the nodes `path` into `layer`, which holds the states before them."""
        for nodes in path.split(1 if self.by_level else len(path)):
            args, kwargs = self._changed(nodes[None], layer)
            self.mixer.forward(*args, **kwargs)

    def _inputs(self) -> Iterator[tuple[Any, Any]]:
        """The arguments of each call. A call moves the states on, which the next starts from."""
        for part in self.parts:
            layer = self.layer
            for step in part.steps:
                layer = copied(layer, step.origins)
                yield self._changed(step.nodes, layer)

    def _changed(self, nodes: torch.Tensor, layer: LinearAttentionLayer) -> tuple[Any, Any]:
        """The arguments for rows of `nodes`, `(rows, length)`, and with `layer` in the cache's place."""
        layers: Any = [None] * self.layer_idx + [layer]
        cache = Cache(layers=layers)

        def change(value: Any) -> Any:
            if isinstance(value, Cache):
                return cache
            return value[0, nodes.to(value.device)] if self._is_of_nodes(value) else value

        args, kwargs = _map(change, self.arguments)
        return args, kwargs

    def _is_of_nodes(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape[:2] == (1, self.count)


def _flat(value: Any) -> Any:
    return value.flatten(0, 1)[None] if isinstance(value, torch.Tensor) else value


def _at(tokens: torch.Tensor, value: Any) -> Any:
    return value.index_select(1, tokens.to(value.device)) if isinstance(value, torch.Tensor) else value


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _leaves(part)
    else:
        yield value


def _map(function: Any, value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)([_map(function, part) for part in value])
    if isinstance(value, dict):
        return {key: _map(function, part) for key, part in value.items()}
    return function(value)


def _joined(parts: list[Any]) -> Any:
    """Outputs of one structure, side by side along their tokens."""
    if isinstance(parts[0], (tuple, list)):
        return type(parts[0])([_joined(list(part)) for part in zip(*parts, strict=True)])
    return torch.cat(parts, dim=1) if isinstance(parts[0], torch.Tensor) else parts[0]
