"""Which route lets each recurrent layer of a model read a tree, and taking it for the length of a forward."""

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from enum import Enum

from torch import nn
from transformers import PreTrainedModel

from hf_ddtree.compat import is_stateful, recurrent_mixers
from hf_ddtree.linear_attention.dispatch import globals_of, install
from hf_ddtree.linear_attention.expansion import PathExpansion
from hf_ddtree.round import TreeRound


class Route(Enum):
    """How a recurrent layer reads a tree."""

    DELTA_RULE = "gated delta rule"
    PATHS = "paths"


def routes(model: PreTrainedModel) -> dict[nn.Module, Route]:
    """The recurrent mixers of a model's decoder and the route of each: the tree's own rule, else its paths one by one.

    Mixers are told by what they call, so that a model made from another's parts is served as that one is.
    """
    return _routes(recurrent_mixers(model))


def _routes(by_layer: dict[int, list[nn.Module]]) -> dict[nn.Module, Route]:
    return {mixer: _route(mixers) for mixers in by_layer.values() for mixer in mixers}


def _route(mixers: list[nn.Module]) -> Route:
    """The route of the mixers that share a layer of the cache, which moves along a path in one way."""
    rule = all(globals_of(type(mixer)) is not None for mixer in mixers)
    return Route.DELTA_RULE if rule else Route.PATHS


def check(model: PreTrainedModel) -> None:
    """Raises `ValueError` if the model says that it keeps states and none of its layers is one that a tree can use."""
    if is_stateful(model) and not routes(model):
        raise ValueError(
            f"{type(model).__name__} keeps states that cannot be moved along an accepted path: its layers do not "
            "keep them in the recurrent layers of Transformers' cache. Generate without `assistant_model`."
        )


class RecurrentSwitch:
    """Lets the recurrent layers of a model read trees.

    Args:
        model (`PreTrainedModel`): the target.
    """

    def __init__(self, model: PreTrainedModel):
        by_layer = recurrent_mixers(model)
        found = _routes(by_layer)
        #: How many recurrent layers take each route.
        self.routes = dict(Counter(_route(mixers).value for mixers in by_layer.values()))
        for mixer_class in {type(mixer) for mixer, route in found.items() if route is Route.DELTA_RULE}:
            module_globals = globals_of(mixer_class)
            assert module_globals is not None
            install(module_globals)
        self.paths = PathExpansion(mixer for mixer, route in found.items() if route is Route.PATHS)

    def tree(self, tree: TreeRound) -> AbstractContextManager[None]:
        """Inside, recurrent layers of this thread's forwards read `tree`, which must be the current round's."""
        return self.paths.tree(tree) if self.paths.mixers else nullcontext()
