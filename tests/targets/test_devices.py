"""Targets spread over devices by `device_map`, and targets whose weights are loaded only for the length of a call."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload

from hf_ddtree.drafters import TargetIO
from hf_ddtree.round import KEPT_MASKS, TreeRound
from pairs import LAYERS, make_drafter, make_target, plain, prompt, tree

NEW = 24
TESTS = Path(__file__).parent.parent


def on_the_host(target: Any, folder: Path) -> Any:
    return cpu_offload(target, execution_device=torch.device("cpu"))


def on_disk(target: Any, folder: Path) -> Any:
    target.save_pretrained(folder / "model")
    places = {"model.embed_tokens": "disk", "lm_head": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(LAYERS)}
    loaded = type(target).from_pretrained(folder / "model", device_map=places, offload_folder=folder / "offload")
    loaded.generation_config = target.generation_config
    return loaded


@pytest.mark.parametrize("offload", [on_the_host, on_disk])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
def test_offloaded_targets(family: str, offload: Any, tmp_path: Path) -> None:
    """Between calls every weight is on the meta device, the embedding's and the head's too."""
    whole = make_target(family)
    drafter = make_drafter(whole, input_embedding_scale=1.0 if family == "gemma3" else None)
    expected = plain(whole, prompt(), max_new_tokens=NEW)
    accepted = tree(whole, drafter, prompt(), max_new_tokens=NEW, return_dict_in_generate=True)
    states, io = torch.randn(1, 3, 32), TargetIO(whole, drafter)
    logits, embedded = io.logits(states), io.embed(prompt())
    target = offload(make_target(family), tmp_path)
    assert {target.get_input_embeddings().weight.device.type, target.lm_head.weight.device.type} == {"meta"}
    output = tree(target, drafter, prompt(), max_new_tokens=NEW, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert output.speculation.acceptance_lengths == accepted.speculation.acceptance_lengths
    io = TargetIO(target, drafter)
    assert torch.allclose(io.logits(states), logits, atol=1e-5)
    assert torch.allclose(io.embed(prompt()), embedded, atol=1e-5)


def test_two_devices() -> None:
    """Layers, head, embedding and drafter here and on a simulated second device, where mixing the two raises."""
    search = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(TESTS / "targets" / "two_devices.py")]
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["mixing"] == "aten.add.Tensor was given tensors of two devices."
    assert len(results["cases"]) == 7
    for name, case in results["cases"].items():
        assert case["equal"], name
        assert case["accepted"] > 1 and case["ran there"] > 1000, name
    for name, case in results["rounds"].items():
        assert case["equal"], name
        assert case["reads"] == [1] * len(case["accepted"]), name
    assert max(results["rounds"]["greedy"]["accepted"]) > 1
    by_host = results["built by the host"]
    assert by_host["equal"] and by_host["accepted"] == results["rounds"]["greedy"]["accepted"]
    assert max(by_host["reads"]) > 1
    few = results["rounds"]["sliding, fewer paths than nodes"]
    assert few["nodes"] <= 62 * len(few["accepted"]), "padding is no node"
    assert results["nan"]["error"].startswith("The drafter 'DFlashModel' in torch.float32 gave NaN logits")
    assert results["nan"]["emitted"] == 1, "the prefill's token, and nothing of the round"


def test_copies_of_a_mask_for_other_devices_are_not_kept() -> None:
    tree_round = TreeRound(torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.long))
    masks = [torch.full((1, 1, 2, 3), float(i)) for i in range(3 * KEPT_MASKS)]
    for mask in masks:
        packed = tree_round.packed_mask(mask, 2)
        assert torch.equal(packed, mask.repeat(1, 1, 2, 1))
        assert tree_round.packed_mask(mask, 2) is packed
    assert len(tree_round._packed) == KEPT_MASKS
