"""Two processes on one target, by torchrun and gloo: both emit plain `generate`'s tokens, and none waits for ever."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.distributed import DistributedConfig

from hf_ddtree import DDTreeConfig
from pairs import make_drafter, make_target, prompt, tree

TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process wrote, first to last."""
    folder = tmp_path_factory.mktemp("processes")
    for family in ("gemma3", "qwen3"):
        make_target(family).save_pretrained(folder / family)
    search = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    script = [str(TESTS / "targets" / "two_processes.py"), str(folder)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *script]
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_tensor_parallel(ranks: list[dict[str, Any]]) -> None:
    first, second = (results["tensor parallel"] for results in ranks)
    assert list(first) == ["greedy", "sampled", "one token", "drafters that differ", "automatic"]
    for name, result in first.items():
        assert result["tokens"] == result["plain"], name
        assert result["trees"] == second[name]["trees"], f"{name}: the processes built different trees"
        assert result == second[name], f"{name}: the processes disagree"
        assert len(result["trees"]) == len(result["accepted"])
        if name not in ("one token", "automatic"):
            assert max(result["accepted"]) > 1
            assert max(len(tokens) for tokens, _ in result["trees"]) > 20


def test_fully_sharded(ranks: list[dict[str, Any]]) -> None:
    both = [results["fully sharded"] for results in ranks]
    for results in both:
        assert "load the drafter whole in each process" in results.pop("path head")
        assert len(results) == 7
        for name, result in results.items():
            assert result["tokens"] == result["plain"], name
    for name in ("loaded so", "sampled", "one token beside many", "by fully_shard, drafter too"):
        rounds = [len(results[name]["accepted"]) for results in both]
        assert rounds[0] < rounds[1], f"{name}: the first process had to wait for the second"
        assert max(both[1][name]["accepted"]) > 1


def test_guidance_under_synced_gpus_is_refused() -> None:
    target = make_target("llama")
    config = DDTreeConfig(max_new_tokens=4, guidance_scale=1.5)
    with pytest.raises(ValueError, match=r"guidance_scale=1\.5.* adds one for each token: leave it unset"):
        target.generate(prompt(), assistant_model=make_drafter(target), generation_config=config, synced_gpus=True)


@pytest.mark.parametrize("setting", [dict(pp_size=2), dict(tp_size=2, enable_sequence_parallel=True)])
def test_a_target_split_by_layers_or_tokens_is_refused(setting: dict[str, Any]) -> None:
    target = make_target("llama")
    target.config.distributed_config = DistributedConfig(**setting)
    name = list(setting)[-1]
    with pytest.raises(ValueError, match=rf"DistributedConfig\({name}=.*Load it with `tp_plan` or `fsdp_size` alone"):
        tree(target, make_drafter(target), prompt(), max_new_tokens=4)


def test_a_process_alone_agrees_with_itself() -> None:
    """No process group is asked for where there is none."""
    assert not torch.distributed.is_initialized()
    target = make_target("llama")
    assert tree(target, make_drafter(target), prompt(), max_new_tokens=4).shape == (1, 15)
