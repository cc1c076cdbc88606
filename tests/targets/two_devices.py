"""What `test_devices.py` runs in a process of its own: pairs spread over two devices, and what they generated."""

import json
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_map_only

from hf_ddtree.compat import decoder_layers
from hf_ddtree.generation.decoding import _Session
from linear_attention.hybrids import make_hybrid
from models.zoo import ALL
from pairs import make_drafter, make_target, plain, prompt, tree
from targets.second_device import ELSEWHERE, Elsewhere, SecondDevice, put_elsewhere

NEW = 10


def last_layers(target: Any, drafter: Any) -> None:
    for module in (*decoder_layers(target)[2:], target.get_decoder().norm, target.get_output_embeddings()):
        put_elsewhere(module)


def first_layers(target: Any, drafter: Any) -> None:
    for module in (target.model.embed_tokens, *target.model.layers[:3]):
        put_elsewhere(module)

    def bring_back(_module: Any, args: Any, kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), (args, kwargs))

    for module in (target.model.rotary_emb, target.model.layers[3], target.model.norm):
        module.register_forward_pre_hook(bring_back, with_kwargs=True)


def drafter_alone(target: Any, drafter: Any) -> None:
    put_elsewhere(drafter)


def one_layer_beside_the_drafter(target: Any, drafter: Any) -> None:
    put_elsewhere(drafter)
    last_layers(target, drafter)


def everything(target: Any, drafter: Any) -> None:
    put_elsewhere(target)
    put_elsewhere(drafter)


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], None]]] = {
    "last layers": (lambda: make_target("qwen3"), last_layers),
    "last layers, sliding": (lambda: make_target("qwen3_sliding"), last_layers),
    "last layers, eager": (lambda: make_target("gemma2"), last_layers),
    "first layers": (lambda: make_target("llama"), first_layers),
    "drafter": (lambda: make_target("qwen3"), drafter_alone),
    "both": (lambda: make_target("qwen3"), one_layer_beside_the_drafter),
    "recurrent": (lambda: make_hybrid(), last_layers),
}


def generate(make: Callable[[], Any], spread: Callable[[Any, Any], None]) -> dict[str, Any]:
    whole, target = make(), make()
    drafter = make_drafter(whole)
    expected = plain(whole, prompt(), max_new_tokens=NEW)
    spread(target, drafter)
    with SecondDevice() as second:
        output = tree(target, drafter, prompt(), max_new_tokens=NEW, return_dict_in_generate=True)
    return {
        "equal": torch.equal(output.sequences, expected),
        "accepted": max(output.speculation.acceptance_lengths),
        "ran there": second.ran,
    }


def reads_of_rounds(family: Any, **kwargs: Any) -> dict[str, Any]:
    """Target, drafter and prompt all there: how often each round of a generate waits for values to come back."""
    whole, target = make_target(family), make_target(family)
    drafter = make_drafter(whole)
    expected = plain(whole, prompt(), max_new_tokens=NEW)
    everything(target, drafter)
    reads: list[int] = []
    one_round = _Session._round
    with SecondDevice() as second:

        def counted(*arguments: Any) -> Any:
            before = second.reads
            walk = one_round(*arguments)
            reads.append(second.reads - before)
            return walk

        with patch.object(_Session, "_round", counted):
            ids = prompt().to(ELSEWHERE)
            output = tree(target, drafter, ids, max_new_tokens=NEW, return_dict_in_generate=True, **kwargs)
        sequences = output.sequences.cpu()
    return {
        "equal": torch.equal(sequences, expected),
        "accepted": output.speculation.acceptance_lengths,
        "nodes": output.speculation.nodes_verified,
        "reads": reads,
    }


class Tokens:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        pass


def nan_elsewhere() -> dict[str, Any]:
    """What a drafter that gives NaN raises, and what had been emitted by then."""
    target, streamer = make_target("qwen3"), Tokens()
    drafter = make_drafter(target)
    drafter.norm.weight.data.fill_(float("nan"))
    everything(target, drafter)
    with SecondDevice():
        try:
            tree(target, drafter, prompt().to(ELSEWHERE), max_new_tokens=NEW, streamer=streamer)
        except ValueError as error:
            return {"error": str(error), "emitted": len(streamer.tokens) - prompt().shape[1]}
    return {}


def mixing() -> str:
    """What an operation on tensors of both devices says."""
    with SecondDevice():
        there = torch.ones(2, device=ELSEWHERE)
        assert isinstance(there, Elsewhere) and (there.cpu() + torch.ones(2)).tolist() == [2, 2]
        try:
            there + torch.ones(2)
        except RuntimeError as error:
            return str(error)
    return "nothing"


def building(there: bool) -> Any:
    """Inside, trees are built on the second device, or read and built on the host, whichever would be sooner."""
    return patch("hf_ddtree.generation.candidate_generator.builds_on_device", lambda *_: there)


if __name__ == "__main__":
    torch.set_num_threads(1)
    results: dict[str, Any] = {name: generate(*case) for name, case in CASES.items()}
    with building(there=True):
        rounds = {
            "greedy": reads_of_rounds("qwen3"),
            "sliding, fewer paths than nodes": reads_of_rounds("qwen3_sliding", budget=100, max_branching=2),
            "learned positions": reads_of_rounds(ALL["gpt2"].build),
        }
        nan = nan_elsewhere()
    with building(there=False):
        by_host = reads_of_rounds("qwen3")
    report = {"mixing": mixing(), "cases": results, "rounds": rounds, "nan": nan, "built by the host": by_host}
    print(json.dumps(report), file=sys.stdout)
