"""What `test_processes.py` runs with torchrun: each process writes what it generated to `FOLDER/RANK.json`.

`FOLDER` holds a tiny target each of the families `gemma3` and `qwen3`.
"""

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.distributed import DistributedConfig

from hf_ddtree.generation.self_test import _passed
from pairs import make_drafter, make_target, plain, prompt, tree

torch.set_num_threads(1)


def loaded(folder: Path, **distributed: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**distributed))
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None)
    return model


def sharded(model: Any) -> Any:
    for layer in model.layers if hasattr(model, "layers") else model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def compare(target: Any, whole: Any, drafter: Any, ids: torch.Tensor, new: int, **kwargs: Any) -> dict[str, Any]:
    """Trees on the target of several processes beside plain `generate` on a whole one in this process."""
    # `generate` knows by itself that a model loaded with `fsdp_size` is sharded, and not that `fully_shard` did it.
    settings: dict[str, Any] = dict(max_new_tokens=new, return_dict_in_generate=True, output_trees=True)
    output = tree(target, drafter, ids, **settings, **kwargs)
    kwargs.pop("synced_gpus", None)
    trees = [verified.tree for verified in output.speculation.trees]
    return {
        "tokens": output.sequences[0].tolist(),
        "plain": plain(whole, ids, max_new_tokens=new, **kwargs)[0].tolist(),
        "accepted": output.speculation.acceptance_lengths,
        "trees": [(draft.token_ids.tolist(), draft.parents.tolist()) for draft in trees],
    }


def refusal(target: Any, drafter: Any, ids: torch.Tensor) -> str:
    try:
        tree(target, drafter, ids, max_new_tokens=4)
    except ValueError as error:
        return str(error)
    return "none"


def tensor_parallel(folder: Path, rank: int) -> dict[str, Any]:
    """The same prompts in both processes; at last another drafter in the second, whose head is not the target's."""
    whole = make_target("gemma3")
    target = loaded(folder / "gemma3", tp_plan="auto")
    drafter = make_drafter(whole, input_embedding_scale=1.0)
    own = make_drafter(whole, seed=7 if rank else 1, own_head=True)
    return {
        "greedy": compare(target, whole, drafter, prompt(), 24),
        "sampled": compare(target, whole, drafter, prompt(9), 20, do_sample=True),
        "one token": compare(target, whole, drafter, prompt(), 1),
        "drafters that differ": compare(target, whole, own, prompt(), 24),
        "automatic": compare(target, whole, drafter, prompt(), 40, budget="auto"),
    }


def fully_sharded(folder: Path, rank: int) -> dict[str, Any]:
    """Prompts and lengths of each process's own, so that one finishes long before the other."""
    whole = make_target("qwen3")
    drafter = make_drafter(whole)
    ids, new = prompt(11 + 2 * rank, seed=3 + rank), 30 if rank else 5
    target = loaded(folder / "qwen3", fsdp_size=2)
    results = {"loaded so": compare(target, whole, drafter, ids, new)}
    if rank:
        # As if the first process alone had met the target before: the self-test must still run in both.
        _passed.pop(target)
    results["sampled"] = compare(target, whole, drafter, ids, new, do_sample=True)
    results["one token beside many"] = compare(target, whole, drafter, ids, 20 if rank else 1)
    results["nothing drafted beside trees"] = compare(target, whole, drafter, ids, 12, budget=40 if rank else 0)
    results["automatic"] = compare(target, whole, drafter, ids, new, budget="auto")
    results["automatic beside a number"] = compare(target, whole, drafter, ids, 12, budget="auto" if rank else 40)
    results["path head"] = refusal(target, sharded(make_drafter(whole, markov_rank=4)), ids)
    both, small = sharded(make_target("qwen3")), sharded(make_drafter(whole))
    results["by fully_shard, drafter too"] = compare(both, whole, small, ids, new, synced_gpus=True)
    return results


if __name__ == "__main__":
    # Processes that wait for each other end, and say where.
    faulthandler.dump_traceback_later(240, exit=True)
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results = {"tensor parallel": tensor_parallel(folder, rank), "fully sharded": fully_sharded(folder, rank)}
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
