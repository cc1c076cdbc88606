"""`hf-ddtree doctor` as a user runs it: what it detects, every check with both values, and the exit code."""

import json
import re
import shutil

import pytest
from transformers import GPTNeoConfig, GPTNeoForCausalLM
from typer.testing import CliRunner

from hf_ddtree.cli import app, tested
from hf_ddtree.cli.pair import Pair
from hf_ddtree.compat import CACHE_NAME

from .conftest import BLOCK, LAYERS, WIDTH, save_target, save_tokenizer

matrix = tested.load
TARGET_CLASS = "Qwen3ForCausalLM"


def invoke(*arguments):
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments), "--device", "cpu"], catch_exceptions=False)
    return result, " ".join(result.output.split())


def states_of(layer):
    """The tensors that a recurrent layer of a cache keeps, none of another layer."""
    kinds = (getattr(layer, name, {}) for name in ("conv_states", "recurrent_states"))
    return [state for states in kinds for state in states.values()]


def drafter_like(folders, folder, **changes):
    """The drafter with another `config.json`."""
    shutil.copytree(folders.drafter, folder, dirs_exist_ok=True)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))
    return folder


def test_a_sound_pair(folders):
    result, text = invoke(folders.target, folders.drafter, "--prompt", "hello world", "--budget", 15)
    assert result.exit_code == 0, result.output
    for detected in ("layout ", f"block size {BLOCK}", "tapped layers 0, 1", "DFlashDraftModel", "bidirectional"):
        assert detected in text
    assert f"target layers trained for {LAYERS} {LAYERS} ok" in text
    assert f"hidden size of the taps {WIDTH} {WIDTH} ok" in text
    assert re.search(r"target weights [\d.]+ KiB", text) and re.search(r"drafter cache, 1000 tokens [\d.]+ KiB", text)
    assert "logits of 16 nodes" in text and "recurrent states" not in text
    assert "kind of target Qwen3ForCausalLM ok" in text
    assert "self-test each node as its path ok" in text
    assert re.search(r"acceptance length [\d.]+ tokens a round", text)
    assert "text of 20 tokens with trees: equal plain decoding ok" in text
    assert "tree attention packed: 100% of layers ok" in text
    assert "FAIL" not in text and "Every check passed." in text


def test_the_rows_of_the_targets_class_in_the_matrix(folders):
    _, text = invoke(folders.target, folders.drafter, "--prompt", "hello")
    rows = [row for row in matrix() if row["model_class"] == TARGET_CLASS]
    assert {row["dtype"] for row in rows} == {"float64", "float32", "bfloat16"}
    assert f"tested as {rows[0]['title']};" in text
    for row in rows:
        error, generated = f"≤ {row['max_error']:.0e}", row["generate"] or "–"
        assert f"{row['title']} {row['dtype']} {', '.join(row['routes'])} {error} {generated}" in text


def test_a_class_that_is_not_in_the_matrix(folders, monkeypatch):
    monkeypatch.setattr(tested, "load", lambda: [])
    result, text = invoke(folders.target, folders.drafter, "--prompt", "hello")
    assert result.exit_code == 0
    assert "tested as none doubtful" in text
    assert f"{TARGET_CLASS} is not among the families that this release was tested with" in text


def test_the_matrix_is_whole():
    """Every family has fp32 and bf16, every text was equal, and no error is larger than its dtype explains."""
    rows = matrix()
    names = {row["family"] for row in rows}
    assert len(names) >= 80
    for row in rows:
        assert row["max_error"] <= {"float64": 1e-3, "float32": 1e-3, "bfloat16": 1.0}[row["dtype"]], row
        verdicts = {"float64": [None], "float32": ["equal"], "bfloat16": ["equal", "equal to rounding"]}
        assert row["generate"] in verdicts[row["dtype"]], row
        assert row["dtype"] != "bfloat16" or row["times_plain"] <= 4, row
    for name in names:
        assert {"float32", "bfloat16"} <= {row["dtype"] for row in rows if row["family"] == name}, name


def test_a_target_that_fails_the_self_test(folders, tmp_path):
    """GPT-Neo computes attention in code of its own."""
    config = GPTNeoConfig(
        vocab_size=16, hidden_size=WIDTH, num_layers=4, num_heads=4, attention_types=[[["global"], 4]], window_size=8
    )
    GPTNeoForCausalLM(config).save_pretrained(tmp_path / "target")
    save_tokenizer(tmp_path / "target")
    result, text = invoke(tmp_path / "target", drafter_like(folders, tmp_path / "drafter", num_target_layers=4))
    assert result.exit_code == 1
    assert "self-test each node as its path FAIL" in text
    assert "through Transformers' attention interface" in text and "1 check failed" in text
    assert "mask token 1 below 16 ok" in text, "the other checks are shown all the same"
    assert "Trial" not in text


def test_recurrent_states_are_a_line_of_their_own(family_folders):
    folders = family_folders("qwen3_next")
    result, text = invoke(folders.target, folders.drafter, "--prompt", "hello")
    assert result.exit_code == 0, result.output
    pair = Pair.load(folders.target, folders.drafter, device="cpu")
    cache = pair.target(**pair.inputs("hello"), use_cache=True)[CACHE_NAME]
    held = [state for layer in cache.layers for state in states_of(layer)]
    assert len(held) == 4
    size = sum(state.numel() * state.element_size() for state in held)
    assert f"recurrent states {size / 1024:.1f} KiB" in text


def test_a_target_that_reads_images_too(family_folders):
    folders = family_folders("qwen2_5_vl")
    result, text = invoke(folders.target, folders.drafter, "--prompt", "hello")
    assert result.exit_code == 0, result.output
    assert "Qwen2.5-VL after an image float32" in text and "Every check passed." in text


def test_piped_output_is_plain_and_narrow(folders):
    result, _ = invoke(folders.target, folders.drafter, "--prompt", "hello")
    assert "\x1b" not in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_every_failing_check_is_shown(folders, tmp_path):
    save_target(tmp_path, layers=LAYERS + 1)
    other = drafter_like(folders, tmp_path / "drafter", num_target_layers=LAYERS, vocab_size=5000)
    result, text = invoke(tmp_path, other)
    assert result.exit_code == 1
    assert f"target layers trained for {LAYERS} {LAYERS + 1} FAIL" in text
    assert f"trained for {LAYERS} target layers, the target has {LAYERS + 1}" in text
    assert "vocabulary 5000 16 ± 1024 FAIL" in text
    assert "2 checks failed" in text
    assert "Trial" not in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["FlashMapDraftModel"]}, "FlashMap"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised (fp8)"),
        ({"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, "missing keys"),
    ],
    ids=["family", "quantised", "weights"],
)
def test_a_drafter_that_does_not_load(folders, tmp_path, changes, message):
    result, text = invoke(folders.target, drafter_like(folders, tmp_path, **changes))
    assert result.exit_code == 1
    assert message in text and "1 check failed" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("which", ["target", "drafter"])
def test_nothing_there_is_misuse(folders, which):
    result, text = invoke(
        *[("no/such/folder" if part == which else getattr(folders, part)) for part in ("target", "drafter")]
    )
    assert result.exit_code == 2
    assert text.startswith("Error: ") and "no/such/folder" in text
